"""Owns the moment: what a save holds on to while training goes on, and what may happen after.

JAX arrays cannot change, but a jitted step may donate them, and then they are gone. A snapshot is
taken in one of three ways:

    reference  holds the arrays themselves, which costs nothing; an array that is donated before it
               was fetched fails the save, since reading a deleted array raises and never lies.
    copy       copies on the devices, enqueued before anything that follows, stacked on the way as
               the plan says. Costs device memory, and waits for nothing.
    transfer   holds the arrays themselves, and the training thread until they were fetched.

``auto`` copies at first, looks at the next save whether the program had donated what was copied,
and goes on with references if not. Should a later step donate after all, that one save fails, and
copies are taken from then on. Where memory does not suffice for copies it transfers.

Whatever is not copied at once is stacked on the devices later, on the save's own thread. Where
memory does not suffice for that either, the leaves of that save are stored one by one.

Each of several processes takes its snapshots in its own way, but what they store is laid out alike.
Whether one of them has no memory for stacks they ask when each has its snapshot, on the saves' own
threads, so that nobody waits for others in training. Who has copied stacks by then cannot undo it:
that save fails, on all of them, and from then on none of them stacks.
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
from torchax_ckpt.device_memory import DeviceMemory, is_exhausted
from torchax_ckpt.errors import DonatedBufferError, OutOfMemoryError, SaveError
from torchax_ckpt.layout.plan import LeafSpec, Plan, plan_leaves
from torchax_ckpt.options import Layout, SnapshotMode
from torchax_ckpt.sharding import shards_of, stacked

logger = logging.getLogger(__name__)

Array = jax.Array | np.ndarray
Way = Literal["reference", "copy", "transfer"]

# Arguments of one jitted call: compiling grows faster than linearly with their number.
_CHUNK = 128


class Planner:
    """Plans the layout of a save; keeps the plan while the leaves look the same.

    The threads of saves to several tiers and the one that trains may ask at the same time.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._may_stack = True
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
        return plan if self._may_stack else _unstacked(plan, dict(zip(names, arrays, strict=True)))

    def stack_no_more(self) -> None:
        """From now on no stacks on devices are planned."""
        self._may_stack = False


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
    _memory: DeviceMemory
    _ready: tuple[Plan, Mapping[str, Array]] | None = None

    def stored(self, agree: Callable[[bool], bool] = bool) -> tuple[Plan, Mapping[str, Array]]:
        """The plan, and the arrays to store by stored name. May be called on any thread.

        Args:
          agree: from whether something is so on this process, to whether it is on any that stores
            the same arrays.

        Raises:
          DonatedBufferError: a reference was donated or deleted meanwhile.
          SaveError: some processes have stacks already, and others no memory for any. From the
            next snapshot on none makes stacks.
        """
        leaves: Mapping[str, Array]
        stored: Mapping[str, Array] | None
        if self._ready is not None:
            plan, stored = self._ready
            leaves = stored
        else:
            plan = self._planner(self.names, self._arrays)
            leaves = dict(zip(self.names, self._arrays, strict=True))
            stored = self._stacked(plan, leaves)
        flat = _unstacked(plan, leaves)
        is_flat = agree(stored is None or plan == flat)
        if not is_flat and stored is not None:
            return plan, stored
        if agree(self._ready is not None and plan != flat):
            self._planner.stack_no_more()
            raise SaveError(
                "the devices of a process have no memory for stacks, and another has copied stacks "
                "already. From the next save on leaves are copied and stored one by one"
            )
        if stored is not None and plan == flat:
            return plan, stored
        logger.info("no device memory for stacks: the leaves of this save are stored one by one")
        return flat, execute(flat, leaves, copy=False)

    def _stacked(self, plan: Plan, leaves: Mapping[str, Array]) -> dict[str, Array] | None:
        """The arrays to store; None where the devices have no memory for the stacks among them."""
        members = (leaves[member] for group in plan.stacks.values() for member in group)
        if not self._memory.holds(members):
            return None
        try:
            stored = execute(plan, leaves, copy=False)
        except Exception as error:  # of a jitted call JAX raises ValueError, of others RuntimeError
            self.require_alive()
            if not is_exhausted(error):
                raise
            self._memory.failed()
            return None
        self._memory.took(stored[name] for name in plan.stacks)
        return stored

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
      memory: what there is on the devices.
    """

    def __init__(
        self, mode: SnapshotMode, layout: Layout, memory: DeviceMemory | None = None
    ) -> None:
        self._mode = mode
        self._planner = Planner(layout)
        self._memory = memory or DeviceMemory()
        self._donates: bool | None = None
        self._samples: list[jax.Array] = []
        self._told: set[tuple[Way, str]] = set()

    def take(self, names: Sequence[str], arrays: Sequence[Array]) -> Snapshot:
        """A snapshot of the leaves. Runs on the training thread; waits for nothing.

        Raises:
          OutOfMemoryError: the mode is "copy", and the devices have no memory for that.
        """
        way, why = self._way(names, arrays)
        if way == "copy":
            try:
                return self._copied(names, arrays, why)
            except jax.errors.JaxRuntimeError as error:
                if not is_exhausted(error):
                    raise
                self._memory.failed()
                if self._mode != "auto":
                    raise OutOfMemoryError(
                        "no device memory for copies of what is to be saved: "
                        f"{self._memory.described(arrays)}. Nothing was saved, and what is being "
                        'trained is as it was. Use CheckpointOptions(snapshot="auto"), which '
                        "transfers such a save, or a state sharded over more devices."
                    ) from error
            way, why = "transfer", "the devices ran out of memory for copies"
        self._tell(way, why)
        return Snapshot(way, names, arrays, self._planner, self._memory)

    def donated(self) -> None:
        """Tells that a reference was donated: from now on copies are taken."""
        self._donates = True

    def _copied(self, names: Sequence[str], arrays: Sequence[Array], why: str) -> Snapshot:
        plan = self._planner(names, arrays)
        ready = execute(plan, dict(zip(names, arrays, strict=True)), copy=True)
        self._memory.took(ready.values())
        self._tell("copy", why)
        return Snapshot("copy", names, (), self._planner, self._memory, (plan, ready))

    def _way(self, names: Sequence[str], arrays: Sequence[Array]) -> tuple[Way, str]:
        """How to take a snapshot, and why so."""
        if self._mode != "auto":
            return self._mode, "the options say so"
        if self._donates is None and self._samples:
            self._donates = any(sample.is_deleted() for sample in self._samples)
            self._samples = []
        if self._donates is False:
            return "reference", "the program donates nothing that is saved"
        if self._donates is None:
            self._samples = _samples(names, arrays)
            why = "the next save will show whether the program donates"
        else:
            why = "the program donates what is saved"
        if self._memory.holds(arrays):
            return "copy", why
        return "transfer", f"{why}, and there is no memory for copies"

    def _tell(self, way: Way, why: str) -> None:
        """Says it once."""
        if (way, why) not in self._told:
            self._told.add((way, why))
            logger.info("snapshots are taken by %s: %s", way, why)


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


def _unstacked(plan: Plan, arrays: Mapping[str, Array]) -> Plan:
    """The plan without its stacks on devices; of leaves, or of what is stored already."""
    stacks = {
        name: group
        for name, group in plan.stacks.items()
        if not isinstance(arrays.get(name, arrays.get(group[0])), jax.Array)
    }
    return Plan(stacks, plan.empty)


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
