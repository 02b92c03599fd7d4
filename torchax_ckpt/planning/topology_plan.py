"""Plans the saves of a training state on a TPU topology, with the TPU's compiler, without TPUs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt.devices.device_memory import HEADROOM, DeviceMemory, is_exhausted
from torchax_ckpt.devices.device_sizes import shard_bytes
from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import topology
from torchax_ckpt.planning.topology import CHIPS, Chip
from torchax_ckpt.policies import closed_forms
from torchax_ckpt.shardings import fsdp_spec
from torchax_ckpt.snapshot.planner import plan_snapshot
from torchax_ckpt.snapshot.snapshotter import way_if_donated


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopologyPlan:
    """What saves of a training state need on a topology. Sizes are in bytes, per chip by default.

    The compiler reported the sizes of the programs; nothing is measured. The fields from
    ``copy_bytes`` on are None if the state does not fit.

    Attributes:
      topology, num_slices, axes, training_bytes, host_memory_bytes: as given, or their defaults.
      num_chips, num_hosts, chips_per_host: of all slices; of the first host.
      versions: the versions of jax and libtpu.
      num_leaves, state_bytes: the leaves of the state, and all their elements.
      chip_bytes, chip_elements_bytes: the state's part on a chip, with the tiles' padding; without.
      replicated_bytes: the part of ``chip_bytes`` that no mesh axis shards.
      hbm_bytes, usable_bytes: the published memory of a chip, and what programs can use of it.
      free_bytes: ``usable_bytes`` less ``chip_bytes`` and ``training_bytes``; may be negative.
      fits, advice: whether state and training fit; in words, how they would fit, or "" if they do.
      copy_bytes: what copies and stacks of a save take; None also if they exceed the chip.
      wanted_bytes: the free bytes that ``snapshot="auto"`` wants to make these copies.
      snapshot: how ``snapshot="auto"`` takes snapshots, if training steps donate the state.
      offload_host_bytes: the most that an offloaded state takes on a host, each replica counted.
      num_programs, compile_secs: the programs of a save, and how long compiling them took here.
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
    copy_bytes: int | None = None
    wanted_bytes: int | None = None
    snapshot: str | None = None
    offload_host_bytes: int | None = None
    num_programs: int | None = None
    compile_secs: float | None = None


def fsdp_and_tp(shape: tuple[int, ...], axes: Mapping[str, int]) -> PartitionSpec:
    """Shards a leaf over ``tp`` and, by the rule of ``shardings.fsdp``, over ``fsdp``.

    An axis that divides no dim holds replicas of the leaf.
    """
    num_tp = axes.get("tp", 1)
    dims = range(len(shape)) if len(shape) > 1 and num_tp > 1 else ()
    last = next((dim for dim in reversed(dims) if shape[dim] and shape[dim] % num_tp == 0), None)
    rest = [0 if dim == last else length for dim, length in enumerate(shape)]
    spec = [*fsdp_spec(rest, {"fsdp": axes.get("fsdp", 1)})]
    spec += [None] * (len(shape) - len(spec))
    if last is not None:
        spec[last] = "tp"
    return PartitionSpec(*spec)


