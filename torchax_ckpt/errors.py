"""Every error this package raises on purpose, in one tree::

    CheckpointError                 everything below
    ├── AttachError                 called in the wrong order, or with the wrong objects
    ├── BackendError                this torchax or Orbax does not look as expected
    ├── CallError                   called on another thread, in a fork, in jit, within a call
    ├── ClosedError                 used after close()
    ├── CorruptCheckpointError      a step that cannot be read back
    ├── DirectoryError              the directory cannot be used
    ├── DonatedBufferError          a buffer was donated before it could be saved
    ├── ForeignCheckpointError      a step that was not written by this package
    ├── LeaseError                  another program writes to the directory
    ├── MetricsError                metrics that cannot be stored or ranked
    ├── MismatchError               a checkpoint that does not fit what is attached
    ├── OutOfMemoryError            a host or device too small for what was asked of it
    ├── PlanError                   a plan made from numbers that cannot be
    ├── PolicyError                 a policy is missing or contradicts the call
    ├── ProcessError                another process of the run failed
    │   └── ProcessTimeoutError     another process has not come in time
    ├── SaveError                   a save failed in the background
    ├── SaveTimeoutError            a save took longer than the caller wanted to wait
    ├── SelectionError              patterns that match nothing, or names that meet
    ├── StepError                   a step number that cannot be used
    │   ├── StepNotFoundError       no checkpoint at that step
    │   └── StepTypeError           a step that is not an int
    ├── TierError                   a tier that this checkpointer does not have
    ├── UninitializedLeafError      a meta tensor that nobody fills
    ├── UnsupportedLeafError        a value that cannot be stored
    └── UnusableStateError          a restore in budget failed on the way

Each also derives from the builtin a caller would expect (``ValueError``, ``FileNotFoundError``
and so on) and carries ``step``, ``path`` and ``key_path``; each is None where it says nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


class CheckpointError(Exception):
    """Base of all errors of this package.

    Attributes:
      step: completed optimizer steps of the checkpoint concerned, if one is.
      path: the file or directory concerned, if one is.
      key_path: the leaf concerned, as it stands in the manifest (``model/encoder.0.weight``).
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
        # OSError, a base of some subclasses, formats itself from errno; the message says more.
        return self.message


class AttachError(CheckpointError, RuntimeError):
    """Called in the wrong order, or with objects that do not belong together."""


class BackendError(CheckpointError, ImportError):
    """The installed torchax or Orbax lacks internals that this package was written for."""


class CallError(CheckpointError, RuntimeError):
    """Called from where it cannot work: another thread, a forked process, within jit or a call."""


class ClosedError(CheckpointError, RuntimeError):
    """The checkpointer was used after ``close()``."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """A committed step could not be read back."""


class DirectoryError(CheckpointError, OSError):
    """The checkpoint directory cannot be read or written."""


class DonatedBufferError(CheckpointError, RuntimeError):
    """A buffer held by reference was donated or deleted before it could be saved."""


class ForeignCheckpointError(CheckpointError, ValueError):
    """The step holds no manifest of this package, so names cannot be matched."""


class LeaseError(CheckpointError, RuntimeError):
    """Another program writes to the directory, has taken over from this one, or was there since."""


class MetricsError(CheckpointError, ValueError):
    """Metrics that are neither numbers nor JSON, or that a best-N rule cannot rank."""


class OutOfMemoryError(CheckpointError, MemoryError):
    """This host, or one of its devices, lacks the memory; nothing is damaged, nor was changed."""


class PlanError(CheckpointError, ValueError):
    """A plan was asked for with numbers that no run can have."""


class PolicyError(CheckpointError, ValueError):
    """The call needs a policy that was not given, or a policy answered nonsense."""


class ProcessError(CheckpointError, RuntimeError):
    """Another process of the run failed, or cannot be spoken to."""


class ProcessTimeoutError(ProcessError, TimeoutError):
    """Another process of the run has not come to where this one waits for it."""


class SaveError(CheckpointError, RuntimeError):
    """A save failed in the background; the step was not committed."""


class SaveTimeoutError(CheckpointError, TimeoutError):
    """A save was still in flight when the time to wait for it was over."""


class SelectionError(CheckpointError, ValueError):
    """Patterns that match nothing or give two tensors one name; a step or place of what has none.

    Nothing was changed.
    """


class StepError(CheckpointError, ValueError):
    """A step number that cannot be saved or restored."""


class StepNotFoundError(StepError, FileNotFoundError):
    """There is no committed checkpoint at that step."""


class StepTypeError(StepError, TypeError):
    """A step that is not an int."""


class TierError(CheckpointError, ValueError):
    """A tier was asked for that this checkpointer does not have."""


class UninitializedLeafError(CheckpointError, ValueError):
    """A tensor on the meta device that neither a checkpoint nor ``init`` fills."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """A value that cannot be stored without losing something."""


class UnusableStateError(CheckpointError, RuntimeError):
    """A restore failed after it had freed what it was to replace; nothing usable is attached."""


class MismatchError(CheckpointError, ValueError):
    """The checkpoint does not fit what is attached. Nothing live was changed.

    Attributes:
      missing: names that are attached but not in the checkpoint.
      unexpected: names in the checkpoint that nothing attached takes.
      mismatched: names present on both sides that differ -> "expected ..., found ...".
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
