"""The calls that each process makes, by which processes learn at once that their calls differ.

Each process publishes its latest calls: ``restore(5)``, or ``save(12)`` if the step is saved. A
process that waits compares the calls of the awaited processes with its own. If one made a call that
rules out the awaited one, waiting is in vain. A process whose newest call is one that this process
made before is behind, and is waited for.

A call is its text and how often it was made: the first ``save(12)``. Its work is done by processes
that make this same call, and by no others. After calls have differed:

- A ``save`` that was in vain stays so until all restore a step. Who comes to it later finds that it
  has failed, and goes on to the next one at once.
- The next call of any other text is the second one on all processes, also on those that did not
  make the first, which was in vain.
- A process that catches up on what this process has made already is behind, and is waited for.

Saves run in the background, so calls of different kinds may be made in one another's time. A call
that reads on another thread than the training is not published: it rules out no call, and none
rules it out, because each thread makes its calls in its own time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import json
import threading
import time
from collections.abc import Iterator, Sequence

from torchax_ckpt.errors import ProcessError
from torchax_ckpt.processes.messages import POLL_SECS, Messages
from torchax_ckpt.runtime.lazily import jax

# How many calls of each lane are published. A lane has one call at a time, so a call that is still
# carried out is among them.
_PUBLISHED = 4
_REMEMBERED = 64
_FOLDER = "calls"


class Kind(enum.StrEnum):
    """What a call does to its thread, and to calls on other threads.

    ``SAVE`` goes on in the background. ``CALL`` and ``LOAD`` keep the training thread until all
    processes have made the call; ``READ`` keeps any other thread. ``END`` is the last call of the
    training thread. ``AT`` is a ``save`` whose step is not to be saved, or is not yet decided on.
    """

    SAVE = enum.auto()
    CALL = enum.auto()
    LOAD = enum.auto()
    READ = enum.auto()
    END = enum.auto()
    AT = enum.auto()


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a process."""

    lane: str  # what has one call at a time, such as the saves to one tier
    text: str  # the call as in a program: ``save(12)``
    # How many calls of this text the processes have made in this lane, with this one; of saves, in
    # this era.
    number: int
    kind: Kind
    # The step of a save; for other calls, ``CallLog.step`` of the process, or None.
    step: int | None = dataclasses.field(compare=False)
    # Whether the process waits for nobody in this call any more, because it failed.
    has_failed: bool = dataclasses.field(default=False, compare=False)
    era: str = ""  # of a save: the newest call before it by which all have restored a step

    @functools.cached_property
    def entered(self) -> collections.Counter[str]:
        """How often this process has entered each round of this call, by its place."""
        return collections.Counter()

    @property
    def before(self) -> Call:
        """The call of the same text before this one."""
        return dataclasses.replace(self, number=self.number - 1)


