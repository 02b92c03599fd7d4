"""Owns the life of a save: captured, in flight, durable or failed. Knows nothing of torchax.

The training thread hands over a capture and goes on; a thread of its own writes it. At most one
save is in flight, and a save in flight is finished even if the program ends without ``close``.
"""

from __future__ import annotations

import dataclasses
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
from torchax_ckpt.layout.manifest import Manifest, Node
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.snapshot import Snapshot
from torchax_ckpt.storage import arrays as storage
from torchax_ckpt.storage.directory import CommittedStep, StepDirectory
from torchax_ckpt.storage.policies import CheckpointInfo, preserved

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

    def __init__(self, step: int) -> None:
        self.step = step
        self.handed_over = threading.Event()
        self.blocking_secs = 0.0
        self.done = threading.Event()
        self.transferred = threading.Event()


class Saver:
    """Writes captures one after the other, and keeps the books of what was saved.

    Args:
      directory: where steps go.
      preservation_policy: which steps are kept.
      options: how they are written.
      on_donated: called when a save failed because a reference was donated.
    """

    def __init__(
        self,
        directory: StepDirectory,
        preservation_policy: Any,
        options: CheckpointOptions,
        on_donated: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._preservation_policy = preservation_policy
        self._options = options
        self._versions = _versions()
        self._on_donated = on_donated
        self._in_flight: _InFlight | None = None
        self._is_claimed = False
        self._abandoned: list[CommittedStep] = []
        self._unread: list[CheckpointError] = []
        self.newest_failure: SaveError | None = None
        self.finished: list[SaveCost] = []
        """What durable saves have cost, until somebody takes it from here."""
        self.history: list[CheckpointInfo] = []
        """Steps saved or found, oldest first, the one in flight included: what policies see."""
        _unfinished.add(self)

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self._in_flight is not None and not self._in_flight.done.is_set()

    def has(self, step: int) -> bool:
        """Whether the step is saved or being saved."""
        return any(info.step == step for info in self.history)

    def resume_from(self, step: int | None) -> None:
        """Sets the books to a run that goes on from this step; newer ones become abandoned."""
        self.wait()
        steps = self._directory.steps()
        kept = [s for s in steps if step is not None and s.step <= step]
        self._abandoned = steps[len(kept) :]
        self.history = [self._directory.info(s) for s in kept]
        if self._abandoned:
            logger.warning(
                "%s: going on from step %s; steps %s are abandoned and will be set aside once a "
                "new step is durable",
                self._directory.path,
                step or 0,
                [s.step for s in self._abandoned],
            )

    def forget(self, step: int) -> None:
        """Strikes a deleted step from the books."""
        self.history = [info for info in self.history if info.step != step]
        self._abandoned = [s for s in self._abandoned if s.step != step]

    def claim(self) -> None:
        """Makes sure, before the first save, that the directory can be written."""
        if not self._is_claimed:
            self._directory.claim()

    def begin(self, capture: Capture) -> None:
        """Starts to write a capture; first waits for the save in flight, if there is one."""
        self.wait()
        save = _InFlight(capture.step)
        self._in_flight = save
        self.history.append(
            CheckpointInfo(
                capture.step,
                self._directory.path,
                metadata=None,
                commit_timestamp_nsecs=time.time_ns(),
            )
        )
        thread = threading.Thread(
            target=self._run, args=(capture, save), name=f"save-{capture.step}", daemon=True
        )
        thread.start()
        if capture.snapshot.way == "transfer":
            save.transferred.wait()
        save.blocking_secs = time.perf_counter() - capture.began
        save.handed_over.set()

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until no save is in flight; failures are left for ``check_for_errors``.

        Raises:
          SaveTimeoutError: it took longer than ``timeout_secs``; the save goes on.
        """
        save = self._in_flight
        if save is not None and not save.done.wait(timeout_secs):
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
            self._write(capture, save.transferred.set)
        except BaseException as error:  # whatever it is, it must reach the training thread
            self._fail(capture, error)
        else:
            durable_secs = time.perf_counter() - capture.began
            self.newest_failure = None
            self._tidy(capture.step)
            save.handed_over.wait()
            self.finished.append(SaveCost(capture.step, save.blocking_secs, durable_secs))
        finally:
            save.transferred.set()
            save.done.set()

    def _write(self, capture: Capture, transferred: Callable[[], None]) -> None:
        if not self._is_claimed:
            self._directory.recover()
            self._is_claimed = True
        metrics, problem = capture.fetch_metrics()
        if problem is not None:
            self._report(problem)
        plan, stored = capture.snapshot.stored()
        manifest = Manifest(capture.document, plan, self._versions)
        path = self._directory.path_for(capture.step)
        began = time.monotonic()
        storage.write_step(
            path,
            stored,
            manifest.to_json(),
            {
                "metrics": metrics,
                "abandons": [[s.step, s.commit_timestamp_nsecs] for s in self._abandoned],
            },
            self._options,
            on_transferred=transferred,
        )
        logger.info("saved step %d to %s in %.2f s", capture.step, path, time.monotonic() - began)

    def _tidy(self, step: int) -> None:
        """After a commit: sets the abandoned branch aside, deletes what no rule keeps."""
        try:
            self._directory.set_aside(self._abandoned)
            self._abandoned = []
            steps = self._directory.steps()
            self._directory.settle(s for s in steps if s.is_incoming)
            steps = self._directory.steps()
            infos = [self._directory.info(s) for s in steps]
            gone = self._directory.prune(preserved(self._preservation_policy, infos), steps)
            self.history = [info for info in infos if info.step not in gone]
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
        try:
            capture.snapshot.require_alive()
        except DonatedBufferError as donated:
            self._on_donated()
            error = donated
        failure = SaveError(
            f"saving step {step} to {self._directory.path} failed: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Earlier steps are intact; the next save tries again.",
            step=step,
            path=getattr(error, "path", None) or self._directory.path,
            key_path=getattr(error, "key_path", None),
        )
        failure.__cause__ = error
        self.newest_failure = failure
        self.history = [info for info in self.history if info.step != step]
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
