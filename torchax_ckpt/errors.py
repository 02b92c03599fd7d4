"""The error classes of this package, all of which derive from ``CheckpointError``.

``ProcessTimeoutError`` is a ``ProcessError``; ``StepNotFoundError`` and ``StepTypeError`` are a
``StepError``. Each class also derives from the matching builtin exception (``ValueError``,
``FileNotFoundError`` and so on). Each error has the attributes ``step``, ``path``, ``file`` and
``key_path``; an attribute that does not apply is None.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


class CheckpointError(Exception):
    """The base class of all errors of this package.

    Attributes:
      step: completed optimizer steps of the checkpoint concerned, or None.
      path: the file or directory concerned, or None.
      file: the file of the step that is damaged or cannot be read, or None if it is not known.
      key_path: the leaf concerned, named as in the manifest (``model/encoder.0.weight``), or None.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        file: str | os.PathLike[str] | None = None,
        key_path: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.path = None if path is None else os.fspath(path)
        self.file = None if file is None else os.fspath(file)
        self.key_path = key_path

    def __str__(self) -> str:
        # Some subclasses derive from OSError, which would format its errno in place of the message.
        return self.message


class ArgumentError(CheckpointError, TypeError):
    """An argument of a call has a type that the call cannot work with."""


class AttachError(CheckpointError, RuntimeError):
    """A call came in the wrong order, or the given objects cannot be attached."""


class BackendError(CheckpointError, ImportError):
    """The installed torchax or JAX lacks internals that this package was written for."""


class CallError(CheckpointError, RuntimeError):
    """A method was called where it cannot work: on a wrong thread, in jit, in a forked process."""


class ClosedError(CheckpointError, RuntimeError):
    """The checkpointer was used after ``close()``."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """A committed step is damaged: it cannot be decoded, or bytes differ from the saved bytes."""


class DirectoryError(CheckpointError, OSError):
    """A directory or file cannot be read or written; checkpoints in it may be intact."""


class DonatedBufferError(CheckpointError, RuntimeError):
    """A buffer was donated or deleted before its values were saved."""


class ForeignCheckpointError(CheckpointError, ValueError):
    """The step has no manifest of this package, so its arrays cannot be matched with names."""


class LeaseError(CheckpointError, RuntimeError):
    """Another program writes to the directory, or has written to it since this program read it."""


class MetricsError(CheckpointError, ValueError):
    """A metric is neither a number nor JSON, or a best-N rule cannot rank it."""


class MirrorError(CheckpointError, RuntimeError):
    """A run and its mirror cannot be used together, or each has steps that the other lacks."""


class OutOfMemoryError(CheckpointError, MemoryError):
    """This host or one of its devices has too little memory; nothing was damaged or changed."""


class PlanError(CheckpointError, ValueError):
    """An argument of a function in ``torchax_ckpt.planning`` has a value that no run can have."""


class PolicyError(CheckpointError, ValueError):
    """A policy that a call needs is missing, or a policy is invalid or gave an invalid answer."""


class ProcessError(CheckpointError, RuntimeError):
    """Another process of the run failed, made another call, or cannot be reached."""


class ProcessTimeoutError(ProcessError, TimeoutError):
    """This process waited for another process of the run longer than the timeout allows."""


class SaveError(CheckpointError, RuntimeError):
    """A save failed in the background; the step was not committed."""


class SaveTimeoutError(CheckpointError, TimeoutError):
    """A call waited for a save until its timeout; the save is still in flight and continues."""


class SelectionError(CheckpointError, ValueError):
    """``include``, ``exclude``, ``rename``, ``step`` or ``at`` is invalid; nothing was changed.

    For example, a pattern matches nothing, or a rename gives two tensors one name.
    """


class StepError(CheckpointError, ValueError):
    """A step number cannot be used, for example because it is negative or no step has it."""


class StepNotFoundError(StepError, FileNotFoundError):
    """There is no committed checkpoint at the requested step."""


class StepTypeError(StepError, TypeError):
    """A step number is not an int."""


class TierError(CheckpointError, ValueError):
    """The requested tier does not exist, or the checkpointer's options forbid a restore from it."""


class UninitializedLeafError(CheckpointError, ValueError):
    """Neither a checkpoint nor ``init`` fills a tensor on the meta device."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """A value cannot be stored without loss."""


class UnusableStateError(CheckpointError, RuntimeError):
    """A restore failed after it freed the old arrays; the attached objects have no values now."""


class MismatchError(CheckpointError, ValueError):
    """The checkpoint does not match the attached state. No live state was changed.

    Attributes:
      missing: names in the attached state that the checkpoint lacks.
      unexpected: names in the checkpoint that the attached state lacks.
      mismatched: name -> "expected ..., found ...", for leaves of one name that differ.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(message, step=step, path=path)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})
