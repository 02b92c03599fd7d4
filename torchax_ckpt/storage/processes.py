"""Owns how the processes of one run speak to each other: through JAX's coordination service.

What concerns several processes happens in a round, which all of them enter, with the same calls in
the same order. In it process 0 gathers what the others send, and shares what holds for all. Each
message has a key of its own, so that who waits in vain can name whom it waits for. A round ends
alike everywhere: an error on one process is sent in place of its next message, process 0 shares the
first that it meets, and that one is raised by all.

No device takes part, so a round may run beside the training, on a thread of its own. With one
process nothing is sent.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from orbax import checkpoint as v0

from torchax_ckpt import errors
from torchax_ckpt.errors import CheckpointError, ProcessError, ProcessTimeoutError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# So that Ctrl-C is heard while a process waits.
_POLL_SECS = 1.0
_VALUE, _ERROR = b"=", b"!"
_made: collections.Counter[str] = collections.Counter()


class Processes:
    """The processes of a run, as one thread of one checkpointer speaks to them.

    Args:
      name: what the conversation is about; those of one name are told apart by the order in which
        they are made, which is the same everywhere.
      timeout_secs: how long to wait for a process that is behind.
      index, count, client: this process, how many there are, and JAX's coordination service;
        default: JAX's own.
    """

    def __init__(
        self,
        name: str,
        timeout_secs: float,
        *,
        index: int | None = None,
        count: int | None = None,
        client: Any = None,
    ) -> None:
        self.index = jax.process_index() if index is None else index
        self.count = jax.process_count() if count is None else count
        self._timeout_secs = timeout_secs
        if self.count == 1:
            return
        self._client = client or v0.multihost.get_jax_distributed_client()
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._place = f"torchax_ckpt/{digest}/{_made[name]}"
        _made[name] += 1
        self._what = ""
        self._rounds = self._oldest = 0
        self._gathers = self._shares = 0
        self._verdict: bytes | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which commits, moves and deletes for all."""
        return self.index == 0

    @contextlib.contextmanager
    def round(self, what: str) -> Iterator[None]:
        """Within it processes can be spoken to; it ends with the same error on all, or with none.

        Args:
          what: is done, for messages: ``saving step 12``.

        Raises:
          CheckpointError: what another process raised, of the same type where it is one of this
            package's errors, else ProcessError.
          ProcessTimeoutError: a process has not come in time; names it.
        """
        if self.count == 1:
            yield
            return
        self._what = what
        self._rounds += 1
        self._gathers = self._shares = 0
        self._verdict = None
        try:
            yield
            self.meet()
        except BaseException as error:
            agreed = self._agreed(error)
            if agreed is error:
                raise
            raise agreed from error

    def gather(self, value: bytes = b"") -> list[bytes]:
        """Sends a value to process 0, where the answer is those of all processes; elsewhere []."""
        if self.count == 1:
            return [value]
        place = f"{self._here}/gather-{self._gathers}"
        self._gathers += 1
        if not self.is_first:
            self._set(f"{place}/{self.index}", _VALUE + value)
            return []
        deadline = time.monotonic() + self._timeout_secs
        values = [value]
        for index in range(1, self.count):
            values.append(self._take(f"{place}/{index}", place, deadline))
        self._forget()
        return values

    def share(self, value: bytes = b"") -> bytes:
        """The value of process 0, on all."""
        if self.count == 1:
            return value
        key = f"{self._here}/share-{self._shares}"
        self._shares += 1
        if self.is_first:
            self._set(key, _VALUE + value)
            return value
        return self._take(key, f"{self._here}/gather-{self._gathers - 1}", self._patience())

    def meet(self) -> None:
        """Waits until all processes have come here."""
        self.gather()
        self.share()

    def first(self, action: Callable[[], T]) -> T:
        """What an action, on process 0 alone, gives as JSON; raises what it raises, on all."""
        if self.count == 1:
            return action()
        if not self.is_first:
            return json.loads(self.share())
        value = action()
        self.share(json.dumps(value).encode())
        return value

    @property
    def _here(self) -> str:
        return f"{self._place}/{self._rounds}"

    def _patience(self) -> float:
        """Until when to wait for process 0, which may be behind and then wait for another."""
        return time.monotonic() + 2 * self._timeout_secs

    def _take(self, key: str, place: str, deadline: float) -> bytes:
        """The value under a key; raises the error that was sent instead.

        Args:
          key: where it will be.
          place: where it can be seen who is behind.
          deadline: until when to wait.
        """
        message = self._get(key, deadline)
        if message is None:
            late = self._late(self._missing(place))
            if not self.is_first:
                self._verdict = _described(late, self.index)  # there is nobody to agree with
            raise late
        if message[:1] == _ERROR:
            self._verdict = message[1:]
            raise _rebuilt(self._verdict)
        return message[1:]

    def _get(self, key: str, deadline: float) -> bytes | None:
        """The message under a key, or None if it has not come in time."""
        while True:
            left = max(0.001, min(deadline - time.monotonic(), _POLL_SECS))
            try:
                return self._client.blocking_key_value_get_bytes(key, int(left * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self._unheard(error) from error
            if time.monotonic() >= deadline:
                return None

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
        there = {key.rpartition("/")[2] for key, _ in self._client.key_value_dir_get_bytes(place)}
        behind = [i for i in range(1, self.count) if str(i) not in there]
        return behind if self.is_first or (there and behind) else [0]

    def _late(self, missing: list[int]) -> ProcessTimeoutError:
        named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return ProcessTimeoutError(
            f"{self._what}: process {named} of {self.count} has not come to it within "
            f"{self._timeout_secs:g} s of process {self.index}. It has died or hangs, is much "
            "slower, or did not make the same calls: every process must call attach, save, "
            "restore, load, delete and verify alike. CheckpointOptions(process_timeout_secs=...) "
            "says how long to wait."
        )

    def _agreed(self, error: BaseException) -> BaseException:
        """With which error the round ends, after this one on this process."""
        try:
            if self._verdict is None and not self.is_first:
                self._set(
                    f"{self._here}/gather-{self._gathers}/{self.index}",
                    _ERROR + _described(error, self.index),
                )
                while self._verdict is None:  # process 0 may have shared other things before
                    message = self._get(f"{self._here}/share-{self._shares}", self._patience())
                    if message is None:
                        return error
                    self._shares += 1
                    self._verdict = message[1:] if message[:1] == _ERROR else None
            verdict = self._verdict or _described(error, self.index)
            if self.is_first:
                self._set(f"{self._here}/share-{self._shares}", _ERROR + verdict)
        except ProcessError as in_the_way:
            logger.warning("%s failed, and others cannot be told: %s", self._what, in_the_way)
            return error
        return error if json.loads(verdict)["process"] == self.index else _rebuilt(verdict)

    def _forget(self) -> None:
        """Deletes the messages of earlier rounds: all processes have come to this one."""
        for number in range(self._oldest, self._rounds):
            self._client.key_value_delete(f"{self._place}/{number}")
        self._oldest = self._rounds


def _described(error: BaseException, index: int) -> bytes:
    """An error of this process, for others."""
    cause = error.__cause__
    return json.dumps(
        {
            "process": index,
            "kind": type(error).__name__,
            "message": str(error),
            "step": getattr(error, "step", None),
            "path": getattr(error, "path", None),
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


ALONE = Processes("", 0, index=0, count=1)
"""A process by itself, whatever JAX says."""
