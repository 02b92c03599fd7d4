"""Owns the life of a restore: checked, read, written back, or nothing touched at all.

Each process reads what goes to its devices and host. They agree once all have read, and before any
of them touches what is live.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt import content
from torchax_ckpt.device_memory import free_device_bytes
from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    ForeignCheckpointError,
    StepNotFoundError,
    UnusableStateError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.options import CheckpointOptions, TierName
from torchax_ckpt.sharding import Local, put
from torchax_ckpt.state import functional, own, random_state
from torchax_ckpt.state.attached import STATE, Attached
from torchax_ckpt.state.component import Read, Restoration, Values, Write
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.leaf import require_jax_dtype
from torchax_ckpt.state.tree import key_part
from torchax_ckpt.storage import arrays as storage
from torchax_ckpt.storage.directory import CommittedStep, StepDirectory
from torchax_ckpt.storage.processes import Processes
from torchax_ckpt.stored import still_there

T = TypeVar("T")

# What is freed and read at a time under restore_in_budget, per device, where no more is free or
# nobody knows. Smaller parts would read stacks more often.
_LEAST_PART_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    Attributes:
      step: the step restored; None of weights that came from files.
      missing: names attached but not in the checkpoint; they keep what they held.
      unexpected: names in the checkpoint that nothing attached takes.
      mismatched: names that differ -> "expected ..., found ..."; they keep what they held.
      left_out: names of the model's tensors, on either side, that the patterns do not select.
      skipped_steps: newer steps that could not be read.
      is_verified: whether every stored byte of the step was read and compared with its digest.
      tier: which tier it was read from, "durable" or "local".
    """

    step: int | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    skipped_steps: tuple[int, ...] = ()
    is_verified: bool = False
    tier: TierName = "durable"


def newest_readable(
    candidates: Sequence[CommittedStep], attempt: Callable[[CommittedStep], T]
) -> tuple[T, tuple[int, ...]]:
    """What ``attempt`` gives for the newest step that can be read, and the steps skipped.

    Candidates come oldest first; of one number there may be one in each tier.

    Raises:
      CorruptCheckpointError: none of them can be read; the error of the newest.
      UnusableStateError: nor can they, and what they were to be restored into is gone already.
      StepNotFoundError: all were deleted meanwhile.
    """
    first_error: CheckpointError | None = None
    skipped: list[int] = []
    for left, committed in reversed(list(enumerate(candidates))):
        try:
            return attempt(committed), tuple(skipped)
        except StepNotFoundError as error:  # whoever writes here has deleted it meanwhile
            first_error = first_error or error
        except (CorruptCheckpointError, UnusableStateError) as error:
            if not is_damage(error):
                raise
            first_error = error if isinstance(error, UnusableStateError) else first_error or error
            if left == 0:
                break
            skipped.append(committed.step)
            warnings.warn(f"skipping an unreadable checkpoint: {error}", stacklevel=4)
    assert first_error is not None, "called with no candidates"
    raise first_error


@contextlib.contextmanager
def reading(
    committed: CommittedStep, directory: StepDirectory, processes: Processes
) -> Iterator[None]:
    """A round in which a step is read; notes it if the step is damaged, and offers others.

    Where each process has a place of its own, a failure says nothing of the copy there.

    Raises:
      StepNotFoundError: it was deleted while it was read.
    """
    looked = contextlib.nullcontext() if processes.is_apart else still_there(committed)
    try:
        with looked, processes.round(f"reading step {committed.step}"):
            yield
    except CheckpointError as error:
        is_readable = not is_damage(error) and not isinstance(error, DirectoryError)
        if processes.is_apart or is_readable:
            raise
        if is_damage(error):
            directory.verified.note(committed, is_sound=False)
        with contextlib.suppress(Exception):  # the storage may not answer: this error counts
            others = [s for s in directory.steps() if s.step != committed.step]
            text = f". Other steps there: {directory.verified.named(others)}."
            error.message = error.message.rstrip(".") + text
        raise


def is_damage(error: BaseException) -> bool:
    """Whether a restore or load has failed because the step is damaged."""
    if isinstance(error, UnusableStateError):
        return isinstance(error.__cause__, CorruptCheckpointError)
    return isinstance(error, CorruptCheckpointError)


class Source(Protocol):
    """A step that can be read: see ``content.StoredLeaves``."""

    committed: CommittedStep
    document: Mapping[str, Node]

    def require_plausible(self, reads: Mapping[str, Read]) -> None:
        """Refuses what is not stored as the manifest says, before memory is taken for it."""

    def read(self, reads: Mapping[str, Read]) -> dict[str, Any]:
        """Reads leaves and puts each on its placement."""

    def is_whole(self, reads: Mapping[str, Read], num_processes: int) -> bool:
        """Whether these reads, checked, have seen every stored byte."""


