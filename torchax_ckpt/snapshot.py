"""Owns the moment: what a save holds on to while training goes on, and what may happen after.

JAX arrays cannot change, but a jitted step may donate them, and then they are gone. A snapshot is
taken in one of three ways:

    reference  holds the arrays themselves. Costs nothing; an array that is donated before it was
               fetched fails the save, since reading a deleted array raises and never lies.
    copy       copies on the devices, enqueued before anything that follows, stacked on the way as
               the plan says. Costs device memory, and waits for nothing.
    transfer   holds the arrays themselves, and the training thread until they were fetched.

``auto`` copies at first, looks at the next save whether the program had donated what was copied,
and goes on with references if not. Should a later step donate after all, that one save fails, and
copies are taken from then on. Where memory does not suffice for copies it transfers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.bits import from_bits, to_bits
from torchax_ckpt.errors import DonatedBufferError
from torchax_ckpt.layout.plan import LeafSpec, Plan, plan_leaves
from torchax_ckpt.options import Layout, SnapshotMode
from torchax_ckpt.sharding import shards_of, stacked

logger = logging.getLogger(__name__)

Array = jax.Array | np.ndarray
Way = Literal["reference", "copy", "transfer"]
FreeBytes = Callable[[jax.Device], "int | None"]

# Arguments of one jitted call: compiling grows faster than linearly with their number.
_CHUNK = 128
# Room that copies must leave on a device for the step that runs meanwhile.
_HEADROOM = 1.25


class Planner:
    """Plans the layout of a save; keeps the plan while the leaves look the same.

    The threads of saves to several tiers and the one that trains may ask at the same time.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # In one attribute, so that no thread sees the plan of other leaves.
        self._known: tuple[Sequence[str], list[Any], Plan] = ((), [], Plan({}, frozenset()))

    def __call__(self, names: Sequence[str], arrays: Sequence[Array]) -> Plan:
        """Where each of the leaves is stored."""
        looks = [
            (a.shape, a.dtype, a.sharding if isinstance(a, jax.Array) else None) for a in arrays
        ]
        known_names, known_looks, plan = self._known
        if looks != known_looks or names != known_names:
            plan = plan_leaves(names, [_spec(array) for array in arrays], self._layout)
            self._known = (names, looks, plan)
        return plan


