"""Plans the saves of a training state on a TPU topology, with the TPU's compiler and without TPUs.

"Compiled" means here: the compiler reported it, for the programs that a save runs. "Estimated"
means: it follows from published bandwidths (see ``chips``). Nothing is measured on a TPU.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt.errors import PlanError
from torchax_ckpt.options import Layout
from torchax_ckpt.planning import arguments, topology
from torchax_ckpt.planning.chips import CHIPS, Chip
from torchax_ckpt.snapshot.device_memory import is_exhausted
from torchax_ckpt.snapshot.device_sizes import shard_bytes
from torchax_ckpt.snapshot.forecast import Forecast, forecast

Rule = Callable[[tuple[int, ...], Mapping[str, int]], PartitionSpec]
"""The shape of a leaf, and name -> length of the mesh axes -> how the leaf is sharded."""


class AbstractLeaf(Protocol):
    """A leaf without elements, such as ``jax.ShapeDtypeStruct``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims of the whole leaf."""

    @property
    def dtype(self) -> Any:
        """The dtype, or its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopologyPlan:
    """What saves of a training state need on a topology.

    Sizes are in bytes. All chips hold equally much. The fields about copies and offloads are None
    if the state does not fit, because no program of a save is compiled then.

    Attributes:
      topology, num_slices: as given.
      axes: name -> length of the mesh axes.
      num_chips: the chips of all slices.
      num_hosts: the hosts of all slices.
      chips_per_host: the chips of the first host.
      versions: the versions of jax and libtpu.
      num_leaves: the leaves of the state.
      state_bytes: the elements of the whole state.
      chip_bytes: compiled: the state's part on a chip, in tiles.
      chip_elements_bytes: the elements of that part, without tiles.
      replicated_bytes: compiled: the part of ``chip_bytes`` that all chips hold alike, because no
        mesh axis shards these leaves.
      training_bytes, host_memory_bytes: as given.
      hbm_bytes: published: the memory of a chip.
      usable_bytes: compiled: how much of it programs can use.
      free_bytes: ``usable_bytes`` less ``chip_bytes`` and ``training_bytes``; negative if the state
        does not fit.
      fits: whether the state and the training fit.
      advice: what would do if the state does not fit, in words; "" if it fits.
      copy_bytes: compiled: what the copies and stacks of a save take on a chip beside the state;
        None also if the compiler refuses them, because they exceed the chip.
      wanted_bytes: the free bytes that ``snapshot="auto"`` wants on a chip to make these copies.
      snapshot: how ``CheckpointOptions(snapshot="auto")`` takes snapshots, if training steps donate
        the state and peak at ``chip_bytes`` and ``training_bytes``.
      part_bytes: compiled: what this snapshot takes on a chip beside the state: ``copy_bytes`` for
        a copy, the copies of the arrays that fit for an offload, 0 for a transfer.
      offload_host_bytes: compiled: the most memory of a host that the offloaded arrays take: pinned
        memory, in tiles, and ordinary memory; 0 if nothing is offloaded. Of several hosts, each is
        assumed to offload a replicated leaf from each of its chips, although one suffices.
      num_programs: how many different programs copy, stack and offload the state.
      compile_secs: how long compiling them took on this machine, or how long JAX took to find them
        if this process has compiled them before.
      copy_secs: estimated: reading and writing ``copy_bytes`` in the memory of a chip.
      host_bytes: estimated: the most that one host fetches from its chips in a save. Hosts share a
        replicated leaf if the number of replicas divides a dim; else one of them fetches it.
      transfer_secs: estimated: the transfer of ``host_bytes``, each chip's part over its own link.
    """

    topology: str
    num_slices: int
    axes: Mapping[str, int]
    num_chips: int
    num_hosts: int
    chips_per_host: int
    versions: str
    num_leaves: int
    state_bytes: int
    chip_bytes: int
    chip_elements_bytes: int
    replicated_bytes: int
    training_bytes: int
    host_memory_bytes: int | None
    hbm_bytes: int
    usable_bytes: int
    free_bytes: int
    fits: bool
    advice: str
    copy_bytes: int | None
    wanted_bytes: int | None
    snapshot: str | None
    part_bytes: int | None
    offload_host_bytes: int | None
    num_programs: int | None
    compile_secs: float | None
    copy_secs: float | None
    host_bytes: int
    transfer_secs: float


def fsdp_and_tp(shape: tuple[int, ...], axes: Mapping[str, int]) -> PartitionSpec:
    """Shards a leaf over the mesh axes ``fsdp`` and ``tp``; other axes hold replicas of it.

    ``tp`` shards the last dim that its length divides, of leaves with two dims or more. ``fsdp``
    shards the first of the other dims that its length divides. An axis that divides no dim holds
    replicas of the leaf.
    """
    spec: list[str | None] = [None] * len(shape)
    tp, fsdp = axes.get("tp", 1), axes.get("fsdp", 1)
    if tp > 1 and len(shape) > 1:
        dim = next((i for i in reversed(range(len(shape))) if _divides(tp, shape[i])), None)
        if dim is not None:
            spec[dim] = "tp"
    if fsdp > 1:
        free = (i for i, length in enumerate(shape) if spec[i] is None and _divides(fsdp, length))
        if (dim := next(free, None)) is not None:
            spec[dim] = "fsdp"
    return PartitionSpec(*spec)