class CallLog:
    """Publishes the calls of this process on ``channel``, and compares them with others' calls."""

    def __init__(self, channel: Messages | None = None) -> None:
        self._channel = channel if channel is not None and channel.count > 1 else None
        # The last step of a ``save`` or ``should_save``, or which was restored after that.
        self.step: int | None = None
        self.num_restores = 0  # of all processes together, from a step or from the start
        self._lock = threading.RLock()
        self._numbers: collections.Counter[tuple[str, str]] = collections.Counter()
        # Those of the newest saves of this era, whose steps only go up.
        self._save_numbers: dict[tuple[str, str], int] = {}
        self._era = ""
        self._made: collections.deque[Call] = collections.deque(maxlen=_REMEMBERED)
        self._told_step: int | None = None  # the step at the newest published call
        # Of each call of a process: at which call of this process it was named first, and when.
        self._named: dict[tuple[int, Call], tuple[str, float]] = {}
        self._in_vain: list[Call] = []
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def calling(self, text: str, kind: Kind) -> Iterator[None]:
        """Makes ``text`` the call of this thread; publishes a save only if ``current`` is read."""
        self._of_thread.call = (text, kind, self.step)
        self._of_thread.published = None
        try:
            if kind is not Kind.SAVE:
                _ = self.current
            yield
        finally:
            self._of_thread.call = None

    @property
    def current(self) -> Call | None:
        """The call that this thread is in, published if it was not; None outside of calls."""
        call = getattr(self._of_thread, "call", None)
        if call is None:
            return None
        if self._of_thread.published is None:
            self._of_thread.published = self.publish("calls", *call)
        return self._of_thread.published

    def publish(self, lane: str, text: str, kind: Kind, step: int | None) -> Call:
        """Publishes and returns a call."""
        if self._channel is None:  # nobody reads it
            return Call(lane, text, 1, kind, step)
        with self._lock:
            era = self._era if kind is Kind.SAVE else ""
            number = self._next_number(self._channel, lane, text, kind)
            call = Call(lane, text, number, kind, step, era=era)
            if kind is Kind.READ:
                return call
            if kind is Kind.AT and self._made and self._made[-1].kind is Kind.AT:
                self._made.pop()  # only the newest counts, and many would displace the other calls
            self._made.append(call)
            self._told_step = self.step
            self._put_latest(self._channel)
            return call

    def _put_latest(self, channel: Messages) -> None:
        message = json.dumps([channel.index, *map(dataclasses.astuple, self._latest)])
        # If the service does not answer, the round that follows says so.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            channel.put_note(f"{_FOLDER}/{channel.index}", message.encode())

    def fail(self, call: Call) -> None:
        """Publishes that a call has failed: until the next one, this process is behind."""
        with self._lock:
            if self._channel is not None and call in self._made:
                self._made[self._made.index(call)] = dataclasses.replace(call, has_failed=True)
                self._put_latest(self._channel)

    def _next_number(self, channel: Messages, lane: str, text: str, kind: Kind) -> int:
        """Returns the number of the next call of a text."""
        if kind is Kind.AT:  # no work belongs to it
            return 1
        if kind is Kind.SAVE:
            number = self._save_numbers.pop((lane, text), 0) + 1
            self._save_numbers[lane, text] = number
            if len(self._save_numbers) > _REMEMBERED:
                del self._save_numbers[next(iter(self._save_numbers))]
            return number
        made = [self._numbers[lane, text]]
        # A process that left a call out may not know that the others made it in vain.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            made += [json.loads(note) for note in channel.notes(_in_vain(lane, text))]
        self._numbers[lane, text] = max(made) + 1
        return self._numbers[lane, text]

    def go_on_from(self, step: int | None) -> None:
        """Records that by its present call all have restored a step, or none of them has one."""
        self.step = step
        self.num_restores += 1
        call = self.current
        self._era = "" if call is None else f"{call.text} {call.number}"
        self._save_numbers.clear()
        self._named.clear()
        self._in_vain.clear()

    def tell_step(self) -> None:
        """Publishes the last step of a ``save``, for a process that waits, unless it is known."""
        with self._lock:
            # A later call of another kind, once published, has told the step too.
            if self._channel is not None and self.step not in (None, self._told_step):
                self.publish("at", f"save({self.step})", Kind.AT, self.step)

    def at(self, step: int) -> Call:
        """Publishes that this process called ``save`` for a step, unless it did so just before."""
        if self._made and self._made[-1].kind is Kind.AT and self._made[-1].step == step:
            return self._made[-1]
        return self.publish("at", f"save({step})", Kind.AT, step)

    @property
    def _latest(self) -> list[Call]:
        lanes: collections.Counter[str] = collections.Counter()
        latest = []
        for call in reversed(self._made):
            lanes[call.lane] += 1
            if lanes[call.lane] <= (1 if call.kind is Kind.AT else _PUBLISHED):
                latest.append(call)
        return latest[::-1]

    def difference(self, mine: Call, others: Sequence[int]) -> ProcessError | None:
        """Returns an error if one of ``others`` made a call that rules out the call ``mine``."""
        error = None
        if self._channel is None or mine.kind is Kind.READ:
            return None
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self._channel.index == 0:
                sent = self._channel.notes(_FOLDER)
            else:  # waits for process 0 only; all messages to all processes would be too many
                note = self._channel.wait_for_note(f"{_FOLDER}/0")
                sent = [] if note is None else [note]
                if note is None:
                    self._channel.liveness.ask()
            for message in sent:
                index, *fields = json.loads(message)
                theirs = [Call(lane, text, n, Kind(k), *more) for lane, text, n, k, *more in fields]
                if index not in others:
                    continue
                if index == 0 and mine not in theirs:
                    self._channel.liveness.ask()
                other = _instead(mine, list(self._made), theirs)
                if other is None or self._is_behind(mine, other):
                    continue
                now = time.monotonic()
                named_at, since = self._named.setdefault((index, other), (mine.text, now))
                # Named at an earlier call, it fails too, unless the process waits there for others.
                is_waiting = now - since > 2 * POLL_SECS and not (
                    other.has_failed or other.kind is Kind.AT
                )
                is_left = mine.kind is Kind.SAVE and other.kind in (Kind.SAVE, Kind.AT)
                is_left = is_left and (mine.step or 0) < (other.step or 0)
                if mine.text in (named_at, other.text) or is_waiting or is_left:
                    self._in_vain.append(mine)
                    text = other.text + " out of turn" * (other.text == mine.text)
                    error = error or different(self._channel.index, mine.text, index, text)
            if error is not None and mine.kind is not Kind.SAVE:  # a save stays in vain
                folder = _in_vain(mine.lane, mine.text)
                self._channel.put_note(f"{folder}/{self._channel.index}", b"%d" % mine.number)
        return error

    def refuse(self, text: str, step: int | None) -> Call:
        """Publishes a ``save`` that this process alone makes fail, at a step or at none."""
        call = self.publish("refused", text, Kind.SAVE, step)
        self._in_vain.append(call)
        self.fail(call)
        return call

    def _is_behind(self, mine: Call, other: Call) -> bool:
        """Returns whether a process with another call catches up on those that differed before."""
        if (other.lane, other.text) == (mine.lane, mine.text):
            return other.era != mine.era or other.number < mine.number
        if mine.number > 1 and mine.before not in list(self._made):
            return False  # ``mine`` makes up for a call too, and each would wait for the other
        in_vain = [call for call in list(self._in_vain) if call.text != mine.text]
        if other.kind in (Kind.SAVE, Kind.AT) and other.step is not None:
            return other.step <= max([call.step or -1 for call in in_vain], default=-1)
        return other.before in in_vain


