"""Saves and restores the position of a Trainer in Lightning's loops.

Training can resume bit for bit only from a point between two batches: after all hooks, schedulers
and validation of one batch, and before the next is fetched, which advances the loader and may draw
random numbers. Lightning calls no hook there, so during a fit this module wraps ``on_run_start``
and ``on_advance_end`` of the Trainer's loops, which return between batches.

Source: Lightning 2.6, ``loops/fit_loop.py`` and ``loops/training_epoch_loop.py``.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from torchax_ckpt import RandomState


class Moment(enum.StrEnum):
    """A point in a Trainer's loops that ``LoopPosition.watch`` reports."""

    START = "start"  # before the first batch
    BEFORE_VALIDATION = "before_validation"  # after a batch, before the validation that follows it
    WITHIN_EPOCH = "within_epoch"  # after a batch and its validation, within an epoch
    AFTER_EPOCH = "after_epoch"  # after the last batch of an epoch and the epoch's hooks


class CompletedStep:
    """What a save needs of a completed step until the next step begins; no copies of tensors."""

    def __init__(self, trainer: Any) -> None:
        self._module, self._optimizers = trainer.lightning_module, trainer.optimizers
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        # Tensors are not copied: a change of one is detected. The others may change before the next
        # step, such as a scheduler in a batch that only accumulates gradients.
        self._versions = [(weakref.ref(value), number) for value, number in self._present_tensors()]
        self._settings = copy.deepcopy(self._present_settings())
        self.random_state = RandomState().state_dict()

    @property
    def is_unchanged(self) -> bool:
        """True if no tensor changed and no parameter group was added since the completed step."""
        present = list(self._present_tensors())
        return (
            len(present) == len(self._versions)
            and all(
                reference() is value and before == number
                for (reference, before), (value, number) in zip(
                    self._versions, present, strict=True
                )
            )
            # Callbacks that unfreeze layers add groups.
            and len(self._groups) == len(self._settings["groups"])
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """In the block, schedulers, hyperparameters and random state are those of the step."""
        rng = RandomState()
        random_state, settings = rng.state_dict(), self._present_settings()
        try:
            self._set(self._settings)
            rng.load_state_dict(self.random_state)
            yield
        finally:
            self._set(settings)
            rng.load_state_dict(random_state)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _present_tensors(self) -> Iterator[tuple[Any, int]]:
        """Yields an object and a number for each tensor; a change of its value changes one."""
        # An optimizer may fail in the middle of a step, after it has changed its state.
        of_optimizers = (
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        for tensor in (*self._module.parameters(), *self._module.buffers(), *of_optimizers):
            if tensor.device.type == "jax":
                yield tensor.jax(), 0  # arrays are immutable
            else:
                yield tensor, tensor._version

    def _present_settings(self) -> dict[str, list[Any]]:
        """Returns the state of schedulers and the hyperparameters, which may share objects."""
        return {
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "groups": [{n: v for n, v in g.items() if n != "params"} for g in self._groups],
        }

    def _set(self, settings: dict[str, list[Any]]) -> None:
        for scheduler, state in zip(self._schedulers, settings["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for group, values in zip(self._groups, settings["groups"], strict=True):
            group.update(values)


class LoopPosition:
    """The position of a Trainer after its last optimizer step, stored as ``stateful/lightning``.

    Until the next optimizer step, Lightning fetches batches, accumulates gradients and ends epochs.
    A save stores loops, loaders and callbacks as the last call of ``record`` found them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer  # Type checkers do not see many of its attributes.
        self.step = trainer.global_step
        self.moment = Moment.START
        self._recorded: dict[str, Any] = {}
        # The state of loaders and random generators before the prefetched batch was fetched.
        self._before_fetch: dict[str, Any] = {}
        self._completed: CompletedStep | None = None

    # --- recording -----------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """True if an optimizer has stepped since the last ``record``, or a validation has run."""
        is_halfway = self.moment is Moment.BEFORE_VALIDATION
        return self._trainer.global_step > self.step or is_halfway

    @property
    def is_current(self) -> bool:
        """True if the recorded step can still be saved: no optimizer has begun the next step."""
        if self._completed is None or self._trainer.fast_dev_run:
            return False
        optimization = self._trainer.fit_loop.epoch_loop.manual_optimization
        has_stepped = optimization.optim_step_progress.total.ready != self.step
        return not has_stepped and self._completed.is_unchanged

    def record(self, moment: Moment) -> None:
        """Records the Trainer's present position."""
        trainer = self._trainer
        self.step = trainer.global_step
        self.moment = moment
        self._completed = CompletedStep(trainer)
        module: dict[str, Any] = {}
        trainer.lightning_module.on_save_checkpoint(module)
        datamodule = getattr(trainer, "datamodule", None)
        self._recorded = {
            "moment": str(moment),
            "loops": trainer.fit_loop.state_dict(),
            "fetched_ahead": self._before_fetch,
            # Metrics are included, because EarlyStopping may read metrics of earlier steps.
            "metrics": dict(trainer.callback_metrics),
            # Copied, because callbacks, datamodule and module may later change what they return.
            **copy.deepcopy(
                {
                    "callbacks": {
                        c.state_key: s for c in trainer.callbacks if (s := c.state_dict())
                    },
                    "datamodule": {} if datamodule is None else datamodule.state_dict(),
                    "module": module,
                }
            ),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the recorded or resumed position; {} without one."""
        return self._recorded

    def as_recorded(self) -> contextlib.AbstractContextManager[None]:
        """In the block, the live objects that a save reads have their recorded state."""
        assert self._completed is not None
        return self._completed.restored()

    # --- resuming ------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Stores a saved position in this object; ``resume`` then moves the Trainer to it."""
        self._recorded = state_dict

    def resume(self) -> None:
        """Moves the Trainer to the restored position, when Lightning would restore its loops."""
        trainer, restored = self._trainer, self._recorded
        self._completed = CompletedStep(trainer)
        self.moment = Moment(restored["moment"])
        trainer.fit_loop.load_state_dict(restored["loops"])
        self.step = trainer.global_step
        # Because of this flag, Lightning restores the loaders and skips the sanity check. Lightning
        # itself would not set the flag at the end of an epoch.
        _set_restarting(trainer.fit_loop, True)
        for callback in trainer.callbacks:
            if state := restored["callbacks"].get(callback.state_key):
                callback.load_state_dict(state)
        if restored["datamodule"]:
            trainer.datamodule.load_state_dict(restored["datamodule"])
        if restored["module"]:
            trainer.lightning_module.on_load_checkpoint(restored["module"])
        trainer.callback_metrics.update(restored["metrics"])

    def _start(self) -> None:
        """Restores the prefetched batch and the random state, if the fit resumes a step."""
        if self._completed is None:
            return
        fit = self._trainer.fit_loop
        if self.moment is Moment.AFTER_EPOCH:
            # The next epoch begins with a new iterator, as in an uninterrupted run.
            _set_restarting(fit, False)
            fit._resuming_from_checkpoint = False
        elif self.moment is Moment.BEFORE_VALIDATION:
            validation = fit.epoch_loop.val_loop
            validation.restarting = False
            validation._restart_stage = "restarted_mid_evaluation"
        fetched_ahead = self._recorded["fetched_ahead"]
        if fetched_ahead and self.moment is not Moment.AFTER_EPOCH:
            # Fetches again the batch that Lightning had prefetched at the recorded position.
            loaders = fit._data_fetcher.combined_loader
            loaders._load_state_dicts(fetched_ahead["loaders"])
            # A restored loader draws from the random state when it is first asked for its state;
            # see ``attach``.
            loaders._state_dicts()
            RandomState().load_state_dict(fetched_ahead["random_state"])
            iter(fit._data_fetcher)
        # This late, because Lightning's set-up draws random numbers.
        RandomState().load_state_dict(self._completed.random_state)

    def _note_fetch(self, fetcher: Any) -> None:
        """Records the state of loaders and random generators before a batch is prefetched."""
        if fetcher.length is None:  # Otherwise Lightning prefetches none.
            self._before_fetch = {
                "loaders": fetcher.combined_loader._state_dicts(),
                "random_state": RandomState().state_dict(),
            }

    # --- wrapping Lightning's loops ------------------------------------------------------------

    def watch(self, on_moment: Callable[[Moment], None]) -> None:
        """Wraps methods of the Trainer's loops, so that they call ``on_moment`` at each moment."""
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop

        def run_started(original: Callable[[], None]) -> None:
            original()
            self._start()
            on_moment(Moment.START)

        def epoch_started(original: Callable[[Any], None], fetcher: Any) -> None:
            original(fetcher)
            if self.moment is Moment.WITHIN_EPOCH:
                # The counters are already restored. If the loop were still restarting, Lightning
                # would run the validation of the last batch again.
                epoch.restarting = False
            self._note_fetch(fetcher)

        def batch_done(fetcher: Any) -> None:
            if not epoch._num_ready_batches_reached():
                on_moment(Moment.WITHIN_EPOCH)
                self._note_fetch(fetcher)

        def batch_ended(original: Callable[[Any], None], fetcher: Any) -> None:
            if epoch._should_check_val_fx(fetcher):
                on_moment(Moment.BEFORE_VALIDATION)
            try:
                original(fetcher)
            except SIGTERMException:
                if self._trainer.training:  # False in the middle of a validation.
                    batch_done(fetcher)
                raise
            batch_done(fetcher)

        def epoch_ended(original: Callable[[], None]) -> None:
            try:
                original()
            except SIGTERMException:
                on_moment(Moment.AFTER_EPOCH)
                raise
            on_moment(Moment.AFTER_EPOCH)

        _wrap(fit, "on_run_start", run_started)
        _wrap(fit, "on_advance_end", epoch_ended)
        _wrap(epoch, "on_run_start", epoch_started)
        _wrap(epoch, "on_advance_end", batch_ended)

    def unwatch(self) -> None:
        """Removes the wrappers that ``watch`` put around the methods of the Trainer's loops."""
        fit = self._trainer.fit_loop
        for loop in (fit, fit.epoch_loop):
            for name in ("on_run_start", "on_advance_end"):
                vars(loop).pop(name, None)

    @property
    def is_over(self) -> bool:
        """True if no batch follows, due to a limit of steps or epochs, or to early stopping."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        epochs = fit.epoch_progress.current.processed
        return (
            (fit.max_steps != -1 and trainer.global_step >= fit.max_steps)
            or (fit.max_epochs not in (-1, None) and epochs >= fit.max_epochs)
            or (trainer.should_stop and fit._can_stop_early)
        )


def _wrap(loop: Any, name: str, wrapper: Callable[..., None]) -> None:
    """Replaces a loop's method by ``wrapper``, which gets the original method as first argument."""
    method = getattr(loop, name)
    setattr(loop, name, lambda *args: wrapper(method, *args))


def _set_restarting(loop: Any, is_restarting: bool) -> None:
    # Sets the private attribute, because the setter of the outermost loop's ``restarting`` property
    # changes the value that it is given.
    loop._restarting = is_restarting
    for child in vars(loop).values():
        if hasattr(child, "_restarting"):
            _set_restarting(child, is_restarting)
