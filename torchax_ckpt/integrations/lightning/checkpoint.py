"""A Lightning callback that saves and resumes training with a ``TorchaxCheckpointer``."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import jax
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from torchax_ckpt import CheckpointOptions, Event, TorchaxCheckpointer, policies
from torchax_ckpt.errors import CheckpointError, MetricsError, SaveError
from torchax_ckpt.integrations.lightning.loop_position import LoopPosition, Moment

logger = logging.getLogger(__name__)

_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM  # Schedulers restart jobs that end with this code.


class TorchaxCheckpoint(Checkpoint):
    """Saves a Trainer's training state continuously, and resumes it bit for bit::

        trainer = Trainer(strategy=TorchaxStrategy(), callbacks=[TorchaxCheckpoint("runs/a")])
        trainer.fit(module, loader)

    ``fit`` restores the newest step of the directory: modules, optimizers, schedulers, the loops,
    stateful loaders, random state, and the state of other callbacks, the datamodule and the
    module's ``on_save_checkpoint``. A step's number is ``trainer.global_step``. The policy is asked
    after all hooks and the validation of a batch in which an optimizer stepped, and after the end
    of the epoch if it is the last batch. Saved whatever the policy says: the last step of the
    training; each step for which validation or the end of an epoch logged the monitored metric, or
    its batch did, but not that of the step before; and the last completed step on SIGTERM or, if
    the run has one process, on an exception.

    Args:
      directory: a local path, ``gs://bucket/prefix`` or ``s3://bucket/prefix``, one per run.
      monitor: the name under which the metric that ranks steps is logged.
      mode: "min" if small values of the metric are better, "max" if large values are better.
      num_best: how many of the best steps to keep, besides those that ``preservation_policy``
        keeps.
      save_decision_policy, preservation_policy, options, on_event: see ``TorchaxCheckpointer``.
      shardings, init: see ``TorchaxCheckpointer.attach``.

    Attributes:
      checkpointer: the checkpointer of the present or the last fit; None before the first fit.
        After the fit it can still read: ``checkpointer.best_step()``, ``checkpointer.load(step)``.

    Raises:
      PolicyError: ``mode`` or ``num_best`` is invalid.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        num_best: int = 1,
        save_decision_policy: policies.SaveDecisionPolicy | None = None,
        preservation_policy: policies.PreservationPolicy | None = None,
        options: CheckpointOptions | None = None,
        on_event: Callable[[Event], None] | None = None,
        shardings: Any = None,
        init: Callable[..., Any] | None = None,
    ) -> None:
        self.monitor = monitor
        self.checkpointer: TorchaxCheckpointer | None = None
        if monitor is not None:
            best = policies.BestN(metric=monitor, mode=mode, n=num_best)
            is_default = preservation_policy is None
            others = policies.LatestN(3) if is_default else preservation_policy
            preservation_policy = policies.AnyPreservationPolicy([others, best])
        self._make = lambda: TorchaxCheckpointer(
            directory,
            save_decision_policy=save_decision_policy,
            preservation_policy=preservation_policy,
            options=options,
            on_event=on_event,
        )
        self._placing = {"shardings": shardings, "init": init}
        self._position: LoopPosition | None = None
        self._seen: dict[str, Any] = {}
        self._is_validated = self._was_validated = False
        self._warned: set[str] = set()

    # --- hooks ---------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: torch.nn.Module) -> None:
        """Attaches the module and its optimizers, and restores the newest step if there is one."""
        self._seen, self._warned = {}, set()
        self._is_validated = self._was_validated = False
        ckpt = self.checkpointer = self._make()
        if trainer.ckpt_path is not None:
            raise MisconfigurationException(
                f"fit: expected no ckpt_path, found {str(trainer.ckpt_path)!r}, which is for "
                "Lightning's own checkpoints; call fit without ckpt_path, and TorchaxCheckpoint "
                f"resumes from the newest step in {ckpt.directory}"
            )
        _refuse_unsaved(trainer)
        if jax.distributed.is_initialized():
            _sigterm_action()  # remembers it before Lightning registers its handler
        position = self._position = LoopPosition(trainer)
        step = ckpt.attach(
            pl_module,
            _one_or_several(trainer.optimizers),
            lr_scheduler=[c.scheduler for c in trainer.lr_scheduler_configs] or None,
            stateful={"lightning": position},
            resume=not getattr(trainer, "fast_dev_run", False),
            **self._placing,
        )
        if step:
            position.resume()
            self._seen = dict(trainer.callback_metrics)
            rank_zero_info(f"resumed: step {step} in {ckpt.directory}")
        position.watch(functools.partial(self._reached, trainer, position))

    def on_train_end(self, trainer: Trainer, pl_module: torch.nn.Module) -> None:
        """Saves the last step of the training, and waits until this step is durable."""
        if trainer.global_step == 0:
            self._warn(
                "nothing was saved: no optimizer step was counted. training_step must step the "
                "optimizers that self.optimizers() returns"
            )
        else:
            self._save_recorded()
        # Errors of saves are logged already; teardown raises the error of the newest save.
        with contextlib.suppress(SaveError, MetricsError):
            self._open.wait_until_finished()

    def on_exception(
        self, trainer: Trainer, pl_module: torch.nn.Module, exception: BaseException
    ) -> None:
        """Saves the last completed step if its values are unchanged; closes the checkpointer.

        Does not save after an error of this package, nor if the run has several processes. Logs its
        own errors, so that the caller sees the exception that ended the training.
        """
        if self._position is None:
            return  # Not in a fit, but in validation, test or prediction.
        ckpt = self._open
        try:
            # With several processes, a process that saves here would wait for the others, which
            # do not know of its exception.
            if not isinstance(exception, CheckpointError) and jax.process_count() == 1:
                self._save_recorded()
        except Exception:
            logger.exception("no step was saved for the %s", type(exception).__name__)
        with contextlib.suppress(CheckpointError):  # The error is logged already.
            self.teardown(trainer, pl_module, "fit")
        text, kind = "%s: a restart will resume from step %s in %s", type(exception).__name__
        try:
            logger.info(text, kind, ckpt.latest_step(), ckpt.directory)
        except CheckpointError as error:
            logger.error("%s: the steps cannot be listed: %s", kind, error)
        if isinstance(exception, SIGTERMException):
            # Lightning's own exit code, 0, would tell most schedulers that the job has finished.
            exception.code = _SIGTERM_EXIT_CODE

    def teardown(self, trainer: Trainer, pl_module: torch.nn.Module, stage: str) -> None:
        """Closes this fit's checkpointer, which may raise SaveError; hands SIGTERM back."""
        try:
            if self._position is not None:
                self._position.unwatch()
                _end_lightnings_sigterm(trainer)
            self._position = None
        finally:
            if self.checkpointer is not None:
                self.checkpointer.close()

    # --- saving --------------------------------------------------------------------------------

    @property
    def _open(self) -> TorchaxCheckpointer:
        assert self.checkpointer is not None, "on_fit_start was not called"
        return self.checkpointer

    def _reached(self, trainer: Any, position: LoopPosition, moment: Moment) -> None:
        """Handles a moment of the fit; after a batch or an epoch, saves a step if it is due."""
        if moment is Moment.START:
            _put_sigterm_back()
            self._warn_of_loaders(trainer)
        elif moment is Moment.BEFORE_VALIDATION:
            self._is_validated = self._was_validated = True
            if position.is_due:
                # The policy is asked after the validation, whose metrics rank the step.
                position.record(moment)
        elif not trainer.fast_dev_run:
            self._save_if_due(trainer, position, moment)

    def _save_if_due(self, trainer: Trainer, position: LoopPosition, moment: Moment) -> None:
        ckpt, is_due = self._open, position.is_due
        was_measured = moment is Moment.AFTER_EPOCH or self._is_validated
        self._is_validated = False
        if is_due:
            position.record(moment)
        # Metrics are read at every step. Otherwise a metric that an earlier step logged would be
        # taken for a metric of this step.
        fresh = self._fresh(trainer) if is_due or was_measured else {}
        metrics = self._rankable(fresh, waits=was_measured)
        is_ranked = was_measured and self.monitor in metrics
        if is_due:
            ckpt._loop.follows(position.step)  # with several optimizers a batch has several steps
            ckpt.save(position.step, metrics=metrics, force=is_ranked or position.is_over)
        elif is_ranked:
            self._warn(
                f"{self.monitor} was logged after a batch in which no optimizer stepped, and ranks "
                "no step: let an optimizer step in the last batch before each validation (set "
                "val_check_interval to whole multiples) and in the last batch of each epoch"
            )
        if moment is Moment.AFTER_EPOCH:
            self._require_monitored(trainer)
        if ckpt.reached_preemption() or (ckpt.reached_deadline() and not position.is_over):
            raise SIGTERMException

    def _save_recorded(self) -> None:
        """Saves the last completed step, unless a tensor has changed or another step has begun."""
        position = self._position
        if position is None or not position.is_current:
            return
        with position.as_recorded():
            self._open.save(position.step, force=True)

    # --- metrics -------------------------------------------------------------------------------

    def _fresh(self, trainer: Trainer) -> dict[str, Any]:
        """Returns the metrics that were logged since the last call."""
        logged = dict(trainer.callback_metrics)
        seen, self._seen = self._seen, logged
        return {n: v for n, v in logged.items() if n not in seen or _place(v) != _place(seen[n])}

    def _rankable(self, metrics: dict[str, Any], *, waits: bool = False) -> dict[str, Any]:
        """Returns the metrics without the monitored one if it is known to be NaN."""
        # Without ``waits``, the checkpointer fetches a metric on a device in the background, and
        # does not rank the step if it is NaN.
        monitored = metrics.get(self.monitor or "")
        if monitored is None or (_place(monitored)[0] == "jax" and not waits):
            return metrics
        if not math.isnan(float(monitored)):
            return metrics
        self._warn(f"{self.monitor} is NaN: the step is not ranked among the best")
        return {name: value for name, value in metrics.items() if name != self.monitor}

    def _require_monitored(self, trainer: Trainer) -> None:
        if self.monitor is None or self.monitor in self._seen:
            return
        if self._was_validated or not trainer.enable_validation:
            raise MisconfigurationException(
                f"TorchaxCheckpoint(monitor={self.monitor!r}): no metric of that name was logged "
                "by the end of the epoch; log it with self.log, or monitor a logged metric: "
                f"{', '.join(sorted(self._seen)) or '(none)'}"
            )

    # --- warnings ------------------------------------------------------------------------------

    def _warn_of_loaders(self, trainer: Any) -> None:
        loaders = trainer.fit_loop._data_fetcher.combined_loader.flattened
        if not all(callable(getattr(loader, "state_dict", None)) for loader in loaders):
            self._warn(
                "a loader without state_dict restarts its epoch when a run resumes within an "
                "epoch: resuming is exact only at the end of an epoch. Use torchdata's "
                "StatefulDataLoader"
            )

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)


