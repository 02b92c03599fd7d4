"""The error classes of this package, which form one tree::

    CheckpointError                 base of all of them
    ├── AttachError                 a call in the wrong order, or objects that cannot be attached
    ├── BackendError                the installed torchax or JAX lacks expected internals
    ├── CallError                   a call that cannot work, such as on a wrong thread or in jit
    ├── ClosedError                 a call after close()
    ├── CorruptCheckpointError      a committed step that is damaged
    ├── DirectoryError              a directory that cannot be read or written
    ├── DonatedBufferError          a buffer that was donated before it was saved
    ├── ForeignCheckpointError      a step that was not written by this package
    ├── LeaseError                  a directory that another program writes to
    ├── MetricsError                metrics that cannot be stored or ranked
    ├── MismatchError               a checkpoint that does not match the attached objects
    ├── OutOfMemoryError            a host or device without enough memory
    ├── PlanError                   a plan from impossible numbers
    ├── PolicyError                 a missing or invalid policy
    ├── ProcessError                a failure of another process of the run
    │   └── ProcessTimeoutError     another process that did not arrive in time
    ├── SaveError                   a background save that failed
    ├── SaveTimeoutError            a save that took longer than the caller's timeout
    ├── SelectionError              patterns that match nothing, or names that collide
    ├── StepError                   a step number that cannot be used
    │   ├── StepNotFoundError       no checkpoint at that step
    │   └── StepTypeError           a step that is not an int
    ├── TierError                   a tier that the checkpointer does not have, or cannot restore
    ├── UninitializedLeafError      a meta tensor that nothing fills
    ├── UnsupportedLeafError        a value that cannot be stored
    └── UnusableStateError          a restore that failed after it freed the old state

Each class also derives from the matching builtin exception (``ValueError``, ``FileNotFoundError``
and so on). Each error has the attributes ``step``, ``path`` and ``key_path``; an attribute
that does not apply is None.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


class CheckpointError(Exception):
    """The base class of all errors of this package.

    Attributes:
      step: completed optimizer steps of the checkpoint concerned, or None.
      path: the file or directory concerned, or None.
      key_path: the leaf concerned, named as in the manifest (``model/encoder.0.weight``), or None.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        key_path: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.path = None if path is None else os.fspath(path)
        self.key_path = key_path

    def __str__(self) -> str:
        # Some subclasses derive from OSError, which would format its errno in place of the message.
        return self.message


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


class OutOfMemoryError(CheckpointError, MemoryError):
    """This host or one of its devices has too little memory; nothing was damaged or changed."""


class PlanError(CheckpointError, ValueError):
    """An argument of a function in ``torchax_ckpt.planning`` has a value that no run can have."""


class PolicyError(CheckpointError, ValueError):
    """A policy that a call needs is missing, or a policy is invalid or gave an invalid answer."""


class ProcessError(CheckpointError, RuntimeError):
    """Another process of the run failed, or cannot be reached."""


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