def _divides(length: int, dim: int) -> bool:
    return dim > 0 and dim % length == 0


def on_topology(
    abstract_state: Mapping[str, AbstractLeaf],
    topology_name: str,
    *,
    num_slices: int = 1,
    axes: Mapping[str, int] | None = None,
    rule: Rule = fsdp_and_tp,
    training_bytes: int = 0,
    host_memory_bytes: int | None = None,
    layout: Layout = "auto",
) -> TopologyPlan:
    """Returns what saves of a state need on a TPU topology, and whether the state fits there.

    Needs libtpu, the TPU's compiler (extra ``tpu-check``), but no TPU. Nothing is measured.

    Args:
      abstract_state: name of each leaf on devices -> its shape and dtype, as
        ``jax.ShapeDtypeStruct`` has them. ``rule`` decides how a leaf is sharded, unless the leaf
        has a ``NamedSharding``, whose partition spec is then used on the mesh of the topology.
      topology_name: the generation of the chips and the lengths of a slice: ``v5e:16x16``.
      num_slices: the number of slices.
      axes: name -> length of the mesh axes, slices first; their lengths multiply to the chips of
        all slices. None for the axis ``fsdp`` over the chips of a slice, before it, if there are
        several slices, the axis ``slice``, along which the state is replicated.
      rule: takes the shape of a leaf and ``axes``, and returns how the leaf is sharded.
      training_bytes: the memory that training needs on a chip besides the state, at its peak:
        activations, gradients, code. The default 0 assumes that it needs none.
      host_memory_bytes: the memory that a host has available for a save. None assumes that it
        suffices.
      layout: which leaves are stacked (``CheckpointOptions.layout``).

    Raises:
      PlanError: libtpu is missing or cannot be used, the topology is unknown, the mesh does not fit
        it, or a leaf cannot be sharded as the rule says.
    """
    chip = topology.chip_of(topology_name)
    arguments.at_least("training_bytes", training_bytes, 0, "give the bytes on one chip, or 0")
    if host_memory_bytes is not None:
        advice = "give the bytes that one host has available, or None"
        arguments.at_least("host_memory_bytes", host_memory_bytes, 0, advice)
    if axes is None:
        axes = topology.axes_for(topology_name, num_slices)
    real = topology.mesh(topology.devices(topology_name, num_slices), axes)
    hosts = [device.process_index for device in real.devices.flat]
    # The programs of arrays that span hosts run on one chip each, and are the same on every chip.
    # With one chip in each host, each of them is compiled once, and takes its part of the host.
    spans_hosts = len(set(hosts)) > 1
    chips = topology.devices(topology_name, num_slices, one_chip_per_host=spans_hosts)
    parts_of_host = hosts.count(0) if spans_hosts else 1
    leaves = _placed(abstract_state, topology.mesh(chips, axes), rule)
    elements = {name: _elements_bytes(leaf) for name, leaf in leaves.items()}
    try:
        sizes = shard_bytes(leaves)
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise topology.unusable(error) from error
        sizes = elements  # one array of each shape exceeds the chip, so the state does too
    chip_bytes = sum(sizes.values())
    free_bytes = chip.usable_bytes - chip_bytes - training_bytes
    is_fitting = free_bytes >= 0
    replicated_bytes = sum(sizes[name] for name in leaves if _num_shards(leaves[name]) == 1)
    found: Forecast | None = None
    if is_fitting:
        stats = {
            "bytes_limit": chip.usable_bytes,
            "bytes_in_use": chip_bytes,
            "peak_bytes_in_use": chip_bytes + training_bytes,
        }
        host_bytes = None if host_memory_bytes is None else host_memory_bytes // parts_of_host
        found = _forecast(leaves, layout, stats, host_bytes)
    copy_bytes = None if found is None else found.copy_bytes
    fetched = _fetched(leaves, sizes, real)
    by_host: collections.Counter[int] = collections.Counter()
    for device, num_bytes in fetched.items():
        by_host[device.process_index] += num_bytes
    return TopologyPlan(
        topology=topology_name,
        num_slices=num_slices,
        axes=dict(axes),
        num_chips=len(chips),
        num_hosts=len(set(hosts)),
        chips_per_host=hosts.count(0),
        versions=topology.versions(),
        num_leaves=len(leaves),
        state_bytes=sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves.values()),
        chip_bytes=chip_bytes,
        chip_elements_bytes=sum(elements.values()),
        replicated_bytes=replicated_bytes,
        training_bytes=training_bytes,
        host_memory_bytes=host_memory_bytes,
        hbm_bytes=chip.hbm_bytes,
        usable_bytes=chip.usable_bytes,
        free_bytes=free_bytes,
        fits=is_fitting,
        advice="" if is_fitting else _advice(chip, chip_bytes, replicated_bytes, training_bytes),
        copy_bytes=copy_bytes,
        wanted_bytes=None if found is None else found.wanted_bytes,
        snapshot=None if found is None else found.way,
        part_bytes=None if found is None else found.part_bytes,
        offload_host_bytes=None if found is None else found.offloaded_bytes * parts_of_host,
        num_programs=None if found is None else found.num_programs,
        compile_secs=None if found is None else found.compile_secs,
        copy_secs=None if copy_bytes is None else 2 * copy_bytes / chip.hbm_bytes_per_sec,
        host_bytes=max(by_host.values()),
        transfer_secs=max(fetched.values()) / chip.link_bytes_per_sec,
    )