def _spec(array: Array) -> LeafSpec:
    on_host = not isinstance(array, jax.Array)
    return LeafSpec(
        shape=tuple(array.shape),
        dtype=array.dtype.name,
        nbytes=math.prod(array.shape) * array.dtype.itemsize,
        placement=True if isinstance(array, np.ndarray) else stacked(array.sharding),
        on_host=on_host,
    )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The leaves of one save at one moment.

    Attributes:
      way: how it was taken.
      names: of the leaves.
    """

    way: Way
    names: Sequence[str]
    _arrays: Sequence[Array]
    _planner: Planner
    _ready: tuple[Plan, Mapping[str, Array]] | None = None

    def stored(self) -> tuple[Plan, Mapping[str, Array]]:
        """The plan, and the arrays to store by stored name. May be called on any thread.

        Raises:
          DonatedBufferError: a reference was donated or deleted meanwhile.
        """
        if self._ready is not None:
            return self._ready
        plan = self._planner(self.names, self._arrays)
        try:
            return plan, execute(plan, dict(zip(self.names, self._arrays, strict=True)), copy=False)
        except Exception:  # of a jitted call JAX raises ValueError, of others RuntimeError
            self.require_alive()
            raise

    def require_alive(self) -> None:
        """Raises DonatedBufferError, with its name, if an array held by reference is gone."""
        if self._ready is not None:
            return
        for name, array in zip(self.names, self._arrays, strict=True):
            if isinstance(array, jax.Array) and array.is_deleted():
                raise DonatedBufferError(
                    f"{name}: its buffer was donated or deleted before it could be saved. Use "
                    'CheckpointOptions(snapshot="copy"), or "auto", for programs that donate.',
                    key_path=name,
                )


class Snapshotter:
    """Takes snapshots, each in the way that the mode and the program call for.

    Args:
      mode: see the module's docstring.
      layout: which leaves are stacked.
      free_bytes: free memory of a device in bytes, None where it cannot be known.
    """

    def __init__(
        self, mode: SnapshotMode, layout: Layout, free_bytes: FreeBytes | None = None
    ) -> None:
        self._mode = mode
        self._planner = Planner(layout)
        self._free_bytes = free_bytes or free_device_bytes
        self._donates: bool | None = None
        self._samples: list[jax.Array] = []
        self._told: set[str] = set()

    def take(self, names: Sequence[str], arrays: Sequence[Array]) -> Snapshot:
        """A snapshot of the leaves. Runs on the training thread; waits for nothing."""
        way = self._way(names, arrays)
        if way != "copy":
            return Snapshot(way, names, arrays, self._planner)
        plan = self._planner(names, arrays)
        try:
            ready = execute(plan, dict(zip(names, arrays, strict=True)), copy=True)
        except jax.errors.JaxRuntimeError as error:
            if self._mode != "auto" or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._tell("transfer", "the devices ran out of memory for copies")
            return Snapshot("transfer", names, arrays, self._planner)
        return Snapshot(way, names, (), self._planner, (plan, ready))

    def donated(self) -> None:
        """Tells that a reference was donated: from now on copies are taken."""
        self._donates = True

    def _way(self, names: Sequence[str], arrays: Sequence[Array]) -> Way:
        if self._mode != "auto":
            return self._mode
        if self._donates is None and self._samples:
            self._donates = any(sample.is_deleted() for sample in self._samples)
            self._samples = []
        if self._donates is False:
            return self._tell("reference", "the program donates nothing that is saved")
        fits = self._fits(arrays)
        if self._donates is None:
            self._samples = _samples(names, arrays)
            return "copy" if fits else "transfer"
        if fits:
            return self._tell("copy", "the program donates what is saved")
        return self._tell("transfer", "the program donates, and there is no memory for copies")

    def _fits(self, arrays: Sequence[Array]) -> bool:
        needed: dict[jax.Device, float] = collections.defaultdict(float)
        for array in arrays:
            if isinstance(array, jax.Array):
                sharding = array.sharding
                per_device = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
                for device in sharding.addressable_devices:
                    needed[device] += per_device
        # On CPU all devices share one memory.
        share = len(needed) if any(d.platform == "cpu" for d in needed) else 1
        return all(
            (free := self._free_bytes(device)) is None or bytes_ * share * _HEADROOM <= free
            for device, bytes_ in needed.items()
        )

    def _tell(self, way: Way, why: str) -> Way:
        if way not in self._told:
            self._told.add(way)
            logger.info("snapshots are taken by %s: %s", way, why)
        return way


def free_device_bytes(device: jax.Device) -> int | None:
    """Free memory of a device in bytes: what its peak so far has left over, or the host's.

    The peak counts, not what is in use between two steps: the next step needs its room again.
    """
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats and "bytes_in_use" in stats:
        return stats["bytes_limit"] - stats.get("peak_bytes_in_use", stats["bytes_in_use"])
    return _available_host_bytes() if device.platform == "cpu" else None


def _available_host_bytes() -> int | None:
    """What Linux says can be allocated, file caches that it would give up included."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def _samples(names: Sequence[str], arrays: Sequence[Array]) -> list[jax.Array]:
    """The smallest device array of every part that a step would donate as a whole."""
    smallest: dict[tuple[str, ...], jax.Array] = {}
    for name, array in zip(names, arrays, strict=True):
        if isinstance(array, jax.Array):
            component, _, rest = name.partition("/")
            part = (component, rest.partition("/")[0]) if component == "state" else (component,)
            if part not in smallest or array.size < smallest[part].size:
                smallest[part] = array
    return list(smallest.values())


