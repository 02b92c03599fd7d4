"""The end of a run shortly before a known time, after the same step on all processes.

Only the clock of process 0 counts. Once the time is nearly over, a thread of each process reports
the newest step that its training asked about. The last step is the one after the newest of all, so
it lies ahead of all processes, however far they are apart. From its report until it knows the last
step, a process waits where its training asks about a later step. This takes milliseconds, once in a
run, because the threads wait for no training thread.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
import numbers
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchax_ckpt.errors import ArgumentError, CheckpointError, ClosedError, ProcessError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.messages import POLL_SECS
from torchax_ckpt.runtime.background import Flag, Task
from torchax_ckpt.runtime.user_messages import fields, tell

logger = logging.getLogger(__name__)

Until = datetime.datetime | datetime.timedelta | float
# The years 2001 to 5138: durations in seconds are below, times in milliseconds are above.
_FIRST_SECS, _END_SECS = 1e9, 1e11


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop of steps; times are seconds since 1970, infinite without a deadline."""

    number: int = 0  # from 1; 0 before the first
    total: float = math.inf  # the last step, if no deadline comes before
    end: float = math.inf
    half: float = math.inf  # when half of the time until ``end`` is over
    last_step: _LastStep | None = None  # on several processes


class Deadline:
    """Tells after which step a run ends because the time is nearly over.

    ``longest_save_secs`` returns the longest time from a call of ``save`` until its step was safe,
    in seconds; None if no step is safe yet.
    """

    def __init__(
        self,
        processes: Processes,
        until: Until | None,
        margin_secs: float,
        longest_save_secs: Callable[[], float | None],
    ) -> None:
        self._processes = processes
        argument = "CheckpointOptions: deadline"
        self._default = None if until is None else _unix_time(argument, until)
        self._margin_secs = margin_secs
        self._longest_save_secs = longest_save_secs
        self._longest_step_secs = 0.0
        self._loop = _Loop()
        # The newest position asked about, see ``_LastStep``, and when, a ``time.monotonic()``.
        self._asked: tuple[tuple[int, int], float] | None = None
        self._is_reached = False

    def begin(self, until: Until | None, step: int = 0, total: float = math.inf) -> None:
        """Begins a loop from ``step`` to ``total``, to end by ``until`` or the options' deadline.

        Raises:
          ArgumentError: ``until`` is no time.
        """
        self.close()
        self._loop = loop = _Loop(self._loop.number + 1, total)
        self._asked, self._is_reached = None, False
        end = self._default if until is None else _unix_time("until", until)
        if end is None or step >= total:
            return
        with self._processes.round("sharing the deadline, which all processes must give"):
            left, needed = self._processes.first(lambda: [end - time.time(), self._needed_secs])
        self._is_reached = left < needed
        if self._is_reached:
            text = "no step is trained: %.0f s are left before the deadline, and %.0f s are needed"
            logger.warning(text, left, needed)
            return
        last_step = None
        if self._processes.count > 1:
            last_step = _LastStep(self._processes, loop.number)
        self._loop = dataclasses.replace(loop, end=end, half=end - left / 2, last_step=last_step)

    def reached(self, step: int | None = None) -> bool:
        """Returns whether the run ends after ``step``; without it, returns the last answer.

        The first answer about a step stays, and is the same on all processes.
        """
        if step is not None and self._default is not None and self._loop.number == 0:
            self.begin(None)
        loop, before = self._loop, self._asked
        position = self._processes.log.num_restores, step or 0
        is_known = self._is_reached or loop.end == math.inf or (before and before[0] == position)
        if step is None or step >= loop.total or is_known:
            return self._is_reached
        now = time.monotonic()
        if before is not None and before[0][0] == position[0]:  # no restore took the time
            self._longest_step_secs = max(self._longest_step_secs, now - before[1])
        self._asked = position, now
        left = loop.end - time.time()
        is_near = self._processes.is_first and left < self._needed_secs
        if loop.last_step is not None:
            self._is_reached = loop.last_step.is_reached(position, is_near=is_near)
        else:
            self._is_reached = is_near
        if self._is_reached and self._processes.is_first:
            message = f"step {step} is the last one: {left:.0f} s are left before the deadline"
            tell(logger, message, fields(step=step))
        return self._is_reached

    @property
    def needs_save(self) -> bool:
        """Whether half of the time is over, and no step is safe yet."""
        return time.time() >= self._loop.half and self._longest_save_secs() is None

    @property
    def _needed_secs(self) -> float:
        # The last step of several processes lies one step ahead of process 0, or two.
        num_steps = 1 if self._processes.count == 1 else 3
        save_secs = 1.5 * (self._longest_save_secs() or 0.0)
        return num_steps * self._longest_step_secs + save_secs + self._margin_secs

    @property
    def has_begun(self) -> bool:
        """Whether a thread was started, which a run of one process does not need."""
        return self._loop.last_step is not None

    def close(self) -> None:
        """Ends the thread. The others go on to the ends of their loops, unless all have agreed."""
        if self._loop.last_step is not None:
            self._loop.last_step.close()


