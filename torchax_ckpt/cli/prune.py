"""Owns the commands that write to runs: ``prune`` and ``copy``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchax_ckpt import policies
from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import FOUND, OK, UsageError
from torchax_ckpt.cli.step_arguments import existing, named_or_all
from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError, PolicyError
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.policies import described, preservation
from torchax_ckpt.runtime import progress
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import containment
from torchax_ckpt.stored.copy import copy_steps


def prune(directory: str, words: Sequence[str], *, delete: bool, as_json: bool) -> int:
    """``torchax-ckpt prune``."""
    if not words:
        raise UsageError("prune: say what to keep: --policy 'LatestN(3)'")
    try:
        policy = policies.AnyPreservationPolicy([described.parsed(rule) for rule in words])
    except PolicyError as error:
        raise UsageError(f"prune: --policy: {error}") from None
    run = existing(directory, read_only=not delete)
    if delete:
        try:
            run.claim()
            steps = run.steps()  # as they are now that nobody else writes
            doomed, sizes = _doomed(run, steps, policy)
            keep = [committed not in doomed for committed in steps]
            run.prune(keep, steps)
        finally:
            run.release()
    else:
        steps = run.steps()
        doomed, sizes = _doomed(run, steps, policy)
    kept = [committed.step for committed in steps if committed not in doomed]
    gone = [committed.step for committed in doomed]
    if as_json:
        output.print_json(
            {
                "directory": str(run.path),
                "dry_run": not delete,
                "kept": kept,
                "deleted": gone,
                "freed_bytes": sum(sizes),
            }
        )
        return OK
    verb = "deleted" if delete else "would delete"
    for step, nbytes in zip(gone, sizes, strict=True):
        output.print_line(f"{verb} step {step}, {output.size(nbytes)}")
    output.print_line(
        f"{verb} {len(gone)} of {len(steps)} steps, {output.size(sum(sizes))}; kept: "
        f"{', '.join(map(str, kept)) or 'none'}"
    )
    if gone and not delete:
        output.note("nothing was deleted; do it with --delete")
    return OK


def _doomed(
    run: RunDirectory, steps: Sequence[CommittedStep], policy: Any
) -> tuple[list[CommittedStep], list[int]]:
    """What no rule keeps, but the newest verified step, and what each takes."""
    infos = [run.info(committed) for committed in steps]
    for rule in preservation.best_rules(policy):
        if steps and not rule.ranked(infos):
            known = ", ".join(sorted({name for info in infos for name in info.metrics or {}}))
            raise UsageError(
                f"prune: no step has the metric {rule.metric!r}; they have: {known or 'none'}"
            )
    damaged = [run.verified.is_damaged(committed) for committed in steps]
    keep = preservation.preserved(policy, infos, damaged)
    doomed = [committed for committed, kept in zip(steps, keep, strict=True) if not kept]
    spared = run.verified.newest_of(doomed, steps)
    doomed = [committed for committed in doomed if committed is not spared]
    return doomed, [containment.stored_bytes(committed.path) for committed in doomed]


def copy(source: str, target: str, *, max_bytes: int | None, as_json: bool) -> int:
    """``torchax-ckpt copy``."""
    steps = named_or_all(source)
    run = RunDirectory(target)
    sizes = {committed.step: containment.stored_bytes(committed.path) for committed in steps}
    left_out: list[CheckpointError] = []
    with progress.bar("copying", lambda: sum(sizes.values())) as on_bytes:
        options = CheckpointOptions(max_host_bytes=max_bytes)
        copied = copy_steps(steps, run, options, on_bytes, left_out.append)
    for error in left_out:
        output.note(f"{error}: it was not copied")
    total = sum(sizes[committed.step] for committed in copied)
    if as_json:
        output.print_json(
            {
                "directory": str(run.path),
                "steps": [committed.step for committed in copied],
                "num_bytes": total,
            }
        )
    else:
        listed = ", ".join(str(committed.step) for committed in copied)
        output.print_line(f"copied to {run.path}, and verified: {listed}, {output.size(total)}")
    return FOUND if any(isinstance(error, CorruptCheckpointError) for error in left_out) else OK