def different(index: int, call: str, other_index: int, other: str) -> ProcessError:
    """Returns the error that names two calls of two processes."""
    first, second = sorted([(index, call), (other_index, other)])
    return ProcessError(
        f"the processes do not make the same calls: process {first[0]} called {first[1]}, but "
        f"process {second[0]} called {second[1]}. Every process must make the same calls of "
        "attach, save, restore, load, delete and verify, at the same steps."
    )


def _instead(mine: Call, own: Sequence[Call], theirs: Sequence[Call]) -> Call | None:
    """Returns which of the calls ``theirs``, oldest first, rules out that they make ``mine``."""
    if mine in theirs:
        return None
    for other in reversed(theirs):
        kinds = {mine.kind, other.kind}
        if Kind.AT in kinds:
            return other if _is_past(mine, other, own) else None
        if other not in own:
            return other
        # Made here before ``mine``: the other process is behind. Made after: it left ``mine`` out.
        is_behind = mine not in own or own.index(other) < own.index(mine)
        return None if is_behind or other.kind is Kind.LOAD else other
    return None


def _is_past(mine: Call, other: Call, own: Sequence[Call]) -> bool:
    """Returns whether one call is a ``save`` at a step that rules out the other call."""
    if mine.kind is other.kind:
        return False
    if other.kind is Kind.AT:
        return mine.step is None or (other.step or 0) > mine.step
    if other in own:
        return False
    if other.kind is Kind.SAVE:
        return other.step != mine.step
    return other.step is None or (mine.step or 0) > other.step


def _in_vain(lane: str, text: str) -> str:
    """Returns the folder of notes on calls of a text that processes made in vain."""
    return f"{_FOLDER} in vain/{lane} {text.encode().hex()}"
