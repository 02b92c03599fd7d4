"""Errors as messages: a process tells the other processes of a run why it failed."""

from __future__ import annotations

import json

from torchax_ckpt import errors
from torchax_ckpt.errors import CheckpointError, ProcessError


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
            "cause": type(cause).__name__,
        }
    ).encode()


def from_json(message: bytes) -> CheckpointError:
    """Returns the error of another process, from its JSON."""
    fields = json.loads(message)
    kind, cause = getattr(errors, fields["kind"], None), getattr(errors, fields["cause"], None)
    text = f"process {fields['process']}: {fields['message']}"
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind, text = (
            ProcessError,
            f"process {fields['process']}: {fields['kind']}: {fields['message']}",
        )
    error = kind(text, step=fields["step"], path=fields["path"])
    if isinstance(cause, type) and issubclass(cause, CheckpointError):
        error.__cause__ = cause(fields["message"])
    return error
