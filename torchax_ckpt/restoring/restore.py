"""Owns the life of a restore: checked, read, written back, or nothing touched at all.

Each process reads what goes to its devices and host. They agree once all have read, and before any
of them touches what is live.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.errors import UnusableStateError
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.options import CheckpointOptions, TierName
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.restoring import step_reader
from torchax_ckpt.restoring.step_reader import Source
from torchax_ckpt.snapshot.device_memory import free_device_bytes
from torchax_ckpt.snapshot.sharding import Local
from torchax_ckpt.state import per_process_state, random_state
from torchax_ckpt.state.component import Findings, Read, Restoration, Values, Write
from torchax_ckpt.state.training_state import TrainingState

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
      mismatched: names that differ -> "expected ..., found ..."; they keep what they held. State of
        an optimizer stands under its parameter's name, ``optimizer/head.weight``.
      left_out: names of the model's tensors, on either side, that the patterns do not select; and
        of optimizer state in the checkpoint that is not restored for that reason.
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


def restore_attached(
    source: Source,
    attached: TrainingState,
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
    with step_reader.about(committed), random_state.left_alone(on_success=not brings_rng):
        document = per_process_state.document_of(
            source.document, processes, f"step {committed.step}"
        )
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
    """The report of a restore with these findings, of the tensors that are selected."""
    return RestoreReport(
        step,
        missing=tuple(findings.missing),
        unexpected=tuple(findings.unexpected),
        mismatched=dict(findings.mismatched),
        left_out=(*(f"model/{name}" for name in selection.left_out), *findings.left_out),
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