def _refuse_unsaved(trainer: Any) -> None:
    """Raises if a callback has state in ``on_save_checkpoint``, which is never called here."""
    for callback in trainer.callbacks:
        if is_overridden("on_save_checkpoint", callback):
            raise MisconfigurationException(
                f"{type(callback).__name__} overrides on_save_checkpoint, which TorchaxCheckpoint "
                "does not call, so the state that on_save_checkpoint stores would be lost: return "
                "this state from state_dict, and restore it in load_state_dict"
            )


def _one_or_several(optimizers: list[torch.optim.Optimizer]) -> Any:
    """Returns a single optimizer as it is, several as a dict by position, and None for none."""
    if len(optimizers) == 1:
        return optimizers[0]
    return {str(index): optimizer for index, optimizer in enumerate(optimizers)} or None


def _place(value: Any) -> tuple[str, int]:
    """Returns where a logged value is, and its identity, which a detached tensor keeps."""
    if isinstance(value, torch.Tensor):
        tensor: Any = value
        is_on_device = tensor.device.type == "jax"
        return tensor.device.type, id(tensor.jax()) if is_on_device else tensor.data_ptr()
    return "jax" if isinstance(value, jax.Array) else "", id(value)


# --- SIGTERM on several processes ------------------------------------------------------------
#
# JAX's handler makes all processes agree on the step after which they end. It is written in C++, so
# Python does not see it, and Lightning replaces it with its own handler when a fit begins. Only the
# process that got the SIGTERM would then end, in the middle of the work of all.


@functools.cache
def _sigterm_action() -> ctypes.Array[ctypes.c_char]:
    """Returns C's handler of SIGTERM as it is at the first call."""
    # Larger than C's struct sigaction on any platform; only the C library looks into it.
    action = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    return action


def _put_sigterm_back() -> None:
    if jax.distributed.is_initialized():
        ctypes.CDLL(None).sigaction(signal.SIGTERM, _sigterm_action(), None)


def _end_lightnings_sigterm(trainer: Any) -> None:
    """Removes Lightning's handler, so that ``close`` finds and removes this package's below it."""
    connector = trainer._signal_connector
    if (handler := connector._original_handlers.pop(signal.SIGTERM, None)) is not None:
        connector._register_signal(signal.SIGTERM, handler)
    _put_sigterm_back()
