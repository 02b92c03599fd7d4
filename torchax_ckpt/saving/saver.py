"""Owns the life of a save: captured, in flight, durable or failed. Knows nothing of torchax.

The training thread hands over a capture and goes on; a thread of its own writes it. At most one
save is in flight, and a save in flight is finished even if the program ends without ``close``.

A save that fails costs that save and nothing else. Each of them tries anew, so saving goes on by
itself once the medium does; what is wrong is said once, when it changes, and when it is over.

Of several processes each writes what its devices hold, and process 0 does for all whatever is done
once; a save succeeds on all of them or fails on all.
"""

from __future__ import annotations

import collections
import functools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from torchax_ckpt.errors import DonatedBufferError, LeaseError, SaveError, SaveTimeoutError
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.policies.preservation import preserved
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.runtime import progress
from torchax_ckpt.runtime.failure_log import FailureLog
from torchax_ckpt.runtime.save_in_flight import SaveCost, SaveInFlight
from torchax_ckpt.saving import closing
from torchax_ckpt.saving.writer import Capture, Writer
from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.storage.medium import storage_errors
from torchax_ckpt.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)


class Saver:
    """Writes captures one after the other, and keeps what no rule keeps from piling up.

    Args:
      directory: where steps go.
      history: the steps of this run, which saves add to.
      preservation_policy: which steps are kept.
      options: how they are written.
      telemetry: is told what happens.
      calls, saves: the processes of the run, as its training threads and the threads of its saves
        speak to them.
      on_donated: called when a save failed because a reference was donated.

    Attributes:
      path: where steps go.
      newest_failure: why the newest save failed, if it did.
    """

    def __init__(
        self,
        directory: RunDirectory,
        history: RunHistory,
        preservation_policy: Any,
        options: CheckpointOptions,
        telemetry: Telemetry,
        calls: Processes,
        saves: Processes,
        on_donated: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = directory.path
        self._directory = directory
        self._history = history
        self._preservation_policy = preservation_policy
        self._options = options
        self._telemetry = telemetry
        self._calls, self._saves = calls, saves
        self._on_donated = on_donated
        self._in_flight: SaveInFlight | None = None
        self._has_tried = self._was_claimed = self._is_claimed = False
        self._releasing = threading.Lock()
        self._num_failures = 0
        self._failures = FailureLog()
        self._writer = Writer(directory, history, options, saves, self._failures)
        self.newest_failure: SaveError | None = None
        # Bounded: where every save is forced, nobody asks what they cost.
        self.finished: collections.deque[SaveCost] = collections.deque(maxlen=64)
        """What durable saves have cost, until somebody takes it from here."""

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self._in_flight is not None and self._in_flight.thread.is_alive()

    @property
    def saving_step(self) -> int | None:
        """The step of the save in flight, if there is one."""
        return self._in_flight.step if self.is_saving and self._in_flight else None

    @property
    def is_claimed(self) -> bool:
        """Whether the directory was taken, and is not known to be lost."""
        return self._was_claimed

    @property
    def has_begun(self) -> bool:
        """Whether there may be anything to close: a lease, or threads."""
        return self._has_tried or self._telemetry.has_thread

    def claim(self, step: int | None = None) -> None:
        """Makes sure, before the first save, that the directory can be written, and takes it.

        Args:
          step: which is to be saved, if one is.

        Raises:
          LeaseError: another program writes to it, or has saved this step or newer ones since this
            run looked.
        """
        # Once only: after a failure the save's own thread does it, as the medium may keep it long.
        if not self._was_claimed:
            self._has_tried = True
            with self._calls.round("taking the directory"):
                closing.take_over(self)
                self._calls.first(functools.partial(self._take, step))
            self._was_claimed = True
            self._history.open()
            self._telemetry.open([s.step for s in self._history.branches.in_place])

    def _take(self, step: int | None) -> None:
        """Takes the lease, unless what this run would save would mix with another program's."""
        self._directory.claim()
        if unknown := self._history.unknown(step):
            self._directory.release()
            path = self._directory.path
            raise LeaseError(
                f"{path}: since this program looked, another one has saved steps "
                f"{', '.join(str(s.step) for s in unknown)} there, which do not belong to the run "
                "that this one goes on with. Nothing was written. Start this program again, or "
                "restore() one of the steps there: what is newer is then set aside. Or give it a "
                "directory of its own.",
                path=path,
            )

    def delete(self, step: int) -> None:
        """Deletes a step. Without a save in flight."""

        def delete() -> list[Any]:
            self._recover()
            for committed in self._directory.steps():  # of a local tier perhaps on other hosts only
                if committed.step == step:
                    self._directory.delete(committed)
            self._telemetry.steps_gone("deleted", [step])
            return committed_step.described(self._directory.branches().in_place)

        with self._calls.round(f"deleting step {step}"):
            left = self._calls.first(delete)
        self._history.refresh(committed_step.named(left, self._directory.path))

    def _recover(self) -> None:
        """Finishes or removes what killed and failed saves have left; for process 0."""
        if not self._is_claimed:
            if self._num_failures:
                self._directory.claim()
            self._directory.recover()
            self._history.refresh(self._directory.branches().in_place)
            self._is_claimed = True

    def begin(self, capture: Capture) -> None:
        """Starts to write a capture; first waits for the save in flight, if there is one."""
        self.wait()
        save = SaveInFlight(capture.step, capture.began, functools.partial(self._run, capture))
        self._in_flight = save
        self._history.begin(capture.step)
        try:
            save.thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            self._in_flight = None
            self._history.end(None)
            self._telemetry.saving(capture.step, capture.began)
            self._telemetry.emit("failed", capture.step, error=str(error))
            raise
        try:
            if self._options.save_timeout_secs is not None:
                name = f"watch-save-{save.step}"
                threading.Thread(target=self._watch, args=(save,), name=name, daemon=True).start()
            if capture.snapshot.way == "transfer" and not save.transferred.wait(self._left(save)):
                raise self._timeout_error(save)
        finally:  # also when interrupted: the save's thread waits for this
            save.blocking_secs = time.perf_counter() - capture.began
            save.handed_over.set()

    def abstain(self, step: int, error: BaseException) -> None:
        """Fails the save of a step that the other processes begin, and this one cannot."""
        self._saves.refuse(_round_of(step), error)
        self._history.begin(step)
        self._fail(step, 0.0, error)

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until no save is in flight; failures are left for ``check_for_errors``.

        Raises:
          SaveTimeoutError: it took longer than ``timeout_secs``, or in all longer than
            ``save_timeout_secs``; the save goes on.
        """
        save = self._in_flight
        if save is None:
            return
        bounds = [s for s in (timeout_secs, self._left(save)) if s is not None]
        # Until its very end: a thread that is still on its way out when the interpreter shuts
        # down is killed inside whatever C++ it is in, which aborts the process.
        save.thread.join(min(bounds, default=None))
        if save.thread.is_alive():
            raise self._timeout_error(save)

    def close(self) -> None:
        """Finishes the save in flight, and lets others write to the directory.

        May be called again, and on several threads at once.

        Raises:
          SaveTimeoutError: the save takes too long. It goes on, and keeps the directory.
        """
        self._wait_and_say()
        self._telemetry.close()
        with self._releasing:  # another thread may be at it: the directory is free after this
            self._directory.release()

    def join(self) -> None:
        """Waits for the save in flight, even if it has taken too long."""
        if self._in_flight is not None:
            self._in_flight.thread.join()

    def _wait_and_say(self) -> None:
        """Waits as ``wait`` does, and lets a person at a terminal see what for."""
        if (save := self._in_flight) is not None:
            what = f"finishing the save of step {save.step}"
            progress.join(save.thread, self._left(save), lambda: f"{what}: {save.where()}")
        self.wait()

    def check_for_errors(self) -> None:
        """Raises the oldest failure that nobody has read yet, once; then that a save is late."""
        self._failures.raise_oldest()
        save = self._in_flight
        if save is None or not save.thread.is_alive() or save.is_known_overdue:
            return
        if self._left(save) == 0:
            save.is_known_overdue = True
            raise self._timeout_error(save)

    def _left(self, save: SaveInFlight) -> float | None:
        """Seconds until the save has taken too long; None if nothing is too long."""
        limit = self._options.save_timeout_secs
        return None if limit is None else max(0.0, limit - save.age_secs)

    def _timeout_error(self, save: SaveInFlight) -> SaveTimeoutError:
        return SaveTimeoutError(
            f"the save of step {save.step} to {self._directory.path} is still in flight after "
            f"{save.age_secs:.2f} s. It stands at: {save.where()}. It goes on; earlier steps are "
            "intact.",
            step=save.step,
            path=self._directory.path,
        )

    def _watch(self, save: SaveInFlight) -> None:
        """Says where a save stands that takes too long; at growing distances, until it ends."""
        limit = self._options.save_timeout_secs
        assert limit is not None
        while True:
            save.thread.join(max(0.0, limit - save.age_secs))
            frame = sys._current_frames().get(save.thread.ident or 0)
            if not save.thread.is_alive() or frame is None:
                return
            if save.age_secs >= limit:
                stack = "".join(traceback.format_stack(frame))
                logger.error("%s Its thread:\n%s", self._timeout_error(save), stack)
                limit *= 2

    # --- on the save's own thread ---

    def _run(self, capture: Capture, save: SaveInFlight) -> None:
        if capture.snapshot.way != "transfer":
            # Otherwise the training thread would wait for the interpreter lock to hand over.
            save.handed_over.wait()
        self._telemetry.saving(capture.step, capture.began)
        try:
            with self._saves.round(_round_of(capture.step)):
                durable, summary = self._writer.write(capture, save, self._recover)
            self._history.end(durable, summary)
        except BaseException as error:  # whatever it is, it must reach the training thread
            self._fail(capture.step, save.age_secs, _named(capture, error))
        else:
            durable_secs = time.perf_counter() - capture.began
            self.newest_failure = None
            logger.info("saved step %d to %s in %.2f s", durable.step, durable.path, durable_secs)
            if self._num_failures:
                text = "saving to %s works again after %d failed saves"
                logger.warning(text, self._directory.path, self._num_failures)
            self._num_failures = 0
            self._failures.over("saving")
            save.enter("deleting what no rule keeps")
            save.handed_over.wait()
            cost = SaveCost(capture.step, save.blocking_secs, durable_secs)
            self._telemetry.durable(cost, durable.path)
            self._tidy(durable)
            self.finished.append(cost)
        finally:
            save.transferred.set()
            del capture  # frames of an error that is kept lead here

    def _tidy(self, durable: CommittedStep) -> None:
        """After a commit: sets the abandoned branch aside, deletes what no rule keeps."""

        def tidy() -> list[Any]:
            history = self._history
            abandoned = history.branches.abandoned
            self._directory.set_aside(abandoned)
            self._telemetry.steps_gone("set_aside", [s.step for s in abandoned])
            history.clear_abandoned()
            if durable.is_incoming:
                history.settle(self._directory.settle(durable))
            steps = history.branches.committed
            infos = [self._directory.info(s) for s in steps]
            # What one host alone knows to be damaged is no reason to keep other parts than others.
            is_per_host = self._saves.is_per_host
            verified = self._directory.verified
            damaged = [not is_per_host and verified.is_damaged(s) for s in steps]
            keep = preserved(self._preservation_policy, infos, damaged)
            verified.mark(steps)
            gone = self._directory.prune(keep, steps)
            self._telemetry.steps_gone("deleted", gone)
            history.forget(gone)
            return committed_step.described(history.branches.committed)

        try:
            with self._saves.round(f"tidying up after step {durable.step}"):
                left = self._saves.first(tidy)
            self._history.refresh(committed_step.named(left, self._directory.path))
        except Exception as error:
            failure = SaveError(
                f"step {durable.step} is durable in {self._directory.path}, but tidying up after "
                f"it failed: {storage_errors.explained(error, self._directory.path)}",
                step=durable.step,
                path=self._directory.path,
            )
            failure.__cause__ = error
            self._is_claimed = False  # what it left undone is done before the next save
            self._failures.report(failure, "tidying", storage_errors.kind(error))
        else:
            self._failures.over("tidying")

    def _fail(self, step: int, age_secs: float, error: BaseException) -> None:
        path = self._directory.path
        if isinstance(error, DonatedBufferError):
            self._on_donated()
        does_end = isinstance(error, LeaseError)
        failure = SaveError(
            f"saving step {step} to {path} failed: {storage_errors.explained(error, path)} "
            + ("" if does_end else "Earlier steps are intact; the next save tries again."),
            step=step,
            path=getattr(error, "path", None) or path,
            key_path=getattr(error, "key_path", None),
        )
        failure.__cause__ = storage_errors.without_locals(error)
        self.newest_failure = failure
        self._num_failures += 1
        self._is_claimed = False  # what it left behind is removed before the next one
        self._history.end(None)
        self._failures.report(failure, "saving", storage_errors.kind(error))
        self._telemetry.emit("failed", step, secs=age_secs, error=str(failure))
        if does_end:
            self._telemetry.lost()
            self._was_claimed = False  # the next save finds out anew, and raises
            return
        try:
            if self._saves.is_first:
                self._directory.recover()  # if the medium lets it: a full disk needs the room now
        except Exception as in_the_way:
            logger.debug("leftovers stay until the next save: %s", in_the_way)


def _round_of(step: int) -> str:
    return f"saving step {step}"


def _named(capture: Capture, error: BaseException) -> BaseException:
    """The error, or one that names the array which was held by reference, and is gone."""
    if "has been deleted" in str(error):
        try:
            capture.snapshot.require_alive()
        except DonatedBufferError as donated:
            return donated.with_traceback(None)
    return error