def restore_attached(
    source: Source,
    attached: Attached,
    strict: bool,
    options: CheckpointOptions,
    processes: Processes,
    selection: Selection | None = None,
) -> RestoreReport:
    """Restores a step into what is attached: all that is selected, or nothing, on all alike.

    Raises:
      MismatchError: something differs and ``strict``.
      SelectionError: patterns that match nothing, or names that meet.
      CorruptCheckpointError, ForeignCheckpointError, UninitializedLeafError
    """
    committed = source.committed
    findings, selection = Findings(), selection or Selection()
    brings_rng = "rng" in attached.components and "rng" in source.document
    with content.about(committed), random_state.left_alone(on_success=not brings_rng):
        document = own.document_of(source.document, processes, f"step {committed.step}")
        restoration = attached.prepare(document, findings, selection)
        if strict and findings:
            raise findings.error(committed.step, str(committed.path))
        restoration.require_filled()
        source.require_plausible(restoration.reads)
        path = str(committed.path)
        apply(restoration, source.read, options, processes, committed.step, path)
    is_whole = options.verify != "never" and source.is_whole(restoration.reads, processes.count)
    return report_of(committed.step, findings, selection, is_verified=is_whole)


def report_of(
    step: int | None, findings: Findings, selection: Selection, *, is_verified: bool
) -> RestoreReport:
    """What a restore has done that found and left out these."""
    return RestoreReport(
        step,
        missing=tuple(findings.missing),
        unexpected=tuple(findings.unexpected),
        mismatched=dict(findings.mismatched),
        left_out=tuple(f"model/{name}" for name in selection.left_out),
        is_verified=is_verified,
    )


def apply(
    restoration: Restoration,
    reader: Callable[[Mapping[str, Read]], Values],
    options: CheckpointOptions,
    processes: Processes,
    step: int | None,
    path: str,
) -> None:
    """Reads what a restoration asks for and makes its changes: all of them, or none.

    Args:
      restoration: what to do.
      reader: reads leaves, each onto its placement.
      options: ``restore_in_budget``.
      processes: those that do it together, in a round.
      step, path: where the leaves come from, for messages.

    Raises:
      UnusableStateError: it failed on the way, under ``restore_in_budget``.
    """
    if options.restore_in_budget:
        _apply_in_budget(restoration, reader, processes, step, path)
    else:
        restoration.apply(reader(restoration.reads), processes.meet)


def _apply_in_budget(
    restoration: Restoration,
    reader: Callable[[Mapping[str, Read]], Values],
    processes: Processes,
    step: int | None,
    path: str,
) -> None:
    """Applies a restoration part by part, deleting what each part replaces before it is read.

    Raises:
      UnusableStateError: it failed on the way; then every buffer concerned is deleted.
    """
    reads = restoration.reads
    early = {name for call in (*restoration.checks, *restoration.calls) for name in call.needs}
    restoration.apply_calls(reader({name: reads[name] for name in early}), processes.meet)
    try:
        for part in _parts(restoration.writes, reads, _part_bytes(reads.values())):
            for write in part:
                if write.release is not None:
                    write.release()
            needed = {name: reads[name] for write in part for name in write.needs}
            restoration.apply_writes(part, reader(needed))
        processes.meet()
    except BaseException as error:
        for write in restoration.writes:
            if write.release is not None:
                write.release()
        if isinstance(error, UnusableStateError):
            raise  # that of another process
        raise UnusableStateError(
            f"restoring {'' if step is None else f'step {step} '}from {path} failed after buffers "
            f"had been freed for it (restore_in_budget=True): {error}. What is attached holds no "
            "state any more. Restore another step, or start the program again.",
            step=step,
            path=path,
        ) from error