def on_topology(
    abstract_state: Mapping[str, Any],
    topology_name: str,
    *,
    num_slices: int = 1,
    axes: Mapping[str, int] | None = None,
    training_bytes: int = 0,
    host_memory_bytes: int | None = None,
) -> TopologyPlan:
    """Returns what saves of a state need on a TPU topology, and whether the state fits there.

    Needs libtpu, the TPU's compiler (extra ``tpu-check``), but no TPU.

    Args:
      abstract_state: name of each leaf on devices -> a value with its ``shape`` and ``dtype``, such
        as ``jax.ShapeDtypeStruct``. The partition spec of its ``NamedSharding`` is used on the mesh
        of the topology. Without one, the mesh axis ``tp`` shards the last dim that it divides, of
        leaves with two dims or more, and ``fsdp`` the longest other dim that it divides, as
        ``shardings.fsdp`` does.
      topology_name: the generation of the chips and the lengths of a slice: ``v5e:16x16``.
      num_slices: the number of slices.
      axes: name -> length of the mesh axes, slices first; their product is the number of chips.
        None for ``fsdp`` over the chips of a slice, after ``slice`` (replicas) if there are
        several.
      training_bytes: what training needs on a chip besides the state, at its peak.
      host_memory_bytes: the memory that a host has for a save; None assumes that it suffices.

    Raises:
      PlanError: libtpu is missing or cannot be used, the topology is unknown, the mesh does not fit
        it, or a leaf cannot be sharded as its own sharding says.
    """
    chip, _ = topology.parsed(topology_name)
    closed_forms.at_least("training_bytes", training_bytes, 0, "give the bytes on one chip, or 0")
    if host_memory_bytes is not None:
        advice = "give the bytes that one host has available, or None"
        closed_forms.at_least("host_memory_bytes", host_memory_bytes, 0, advice)
    hosts = [device.process_index for device in topology.devices(topology_name, num_slices)]
    if axes is None:
        axes = {"slice": num_slices} if num_slices > 1 else {}
        axes["fsdp"] = len(hosts) // num_slices
    # The programs of arrays that span hosts run on one chip each, and are the same on every chip.
    # With one chip in each host, each of them is compiled once, and takes its part of the host.
    spans_hosts = len(set(hosts)) > 1
    chips = topology.devices(topology_name, num_slices, one_chip_per_host=spans_hosts)
    parts_of_host = hosts.count(0) if spans_hosts else 1
    leaves = _placed(abstract_state, topology.mesh(chips, axes))
    shards = {name: leaf.sharding.shard_shape(leaf.shape) for name, leaf in leaves.items()}
    elements = {n: math.prod(shards[n]) * leaf.dtype.itemsize for n, leaf in leaves.items()}
    try:
        sizes = shard_bytes(leaves)
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise topology.unusable(error) from error
        sizes = elements  # one array of each shape exceeds the chip, so the state does too
    chip_bytes = sum(sizes.values())
    free_bytes = chip.usable_bytes - chip_bytes - training_bytes
    is_fitting = free_bytes >= 0
    replicated_bytes = sum(sizes[n] for n, leaf in leaves.items() if shards[n] == leaf.shape)
    of_save: dict[str, Any] = {}
    if is_fitting:
        of_save = snapshot_forecast(
            leaves,
            chip,
            state_bytes=chip_bytes,
            peak_bytes=chip_bytes + training_bytes,
            host_bytes=host_memory_bytes,
            parts_of_host=parts_of_host,
        )
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
        **of_save,
    )


def snapshot_forecast(
    leaves: Mapping[str, Any],
    chip: Chip,
    *,
    state_bytes: int,
    peak_bytes: int,
    host_bytes: int | None,
    parts_of_host: int = 1,
) -> dict[str, Any]:
    """Asks the code of a save how "auto" takes a snapshot; returns the fields of TopologyPlan."""
    stats = {
        "bytes_limit": chip.usable_bytes,
        "bytes_in_use": state_bytes,
        "peak_bytes_in_use": peak_bytes,
    }
    of_process = None if host_bytes is None else host_bytes // parts_of_host
    memory = DeviceMemory(lambda device: stats, lambda: of_process)
    arrays = [*leaves.values()]
    began = time.perf_counter()
    try:
        plan = plan_snapshot([*leaves], arrays, "auto")
        way = way_if_donated(plan, arrays, memory)
        copies = plan.needed("copy", arrays)
        need = plan.needed(way, arrays)
    except jax.errors.JaxRuntimeError as error:
        raise topology.unusable(error) from error
    copy_bytes = None if copies is None else max(copies.devices.values(), default=0)
    return {
        "snapshot": way,
        "copy_bytes": copy_bytes,
        "wanted_bytes": None if copy_bytes is None else math.ceil(copy_bytes * HEADROOM),
        "offload_host_bytes": need.host_bytes * parts_of_host if need and way == "offload" else 0,
        "num_programs": need.num_programs if need else 0,
        "compile_secs": time.perf_counter() - began,
    }


def _placed(abstract_state: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Returns each leaf as a ``jax.ShapeDtypeStruct`` with a sharding on the mesh."""
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
        spec = given.spec if isinstance(given, NamedSharding) else fsdp_and_tp(shape, axes)
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


def _advice(chip: Chip, chip_bytes: int, replicated_bytes: int, training_bytes: int) -> str:
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
