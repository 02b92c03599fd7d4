"""Single messages between processes, by keys of JAX's coordination service, and their errors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from torchax_ckpt import errors
from torchax_ckpt.errors import CheckpointError, ProcessError
from torchax_ckpt.processes.liveness import Liveness
from torchax_ckpt.runtime.lazily import jax

# The time within which a waiting process notices what another process did, or Ctrl-C.
POLL_SECS = 0.4
# Begins the message of an error that names the processes itself.
OTHER_CALLS = "the processes do not make the same calls"


class Messages:
    """The messages of one channel. A note is a message that belongs to no round."""

    index: int
    count: int
    liveness: Liveness
    _client: Any
    _place: str  # precedes the keys of the channel
    _work: str  # for messages of errors

    def put_note(self, key: str, message: bytes) -> None:
        """Writes or replaces a note."""
        self._client.key_value_set_bytes(f"{self._place}/{key}", message, allow_overwrite=True)

    def put_first_note(self, key: str, message: bytes) -> None:
        """Writes a note; raises JaxRuntimeError if there is one already."""
        self._client.key_value_set_bytes(f"{self._place}/{key}", message)

    def wait_for_note(self, key: str) -> bytes | None:
        """Returns the note ``key``, or None if no process writes it within ``POLL_SECS``."""
        return self._wait(f"{self._place}/{key}", POLL_SECS)

    def notes(self, folder: str) -> list[bytes]:
        """Returns the messages of all notes whose keys begin with ``folder`` and a slash."""
        return [m for _, m in self._client.key_value_dir_get_bytes(f"{self._place}/{folder}/")]

    def remove_note(self, key: str) -> None:
        """Removes a note."""
        self._client.key_value_delete(f"{self._place}/{key}")

    def _wait(self, key: str, secs: float) -> bytes | None:
        with self._explained():
            try:
                return self._client.blocking_key_value_get_bytes(key, max(1, int(secs * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        return None

    def _listed(self, folder: str) -> list[tuple[str, bytes]]:
        """Returns the keys and messages whose keys begin with ``folder``, which ends in a slash."""
        with self._explained():
            return self._client.key_value_dir_get_bytes(folder)

    def _set(self, key: str, message: bytes) -> None:
        with self._explained():
            self._client.key_value_set_bytes(key, message)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise ProcessError(
                f"{self._work}: JAX's coordination service, which process 0 runs, does not answer "
                f"process {self.index}: {error}"
            ) from error


def to_json(error: BaseException, index: int) -> bytes:
    """Returns an error of this process as JSON, for other processes."""
    cause = error.__cause__
    # Errors of other packages may have unrelated attributes ``step`` and ``path``.
    is_ours = isinstance(error, CheckpointError)
    return json.dumps(
        {
            "process": index,
            "kind": type(error).__name__,
            "message": str(error),
            "step": getattr(error, "step", None) if is_ours else None,
            "path": getattr(error, "path", None) if is_ours else None,
            "file": getattr(error, "file", None) if is_ours else None,
            "cause": type(cause).__name__,
            "errno": getattr(error, "errno", None) if is_ours else None,
        }
    ).encode()


def from_json(message: bytes) -> CheckpointError:
    """Returns the error of another process, from its JSON."""
    fields = json.loads(message)
    kind, cause = getattr(errors, fields["kind"], None), getattr(errors, fields["cause"], None)
    text = fields["message"]
    if not text.startswith(OTHER_CALLS):
        text = f"process {fields['process']}: {text}"
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind = ProcessError
        text = f"process {fields['process']}: {fields['kind']}: {fields['message']}"
    error = kind(text, step=fields["step"], path=fields["path"])
    error.file = fields["file"]
    if isinstance(cause, type) and issubclass(cause, CheckpointError):
        error.__cause__ = cause(fields["message"])
    elif (number := fields["errno"]) is not None:
        text = f"{os.strerror(number)} on process {fields['process']}"
        error.__cause__ = OSError(number, text)
    return error