def _part_bytes(reads: Iterable[Read]) -> int:
    """How much to free and read at a time, per device: half of what devices have left over.

    What is left over at their peak: a restore must not need more than the training it is for.
    """
    placements = {read.placement for read in reads}
    devices: set[Any] = {
        d for p in placements if isinstance(p, Sharding) for d in p.addressable_devices
    }
    if Local.DEFAULT_DEVICE in placements:
        devices.add(jax.local_devices()[0])
    free = [f for device in devices if (f := free_device_bytes(device)) is not None]
    shared = len(devices) if any(d.platform == "cpu" for d in devices) else 1
    return max(_LEAST_PART_BYTES, min(free, default=0) // shared // 2)


def _parts(
    writes: Sequence[Write], reads: Mapping[str, Read], part_bytes: int
) -> Iterator[list[Write]]:
    """The writes in parts of at most so many bytes per device, or of one write."""
    part: list[Write] = []
    size = 0
    for write in writes:
        more = sum(_device_bytes(reads[name]) for name in write.needs)
        if part and size + more > part_bytes:
            yield part
            part, size = [], 0
        part.append(write)
        size += more
    if part:
        yield part


def _device_bytes(read: Read) -> int:
    """What a leaf takes on each of its devices."""
    if isinstance(read.placement, Sharding):
        shard = read.placement.shard_shape(read.spec.shape)
        return math.prod(shard) * np.dtype(read.spec.dtype).itemsize
    return read.spec.nbytes if read.placement is Local.DEFAULT_DEVICE else 0


def load_state(
    committed: CommittedStep,
    opened: Callable[[CommittedStep], Source],
    abstract_state: Any,
    options: CheckpointOptions,
    processes: Processes,
) -> Any:
    """Reads the functional state of one step, or all components of one that was attached.

    Raises:
      MismatchError: the step does not have what the abstract state asks for.
      CorruptCheckpointError: it cannot be read.
    """
    try:
        source = opened(committed)
    except ForeignCheckpointError:
        with storage.one_order(processes):
            return _load_foreign(committed, abstract_state, options)
    findings = Findings()
    prefix: tuple[str, ...] = ()
    if STATE in source.document:
        root, prefix = source.document[STATE], (STATE,)
    else:
        asked = abstract_state.keys() if isinstance(abstract_state, Mapping) else None
        document = own.document_of(source.document, processes, f"step {committed.step}")
        root = {"dict": [[n, d] for n, d in document.items() if asked is None or n in asked]}
    with content.about(committed):
        request = functional.Request(root, abstract_state, prefix, findings)
        if findings:
            raise findings.error(committed.step, str(committed.path))
        source.require_plausible(request.reads)
        return request.build(source.read(request.reads))


def _load_foreign(committed: CommittedStep, abstract_state: Any, options: CheckpointOptions) -> Any:
    """Reads a step of bare Orbax; its pytree must have the abstract state's structure."""
    if abstract_state is None:
        return storage.load_foreign(committed, None, options)
    _require_there(committed, abstract_state)
    leaves, treedef = jax.tree_util.tree_flatten(abstract_state)
    reads = {str(i): read for i, leaf in enumerate(leaves) if (read := functional.as_read(leaf))}
    asked = [
        storage.abstract_array(read.spec.shape, read.spec.dtype, _sharding(read))
        if (read := reads.get(str(i)))
        else leaf
        for i, leaf in enumerate(leaves)
    ]
    loaded = storage.load_foreign(committed, jax.tree_util.tree_unflatten(treedef, asked), options)
    found = {str(i): leaf for i, leaf in enumerate(jax.tree_util.tree_leaves(loaded))}
    arrays = put({n: found[n] for n in reads}, {n: read.placement for n, read in reads.items()})
    revived = {n: functional.revive(reads[n].spec.node(n), arrays[n]) for n in reads}
    return jax.tree_util.tree_unflatten(treedef, {**found, **revived}.values())


def _require_there(committed: CommittedStep, abstract_state: Any) -> None:
    """Raises MismatchError; Orbax would give what was asked for, cast, or as it was asked."""
    stored = storage.foreign_metadata(committed)
    findings = Findings()
    for path, abstract in jax.tree_util.tree_flatten_with_path(abstract_state)[0]:
        parts = [key_part(entry) for entry in path]
        name = names.join(parts)
        found: Any = stored
        for part in parts:
            children = (
                {str(k): v for k, v in found.items()}
                if isinstance(found, Mapping)
                else dict(zip(map(str, range(len(found))), found, strict=True))
                if isinstance(found, (list, tuple))
                else {}
            )
            found = children.get(part, _ABSENT)
        if found is _ABSENT:
            findings.missing.append(name)
        elif (read := functional.as_read(abstract)) is not None:
            if read.placement is not Local.HOST:
                require_jax_dtype(read.spec.dtype, name)
            shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
            if (shape, dtype) != (read.spec.shape, np.dtype(read.spec.dtype)):
                text = f"{dtype}{list(shape)}" if shape is not None else repr(found)
                findings.mismatch(name, read.spec.content(), text)
    if findings:
        raise findings.error(committed.step, str(committed.path))


_ABSENT = object()


def _sharding(read: Read) -> Sharding | None:
    """What storage is asked for: a sharding, or None for a host array that is moved afterwards."""
    return None if isinstance(read.placement, Local) else read.placement
