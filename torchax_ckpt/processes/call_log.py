"""The calls of the training threads, compared between processes; the error of a run that differs.

Every process makes the same calls of attach, save, restore, load, delete and verify in the same
order. Each process publishes the newest ones of its training thread. A process that waits for
another one compares what that process has called with its own calls. If two calls cannot follow
each other, the process that sees this first publishes an error. From then on, every call on every
process raises this error. The calls do not go on, because the processes may hold different states.
A save that all processes had begun still becomes durable.

The following are no differences:

- A process is late: its newest call is one that this process has made as well.
- A process refuses a call, because the call is invalid there. The call fails on all processes.
- The policy declines a save. A declined save is not published, so it costs no message.
- A call reads on another thread than the training thread. Threads make their calls in any order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torchax_ckpt.errors import ProcessError
from torchax_ckpt.processes.messages import OTHER_CALLS, Messages
from torchax_ckpt.runtime.lazily import jax
from torchax_ckpt.runtime.user_messages import user_line

logger = logging.getLogger(__name__)

# How many calls a process publishes. A slow save must be among them, while quick saves to the local
# tier follow it.
_PUBLISHED = 16
_REMEMBERED = 64
_REFUSED = 16
_READS = 10_000  # texts of reads, such as of every step of a long run
_CALLS, _DIFFERENCE = "calls", "difference"
_END_OF_RUN = (
    " This checkpointer makes no more calls: close it, and start all processes again, or open a "
    "new one on all of them. The run then resumes from its newest durable step."
)


class Kind(enum.StrEnum):
    """What a call does to its thread.

    ``SAVE`` goes on in the background. ``CALL`` keeps the training thread until all processes have
    made the call; ``READ`` keeps another thread. ``END`` is the last call of a process.
    """

    SAVE = enum.auto()
    CALL = enum.auto()
    READ = enum.auto()
    END = enum.auto()


Place = tuple[tuple[int, int], tuple[int, int]]
"""``Call.turn`` and ``Call.after`` of a call."""


class Order(NamedTuple):
    """The place of a call among all calls of its training thread; later calls are greater."""

    num_calls: int  # ``turn[0]``; -1 on another thread
    is_call: bool  # whether the call is no save
    step: int  # of a save
    number: int  # of the saves of this step, or of the reads with this text


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a process. Two processes make the same call if text and order are equal."""

    text: str  # as in a program: ``save(12)``
    order: Order
    turn: tuple[int, int] = dataclasses.field(compare=False)  # see ``CallLog.turn``
    # The step of the save before, or -1, and the number of saves that were refused since.
    after: tuple[int, int] = dataclasses.field(compare=False)
    where: str = dataclasses.field(compare=False)  # file and line of the user's program

    @functools.cached_property
    def entered(self) -> collections.Counter[str]:
        """How often this process has entered each round of this call, by the round's place."""
        return collections.Counter()

    @property
    def is_read(self) -> bool:
        """Whether it reads on another thread than the training thread."""
        return self.order.num_calls < 0

    def is_at(self, place: Place) -> bool:
        """Whether this call has the place of a call of another process.

        After a process has left out a declined save, their numbers of saves differ, but the step
        before is the same.
        """
        (num_calls, num_saves), after = place
        is_after = (num_calls, num_saves > 0) == (self.turn[0], self.turn[1] > 0)
        return self.turn == (num_calls, num_saves) or (is_after and self.after == after)

    def __str__(self) -> str:
        return f"{self.text} at {self.where}"


_START = Call("", Order(0, False, -1, 0), (0, 0), (-1, 0), "")


class _Present(threading.local):
    """The call that a thread is in; none at first."""

    kind: Kind | None = None
    name = ""
    argument: Any = None
    turn = 0, 0
    step = after = -1
    is_awaited = True  # whether other processes may be waiting for it
    call: Call | None = None  # once it is published


