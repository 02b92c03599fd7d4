"""The restore of a step: compares, reads, then changes the live objects, or leaves all unchanged.

Each process reads the leaves for its own devices and host. The processes agree after all have read,
and before any of them changes a live object.
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

# With restore_in_budget: the fewest bytes per device that are freed and read at a time, also if the
# free memory is unknown. Smaller parts would read stacks more often.
_MIN_PART_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """The result of a restore.

    Attributes:
      step: the restored step; None for weights from files.
      missing: names that are attached but not in the checkpoint; they keep their values.
      unexpected: names in the checkpoint that no attached object takes.
      mismatched: names that differ -> "expected ..., found ..."; they keep their values. Optimizer
        state is listed under its parameter's name, ``optimizer/head.weight``.
      left_out: names of the model's tensors, in the program or the checkpoint, that the patterns do
        not select; and names of the optimizer state in the checkpoint that belongs to them.
      skipped_steps: newer steps that could not be read.
      is_verified: whether every stored byte of the step was read and compared with its digest.
      tier: the tier from which the step was read, "durable" or "local".
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
    """Restores a step into the attached objects: on all processes, or on none.

    Args:
      source: the step.
      attached: the attached objects.
      strict: whether any difference raises.
      options: ``verify``, ``restore_in_budget``.
      processes: the processes that restore together, in a round.
      selection: the selected tensors; None for all.

    Raises:
      MismatchError: something differs and ``strict``.
      SelectionError: a pattern matches nothing, or two tensors would get the same name.
      CorruptCheckpointError, ForeignCheckpointError: the step cannot be read.
      UninitializedLeafError: a meta tensor that neither the step nor ``init`` fills.
      UnusableStateError: the restore failed midway, with ``restore_in_budget``.
    """
    committed = source.committed
    findings, selection = Findings(), selection or Selection()
    restores_rng = "rng" in attached.components and "rng" in source.document
    with step_reader.about(committed), random_state.left_alone(on_success=not restores_rng):
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
    """Returns the report of a restore with these findings and this selection."""
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
    """Reads the leaves of a restoration and makes its changes: all of them, or none.

    Args:
      restoration: the leaves to read and the changes to make.
      reader: reads leaves, each onto its placement.
      options: ``restore_in_budget``.
      processes: the processes that restore together, in a round.
      step, path: the source of the leaves, for messages.

    Raises:
      UnusableStateError: it failed midway, with ``restore_in_budget``.
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
    """Applies a restoration part by part; deletes the buffers a part replaces before reading it.

    Raises:
      UnusableStateError: it failed midway. Every buffer that the restore replaces is then deleted.
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
            raise  # the error of another process
        raise UnusableStateError(
            f"restoring {'' if step is None else f'step {step} '}from {path} failed after buffers "
            f"had been freed for it (restore_in_budget=True): {error}. The attached objects hold "
            "no state any more. Restore another step, or start the program again.",
            step=step,
            path=path,
        ) from error


def _part_bytes(reads: Iterable[Read]) -> int:
    """Returns the bytes to free and read at a time, per device: half of the free device memory.

    Free is what remains beyond the peak, because a restore must not need more memory than the
    training that it precedes.
    """
    placements = {read.placement for read in reads}
    devices: set[Any] = {
        d for p in placements if isinstance(p, Sharding) for d in p.addressable_devices
    }
    if Local.DEFAULT_DEVICE in placements:
        devices.add(jax.local_devices()[0])
    free = [f for device in devices if (f := free_device_bytes(device)) is not None]
    shared = len(devices) if any(d.platform == "cpu" for d in devices) else 1
    return max(_MIN_PART_BYTES, min(free, default=0) // shared // 2)


def _parts(
    writes: Sequence[Write], reads: Mapping[str, Read], part_bytes: int
) -> Iterator[list[Write]]:
    """Yields the writes in parts of at most ``part_bytes`` per device, or of a single write."""
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
    """Returns the bytes that a leaf takes on each of its devices."""
    if isinstance(read.placement, Sharding):
        shard = read.placement.shard_shape(read.spec.shape)
        return math.prod(shard) * np.dtype(read.spec.dtype).itemsize
    return read.spec.nbytes if read.placement is Local.DEFAULT_DEVICE else 0
