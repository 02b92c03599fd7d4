"""Decides from which steps a run continues, its own or those of its mirror, and fetches a step.

| the run's newest step, and the mirror's | the run continues from |
|---|---|
| neither has steps | the beginning |
| only the run has | its own |
| only the mirror has | the mirror's, fetched |
| the mirror's leads to the run's, or they are one | its own |
| the run's leads to the mirror's | the mirror's, fetched |
| neither leads to the other, and the run has left the mirror's | its own |
| neither leads to the other, and the mirror's branch has left the run's | the mirror's, fetched |
| neither leads to the other | what ``on_conflict`` says |
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import NoReturn

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    MirrorError,
    StepNotFoundError,
)
from torchax_ckpt.options import OnConflict
from torchax_ckpt.runtime import progress, user_messages
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.saving.mirroring import copying
from torchax_ckpt.saving.mirroring.copying import Copy
from torchax_ckpt.saving.mirroring.mirror_directory import LEFT
from torchax_ckpt.storage.directory import lineage
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lineage import Branch
from torchax_ckpt.storage.directory.run_directory import RunDirectory

logger = logging.getLogger(__name__)

# After so long the rate of a fetch is known.
_MEASURED_SECS = 1.0


def join(
    here: Branch,
    mirror: RunDirectory,
    target: RunDirectory,
    on_conflict: OnConflict,
    *,
    may_fetch: bool = True,
) -> None:
    """Fetches the mirror's newest step if the run continues from it; the run's lease is held.

    ``here`` has the steps of all tiers of the run. Raises MirrorError if nothing decides, if all
    steps are abandoned, or if a fetch is needed that is not allowed or would delete a step that
    only a local tier has; and as ``fetch_newest`` does.
    """
    there = mirror.branch()
    verdict = lineage.compared(here, there)
    if verdict == "here":
        if not here.steps and there.left():
            raise MirrorError(
                f"{mirror.path}: all steps of the mirror are abandoned, and the run has no other "
                "to continue from. Nothing was trained or deleted. Begin anew with "
                "attach(resume=False), or give another mirror",
                path=mirror.path,
            )
        return
    theirs = there.newest or there.steps[-1]
    if not may_fetch:
        raise MirrorError(
            f"{mirror.path}: the mirror has step {theirs.step}, which this run does not "
            "continue: call attach before the first save, which fetches that step, or refuses to",
            step=theirs.step,
            path=mirror.path,
        )
    if verdict == "conflict":
        ours = here.newest or here.steps[-1]
        if on_conflict == "error":
            _refuse(ours, theirs, mirror)
        chosen = theirs if on_conflict == "mirror" else ours
        text = "%s and %s do not lead to each other: the run continues from %s, as on_conflict says"
        logger.warning(text, ours.path, theirs.path, chosen.path)
        if on_conflict == "local":
            return
        _require_durable(ours, here, target)
    fetch_newest(mirror, target, here)


def _refuse(ours: CommittedStep, theirs: CommittedStep, mirror: RunDirectory) -> NoReturn:
    one, other = (f"step {step.step}, saved {step.age()} ago" for step in (ours, theirs))
    raise MirrorError(
        f"{ours.path.parent} and its mirror {mirror.path} have gone different ways: the newest "
        f"step here is {one}; that of the mirror is {other}; and neither continues the other, as "
        "if two machines had trained the run. Nothing was changed. Choose one: continue from the "
        "mirror's with mirror=Mirror(url, on_conflict='mirror'); continue from the one here with "
        "on_conflict='local'; or keep both apart, and give this run another directory or another "
        "mirror. The first two abandon the steps of the other way, which stay on storage.",
        step=ours.step,
        path=ours.path.parent,
    )


def _require_durable(ours: CommittedStep, here: Branch, target: RunDirectory) -> None:
    """Raises MirrorError if the newest step of a run is in its local tier only."""
    if not any(step.key == ours.key and step.path.parent == target.path for step in here.steps):
        raise MirrorError(
            f"{ours.path}: on_conflict='mirror' would delete this step, because a local tier keeps "
            "no abandoned steps, and no other place has it. Nothing was changed. Copy it to a "
            f"directory of its own (torchax-ckpt copy {ours.path.parent} NEW_DIRECTORY), or remove "
            f"{ours.path.parent}; then start the program again",
            step=ours.step,
            path=ours.path.parent,
        )


def fetch_newest(mirror: RunDirectory, target: RunDirectory, here: Branch) -> None:
    """Fetches the newest sound step of the mirror that the run does not have or continue.

    Leaves the run as it is if all such steps are damaged, and its newest step leads to them. Raises
    CorruptCheckpointError if no step at all can be used, and DirectoryError if the mirror cannot be
    read now.
    """
    there, left = mirror.branch(), here.left()
    first_error: CheckpointError | None = None
    for committed in reversed(there.steps):
        is_sound = there.is_sound(committed)
        abandoned = lineage.abandoned_by(committed, there, here) if is_sound else []
        if abandoned is None or committed.key in left:
            break
        try:
            with _noting_damage(committed, mirror, "skipping a damaged step of the mirror"):
                if not is_sound:
                    text = "its summary or commit record is damaged, or a digest differs"
                    raise committed.error(CorruptCheckpointError, text)
                _fetch(committed, mirror, target, abandoned)
            return
        except StepNotFoundError:  # deleted meanwhile; there is a newer one now
            fetch_newest(mirror, target, here)
            return
        except CorruptCheckpointError as error:
            first_error = first_error or error
    is_lost = not here.steps or lineage.compared(here, there) == "conflict"
    if first_error is not None and is_lost:
        raise CorruptCheckpointError(
            f"{mirror.path}: all steps of the mirror are damaged, and the run has no other to "
            f"continue from. Nothing was trained or deleted. The newest: {first_error}",
            path=mirror.path,
        ) from first_error


def fetch_again(
    damaged: CommittedStep, mirror: RunDirectory, target: RunDirectory
) -> CommittedStep | None:
    """Fetches a step that is damaged in the run; returns it, or None if that cannot be done.

    It cannot if the mirror lacks the step, or has it damaged too, or if the system refuses to
    delete the damaged one. Raises DirectoryError if the mirror cannot be read now.
    """
    same = next((step for step in mirror.steps() if step.key == damaged.key), None)
    if same is None or mirror.verified.is_damaged(same):
        return None
    text = "%s is damaged: the mirror has this step, which is fetched from there"
    logger.warning(text, damaged.path, extra=fields(step=damaged.step, path=damaged.path))
    try:
        with _noting_damage(same, mirror, "the mirror has this step damaged too"):
            _fetch(same, mirror, target, ())
    except (StepNotFoundError, CorruptCheckpointError):  # deleted meanwhile, or damaged too
        return None
    except DirectoryError as error:
        if damaged.key not in target.staying:
            raise
        user_messages.warn(f"the step of the mirror cannot replace this one: {error}")
        return None
    return next((step for step in target.steps() if step.key == damaged.key), None)


def fetch_before(
    damaged: CommittedStep, mirror: RunDirectory, target: RunDirectory, here: Branch
) -> CommittedStep | None:
    """Fetches the newest sound step of the mirror that led to a step that is damaged here.

    Returns it; or None without one that is newer than the sound steps here. Raises DirectoryError
    if the mirror cannot be read now.
    """
    there, of_damaged = mirror.branch(), here.lineage_of(damaged)
    for committed in filter(there.is_sound, reversed(there.steps)):
        of_step = there.lineage_of(committed)
        is_on_way = lineage.leads_to(committed, of_step, damaged.step, of_damaged)
        if not is_on_way or committed.key == damaged.key:
            continue
        abandoned = lineage.abandoned_by(committed, there, here)
        if abandoned is None:
            return None
        with (
            contextlib.suppress(StepNotFoundError, CorruptCheckpointError),
            _noting_damage(committed, mirror, "skipping a damaged step of the mirror"),
        ):
            _fetch(committed, mirror, target, abandoned)
            return next((step for step in target.steps() if step.key == committed.key), None)
    return None


@contextlib.contextmanager
def _noting_damage(committed: CommittedStep, mirror: RunDirectory, what: str) -> Iterator[None]:
    """Notes and warns of damage that a block finds in a step of the mirror, and raises it."""
    try:
        with mirror.verified.noting_damage(committed):
            yield
    except CorruptCheckpointError as error:
        user_messages.warn(f"{what}: {error}")
        raise


def _fetch(
    committed: CommittedStep,
    mirror: RunDirectory,
    target: RunDirectory,
    abandoned: Sequence[CommittedStep],
) -> None:
    what = f"step {committed.step} of {mirror.path}, saved {committed.age()} ago"
    about = fields(step=committed.step, path=mirror.path)
    if newer := _newer_elsewhere(committed, mirror):
        logger.warning(
            "%s: the run had gone back before it ended, and its new step %s has not arrived in the "
            "mirror: step %d is of the branch that it had left",
            mirror.path,
            newer,
            committed.step,
            extra=about,
        )
    has_told = False

    def on_bytes(num_bytes: int) -> None:
        nonlocal has_told
        show(num_bytes)
        if not has_told and copy.secs >= _MEASURED_SECS:
            has_told = True
            size, rate = (n / 1e6 for n in (copy.total_bytes, copy.bytes_per_sec))
            left = f"{size:.1f} MB at {rate:.1f} MB/s, some {copy.secs_left:.0f} s to go"
            user_messages.tell(logger, f"fetching {what}: {left}", about)

    copy, name = Copy(committed, on_bytes), f"fetching step {committed.step}"
    with progress.bar(name, lambda: copying.num_bytes(committed)) as show:
        copying.fetch(copy, target, abandoned)
    rate = f"{copy.sent_bytes / 1e6:.1f} MB in {copy.secs:.1f} s"
    user_messages.tell(logger, f"fetched {what}: {rate}, compared with its digests", about)


def _newer_elsewhere(committed: CommittedStep, mirror: RunDirectory) -> str:
    """Returns the number of a step that leaves the branch of one in the mirror; "" without one."""
    try:
        text = (mirror.path / LEFT).read_text(encoding="utf-8")[:80]
    except FileNotFoundError:
        return ""
    step, _, at_nsecs = text.partition(" ")
    has_arrived = at_nsecs == str(committed.commit_timestamp_nsecs)
    return "" if has_arrived else step
