"""The calls that each process makes, by which processes learn at once that their calls differ.

A process that waits for another one cannot tell a slow process from one that made another call. So
each process publishes its latest calls: ``restore(5)``, or ``save(12)`` if the step is saved. A
process that waits compares the calls of the processes that it waits for with its own. If another
process made a call that rules out the awaited one, waiting is in vain. A process whose newest call
is one that this process made before is behind, and is waited for.

Saves run in the background, so calls of different kinds may be made in one another's time: a
``load`` on a thread beside the training rules out no save.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torchax_ckpt.errors import ProcessError
from torchax_ckpt.processes.messages import Messages
from torchax_ckpt.runtime.lazily import jax

P = ParamSpec("P")
R = TypeVar("R")

# How many calls of each lane are published. A lane has one call at a time, so a call that is still
# carried out is among them.
_PUBLISHED = 4
_REMEMBERED = 64
_FOLDER = "calls"


class Kind(enum.StrEnum):
    """What a call does to its thread, and to calls on other threads.

    ``SAVE`` goes on in the background. ``CALL`` and ``LOAD`` keep the training thread until all
    processes have made the call; ``READ`` keeps another thread. ``END`` is the last call of the
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
    """One call of a process.

    Attributes:
      lane: what has one call at a time, such as the saves to one tier.
      text: the call as in a program: ``save(12)``.
      number: how many calls of this text the process has made in this lane, with this one.
      kind: see ``Kind``.
      step: the step of a save; for other calls, ``CallLog.step`` of the process, or None.
    """

    lane: str
    text: str
    number: int
    kind: Kind
    step: int | None


class _HasLog(Protocol):
    @property
    def _call_log(self) -> CallLog: ...


S = TypeVar("S", bound=_HasLog)


class CallLog:
    """Publishes the calls of this process, and compares them with those of other processes.

    Args:
      channel: carries the messages; None, or a channel of one process, for no messages.

    Attributes:
      step: the last step for which this process called ``save`` or ``should_save``, or which it
        restored after that.
      has_differed: whether a call of this process differed from one of another process, or may have
        without this process being told.
    """

    def __init__(self, channel: Messages | None = None) -> None:
        self._channel = channel if channel is not None and channel.count > 1 else None
        self.step: int | None = None
        self.has_differed = False
        self._lock = threading.Lock()
        self._numbers: collections.Counter[tuple[str, str]] = collections.Counter()
        self._made: collections.deque[Call] = collections.deque(maxlen=_REMEMBERED)
        self._told_step: int | None = None  # the step at the newest published call
        self._named: set[tuple[int, Call]] = set()
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def calling(self, text: str, kind: Kind) -> Iterator[None]:
        """Makes ``text`` the call of this thread within the ``with`` block.

        Publishes the call; but a save, only if ``current`` is read, because most calls of ``save``
        concern no other process.
        """
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
        """Publishes a call; ``lane``, ``text``, ``kind`` and ``step`` are those of ``Call``."""
        if self._channel is None:  # nobody reads it, and the texts of a long run would pile up
            return Call(lane, text, 1, kind, step)
        with self._lock:
            return self._publish(self._channel, lane, text, kind, step)

    def _publish(
        self, channel: Messages, lane: str, text: str, kind: Kind, step: int | None
    ) -> Call:
        self._numbers[lane, text] += 1
        call = Call(lane, text, self._numbers[lane, text], kind, step)
        if kind is Kind.AT and self._made and self._made[-1].kind is Kind.AT:
            self._made.pop()  # only the newest counts, and many would displace the other calls
        self._made.append(call)
        self._told_step = self.step
        message = json.dumps([channel.index, *map(dataclasses.astuple, self._latest)])
        # If the service does not answer, the round that follows says so.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            channel.put_note(f"{_FOLDER}/{channel.index}", message.encode())
        return call

    def tell_step(self) -> None:
        """Publishes the last step for which this process called ``save``, unless others know it.

        Most calls of ``save`` save nothing and are not published. A process that waits for process
        0 in another call asks for this, and so learns that process 0 goes on without it. May be
        called on any thread.
        """
        with self._lock:
            # A later call of another kind, once published, has told the step too.
            if self._channel is not None and self.step not in (None, self._told_step):
                self.has_differed = True
                self._publish(self._channel, "at", f"save({self.step})", Kind.AT, self.step)

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
        """Returns an error if one of ``others`` made a call that rules out the call ``mine``.

        Each call of another process is named once, so that it costs no later call.
        """
        if self._channel is None:
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
                theirs = [Call(lane, text, n, Kind(kind), s) for lane, text, n, kind, s in fields]
                if index not in others:
                    continue
                if index == 0 and mine not in theirs:
                    self._channel.liveness.ask()
                other = _instead(mine, list(self._made), theirs)
                if other is not None and (index, other) not in self._named:
                    self._named.add((index, other))
                    self.has_differed = True
                    return different(self._channel.index, mine.text, index, other.text)
        return None


def called(
    kind: Kind | Callable[[Any], Kind],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Returns a decorator; a decorated method publishes its calls.

    Args:
      kind: the kind of call; or a function that returns it for the object of the method.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        name = getattr(method, "__name__", "a method")
        has_step = "step" in inspect.signature(method).parameters

        @functools.wraps(method)
        def logged(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            step = args[0] if args and has_step else kwargs.get("step")
            text = f"{name}({'' if step is None else repr(step)[:40]})"
            with self._call_log.calling(text, kind(self) if callable(kind) else kind):
                return method(self, *args, **kwargs)

        return logged

    return decorate


def different(index: int, call: str, other_index: int, other: str) -> ProcessError:
    """Returns the error that names two calls of two processes."""
    first, second = sorted([(index, call), (other_index, other)])
    return ProcessError(
        f"the processes do not make the same calls: process {first[0]} called {first[1]}, but "
        f"process {second[0]} called {second[1]}. Every process must make the same calls of "
        "attach, save, restore, load, delete and verify, at the same steps."
    )


def _instead(mine: Call, own: Sequence[Call], theirs: Sequence[Call]) -> Call | None:
    """Returns the call of another process that rules out that the process will make ``mine``.

    Args:
      mine: the call of this process that waits for the other process.
      own: the calls that this process has made, oldest first.
      theirs: the latest calls of the other process, oldest first.
    """
    if mine in theirs:
        return None
    for other in reversed(theirs):
        kinds = {mine.kind, other.kind}
        if Kind.READ in kinds and kinds & {Kind.SAVE, Kind.END, Kind.AT}:
            continue  # on different threads
        if Kind.AT in kinds:
            return other if _is_past(mine, other, own) else None
        if other not in own:
            return other
        # Made here before ``mine``: the other process is behind. Made after: it left ``mine`` out.
        is_behind = mine not in own or own.index(other) < own.index(mine)
        return None if is_behind or other.kind in (Kind.LOAD, Kind.READ) else other
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
