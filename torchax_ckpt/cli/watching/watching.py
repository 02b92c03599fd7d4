"""The command ``watch``, which follows a run in the terminal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

import rich.live
from rich.console import RenderableType
from rich.text import Text

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import OK, UsageError
from torchax_ckpt.cli.quantities import parsed_secs
from torchax_ckpt.cli.step_arguments import existing
from torchax_ckpt.cli.watching.running import is_held
from torchax_ckpt.cli.watching.view import Seen, as_json_of, view
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import containment, location
from torchax_ckpt.telemetry.journal import read_events
from torchax_ckpt.telemetry.timeline import RecordedRun, runs_of

# Enough for hours of events of a fast run, and little enough to read at each look.
_MAX_FILES = 8
_POLL, _POLL_OF_BUCKET = "2s", "10s"


def watch(directory: str, poll: str | None, *, once: bool, as_json: bool) -> int:
    """Runs ``torchax-ckpt watch``; returns the exit code, which is 0 also after Ctrl-C.

    Args:
      directory: the run's directory.
      poll: from one look at the directory to the next, as text; None for the default.
      once: whether to look once. Without a terminal, the command looks once in any case.
      as_json: whether to print JSON.

    Raises:
      UsageError: the directory does not exist, or ``poll`` is no time.
      DirectoryError: the directory cannot be read; later looks say so in the view instead.
    """
    if poll is None:
        poll = _POLL_OF_BUCKET if location.is_bucket(directory) else _POLL
    poll_secs = parsed_secs(poll, "watch: --poll")
    if poll_secs <= 0:
        raise UsageError(f"watch: --poll: expected more than 0 s, found {poll!r:.80}")
    run = existing(directory)
    seen = look(run)
    if as_json:
        output.print_json(as_json_of(seen))
        return OK
    if once or not output.is_watched():
        output.console().print(view(seen))
        return OK
    try:
        with rich.live.Live(view(seen), console=output.console(), auto_refresh=False) as live:
            while True:
                time.sleep(poll_secs)
                live.update(_next(run), refresh=True)
    except KeyboardInterrupt:
        return OK


def _next(run: RunDirectory) -> RenderableType:
    """Returns the view of a run; the error if the directory cannot be read at the moment."""
    try:
        return view(look(run))
    except Exception as error:  # bucket clients raise errors of their own
        return Text(f"{run.path}: cannot be read now: {output.plain(error):.300}", style="red")


def _num_bytes(newest: CommittedStep, runs: Sequence[RecordedRun]) -> int:
    """Returns the size of a step, which its save recorded, or which its files have."""
    saves = runs[-1].saves if runs else ()
    recorded = {save.step: save.num_bytes for save in saves}
    return recorded.get(newest.step) or containment.stored_bytes(newest.path)


def look(run: RunDirectory) -> Seen:
    """Reads the steps and the newest events of a run.

    Raises:
      DirectoryError: the directory cannot be read at the moment.
    """
    now_secs = time.time()
    runs = runs_of(read_events(run.path, _MAX_FILES), is_running=is_held(run))
    steps = run.steps()
    newest = steps[-1] if steps else None
    room = None if location.is_bucket(run.path) else shutil.disk_usage(run.path)
    return Seen(
        path=str(run.path),
        now_secs=now_secs,
        runs=runs,
        steps=[committed.step for committed in steps],
        committed=None if newest is None else output.committed_at(newest),
        num_bytes=None if newest is None else _num_bytes(newest, runs),
        free_bytes=None if room is None else room.free,
        disk_bytes=None if room is None else room.total,
    )
