"""The commands ``prune`` and ``copy``, which delete and copy the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import FOUND, OK, UNAVAILABLE, USAGE, UsageError
from torchax_ckpt.cli.step_arguments import (
    Directory,
    Json,
    existing,
    parsed_secs,
    parted,
    require_no_step,
    run_at,
    run_to_write,
    step_named,
)
from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError, PolicyError
from torchax_ckpt.policies import preservation_rules
from torchax_ckpt.policies.preservation import with_newest
from torchax_ckpt.runtime import progress
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.storage.directory import given_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.shared_files import Usage
from torchax_ckpt.stored.copy import copy_steps
from torchax_ckpt.stored.named_steps import step_infos


def prune(
    directory: Directory,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Keep the steps of this rule: 'LatestN(3)', 'EveryNSteps(1000)', "
            "'BestN(loss, min)'. May be repeated.",
        ),
    ] = None,
    abandoned: Annotated[
        bool,
        typer.Option("--abandoned", help="The steps from which the run went back; see ls."),
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Of these, those saved longer ago than that: 7d."),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the steps; without it, only list them.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Lists the steps that no given rule keeps, or abandoned ones; with --delete, deletes them.

    The newest step and the newest verified step are kept even if no rule keeps them. With --delete,
    the command takes the directory's lease and refuses a directory to which a training writes,
    because the training prunes its own steps.
    """
    if not abandoned and (not policy or older_than is not None):
        raise UsageError(
            "prune: expected a rule for the steps to keep, or --abandoned, which --older-than "
            "needs; give --policy 'LatestN(3)'"
        )
    least_secs = 0.0 if older_than is None else parsed_secs(older_than, "prune: --older-than")
    try:
        rules = [preservation_rules.parsed(rule) for rule in policy or ()]
    except PolicyError as error:
        raise UsageError(f"prune: --policy: {error}") from None
    run = existing(directory, read_only=not delete)
    try:
        if delete:
            run.claim()
        steps = run.steps()  # listed under the lease, so that no other program changes them
        aside = run.abandoned()
        usage = Usage([*steps, *aside])
        to_delete = _steps_to_delete(run, steps, rules) if rules else []
        # A step whose time is lost is as old as the others only if no time is given.
        gone = [s for s in aside if abandoned and (s.age_secs or 0.0) >= least_secs]
        stay = run.prune([*to_delete, *gone]) if delete else []
        run.warn_of_staying(stay)
    finally:
        run.release()
    to_delete, gone = ([s for s in some if s not in stay] for some in (to_delete, gone))
    freed_bytes = usage.freed_bytes([*to_delete, *gone])
    kept = [committed.step for committed in steps if committed not in to_delete]
    deleted = [committed.step for committed in to_delete]
    if as_json:
        output.print_json(
            {
                "directory": str(run.path),
                "dry_run": not delete,
                "kept": kept,
                "deleted": deleted,
                "abandoned": {s.path.name: usage.num_bytes(s) for s in gone},
                "freed_bytes": freed_bytes,
            }
        )
        return UNAVAILABLE if stay else OK
    verb = "deleted" if delete else "would delete"
    for committed in (*to_delete, *gone):
        shared = usage.shared_bytes(committed)
        text = f", of which {output.size(shared)} are shared with other steps" if shared else ""
        nbytes = output.size(usage.num_bytes(committed))
        of_branch = f" of an abandoned branch, {committed.path.name}" if committed in gone else ""
        output.print_line(f"{verb} step {committed.step}{of_branch}, {nbytes}{text}")
    more = f" and {len(gone)} of {counted(len(aside), 'abandoned step')}" if abandoned else ""
    output.print_line(
        f"{verb} {len(deleted)} of {counted(len(steps), 'step')}{more}, freeing "
        f"{output.size(freed_bytes)}; kept: {', '.join(map(str, kept)) or 'none'}"
    )
    if (deleted or gone) and not delete:
        output.note("nothing was deleted; --delete deletes these steps")
    return UNAVAILABLE if stay else OK


def _steps_to_delete(
    run: RunDirectory, steps: Sequence[CommittedStep], rules: Sequence[Mapping[str, Any]]
) -> list[CommittedStep]:
    """Returns the steps that neither a rule nor their verification keeps."""
    infos = step_infos(steps, lambda committed: run)
    damaged = [run.verified.is_damaged(committed) for committed in steps]
    kept_by = [preservation_rules.kept_by(rule, infos, damaged) or () for rule in rules]
    for rule, kept in zip(rules, kept_by, strict=True):
        if steps and "metric" in rule and not any(kept):
            known = ", ".join(sorted({name for info in infos for name in info.metrics or {}}))
            raise UsageError(
                f"prune: --policy: expected a metric that a step has, found {rule['metric']!r}; "
                f"the steps have the metrics: {known or 'none'}"
            )
    are_kept = with_newest([any(kept) for kept in zip(*kept_by, strict=True)], damaged)
    are_kept = run.verified.sparing_newest(are_kept, steps)
    return [step for step, is_kept in zip(steps, are_kept, strict=True) if not is_kept]


def copy(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="A step, DIRECTORY/STEP; or all steps, DIRECTORY.")
    ],
    target: Annotated[str, typer.Argument(metavar="TO", help="A directory; created if necessary.")],
    as_json: Json = False,
) -> int:
    """Copies steps to another directory; reads and verifies each copy before it appears there.

    Holds the lease of the target directory during the copy.
    """
    require_no_step(target)
    run = run_to_write(target)
    directory, name = parted(source)
    given = run_at(directory)
    steps = given.candidates(None) if name is None else [step_named(given, name)]
    if given.is_of_one_step and not given_step.tells_number(steps[0].path):
        raise UsageError(
            f"{source}: expected a folder whose name tells the number of the step, which the step "
            f"itself does not store; found {steps[0].path.name!r}. Rename it to this number"
        )
    usage = Usage(steps)
    left_out: list[CheckpointError] = []
    with progress.bar("copying", lambda: usage.total_bytes) as on_bytes:
        copied = copy_steps(steps, run, on_bytes, left_out.append)
    for error in left_out:
        output.note(f"not copied: {error}")
    copied_bytes = Usage(copied).total_bytes
    if as_json:
        output.print_json(
            {
                "directory": str(run.path),
                "steps": [committed.step for committed in copied],
                "num_bytes": copied_bytes,
            }
        )
    elif copied:
        listed = ", ".join(str(committed.step) for committed in copied)
        output.print_line(
            f"copied to {run.path}, and verified: {listed}, {output.size(copied_bytes)}"
        )
    else:
        output.print_line(f"nothing was copied to {run.path}")
    if any(isinstance(error, CorruptCheckpointError) for error in left_out):
        return FOUND
    return OK if copied else USAGE
