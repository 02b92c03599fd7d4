"""The command ``follow``, which publishes the steps of a run as folders while the run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

from torchax_ckpt.cli import output
from torchax_ckpt.cli.convert import in_options
from torchax_ckpt.cli.exit_codes import INTERRUPTED, OK, TERMINATED, UsageError
from torchax_ckpt.cli.quantities import parsed_secs
from torchax_ckpt.cli.step_arguments import existing
from torchax_ckpt.errors import DirectoryError, MismatchError, OutOfMemoryError, SelectionError
from torchax_ckpt.publishing import Best, Every, FolderForm, Follower, Published
from torchax_ckpt.runtime.background import Flag
from torchax_ckpt.storage.medium import location


@dataclasses.dataclass(frozen=True)
class Asked:
    """The arguments that say what is followed, and which steps are published.

    Attributes:
      run: the directory of the run.
      out: the folder to publish to.
      every: the least number of steps between two published ones; None if ``best`` is given.
      best: a metric, or a metric and ``:max`` or ``:min``.
      keep: how many folders to keep.
      grace: how long a folder stays after it was replaced, as text.
      poll: from one look at the run to the next, as text.
      is_once: whether to end after one look.
      as_json: whether to print JSON.
    """

    run: str
    out: str
    every: int | None
    best: str | None
    keep: int
    grace: str
    poll: str
    is_once: bool
    as_json: bool

    def rule(self) -> Every | Best:
        """Returns the rule for the steps to publish.

        Raises:
          UsageError: the options exclude each other, or are invalid.
        """
        if self.every is not None and self.best is not None:
            raise UsageError("follow: expected --every or --best, found both; omit one of them")
        if self.best is None:
            return Every(1 if self.every is None else self.every)
        metric, _, mode = self.best.partition(":")
        if not metric or mode not in ("", "min", "max"):
            raise UsageError(
                "follow: --best: expected METRIC, METRIC:min or METRIC:max, found "
                f"{self.best!r:.80}"
            )
        return Best(metric, "max" if mode == "max" else "min")


class _Stopped(Exception):  # noqa: N818 - ends a publication from inside, and is no failure
    """A signal asked the command to end."""


def follow(asked: Asked, form: FolderForm) -> int:
    """Runs ``torchax-ckpt follow``; returns the exit code."""
    poll_secs = parsed_secs(asked.poll, "follow: --poll")
    if poll_secs <= 0:
        raise UsageError(f"follow: --poll: expected more than 0 s, found {asked.poll!r:.80}")
    if asked.is_once or location.is_bucket(asked.run) or os.path.exists(asked.run):
        existing(asked.run)  # else it is a typo, or has not begun
    else:
        output.note(f"{asked.run}: does not exist yet; waiting for it")
    with _signals() as signals:
        try:
            follower = Follower(
                asked.run,
                asked.out,
                asked.rule(),
                form,
                keep=asked.keep,
                grace_secs=parsed_secs(asked.grace, "follow: --grace"),
                on_skipped=lambda error: output.note(f"skipped: {error}"),
                on_bytes=signals.go_on,
            )
        except (ValueError, TypeError) as error:
            raise UsageError(f"follow: {in_options(str(error))}") from error
        with follower:
            try:
                _loop(follower, signals.stop, poll_secs, asked)
            except (MismatchError, SelectionError) as error:
                raise UsageError(f"follow: {in_options(str(error))}") from error
            except _Stopped:
                if asked.is_once and signals.received == signal.SIGTERM:
                    return TERMINATED
    return INTERRUPTED if signals.received == signal.SIGINT else OK


def _loop(follower: Follower, stop: Flag, poll_secs: float, asked: Asked) -> None:
    """Publishes what is due, again and again until ``stop`` is set.

    Raises:
      CheckpointError: the first look failed, so that the arguments may be wrong; or no later look
        can succeed.
    """
    _print(follower.publish_due(), asked)
    noted = ""
    while not asked.is_once and not stop.wait(poll_secs):
        try:
            new = follower.publish_due()
        except (DirectoryError, OutOfMemoryError) as error:  # may pass
            if str(error) != noted:
                output.note(f"will try again: {error}")
            noted = str(error)
            continue
        noted = ""
        if new is not None:
            _print(new, asked)


def _print(new: Published | None, asked: Asked) -> None:
    """Prints a new folder; without one, prints something only at ``--once``."""
    if asked.as_json and (new is not None or asked.is_once):
        described: dict[str, Any] = {"step": None, "folder": None, "metrics": None}
        if new is not None:
            described = {"step": new.step, "folder": str(new.path), "metrics": new.metrics}
        print(json.dumps(described), flush=True)
    elif new is not None:
        output.print_line(f"step {new.step}: published as {new.path}")
    elif asked.is_once:
        output.print_line("no step is due")


class _Signals:
    """Asks the command to end at the next moment at which nothing is half done.

    Attributes:
      stop: set once a signal came.
      received: its number; None until then.
    """

    def __init__(self) -> None:
        self.stop = Flag()
        self.received: int | None = None

    def handle(self, number: int, frame: Any) -> None:
        """Handles a signal; a second one has its usual effect."""
        self.received = number
        self.stop.set()
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )

    def go_on(self, num_bytes: int) -> None:
        """Raises ``_Stopped`` if a signal came."""
        if self.stop.is_set:
            raise _Stopped


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    before = {n: signal.signal(n, signals.handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