# --- executing a plan ----------------------------------------------------------------------------


def beside(
    plan: Plan, leaves: Mapping[str, np.ndarray], layout: Layout
) -> tuple[Plan, dict[str, Array]]:
    """A plan that has more leaves, all on the host, and their arrays to store."""
    specs = [_spec(array) for array in leaves.values()]
    more = plan_leaves(list(leaves), specs, layout, taken=plan.stacks)
    stored = execute(more, leaves, copy=False)
    return Plan({**plan.stacks, **more.stacks}, plan.empty | more.empty), stored


def execute(plan: Plan, leaves: Mapping[str, Array], *, copy: bool) -> dict[str, Array]:
    """The arrays to store: stacks, and all other leaves, which are copied if asked to."""
    members = {member for group in plan.stacks.values() for member in group}
    alone = {n: a for n, a in leaves.items() if n not in members and n not in plan.empty}
    stored = _copies(alone) if copy else alone
    for name, group in plan.stacks.items():
        stored[name] = _stack([leaves[member] for member in group])
    return stored


def _stack(arrays: list[Array]) -> Array:
    first = arrays[0]
    if not isinstance(first, jax.Array):
        return np.stack(arrays)
    target = stacked(first.sharding)
    assert target is not None, "planned as a stack"
    if not first.is_fully_addressable:
        rows = zip(*(_parts(array) for array in arrays), strict=True)
        shape = (len(arrays), *first.shape)
        return _assembled(shape, target, [_stack([*row]) for row in rows])
    parts = [_stack_onto(target)(*chunk) for chunk in _chunks(arrays, _CHUNK)]
    return parts[0] if len(parts) == 1 else _concatenate_onto(target)(*parts)


def _copies(leaves: Mapping[str, Array]) -> dict[str, Array]:
    arrays = {name: array for name, array in leaves.items() if isinstance(array, jax.Array)}
    parts = {name: _parts(array) for name, array in arrays.items()}
    by_sharding: dict[Sharding, list[tuple[str, int]]] = collections.defaultdict(list)
    for name, own in parts.items():
        for place, part in enumerate(own):
            by_sharding[part.sharding].append((name, place))
    for sharding, members in by_sharding.items():
        for chunk in _chunks(members, _CHUNK):
            copies = _copy_onto(sharding)(*(parts[name][place] for name, place in chunk))
            for (name, place), copy in zip(chunk, copies, strict=True):
                parts[name][place] = copy
    copied = {n: _assembled(a.shape, a.sharding, parts[n]) for n, a in arrays.items()}
    return {**leaves, **copied}


def _parts(array: Any) -> list[Any]:
    """What of an array is computed with at once: of one over several processes, each shard here.

    Computations on shards are the process's own: it may begin them on any thread, whether others do
    or not.
    """
    if array.is_fully_addressable:
        return [array]
    return [shard.data for shard in shards_of(array)]


def _assembled(shape: tuple[int, ...], sharding: Sharding, parts: list[Any]) -> jax.Array:
    """The array of these parts."""
    if sharding.is_fully_addressable:
        return parts[0]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


@functools.lru_cache(maxsize=256)
def _copy_onto(sharding: Sharding) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.jit(lambda *xs: tuple(jnp.copy(x) for x in xs), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _stack_onto(sharding: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda *xs: _by_bits(jnp.stack, xs), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _concatenate_onto(sharding: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda *xs: _by_bits(jnp.concatenate, xs), out_shardings=sharding)


def _by_bits(join: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
    """Joins arrays; small floats by their bits: XLA converts them on the way and changes NaNs."""
    dtype = arrays[0].dtype
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits >= 32:
        return join(arrays)
    return from_bits(join([to_bits(array) for array in arrays]), dtype)


def _chunks(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