def _placed(
    abstract_state: Mapping[str, AbstractLeaf], mesh: Mesh, rule: Rule
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the leaves with shardings on the mesh."""
    if not abstract_state:
        raise PlanError(
            "abstract_state: expected at least one leaf on devices, found none; give name -> "
            "jax.ShapeDtypeStruct"
        )
    axes = dict(mesh.shape)
    leaves = {}
    for name, leaf in abstract_state.items():
        try:
            shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
        except (AttributeError, TypeError):
            raise PlanError(
                f"abstract_state: {name}: expected a value with a shape and a dtype, such as "
                f"jax.ShapeDtypeStruct, found {type(leaf).__name__}; convert it",
                key_path=name,
            ) from None
        given = getattr(leaf, "sharding", None)
        spec = given.spec if isinstance(given, NamedSharding) else rule(shape, axes)
        try:
            sharding = NamedSharding(mesh, spec)
            sharding.shard_shape(shape)
        except ValueError as error:
            raise PlanError(
                f"{name}: expected a sharding that divides {list(shape)} on the mesh {axes}, found "
                f"{spec}; change the mesh axes or the sharding. JAX says: "
                f"{' '.join(str(error).split())}",
                key_path=name,
            ) from error
        leaves[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return leaves


def _forecast(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    layout: Layout,
    stats: Mapping[str, int],
    host_bytes: int | None,
) -> Forecast:
    """Asks the code of a save how it would take a snapshot on chips with these statistics."""
    try:
        return forecast(
            list(leaves),
            [*leaves.values()],
            layout=layout,
            stats=lambda device: stats,
            host_bytes=host_bytes,
        )
    except jax.errors.JaxRuntimeError as error:
        raise topology.unusable(error) from error


def _elements_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of the elements of one shard."""
    sharding: Any = leaf.sharding
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _num_shards(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns into how many different shards a leaf is divided."""
    sharding: Any = leaf.sharding
    shard = sharding.shard_shape(leaf.shape)
    return math.prod(dim // part for dim, part in zip(leaf.shape, shard, strict=True) if part)


def _fetched(
    leaves: Mapping[str, jax.ShapeDtypeStruct], sizes: Mapping[str, int], mesh: Mesh
) -> collections.Counter[jax.Device]:
    """Returns the bytes that a save fetches from each chip of the mesh.

    As in a save, all replicas of a shard fetch equal parts of it if the array spans hosts and the
    number of replicas divides a dim of the shard; else the first replica fetches it. Stacks are not
    considered.
    """
    groups: collections.Counter[tuple[Any, tuple[int, ...]]] = collections.Counter()
    for name, leaf in leaves.items():
        sharding: Any = leaf.sharding
        groups[sharding.spec, leaf.shape] += sizes[name]
    fetched: collections.Counter[jax.Device] = collections.Counter()
    for (spec, shape), num_bytes in groups.items():
        on_mesh = NamedSharding(mesh, spec)
        replicas = mesh.size // _num_shards(jax.ShapeDtypeStruct(shape, bool, sharding=on_mesh))
        is_shared = not on_mesh.is_fully_addressable and any(
            dim % replicas == 0 for dim in on_mesh.shard_shape(shape)
        )
        if is_shared:
            fetched.update(dict.fromkeys(mesh.devices.flat, math.ceil(num_bytes / replicas)))
        else:
            first: dict[str, jax.Device] = {}
            for device, index in on_mesh.devices_indices_map(shape).items():
                first.setdefault(str(index), device)
            fetched.update(dict.fromkeys(first.values(), num_bytes))
    return fetched


def _advice(chip: Chip, chip_bytes: int, replicated_bytes: int, training_bytes: int) -> str:
    """Returns what would hold a state that does not fit, in words."""
    needed = chip_bytes + training_bytes
    ways: list[str] = []
    sharded = chip_bytes - replicated_bytes
    left = chip.usable_bytes - replicated_bytes - training_bytes
    if sharded and left > 0:
        factor = 2 ** math.ceil(math.log2(sharded / left))
        ways.append(f"shard it over {factor} times as many chips of the same generation")
    larger = [other.name for other in CHIPS.values() if other.usable_bytes >= needed]
    if larger:
        ways.append(f"take as many chips of a generation with more memory ({', '.join(larger)})")
    if replicated_bytes and training_bytes < chip.usable_bytes:
        ways.append(f"shard the {replicated_bytes} bytes of leaves that every chip holds")
    return ", or ".join(ways) or "reduce the memory that training needs"
