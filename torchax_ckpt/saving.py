"""Owns the life of a save: captured, in flight, durable or failed. Knows nothing of torchax.

The training thread hands over a capture and goes on; a thread of its own writes it. At most one
save is in flight, and a save in flight is finished even if the program ends without ``close``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torchax_ckpt.errors import (
    CheckpointError,
    DonatedBufferError,
    SaveError,
    SaveTimeoutError,
)
from torchax_ckpt.history import History
from torchax_ckpt.layout.manifest import Manifest, Node
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.snapshot import Snapshot
from torchax_ckpt.storage import arrays as storage
from torchax_ckpt.storage.directory import CommittedStep, StepDirectory
from torchax_ckpt.storage.policies import preserved

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Capture:
    """What one save writes, fixed at the moment of ``save``.

    Attributes:
      step: completed optimizer steps.
      snapshot: the leaves.
      document: component -> node, see ``layout/manifest.py``.
      fetch_metrics: gives the metrics as JSON; may wait for devices. Its second answer is a
        problem with them that does not keep the step from being saved, or None.
      began: ``time.perf_counter()`` when the training thread turned to this save.
    """

    step: int
    snapshot: Snapshot
    document: Mapping[str, Node]
    fetch_metrics: Callable[[], tuple[dict[str, Any], CheckpointError | None]]
    began: float


@dataclasses.dataclass(frozen=True)
class SaveCost:
    """What a save took, in seconds from when the training thread turned to it.

    Attributes:
      step: the step saved.
      blocking_secs: until the training thread went on.
      durable_secs: until the step was committed.
    """

    step: int
    blocking_secs: float
    durable_secs: float


class _InFlight:
    """A save that is being written."""

    def __init__(self, step: int, write: Callable[[_InFlight], None]) -> None:
        self.step = step
        self.handed_over = threading.Event()
        self.blocking_secs = 0.0
        self.transferred = threading.Event()
        self.thread = threading.Thread(target=write, args=(self,), name=f"save-{step}", daemon=True)


class Saver:
    """Writes captures one after the other, and keeps what no rule keeps from piling up.

    Args:
      directory: where steps go.
      history: the steps of this run, which saves add to.
      preservation_policy: which steps are kept.
      options: how they are written.
      on_donated: called when a save failed because a reference was donated.
    """

    def __init__(
        self,
        directory: StepDirectory,
        history: History,
        preservation_policy: Any,
        options: CheckpointOptions,
        on_donated: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._history = history
        self._preservation_policy = preservation_policy
        self._options = options
        self._versions = _versions()
        self._on_donated = on_donated
        self._in_flight: _InFlight | None = None
        self._is_claimed = False
        self._unread: list[CheckpointError] = []
        self.newest_failure: SaveError | None = None
        self.finished: list[SaveCost] = []
        """What durable saves have cost, until somebody takes it from here."""
        _unfinished.add(self)

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self._in_flight is not None and self._in_flight.thread.is_alive()

    def claim(self) -> None:
        """Makes sure, before the first save, that the directory can be written."""
        if not self._is_claimed:
            self._directory.claim()

    def begin(self, capture: Capture) -> None:
        """Starts to write a capture; first waits for the save in flight, if there is one."""
        self.wait()
        save = _InFlight(capture.step, functools.partial(self._run, capture))
        self._in_flight = save
        self._history.begin(capture.step)
        try:
            save.thread.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            self._in_flight = None
            self._history.end(None)
            raise
        try:
            if capture.snapshot.way == "transfer":
                save.transferred.wait()
        finally:  # also when interrupted: the save's thread waits for this
            save.blocking_secs = time.perf_counter() - capture.began
            save.handed_over.set()

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until no save is in flight; failures are left for ``check_for_errors``.

        Raises:
          SaveTimeoutError: it took longer than ``timeout_secs``; the save goes on.
        """
        save = self._in_flight
        if save is None:
            return
        # Until its very end: a thread that is still on its way out when the interpreter shuts
        # down is killed inside whatever C++ it is in, which aborts the process.
        save.thread.join(timeout_secs)
        if save.thread.is_alive():
            raise SaveTimeoutError(
                f"the save of step {save.step} to {self._directory.path} is still in flight after "
                f"{timeout_secs} s",
                step=save.step,
                path=self._directory.path,
            )

    def check_for_errors(self) -> None:
        """Raises the oldest failure that nobody has read yet, once."""
        if self._unread:
            raise self._unread.pop(0)

    # --- on the save's own thread ---

    def _run(self, capture: Capture, save: _InFlight) -> None:
        try:
            durable = self._write(capture, save.transferred.set)
        except BaseException as error:  # whatever it is, it must reach the training thread
            self._fail(capture, error)
        else:
            durable_secs = time.perf_counter() - capture.began
            self.newest_failure = None
            logger.info("saved step %d to %s in %.2f s", durable.step, durable.path, durable_secs)
            self._tidy(durable)
            save.handed_over.wait()
            self.finished.append(SaveCost(capture.step, save.blocking_secs, durable_secs))
        finally:
            save.transferred.set()

    def _write(self, capture: Capture, transferred: Callable[[], None]) -> CommittedStep:
        if not self._is_claimed:
            self._directory.recover()
            self._history.refresh()
            self._is_claimed = True
        metrics, problem = capture.fetch_metrics()
        if problem is not None:
            self._report(problem)
        plan, stored = capture.snapshot.stored()
        manifest = Manifest(capture.document, plan, self._versions)
        summary = {
            "metrics": metrics,
            "abandons": [[s.step, s.commit_timestamp_nsecs] for s in self._history.abandoned],
        }
        path = self._directory.path_for(capture.step)
        storage.write_step(
            path, stored, manifest.to_json(), summary, self._options, on_transferred=transferred
        )
        durable = self._directory.committed(capture.step, path)
        self._history.end(durable, summary)
        return durable

    def _tidy(self, durable: CommittedStep) -> None:
        """After a commit: sets the abandoned branch aside, deletes what no rule keeps."""
        step = durable.step
        try:
            history = self._history
            self._directory.set_aside(history.abandoned)
            history.abandoned.clear()
            if durable.is_incoming:
                history.committed[-1] = self._directory.settle(durable)
            infos = [self._directory.info(s) for s in history.committed]
            keep = preserved(self._preservation_policy, infos)
            history.forget(self._directory.prune(keep, history.committed))
        except Exception as error:
            failure = SaveError(
                f"step {step} is durable in {self._directory.path}, but tidying up after it "
                f"failed: {error}",
                step=step,
                path=self._directory.path,
            )
            failure.__cause__ = error
            self._report(failure)

    def _fail(self, capture: Capture, error: BaseException) -> None:
        step = capture.step
        if isinstance(error, RuntimeError) and "deleted" in str(error):
            # An array that was held by reference is gone: say which one.
            try:
                capture.snapshot.require_alive()
            except DonatedBufferError as donated:
                donated.__cause__ = error
                error = donated
        if isinstance(error, DonatedBufferError):
            self._on_donated()
        failure = SaveError(
            f"saving step {step} to {self._directory.path} failed: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Earlier steps are intact; the next save tries again.",
            step=step,
            path=getattr(error, "path", None) or self._directory.path,
            key_path=getattr(error, "key_path", None),
        )
        failure.__cause__ = error
        self.newest_failure = failure
        self._history.end(None)
        self._is_claimed = False  # what it left behind is removed before the next one
        self._report(failure)

    def _report(self, failure: CheckpointError) -> None:
        logger.error("%s", failure)
        self._unread.append(failure)


def _versions() -> dict[str, str]:
    """The libraries at work, for the manifest."""
    found = {}
    for library in ("torchax_ckpt", "torch", "torchax", "jax", "orbax-checkpoint"):
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            found[library] = "unknown"
    return found


_unfinished: weakref.WeakSet[Saver] = weakref.WeakSet()


def _finish_at_exit() -> None:
    for saver in list(_unfinished):
        if saver.is_saving and saver._in_flight is not None:
            logger.warning(
                "the program is ending without close(): finishing the save of step %d",
                saver._in_flight.step,
            )
            saver.wait()
            if saver.newest_failure is None:
                logger.warning("step %d is saved", saver._in_flight.step)


# The interpreter refuses new threads and executor work once its shutdown has begun, which a save
# needs; atexit hooks run too late. Hooks registered here run before that, the newest first, so
# this one precedes the one of concurrent.futures, which is registered by importing it above.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]
