"""Restores a step: compares and reads it, then changes all attached objects or none.

Each process reads what its own devices and host memory will hold. Before any makes a change that it
cannot undo, all confirm that they have succeeded so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from torchax_ckpt.devices.device_memory import free_device_bytes
from torchax_ckpt.devices.device_sizes import shard_bytes
from torchax_ckpt.devices.sharding import Local
from torchax_ckpt.errors import CheckpointError, UnusableStateError
from torchax_ckpt.layout.batches import batches
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.restoring.file_weights import FileWeights
from torchax_ckpt.restoring.local_tier import HostSteps
from torchax_ckpt.restoring.restorable_step import RestorableStep
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.state import per_process_state, random_state
from torchax_ckpt.state.component import LeafRead
from torchax_ckpt.state.findings import Call, RestoreReport
from torchax_ckpt.state.plans.restoration import Restoration
from torchax_ckpt.state.training_state import TrainingState
from torchax_ckpt.stored.stored_step import about

# The smallest bound for the parts that restore_in_budget frees and reads, in bytes per device. The
# same bound applies if the free memory is unknown. Smaller parts would read stacks more often.
_MIN_PART_BYTES = 64 << 20

Source = RestorableStep | HostSteps | FileWeights
"""What leaves are read from."""


def restore_attached(
    source: RestorableStep | HostSteps,
    attached: TrainingState,
    strict: bool,
    options: CheckpointOptions,
    processes: Processes,
    selection: Selection | None = None,
) -> RestoreReport:
    """Restores a step into the attached objects: on all processes, or on none."""
    committed = source.committed
    restores_rng = "rng" in attached.components and "rng" in source.document
    with about(committed), random_state.reset_after(on_success=not restores_rng):
        document = per_process_state.document_of(
            source.document,
            processes.index,
            processes.count,
            f"step {committed.step}",
            redistributes=attached.redistributes,
        )
        plan = attached.prepare(document, selection, source.attached)
        step, path = committed.step, str(committed.path)
        if plan.findings.unrestored and processes.is_first:
            names = " and ".join(plan.findings.unrestored)
            holds = plan.findings.functional(f"load({step}, abstract_state)")
            user_messages.warn(f"step {step} in {path}: not restored: {names}. {holds}")
        return carry_out(plan, source, options, processes, step, path, strict=strict)


def carry_out(
    plan: Restoration,
    source: Source,
    options: CheckpointOptions,
    processes: Processes,
    step: int | None,
    path: str,
    *,
    strict: bool,
    call: Call = "restore",
) -> RestoreReport:
    """Reads the leaves of a plan, then makes all of its changes or none; reports them.

    Raises MismatchError first if ``strict`` and anything differs. With ``restore_in_budget``, reads
    and changes alternate; a failure then leaves no usable state. ``step`` is None for files.
    """
    findings = plan.findings
    if strict and findings:
        raise findings.error(step, path, call)
    plan.require_filled("attach" if call == "restore" else call)
    source.require_plausible(plan.reads)
    if options.restore_in_budget:
        _apply_in_budget(plan, source, processes, step, path)
    else:
        plan.apply(source.read_leaves(plan.reads), processes.meet)
    left_out = (*(f"model/{name}" for name in plan.selection.left_out), *findings.left_out)
    is_verified = source.is_whole(plan.reads, processes.count)
    return findings.report(step, left_out, is_verified=is_verified)


def _apply_in_budget(
    plan: Restoration, source: Source, processes: Processes, step: int | None, path: str
) -> None:
    """Makes changes part by part; frees a part's old buffers before each read."""
    reads = plan.reads
    early = {name for call in plan.calls for name in call.needs}
    # Nothing refers to the values afterwards, which may lie on devices.
    plan.apply_calls(source.read_leaves({name: reads[name] for name in early}), processes.meet)
    try:
        sizes, limit = _device_bytes(reads), _part_bytes(reads.values())
        for part in batches(
            plan.changes, lambda change: sum(sizes[n] for n in change.needs), limit
        ):
            for change in part:
                if change.release is not None:
                    change.release()
            needed = {name: reads[name] for change in part for name in change.needs}
            plan.apply_changes(part, source.read_leaves(needed))
        processes.meet()
    except BaseException as error:
        for change in plan.changes:
            if change.release is not None:
                change.release()
        if isinstance(error, UnusableStateError):
            raise  # another process has raised it
        raise UnusableStateError(
            f"restoring {'' if step is None else f'step {step} '}from {path} failed after buffers "
            f"had been freed for it (restore_in_budget=True): {error}. The attached objects hold "
            "no state any more. Restore another step, or start the program again.",
            step=step,
            path=path,
            file=error.file if isinstance(error, CheckpointError) else None,
        ) from error


def _part_bytes(reads: Iterable[LeafRead]) -> int:
    """Returns how much a restore frees and reads at a time: half of the free memory of a device.

    Only memory beyond a device's peak so far is free: a restore must not need more than training.
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


def _device_bytes(reads: Mapping[str, LeafRead]) -> dict[str, int]:
    """Returns the bytes that each leaf takes on each of its devices; 0 for a host array."""
    default = SingleDeviceSharding(jax.local_devices()[0])
    targets = {}
    for name, read in reads.items():
        sharding = default if read.placement is Local.DEFAULT_DEVICE else read.placement
        if isinstance(sharding, Sharding):
            dtype = np.dtype(read.spec.dtype)
            targets[name] = jax.ShapeDtypeStruct(read.spec.shape, dtype, sharding=sharding)
    return {**dict.fromkeys(reads, 0), **shard_bytes(targets)}
