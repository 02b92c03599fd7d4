"""The saver of one tier: a thread that writes captured states as durable steps, one at a time.

At exit, the program waits for the save in flight. A failed save leaves earlier steps intact, and
the next save tries again; of failures in a row for one reason, only the first is logged as an
error. With several processes, a save succeeds on all or fails on all, and process 0 commits.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

from torchax_ckpt.errors import (
    CheckpointError,
    DirectoryError,
    DonatedBufferError,
    LeaseError,
    SaveError,
)
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.call_log import Call, Kind
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.runtime import background, progress
from torchax_ckpt.runtime.save_in_flight import FailureLog, SaveCost, SaveInFlight, on_durable
from torchax_ckpt.runtime.user_messages import counted, fields
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.saving.unchanged.reuse import Reuse
from torchax_ckpt.saving.writer import Capture, Writer
from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.storage.medium import storage_errors
from torchax_ckpt.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)

# An interrupt may end ``begin`` before it sets ``handed_over``.
_HAND_OVER_SECS = 5.0
_LOGGED_SAVES = 100  # in a line of the log at the level INFO
# The newest saves that failed at the end of the program, by directory: what other threads than the
# main thread raise does not change the exit code.
unmended: dict[epath.Path, CheckpointError] = {}


class Saver:
    """Writes captured states one after another, and deletes the steps that no policy preserves.

    ``calls`` is the channel between training threads, ``saves`` the one between threads of saves.
    ``on_donated`` is called if a save fails because a buffer held by reference was donated.
    """

    def __init__(
        self,
        directory: RunDirectory,
        history: RunHistory,
        preserving: Preserving,
        options: CheckpointOptions,
        telemetry: Telemetry,
        calls: Processes,
        saves: Processes,
        reuse: Reuse,
        on_donated: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = directory.path
        self._directory = directory
        self._history = history
        self._preserving = preserving
        self._options = options
        self._telemetry = telemetry
        self._calls, self._saves = calls, saves
        self._on_donated = on_donated
        self._in_flight: SaveInFlight | None = None
        self._call: Call | None = None  # of the newest save, or of the save about to begin
        self._has_tried = False
        # Whether this run acquired the directory's lease, and has not found that lease lost.
        self.is_claimed = False
        self._releasing = threading.Lock()
        self._num_failures = 0
        self._failures = FailureLog()
        self._writer = Writer(directory, history, options, saves, self._failures, reuse)
        self.newest_failure: SaveError | None = None
        # The costs of durable saves, for the save policy; not asked, it removes none of them.
        self.finished: collections.deque[SaveCost] = collections.deque(maxlen=64)
        self.longest_secs: float | None = None  # until a step was durable; None if none is
        self._unlogged: list[SaveCost] = []

    @property
    def saving_step(self) -> int | None:
        """The step of the save in flight; None if no save is in flight."""
        save = self._in_flight
        return None if save is None or save.ended.is_set else save.step

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self.saving_step is not None

    @property
    def has_begun(self) -> bool:
        """Whether ``close`` may have work to do: a lease to release, or threads to end."""
        return self._has_tried or self._telemetry.has_thread

    def claim(self, step: int | None, close_others: Callable[[], None]) -> None:
        """Acquires the directory's lease, unless done; raises LeaseError if others write there."""
        # The training thread acquires the directory once. After a failed save, the thread of the
        # next save acquires it, because a slow medium would block the training thread.
        if not self.is_claimed:
            self._has_tried = True
            with self._calls.round("taking the directory"):
                close_others()
                self._calls.first(functools.partial(self._take, step))
            self.is_claimed = True
            self._history.open()
            self._telemetry.open(self._history.branches.committed)

    def _take(self, step: int | None) -> None:
        """Acquires the lease; raises LeaseError if others saved ``step`` or newer in this run."""
        self._directory.claim()
        if unknown := self._history.unknown(step):
            self._directory.release()
            path = self._directory.path
            raise LeaseError(
                f"{path}: since this program listed the directory, another program has saved steps "
                f"{', '.join(str(s.step) for s in unknown)} there, or they could not be listed "
                "then. They do not belong to the run of this program, so nothing was written. "
                "Start this program again, or restore() one of the steps there; newer steps are "
                "then set aside. Or use another directory.",
                path=path,
            )

    def delete(self, step: int) -> None:
        """Deletes a step. Call ``delete`` only while no save is in flight."""

        def delete() -> Sequence[CommittedStep]:
            self._writer.recover()
            branches = self._history.branches
            staying = [s.step for s in branches.abandoned if s.key in self._directory.staying]
            if staying and branches.committed and branches.committed[-1].step == step:
                raise DirectoryError(
                    f"{self.path}: step {step} lists the steps {staying} as abandoned, and these "
                    "can be neither deleted nor set aside: save a newer step, then delete this one",
                    step=step,
                    path=self.path,
                )
            for committed in self._directory.steps():  # a local step may be on other hosts only
                if committed.step == step:
                    self._directory.delete(committed)
            left = [s for s in self._history.branches.committed if s.step != step]
            self._telemetry.steps_gone("deleted", [step], left)
            return self._directory.branches().in_place

        self._history.refresh(self._history.found(delete, f"deleting step {step}"))

    def announce(self, step: int) -> None:
        """Tells the other processes that ``begin`` or ``abstain`` follows, maybe after a wait."""
        lane = "local" if self._saves.is_per_host else "durable"
        self._call = self._saves.log.publish(lane, f"save({step})", Kind.SAVE, step)

    def begin(self, capture: Capture) -> bool:
        """Waits for the save in flight, if any, then starts a thread that writes ``capture``.

        Returns False if the system refuses the thread: then the save has failed.
        """
        self.wait()
        write = functools.partial(self._run, capture, self._call)
        save = SaveInFlight(capture.step, capture.began, write)
        try:
            self._in_flight = save
            self._history.begin(capture.step)
            save.start()
            if (limit := self._options.save_timeout_secs) is not None:
                save.watch(limit, self.path)
            if capture.snapshot.way == "transfer" and not save.transferred.wait(
                self._remaining_secs(save)
            ):
                raise save.timeout_error(self.path)
            return True
        except BaseException as error:  # also an interrupt, or no thread can be started
            if not save.cancel():
                raise
            self._saves.refuse(_round_of(save.step), error, self._call)
            self._in_flight = None
            self._telemetry.saving(save.step, capture.began)
            if storage_errors.is_limit(error) and not background.ending.is_set:
                self._fail(save.step, save.age_secs, error)
                return False
            self._writer.failed(error)
            self._history.end(None)
            self._telemetry.emit("failed", save.step, error=str(error) or type(error).__name__)
            raise
        finally:
            save.blocking_secs = time.perf_counter() - capture.began
            save.handed_over.set()

    def abstain(self, step: int, error: BaseException) -> None:
        """Makes the save of a step fail on all processes: this process could not begin the save."""
        self._saves.refuse(_round_of(step), error, self._call)
        if not self.is_saving:  # an overdue save is not to be touched
            self._history.begin(step)
            self._fail(step, 0.0, error)

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits for the save in flight; after a SaveTimeoutError, the save continues."""
        save = self._in_flight
        if save is None:
            return
        bounds = [s for s in (timeout_secs, self._remaining_secs(save)) if s is not None]
        if not save.ended.wait(min(bounds, default=None)):
            raise save.timeout_error(self.path)

    def close(self) -> None:
        """Waits for the save in flight, then releases the lease; keeps it at a SaveTimeoutError."""
        if (save := self._in_flight) is not None:
            what = f"finishing the save of step {save.step}"
            progress.wait(save.ended, self._remaining_secs(save), lambda: f"{what}: {save.where()}")
        self.wait()
        self._writer.free()
        self._preserving.warn_of_metrics()
        self._telemetry.close()
        with self._releasing:  # waits if another thread is in this block
            self._directory.release()
            self.is_claimed = False

    def join(self) -> None:
        """Waits for the save in flight without a time limit."""
        if self._in_flight is not None:
            self._in_flight.ended.wait()

    def check_for_errors(self, kind: type[CheckpointError] = CheckpointError) -> None:
        """Raises the oldest unraised failure of this class, else SaveTimeoutError once a save."""
        self._failures.raise_oldest(kind)
        save = self._in_flight
        if save is None or save.ended.is_set or save.is_known_overdue:
            return
        if self._remaining_secs(save) == 0:
            save.is_known_overdue = True
            raise save.timeout_error(self.path)

    def _remaining_secs(self, save: SaveInFlight) -> float | None:
        """Returns the seconds until a save reaches ``save_timeout_secs``; None without a limit."""
        limit = self._options.save_timeout_secs
        return None if limit is None else max(0.0, limit - save.age_secs)

    # --- on the save's own thread ---

    def _run(self, capture: Capture, call: Call | None, save: SaveInFlight) -> None:
        if capture.snapshot.way != "transfer":
            # Otherwise this thread would take the interpreter lock, and save() would block longer.
            save.handed_over.wait(_HAND_OVER_SECS)
        self._telemetry.saving(capture.step, capture.began)
        try:
            with self._saves.round(_round_of(capture.step), call, is_met=False) as outcome:
                outcome.value = self._writer.write(capture, save)
            durable, summary = self._writer.learn(outcome.value)
            if self._options.read_back:
                save.enter("reading it back")
                with self._saves.round(f"reading back step {capture.step}", call):
                    self._writer.read_back(durable)
            self._writer.succeeded(durable)
            self._history.end(durable, summary)
        except BaseException as error:  # the training thread must learn of any failure
            self._fail(capture.step, save.age_secs, capture.explained(error))
        else:
            durable_secs = time.perf_counter() - capture.began
            self.newest_failure = None
            unmended.pop(self.path, None)
            if self._num_failures:
                text, failed = "saving to %s works again after %s", "failed save"
                logger.info(text, self._directory.path, counted(self._num_failures, failed))
            self._num_failures = 0
            self._failures.over("saving")
            save.enter("deleting what no rule keeps")
            save.handed_over.wait(_HAND_OVER_SECS)
            cost = SaveCost(capture.step, save.blocking_secs, durable_secs)
            self._log([cost], logging.DEBUG)
            self._unlogged.append(cost)
            if len(self._unlogged) == _LOGGED_SAVES:
                self._log(self._unlogged, logging.INFO)
                self._unlogged.clear()
            steps = self._history.branches.committed
            self._telemetry.durable(cost, self._writer.reused_bytes, steps)
            self.longest_secs = max(self.longest_secs or 0.0, durable_secs)
            for notify in on_durable:
                notify()
            self._tidy(durable, call)
            self.finished.append(cost)
        finally:
            save.transferred.set()
            del capture  # the traceback of a stored error refers to this frame

    def _log(self, costs: Sequence[SaveCost], level: int) -> None:
        """Logs the medians of the costs of saves; the step is that of the last one."""
        step, path = costs[-1].step, self.path
        columns = zip(*map(dataclasses.astuple, costs), strict=True)
        _, blocking, durable = map(statistics.median, columns)
        text = "%s: step %d is durable (median of %d: blocked %.4f s, durable after %.3f s)"
        about = fields(step=step, path=path, blocking_secs=blocking, durable_secs=durable)
        logger.log(level, text, path, step, len(costs), blocking, durable, extra=about)

    def _tidy(self, durable: CommittedStep, call: Call | None) -> None:
        """Renames abandoned steps (deletes them in a local tier); deletes what no policy keeps."""
        directory = self._directory

        def tidy() -> list[Any]:
            steps = list(self._history.branches.committed)
            unwanted = self._history.branches.unwanted
            staying = directory.set_aside(unwanted)
            if durable.is_incoming:
                steps[-1] = directory.settle(durable)
            self._history.refresh([*steps, *staying])
            aside = [s for s in unwanted if s not in staying and s.key not in directory.failed]
            self._telemetry.steps_gone("set_aside", [s.step for s in aside], steps)
            keep = self._preserving.kept(steps)
            directory.verified.mark(steps)
            doomed = [s for s, is_kept in zip(steps, keep, strict=True) if not is_kept]
            self._writer.retain([s for s in doomed if s.key not in directory.staying])
            undeleted = directory.prune(doomed)
            gone = [s for s in doomed if s not in undeleted]
            left = [s for s in steps if s not in gone]
            self._telemetry.steps_gone("deleted", [s.step for s in gone], left)
            directory.tell_staying([*staying, *undeleted])
            return committed_step.described([*left, *staying])

        try:
            what, is_met = f"tidying up after step {durable.step}", self._saves.is_per_host
            with self._saves.round(what, call, is_met=is_met) as outcome:
                outcome.value = tidy() if self._saves.is_first else None
            self._history.refresh(committed_step.named(outcome.value, self._directory.path))
        except Exception as error:
            failure = SaveError(
                f"step {durable.step} is durable in {self._directory.path}, but tidying up after "
                f"it failed: {storage_errors.explained(error, self._directory.path)}",
                step=durable.step,
                path=self._directory.path,
            )
            failure.__cause__ = error
            self._writer.recover_later()  # the next save does the rest of this work first
            self._failures.report(failure, "tidying", storage_errors.kind(error))
        else:
            self._failures.over("tidying")

    def report(self, step: int, error: BaseException, age_secs: float = 0.0) -> SaveError:
        """Reports the failure of a save, also of one that could not begin; returns it."""
        path, is_ending = self._directory.path, background.ending.is_set
        again = "" if is_ending else "; the next save tries again"
        failure = SaveError(
            f"saving step {step} to {path} failed: {storage_errors.explained(error, path)} "
            + ("" if isinstance(error, LeaseError) else f"Earlier steps are intact{again}."),
            step=step,
            path=getattr(error, "path", None) or path,
            key_path=getattr(error, "key_path", None),
        )
        failure.__cause__ = storage_errors.without_locals(error)
        self.newest_failure = failure
        self._num_failures += 1
        if is_ending and not self._preserving.is_local:
            unmended[path] = failure
        self._failures.report(failure, "" if is_ending else "saving", storage_errors.kind(error))
        self._telemetry.emit("failed", step, secs=age_secs, error=str(failure))
        return failure

    def _fail(self, step: int, age_secs: float, error: BaseException) -> None:
        self._writer.failed(error)
        if isinstance(error, DonatedBufferError):
            self._on_donated()
        self._history.end(None)
        self.report(step, error, age_secs)
        if isinstance(error, LeaseError):
            self._telemetry.lost()
            self._directory.let_go()
            self.is_claimed = False  # the next save tries to acquire the directory, and raises
            return
        try:
            if self._saves.is_first:
                self._directory.recover()  # now, because a full disk needs the space
        except Exception as problem:
            logger.debug("leftovers of the failed save stay until the next save: %s", problem)


def _round_of(step: int) -> str:
    return f"saving step {step}"