class CallLog:
    """The calls of this process, published on ``channel`` and compared with those of others."""

    def __init__(self, channel: Messages | None = None) -> None:
        self._channel = channel if channel is not None and channel.count > 1 else None
        # How many calls of kind ``CALL`` this process has made, and how many saves since the newest
        # of them, with those that were declined or refused.
        self.turn = 0, 0
        self.num_restores = 0  # by all processes together, from a step or without one
        # The newest step that was saved, asked about or restored, and the one before it.
        self._step = self._step_before = -1
        self._lock = threading.RLock()
        self._made = collections.deque([_START], _REMEMBERED)
        self._refused = collections.deque[Call]([], _REFUSED)
        # The newest save that was not begun, made after this process had left out another one.
        self._passing = collections.deque[Call]([], 1)
        self._num_reads = dict[str, int]()  # how often each text was read, the newest last
        self._present = _Present()
        self._difference = ""

    # --- calls of this process ---

    @contextlib.contextmanager
    def calling(self, name: str, kind: Kind, argument: Any = None) -> Iterator[None]:
        """Makes ``name(argument)`` the call of this thread, for the ``with`` block.

        Raises the run's error if calls have differed. If the block raises before the call is
        published, this process refuses the call: it fails on the processes that wait for it.
        """
        if self._difference and kind is not Kind.END:
            raise ProcessError(self._difference)
        here = self._present
        here.name, here.argument, here.kind, here.after = name, argument, kind, self._step
        num_calls, num_saves = self.turn
        here.turn = num_calls, num_saves + 1 if kind is Kind.SAVE else 0
        if kind is Kind.CALL:
            self.turn = num_calls + 1, 0
        try:
            if kind is Kind.END:
                self.publish()
            yield
        except BaseException:
            is_refused = here.call is None and here.is_awaited and not self._difference
            if is_refused and kind in (Kind.SAVE, Kind.CALL):
                self._add(self._refused, self._call())
                self.turn = max(self.turn, here.turn)
            raise
        finally:
            vars(here).clear()

    def at(self, step: int) -> None:
        """Sets the step that this thread's call is given, or asks about, as a number."""
        here = self._present
        here.argument = step
        if here.kind is Kind.SAVE:
            if step != self._step:
                self._step, self._step_before, self.turn = step, self._step, here.turn
            here.turn, here.after, here.step = self.turn, self._step_before, step

    def decline(self) -> None:
        """Notes that no process waits for the save that this thread is in."""
        self._present.is_awaited = False

    def go_on_from(self, step: int | None) -> None:
        """Notes that all processes have restored a step, or that the run begins without one."""
        self._step = self._step_before = -1 if step is None else step
        self.num_restores += 1

    def publish(self) -> Call | None:
        """Publishes the call of this thread, unless that is done; None outside of calls."""
        here = self._present
        if here.call is None and here.kind is not None and self._channel is not None:
            here.call = self._call()
            if not here.call.is_read and here.call not in self._made:
                self._add(self._made, here.call)
        return here.call

    def resume(self, call: Call | None) -> None:
        """Makes a call that was published that of this thread, which does a part of its work."""
        self._present.call = call

    def pass_by(self) -> None:
        """Publishes the save of this thread, which may be declined, after one that was left out."""
        self._add(self._passing, self._call())

    @property
    def place(self) -> Place:
        """The place of the save of this thread."""
        return self.turn, self._after(self._step_before)

    def has_left_out(self, step: int, place: Sequence[Sequence[int]]) -> bool:
        """Whether this process, in a save, has left out one that another made at this ``place``."""
        (num_calls, num_saves), (before, since) = place
        is_past = num_calls < self.turn[0] or step <= self._step_before
        is_refused = self._has_refused(((num_calls, num_saves), (before, since)))
        return not (self._channel is None or is_past or is_refused)

    def _has_refused(self, place: Place) -> bool:
        return any(call.is_at(place) for call in [*self._refused])

    def _after(self, step: int) -> tuple[int, int]:
        """Returns a step, and how many saves this process has refused since."""
        since = [c for c in [*self._refused] if (c.turn[0], c.after[0]) == (self.turn[0], step)]
        return step, len(since)

    def _call(self) -> Call:
        """Returns the call of this thread."""
        here, newest = self._present, self._made[-1]
        text = f"{here.name}({'' if here.argument is None else f'{here.argument!r:.40}'})"
        if here.kind is Kind.READ:
            number = self._num_reads.pop(text, 0) + 1
            self._num_reads[text] = number
            if len(self._num_reads) > _READS:
                del self._num_reads[next(iter(self._num_reads))]
            order = Order(-1, True, -1, number)
        else:
            is_again = newest.text == text and newest.turn[0] == here.turn[0]
            # A process that asks about a step does not save it yet.
            number = here.is_awaited + (newest.order.number if is_again else 0)
            order = Order(here.turn[0], here.kind is not Kind.SAVE, here.step, number)
        return Call(text, order, here.turn, self._after(here.after), user_line())

    def _add(self, calls: collections.deque[Call], call: Call) -> None:
        """Adds a call to those that were made, refused or passing, and publishes all of them."""
        channel = self._channel
        if channel is None:
            return
        with self._lock, contextlib.suppress(jax.errors.JaxRuntimeError):  # a round will say so
            calls.append(call)
            lists = [*self._made][-_PUBLISHED:], self._refused, self._passing
            message = [channel.index, *([dataclasses.astuple(c) for c in each] for each in lists)]
            channel.put_note(f"{_CALLS}/{channel.index}", json.dumps(message).encode())

    # --- comparison with other processes ---

    @property
    def error(self) -> ProcessError | None:
        """The error of the run, which every call raises; None while no calls have differed."""
        return ProcessError(self._difference) if self._difference else None

    def look(self) -> None:
        """Looks whether a process has published the run's error, and logs the error once."""
        with self._lock, contextlib.suppress(jax.errors.JaxRuntimeError):
            if self._channel is not None and not self._difference:
                for message in self._channel.notes(_DIFFERENCE):
                    self._difference = message.decode()
                    logger.error("%s", self._difference)

    def differ(self, index: int, other: str) -> ProcessError:
        """Publishes and returns the run's error, or returns the one that is published already.

        ``other`` is what process ``index`` called in place of the call of this thread.
        """
        assert self._channel is not None
        mine = self._present.call or self._call()
        error = _different(self._channel.index, mine, index, other, _END_OF_RUN)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
            self._channel.put_first_note(f"{_DIFFERENCE}/0", str(error).encode())
        self.look()
        self._channel.liveness.alarm()
        return self.error or error

    def difference(self, others: Sequence[int]) -> ProcessError | None:
        """Returns why the call of this thread waits for ``others`` in vain; None if it may wait."""
        here, channel = self._present, self._channel
        if channel is None:
            return None
        self.look()
        mine = here.call or (self._call() if here.kind is Kind.SAVE else None)
        if mine is None or mine.is_read:
            return self.error
        have_all_begun = not mine.order.is_call
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for index, (made, refused, passing) in self._published(channel, others):
                if mine in made or made[0].order > mine.order:
                    continue
                have_all_begun = False
                for call in refused:
                    if call.is_at((mine.turn, mine.after)):
                        return _different(channel.index, mine, index, str(call))
                if (other := self._instead(mine, made, passing)) is not None:
                    return self.differ(index, str(other))
        return None if have_all_begun else self.error

    def _published(
        self, channel: Messages, others: Sequence[int]
    ) -> Iterator[tuple[int, list[list[Call]]]]:
        """Yields indices of others, what they have made and refused, and what passes by."""
        if channel.index == 0:
            notes = channel.notes(_CALLS)
        else:  # all calls to all processes would be too many
            note = channel.wait_for_note(f"{_CALLS}/0")
            notes, others = [] if note is None else [note], [0]
        found = {index: lists for index, *lists in map(json.loads, notes)}
        for index in others:
            made, *more = map(_from_json, found.get(index, ([], [], [])))
            yield index, [made or [_START], *more]

    def _instead(self, mine: Call, made: Sequence[Call], passing: Sequence[Call]) -> Call | None:
        """Returns the call of a process by which it shows that it does not make ``mine``, if any.

        The process has made the calls ``made``, of which the first comes before ``mine``.
        """
        own = [*self._made]
        # A save that passes by and is of the same step may yet become ``mine``.
        passed = [call for call in passing if call.order[:3] > mine.order[:3]]
        past = next((call for call in (*made, *passed) if call.order >= mine.order), None)
        if past is not None:
            # If it has asked for the step of ``mine``, the decision on this step is on its way.
            is_decided = mine not in own and past.after[0] >= mine.order.step
            return None if is_decided else past
        newest = made[-1]
        is_late = newest in own or newest.order < own[0].order
        return None if is_late or self._has_refused((newest.turn, newest.after)) else newest


def _from_json(calls: Sequence[Sequence[Any]]) -> list[Call]:
    return [
        Call(text, Order(*order), (n, k), (step, since), where)
        for text, order, (n, k), (step, since), where in calls
    ]


def _different(index: int, mine: Call, other_index: int, other: str, end: str = "") -> ProcessError:
    """Returns the error that names two calls of two processes; ``end`` follows."""
    first, second = sorted([(index, str(mine)), (other_index, other)])
    before = ""
    if first[1] == second[1]:
        before = ", after another call that only one of them made, and that perhaps was refused"
    return ProcessError(
        f"{OTHER_CALLS}: process {first[0]} called {first[1]}, but process {second[0]} called "
        f"{second[1]}{before}. Every process must make the same calls of attach, save, restore, "
        f"load, delete and verify, at the same steps.{end}"
    )
