"""Messages between the processes of one run, through JAX's coordination service.

Work that several processes do together, such as one save, happens in a round. All processes enter
the round and make the same calls in the same order, by which process 0 gathers and shares values.
Each message has its own key, so a process that times out can name the process that it waits for.
The name of a round states its work, so processes that do different work enter different rounds and
time out. A round has the same result on all processes: a process that fails reports its error, and
process 0 publishes the verdict, success or one of the errors, which all processes then raise.

A round uses no device, so it can run on a separate thread during training. Threads that read steps
have rounds of their own, beside each other and beside those of the training: the order in which
threads make their calls may differ between processes. A run of one process sends no messages.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torchax_ckpt.errors import ProcessError, ProcessTimeoutError
from torchax_ckpt.processes import liveness
from torchax_ckpt.processes.call_log import Call, CallLog, Kind
from torchax_ckpt.processes.liveness import Liveness
from torchax_ckpt.processes.messages import POLL_SECS, Messages, from_json, to_json
from torchax_ckpt.runtime.background import Task
from torchax_ckpt.runtime.lazily import jax
from torchax_ckpt.runtime.stages import stage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_made: collections.Counter[str] = collections.Counter()
# Begins the verdict on a round that succeeded on all processes; the JSON of its value follows.
_SUCCESS = b"+"
# How long a process waits for another one to find out who is missing; that one may have died.
_LOOKING_SECS = 5.0
# How many processes the message of a timeout names.
_NUM_NAMED = 8
# Messages to process 0 that together may be longer have keys of their own, so that a listing does
# not repeat them.
_MAX_LISTED_BYTES = 4 << 20
_LONG = b"\1"
_SHORT = b"\0"
# How many messages a process waits for one by one, after the first listing of what has arrived.
_FIRST_WAITS = 8


@dataclasses.dataclass
class Outcome:
    """The result of a round: a value that process 0 sets, and that the others get at the end."""

    value: Any = None


class _Round(threading.local):
    """The round that the present thread is in, or was in last."""

    work = ""
    is_of_reader = False  # whether other rounds of its channel may run at the same time
    place = ""  # precedes its keys
    num_messages = 0
    verdict: bytes | None = None
    is_in_vain = False  # whether waiting for other processes was in vain


class Processes(Messages):
    """A channel for messages between the processes of a run.

    Has one round at a time, besides those of calls that read on threads of their own (``READ``).
    Channels with equal names are numbered in the order of their creation, which must be the same on
    all processes. ``open_channel`` opens one with the processes' calls and ``liveness``.
    """

    def __init__(
        self,
        name: str,
        timeout_secs: float,
        client: Any,
        *,
        index: int | None = None,
        count: int | None = None,
    ) -> None:
        self.index = jax.process_index() if index is None else index
        self.count = jax.process_count() if count is None else count
        self.timeout_secs = timeout_secs
        self.log = CallLog()
        self.liveness = Liveness()
        # The channel between all processes, if each of several writes its own directory.
        self.hosts: Processes | None = None
        if self.count == 1:
            return
        self._client = client
        self._place = f"torchax_ckpt/{_digest(name):016x}/{_made[name]}"
        _made[name] += 1
        self._one_round = threading.Lock()
        self._round = _Round()
        # How often each round that belongs to no call was entered.
        self._entered: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()
        # Key prefixes of earlier rounds that are not deleted yet, and last of the newest round.
        self._rounds: list[str] = []
        # Key prefixes of rounds that this process refused since it entered the newest round.
        self._refused: list[str] = []
        # Of readers' rounds, on process 0: the ``time.monotonic()`` of the end, and the key prefix.
        self._read: collections.deque[tuple[float, str]] = collections.deque()

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which commits, moves and deletes steps for all processes."""
        return self.index == 0

    @property
    def is_per_host(self) -> bool:
        """Whether the run has several processes, each of which writes its own directory."""
        return self.hosts is not None

    @contextlib.contextmanager
    def round(self, what: str, *, is_met: bool = True) -> Iterator[Outcome]:
        """Runs the ``with`` block as a round; one of no reader waits until others have ended.

        The round succeeds on all processes, or raises the same error on all: that of one process,
        as ProcessError if it is none of this package's; ProcessError if another process has made
        another call, or has ended; ProcessTimeoutError if one did not arrive in time.
        Process 0 may set the outcome's ``value``, which must fit into JSON.

        Args:
          what: the work of the round, the same on all processes: ``saving step 12``. The n-th round
            of some work of this thread's call meets the n-th round of it on the other processes.
          is_met: whether process 0 waits at the end until all processes have come there. False
            saves messages, if the other processes have nothing left to do by then.
        """
        outcome = Outcome()
        if self.count == 1:
            yield outcome
            return
        call, here = self.log.publish(), self._round
        vars(here).clear()  # of this thread
        here.work = what
        if call is not None and call.order.is_call:
            here.work = f"{call.text}: {what}"
        here.is_of_reader = call is not None and call.is_read
        with contextlib.nullcontext() if here.is_of_reader else self._one_round:
            here.place = self._next_place(what, call)
            if not here.is_of_reader:
                self._follow(here.place)
            try:
                yield outcome
                self._end(outcome.value, is_met=is_met)
            except BaseException as error:
                shared = self._error_for_all(error)
                if shared is error:
                    raise
                if shared is not None:
                    raise shared from shared.__cause__
            finally:
                if here.is_of_reader and self.is_first:
                    self._read.append((time.monotonic(), here.place))
            if here.verdict is not None:
                outcome.value = json.loads(here.verdict[len(_SUCCESS) :])

    def refuse(self, what: str, error: BaseException) -> None:
        """Makes a round of this thread's call fail on the other processes, without any wait."""
        if self.count == 1:
            return
        place = self._next_place(what, self.log.publish())
        kind = "verdict/0" if self.is_first else f"failed/{self.index}"
        self._set(f"{place}/{kind}", to_json(error, self.index))
        self._refused.append(place)

    def _follow(self, place: str) -> None:
        """Makes this round the newest of those that are one at a time."""
        if not self.is_first:  # process 0 deletes the messages of earlier rounds
            self._rounds.clear()
        self._rounds += [*self._refused, place]
        self._refused.clear()

    def _next_place(self, what: str, call: Call | None) -> str:
        """Returns the key prefix of the next round of this work, and counts this round."""
        what += "" if call is None else f" of {call.text} {call.order}"
        place = f"{self._place}/{_digest(what):016x}"
        with self._counting:
            entered = self._entered if call is None else call.entered
            entered[place] += 1
            return f"{place}/{entered[place] - 1}"

    @stage("end a round")
    def _end(self, value: Any, *, is_met: bool) -> None:
        """Waits for the verdict, which process 0 publishes; if ``is_met``, once all are here."""
        place = f"{self._round.place}/the end"
        if is_met:
            self._gather(place, b"")
        if not self.is_first:
            self._round.verdict = self._from_first(f"{self._round.place}/verdict/0", place)
        # Another process may have called this and failed while it waited.
        elif not self._is_decided():
            self._set(f"{self._round.place}/verdict/0", _SUCCESS + json.dumps(value).encode())
        self._require_no_failure()

    # --- exchanges of values through process 0, within a round ---

    @stage("gather")
    def gather(self, value: bytes = b"") -> list[bytes]:
        """Sends a value to process 0; returns all values there, and [] on other processes."""
        return [value] if self.count == 1 else self._gather(self._next_message(), value)

    def _gather(self, place: str, value: bytes) -> list[bytes]:
        if not self.is_first:
            if is_long := len(value) > _MAX_LISTED_BYTES // self.count:
                self._set(f"{place} long/{self.index}", value)
            self._set(f"{place}/{self.index}", _LONG if is_long else _SHORT + value)
            return []
        values = self._received(place)
        for earlier in self._needless():
            self._client.key_value_delete(earlier)
        return [value, *(values[index] for index in range(1, self.count))]

    def _needless(self) -> list[str]:
        """Returns, on process 0, the key prefixes of rounds that no process needs any more."""
        if not self._round.is_of_reader:  # all have entered this round, and left earlier ones
            old, self._rounds[:-1] = self._rounds[:-1], []
            return old
        # A process may still be in an earlier round of another thread, but not for that long.
        before, old = time.monotonic() - 2 * self.timeout_secs, []
        with self._counting:
            while self._read and self._read[0][0] < before:
                old.append(self._read.popleft()[1])
        return old

    def _received(self, place: str) -> dict[int, bytes]:
        """Returns the message of each other process at ``place``, when all have arrived."""
        # One listing costs much less than one read for each message. Between two listings, waits
        # for some of the missing messages one by one, four times as many as before.
        deadline = time.monotonic() + self.timeout_secs
        found: dict[int, bytes] = {}
        num_waits = _FIRST_WAITS
        while missing := [index for index in range(1, self.count) if index not in found]:
            keys = {f"{place}/{index}": index for index in missing}
            listed = self._listed(f"{place}/")
            found |= {keys[key]: message for key, message in listed if key in keys}
            for index in [index for index in missing if index not in found][:num_waits]:
                found[index] = self._get(f"{place}/{index}", deadline, place)
            num_waits *= 4
        return {
            index: message[1:]
            if message != _LONG
            else self._get(f"{place} long/{index}", deadline, place)
            for index, message in found.items()
        }

    # The bytes of all values to all processes would grow with the square of their number.

    def combine(self, value: bytes, combined: Callable[[list[bytes]], bytes]) -> bytes:
        """Returns, on all processes, what process 0 makes of their values, in order."""
        values = self.gather(value)
        return self.share(combined(values) if self.is_first else b"")

    def any(self, *, flag: bool) -> bool:
        """Returns True on all processes if ``flag`` is set on at least one process."""
        return self.combine(bytes([flag]), max) == b"\1"

    def answer(self, value: bytes, answers: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        """Returns what process 0 answers to this process, given the values of all, in order."""
        values, place = self.gather(value), self._next_message()
        if not self.is_first:
            return self._from_first(f"{place} to/{self.index}", place)
        mine, *others = answers(values)
        for index, other in enumerate(others, start=1):
            self._set(f"{place} to/{index}", other)
        return mine

    def post(self, topic: str, value: bytes) -> None:
        """Sends a value to the processes that call ``posted`` in the same round."""
        self._set(f"{self._round.place}/{topic}/from {self.index}", value)

    def posted(self, topic: str, index: int) -> bytes:
        """Returns the value that process ``index`` posts in this round."""
        place = f"{self._round.place}/{topic}"
        return self._from_first(f"{place}/from {index}", place, [index])

    @stage("share")
    def share(self, value: bytes = b"") -> bytes:
        """Returns process 0's ``value`` on all processes."""
        return value if self.count == 1 else self._share(self._next_message(), value)

    def _share(self, place: str, value: bytes) -> bytes:
        if not self.is_first:
            return self._from_first(f"{place}/shared", place)
        self._set(f"{place}/shared", value)
        return value

    def meet(self) -> None:
        """Waits until all processes have called ``meet``."""
        if self.count > 1:
            place = self._next_message()
            self._gather(place, b"")
            self._share(place, b"")

    def first(self, action: Callable[[], T]) -> T:
        """Returns on all processes, as JSON, the result of an action that process 0 runs."""
        if self.count == 1:
            return action()
        if not self.is_first:
            return json.loads(self.share())
        value = action()
        self.share(json.dumps(value).encode())
        return value

    def first_at_length(self, action: Callable[[], None]) -> None:
        """Runs an action on process 0 that may take longer than others wait for a message."""
        if self.count == 1:
            return action()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                action()
            except BaseException as error:  # raised again below
                errors.append(error)

        task = Task("at length", run)
        if self.is_first:
            task.start()
        while not self.first(lambda: task.ended.wait(self.timeout_secs / 2)):
            pass
        if errors:
            raise errors.pop()
        return None

    # --- messages ---

    @property
    def _work(self) -> str:  # type: ignore[override]
        return self._round.work

    def _next_message(self) -> str:
        """Returns the key prefix of the next message of this round."""
        here = self._round
        here.num_messages += 1
        return f"{here.place}/{here.num_messages - 1}"

    def _from_first(self, key: str, place: str, senders: Sequence[int] | None = None) -> bytes:
        """As ``_get``; process 0 may arrive late and itself wait for another, so waits longer."""
        return self._get(key, time.monotonic() + 2 * self.timeout_secs, place, senders)

    def _get(
        self, key: str, deadline: float, place: str, senders: Sequence[int] | None = None
    ) -> bytes:
        """Returns a message when it arrives; ``senders``: else those missing at ``place``."""
        while True:
            message = self._wait(key, min(deadline - time.monotonic(), POLL_SECS))
            self.liveness.connect()  # after: a message of process 0 shows that it listens
            if message is not None:
                return message
            if self._is_decided():
                self._require_no_failure()
            # Read first: whatever an ended process has sent is then found in its place.
            ended = self.liveness.ended()
            others = senders or (self._missing(place) if self.is_first else [0])
            if (error := self.log.difference(others)) is not None:
                self._round.is_in_vain = True
                raise error
            if ends := [ended[index] for index in others if index in ended]:
                raise self._end_error(ends)
            if time.monotonic() >= deadline:
                self._round.is_in_vain = True
                raise self._timeout_error(senders or self._missing(place))

    def _is_decided(self) -> bool:
        """Returns whether another process failed (on process 0) or a verdict exists (on others)."""
        here = self._round
        if here.verdict is None:
            kind = "failed" if self.is_first else "verdict"
            found = self._client.key_value_dir_get_bytes(f"{here.place}/{kind}/")
            here.verdict = next((message for _, message in sorted(found)), None)
        return here.verdict is not None

    def _require_no_failure(self) -> None:
        verdict = self._round.verdict
        if verdict is not None and not verdict.startswith(_SUCCESS):
            raise from_json(verdict)

    def _missing(self, place: str) -> list[int]:
        """Returns the indices of the processes that the others wait for at ``place``."""
        if self.is_first:
            return self._behind(place)[0]
        # One process looks for all of them: the listings of all would grow with the square of
        # their number, because each lists a message of each process.
        try:
            self._client.key_value_set_bytes(f"{place} looked for", b"")
        except jax.errors.JaxRuntimeError:  # another process was first
            found = self._wait(f"{place} missing", _LOOKING_SECS)
            return [0] if found is None else json.loads(found)
        behind, has_any = self._behind(place)
        # Process 0 must answer if all have sent a message, and send first if none has.
        missing = behind[: _NUM_NAMED + 1] if has_any and behind else [0]
        self._set(f"{place} missing", json.dumps(missing).encode())
        return missing

    def _behind(self, place: str) -> tuple[list[int], bool]:
        """Returns the processes that have sent no message at ``place``, and whether any has."""
        there = {key.rpartition("/")[2] for key, _ in self._listed(f"{place}/")}
        return [i for i in range(1, self.count) if str(i) not in there], bool(there)

    def _timeout_error(self, missing: Sequence[int]) -> ProcessTimeoutError:
        named = ", ".join(map(str, missing[:_NUM_NAMED]))
        named += ", ..." if len(missing) > _NUM_NAMED else ""
        return ProcessTimeoutError(
            f"{self._work}: process {named} of {self.count} did not arrive within "
            f"{self.timeout_secs:g} s after process {self.index}. It died, hangs, is much slower, "
            "or did not make the same calls: every process must make the same calls of attach, "
            "save, restore, load, delete and verify. CheckpointOptions(process_timeout_secs=...) "
            "sets how long to wait."
        )

    def _end_error(self, ends: list[str]) -> ProcessError:
        return ProcessError(
            f"{self._work}: {'; '.join(ends)}. It can take no further part in this run: start "
            "all processes again. The run then resumes from its newest durable step."
        )

    def _error_for_all(self, error: BaseException) -> BaseException | None:
        """Reports this process's error; returns the one that all raise, None after a success."""
        message, here = to_json(error, self.index), self._round
        try:
            if self.is_first:
                verdict = here.verdict or message
                self._set(f"{self._round.place}/verdict/0", verdict)
            else:
                if here.verdict is None:
                    self._set(f"{self._round.place}/failed/{self.index}", message)
                    # No wait for a process 0 that may not answer at all.
                    secs = 0 if here.is_in_vain else 2 * self.timeout_secs
                    deadline = time.monotonic() + secs
                    while not self._is_decided() and time.monotonic() < deadline:
                        time.sleep(POLL_SECS / 10)
                        if self.log.difference([0]) is not None:
                            return error  # process 0 does not come to this round
                verdict = message if here.verdict is None else here.verdict
        except (ProcessError, jax.errors.JaxRuntimeError) as problem:
            text = "%s failed, and the other processes cannot be informed: %s"
            logger.warning(text, self._work, problem)
            return error
        if verdict.startswith(_SUCCESS):  # the work is done here too; only the verdict arrived late
            return None if isinstance(error, Exception) else error
        return error if json.loads(verdict)["process"] == self.index else from_json(verdict)


def open_channel(name: str, timeout_secs: float, log: CallLog | None = None) -> Processes:
    """Opens a channel of this run, with the processes' calls; without ``log``, they begin anew."""
    service = liveness.coordination_service()
    processes = Processes(name, timeout_secs, service)
    processes.log = CallLog(processes) if log is None else log
    processes.liveness = liveness.of_run(service)
    return processes


@contextlib.contextmanager
def open_for_call(name: str, argument: Any, timeout_secs: float) -> Iterator[Processes]:
    """Opens a channel for the ``with`` block, which carries out the call ``name(argument)``."""
    channel = open_channel(name, timeout_secs)
    channel.liveness.add(channel.log)
    try:
        with channel.log.calling(name, Kind.CALL, argument):
            yield channel
    finally:
        channel.liveness.remove(channel.log)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8])


SINGLE_PROCESS = Processes("", 0, None, index=0, count=1)
"""A channel of one process, which sends no messages, even in a run of several processes."""