class _LastStep:
    """The last step of one loop, on which several processes agree.

    A position is how many restores the run has made, and a step. So it also rises if a restore goes
    back.
    """

    def __init__(self, processes: Processes, loop: int) -> None:
        self._processes, self._note = processes, f"near the end of loop {loop}"
        self._asked = -1, -1
        self._last: tuple[int, int] | None = None
        self._is_near = Flag()
        self._is_closing = False
        self._task = Task("last-step", self._run)
        self._task.start()

    def is_reached(self, position: tuple[int, int], *, is_near: bool) -> bool:
        """Returns whether the last step is at or before ``position``; waits if it is being chosen.

        ``is_near``, on process 0, has the processes choose the last step, after ``position``.
        """
        if not self._is_near.is_set:
            self._asked = position
            if is_near:
                self._is_near.set()
            # The thread sets the flag and then reads what was asked, so one of both sees it.
            if is_near or not self._is_near.is_set:
                return False
        self._task.ended.wait()
        return self._last is not None and position >= self._last

    def close(self) -> None:
        """Ends the thread. If the last step is not chosen yet, it never will be."""
        self._is_closing = True
        self._is_near.set()
        self._task.ended.wait()

    def _run(self) -> None:
        processes, work = self._processes, "choosing the last step"
        try:
            if not self._wait_until_near():
                processes.refuse(work, ClosedError("a process has ended its loop"))
                return
            with processes.round(work, is_met=False):
                if processes.is_first:
                    processes.put_note(self._note, b"1")
                asked = json.dumps(self._asked).encode()
                newest = processes.combine(asked, lambda all_asked: max(all_asked, key=json.loads))
            num_calls, step = json.loads(newest)
            self._last = num_calls, step + 1
        except ClosedError as error:
            logger.info("the run goes on to the end of the loop, whatever the deadline: %s", error)
        except (CheckpointError, RuntimeError) as error:
            level = logging.DEBUG if self._is_closing else logging.WARNING
            logger.log(level, "the run goes on without its deadline: %s", error)

    def _wait_until_near(self) -> bool:
        """Returns True once process 0 has the last step chosen; False if this loop has ended."""
        if self._processes.is_first:
            self._is_near.wait()
        while not self._is_closing and not self._is_near.is_set:
            try:
                if self._processes.wait_for_note(self._note) is not None:
                    self._is_near.set()
                    return True
            except ProcessError as error:  # unless the service comes back, JAX ends this process
                logger.debug("waiting for the last step: %s", error)
                time.sleep(POLL_SECS)
        return not self._is_closing


def _unix_time(argument: str, until: Any) -> float:
    """Returns a time as seconds since 1970; a timedelta counts from the start of this process."""
    if isinstance(until, datetime.timedelta) and until > datetime.timedelta():
        return _process_start() + until.total_seconds()
    if isinstance(until, datetime.datetime) and until.utcoffset() is not None:
        return until.timestamp()
    if isinstance(until, numbers.Real) and _FIRST_SECS <= (secs := float(until)) < _END_SECS:
        return secs
    raise ArgumentError(
        f"{argument}: expected a datetime with a time zone, a Unix time in seconds, or a positive "
        f"timedelta from the start of this process, found {until!r:.80}. For a local time give "
        "its astimezone(), for a duration datetime.timedelta(seconds=...), and in a job of Slurm "
        "int(os.environ['SLURM_JOB_END_TIME'])"
    )


def _process_start() -> float:
    """Returns the Unix time at which this process started, as the kernel knows it."""
    stat = Path("/proc/self/stat").read_bytes()
    ticks = int(stat.rpartition(b")")[2].split()[19])  # after the name, which may have spaces
    secs_since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - secs_since_boot)
