"""How the processes of one run speak to each other: through JAX's coordination service.

What concerns several processes happens in a round, which all of them enter, with the same calls in
the same order. In it process 0 gathers what the others send, and shares what holds for all. Each
message has a key of its own, so that who waits in vain can name whom it waits for. A round is known
by what is done in it: processes that do different things never meet, and time out. It ends alike
everywhere: a process that fails says so, and process 0 gives the verdict, which is one of the
errors, raised by all, or none.

No device takes part, so a round may run beside the training, on a thread of its own. With one
process nothing is sent.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from torchax_ckpt import errors
from torchax_ckpt.errors import CheckpointError, ProcessError, ProcessTimeoutError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# How soon a process that waits hears that another has failed, or Ctrl-C.
_POLL_SECS = 0.5
_made: collections.Counter[str] = collections.Counter()
# The verdict on a round that has failed nowhere.
_ALL_WELL = b""


class Processes:
    """The processes of a run, as one checkpointer speaks to them: in one round at a time.

    Attributes:
      index: of this process.
      count: how many there are.
      timeout_secs: how long to wait for one that is behind.

    Args:
      name: what the conversation is about; those of one name are told apart by the order in which
        they are made, which is the same everywhere.
      timeout_secs: how long to wait for a process that is behind.
      client: JAX's coordination service; only one process goes without.
      index, count: this process, and how many there are; default: JAX's own.
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
        if self.count == 1:
            return
        self._client = client
        self._place = f"torchax_ckpt/{_digest(name):016x}/{_made[name]}"
        _made[name] += 1
        self._one_round = threading.Lock()
        # By digest, as there are new ones with every step.
        self._entered: collections.Counter[int] = collections.Counter()
        self._what = ""
        # Where the messages of the newest one are, and of earlier ones that are not deleted yet.
        self._rounds: list[str] = []
        self._messages = 0
        self._verdict: bytes | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which commits, moves and deletes for all."""
        return self.index == 0

    @property
    def is_per_host(self) -> bool:
        """Whether there are several, and each has a place of its own."""
        return False

    def agreed_time(self) -> int | None:
        """Nanoseconds since 1970 that all have agreed on; None where one commits for all."""
        return None

    @contextlib.contextmanager
    def round(self, what: str) -> Iterator[None]:
        """Within it processes can be spoken to; it ends with the same error on all, or with none.

        Where other threads are in a round, it waits until that has ended.

        Args:
          what: is done, the same on all: ``saving step 12``. Only processes that do the same, for
            the same time, meet; so a call that one of them did not make costs no later round.

        Raises:
          CheckpointError: what another process raised, of the same type where it is one of this
            package's errors, else ProcessError.
          ProcessTimeoutError: a process has not come in time; names it.
        """
        if self.count == 1:
            yield
            return
        with self._one_round:
            self._enter(what)
            try:
                yield
                self._end()
            except BaseException as error:
                agreed = self._agreed(error)
                if agreed is error:
                    raise
                if agreed is not None:
                    raise agreed from agreed.__cause__

    def refuse(self, what: str, error: BaseException) -> None:
        """Fails a round on all processes but this one, which does not enter it, nor wait."""
        if self.count == 1:
            return
        with self._one_round:
            self._enter(what)
            kind = "verdict/0" if self.is_first else f"failed/{self.index}"
            self._set(f"{self._here}/{kind}", _described(error, self.index))

    def _enter(self, what: str) -> None:
        digest = _digest(what)
        self._what = what
        self._rounds.append(f"{self._place}/{digest:016x}/{self._entered[digest]}")
        self._entered[digest] += 1
        self._messages = 0
        self._verdict = None

    def _end(self) -> None:
        """Waits for the verdict of process 0, which it gives when all have come here."""
        self.gather(topic="the end")
        if not self.is_first:
            place = f"{self._here}/the end"
            self._verdict = self._get(f"{self._here}/verdict/0", self._patience(), place)
        # One may have come here, and failed while it waited.
        elif not self._is_decided():
            self._set(f"{self._here}/verdict/0", _ALL_WELL)
        if self._verdict:
            raise _rebuilt(self._verdict)

    def gather(self, value: bytes = b"", topic: str | None = None) -> list[bytes]:
        """Sends a value to process 0, where the answer is those of all processes; elsewhere [].

        Args:
          value: of this process.
          topic: what tells this message from others of the round that are sent on another thread;
            messages without one are told apart by their order.
        """
        if self.count == 1:
            return [value]
        place = self._place_of(topic)
        if not self.is_first:
            self._set(f"{place}/{self.index}", value)
            return []
        deadline = time.monotonic() + self.timeout_secs
        values = [value]
        for index in range(1, self.count):
            values.append(self._get(f"{place}/{index}", deadline, place))
        self._forget()
        return values

    def share(self, value: bytes = b"", topic: str | None = None) -> bytes:
        """The value of process 0, on all; args as for ``gather``."""
        if self.count == 1:
            return value
        place = self._place_of(topic)
        if self.is_first:
            self._set(f"{place}/shared", value)
            return value
        return self._get(f"{place}/shared", self._patience(), place)

    def meet(self, topic: str | None = None) -> None:
        """Waits until all processes have come here; a topic as for ``gather``."""
        if self.count == 1:
            return
        if topic is None:
            topic = f"meeting {self._messages}"
            self._messages += 1
        self.gather(topic=topic)
        self.share(topic=topic)

    def first(self, action: Callable[[], T]) -> T:
        """What an action, on process 0 alone, gives as JSON; raises what it raises, on all."""
        if self.count == 1:
            return action()
        if not self.is_first:
            return json.loads(self.share())
        value = action()
        self.share(json.dumps(value).encode())
        return value

    # --- outside of rounds: notes that anybody may leave and look at ---

    def put(self, key: str, message: bytes) -> None:
        """Leaves a note, or replaces it."""
        self._client.key_value_set_bytes(f"{self._place}/{key}", message, allow_overwrite=True)

    def look(self, key: str) -> bytes | None:
        """A note; waits for it a while, and gives None if it has not come."""
        return self._wait(f"{self._place}/{key}", _POLL_SECS)

    def there(self, folder: str) -> list[bytes]:
        """All notes whose keys are in a folder."""
        return [m for _, m in self._client.key_value_dir_get_bytes(f"{self._place}/{folder}/")]

    def remove(self, key: str) -> None:
        """Removes a note."""
        self._client.key_value_delete(f"{self._place}/{key}")

    # --- messages ---

    @property
    def _here(self) -> str:
        return self._rounds[-1]

    def _place_of(self, topic: str | None) -> str:
        if topic is None:
            topic = str(self._messages)
            self._messages += 1
        return f"{self._here}/{topic}"

    def _patience(self) -> float:
        """Until when to wait for process 0, which may be behind and then wait for another."""
        return time.monotonic() + 2 * self.timeout_secs

    def _get(self, key: str, deadline: float, place: str) -> bytes:
        """The message under a key; raises the error of a process that has failed meanwhile.

        Args:
          key: where it will be.
          deadline: until when to wait.
          place: where it can be seen who is behind.
        """
        while True:
            message = self._wait(key, min(deadline - time.monotonic(), _POLL_SECS))
            if message is not None:
                return message
            if self._is_decided() and self._verdict:
                raise _rebuilt(self._verdict)
            if time.monotonic() >= deadline:
                raise self._late(self._missing(place))

    def _wait(self, key: str, secs: float) -> bytes | None:
        try:
            return self._client.blocking_key_value_get_bytes(key, max(1, int(secs * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise self._unheard(error) from error
            return None

    def _is_decided(self) -> bool:
        """Whether the round has failed: on process 0, whether any other has."""
        if self._verdict is None:
            kind = "failed" if self.is_first else "verdict"
            found = self._client.key_value_dir_get_bytes(f"{self._here}/{kind}/")
            self._verdict = next((message for _, message in sorted(found)), None)
        return self._verdict is not None

    def _set(self, key: str, message: bytes) -> None:
        try:
            self._client.key_value_set_bytes(key, message)
        except jax.errors.JaxRuntimeError as error:
            raise self._unheard(error) from error

    def _unheard(self, error: BaseException) -> ProcessError:
        return ProcessError(
            f"{self._what}: JAX's coordination service, which process 0 runs, does not answer "
            f"process {self.index}: {error}"
        )

    def _missing(self, place: str) -> list[int]:
        """The processes that have sent nothing to be gathered at a place; else process 0."""
        found = self._client.key_value_dir_get_bytes(f"{place}/")
        there = {key.rpartition("/")[2] for key, _ in found}
        behind = [i for i in range(1, self.count) if str(i) not in there]
        return behind if self.is_first or (there and behind) else [0]

    def _late(self, missing: list[int]) -> ProcessTimeoutError:
        named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return ProcessTimeoutError(
            f"{self._what}: process {named} of {self.count} has not come to it within "
            f"{self.timeout_secs:g} s of process {self.index}. It has died or hangs, is much "
            "slower, or did not make the same calls: every process must call attach, save, "
            "restore, load, delete and verify alike. CheckpointOptions(process_timeout_secs=...) "
            "says how long to wait."
        )

    def _agreed(self, error: BaseException) -> BaseException | None:
        """With which error the round ends, after this one on this process; None: with none."""
        mine = _described(error, self.index)
        try:
            if self.is_first:
                verdict = self._verdict or mine
                self._set(f"{self._here}/verdict/0", verdict)
            else:
                if self._verdict is None:
                    self._set(f"{self._here}/failed/{self.index}", mine)
                    # Unless process 0 is not heard of at all.
                    deadline = time.monotonic() + (
                        0 if isinstance(error, ProcessTimeoutError) else 2 * self.timeout_secs
                    )
                    while not self._is_decided() and time.monotonic() < deadline:
                        time.sleep(_POLL_SECS / 10)
                verdict = mine if self._verdict is None else self._verdict
        except (ProcessError, jax.errors.JaxRuntimeError) as in_the_way:
            logger.warning("%s failed, and others cannot be told: %s", self._what, in_the_way)
            return error
        if verdict == _ALL_WELL:  # all has been done here too; only word of it was late
            return None if isinstance(error, Exception) else error
        return error if json.loads(verdict)["process"] == self.index else _rebuilt(verdict)

    def _forget(self) -> None:
        """Deletes the messages of earlier rounds: all processes have come to this one."""
        while len(self._rounds) > 1:
            self._client.key_value_delete(self._rounds.pop(0))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _described(error: BaseException, index: int) -> bytes:
    """An error of this process, for others."""
    cause = error.__cause__
    is_ours = isinstance(error, CheckpointError)  # else it may have anything under these names
    return json.dumps(
        {
            "process": index,
            "kind": type(error).__name__,
            "message": str(error),
            "step": getattr(error, "step", None) if is_ours else None,
            "path": getattr(error, "path", None) if is_ours else None,
            "cause": type(cause).__name__,
        }
    ).encode()


def _rebuilt(message: bytes) -> CheckpointError:
    """The error of another process."""
    said = json.loads(message)
    kind, cause = getattr(errors, said["kind"], None), getattr(errors, said["cause"], None)
    text = f"process {said['process']}: {said['message']}"
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind, text = ProcessError, f"process {said['process']}: {said['kind']}: {said['message']}"
    error = kind(text, step=said["step"], path=said["path"])
    if isinstance(cause, type) and issubclass(cause, CheckpointError):
        error.__cause__ = cause(said["message"])
    return error


SINGLE_PROCESS = Processes("", 0, None, index=0, count=1)
"""A process by itself, whatever JAX says."""
