"""Owns what is known of Lightning's loops: where a Trainer is, and how it goes on from there.

A state from which training goes on bit for bit exists between two batches: after all that belongs
to one of them, hooks of the module, schedulers and validation included, and before the next is
fetched, which moves the loader and may draw random numbers. Lightning calls no hook there. So the
methods of its loops that end there are wrapped, on the loops of the one Trainer, while it fits.

Source: Lightning 2.6, ``loops/fit_loop.py`` and ``loops/training_epoch_loop.py``.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from torchax_ckpt import RandomState
from torchax_ckpt.integrations.lightning.held_step import HeldStep


class Moment(enum.StrEnum):
    """Where in its loops a Trainer is."""

    START = "start"
    """The first batch comes next."""
    BEFORE_VALIDATION = "before_validation"
    """A batch is done but for a validation."""
    WITHIN_EPOCH = "within_epoch"
    """A batch is done, and the epoch is not."""
    AFTER_EPOCH = "after_epoch"
    """The epoch is done."""


class LoopPosition:
    """Where a Trainer was when its optimizers last stepped, with everything that moves on since.

    Saved beside the modules as ``stateful/lightning``. Loops, loaders and what callbacks say are
    saved as they were held last, and not as they are: between two steps batches are fetched,
    gradients accumulate and epochs end, but modules and optimizers stay the same. So one step can
    be saved all that time, within ``as_held``.

    Attributes:
      step: ``trainer.global_step`` of what is held.
      moment: where that was.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer  # many attributes are set where no type checker sees them
        self.step = trainer.global_step
        self.moment = Moment.START
        self._loops: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        # Of the loaders and of random state, where the batch that is fetched ahead was fetched.
        self._before_fetch: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}
        self._held: HeldStep | None = None

    # --- holding -------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether there is something newer to hold than what is held."""
        is_halfway = self.moment is Moment.BEFORE_VALIDATION
        return self._trainer.global_step > self.step or is_halfway

    @property
    def is_current(self) -> bool:
        """Whether what it was when it was held is still there, or can be put back."""
        if self._held is None or self._trainer.fast_dev_run:
            return False
        optimization = self._trainer.fit_loop.epoch_loop.manual_optimization
        has_stepped = optimization.optim_step_progress.total.ready != self.step
        return not has_stepped and self._held.is_there

    def hold(self, moment: Moment) -> None:
        """Takes down where the Trainer is now."""
        trainer = self._trainer
        self.step = trainer.global_step
        self.moment = moment
        self._loops = trainer.fit_loop.state_dict()
        self._fetched_ahead = self._before_fetch
        self._held = self._hold()
        self._others = self._ask_others()

    def _hold(self) -> HeldStep:
        trainer = self._trainer
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        return HeldStep(trainer.lightning_module, trainer.optimizers, schedulers)

    def state_dict(self) -> dict[str, Any]:
        """What is held."""
        if self.moment is Moment.START:
            return {}
        return {
            "moment": str(self.moment),
            "loops": self._loops,
            "fetched_ahead": self._fetched_ahead,
            **self._others,
        }

    @contextlib.contextmanager
    def as_held(self) -> Iterator[None]:
        """Puts back for a while what is saved where it always is, and has moved on since.

        A scheduler may step where no optimizer does: in a batch that only accumulates, in a
        validation, at the end of an epoch.
        """
        assert self._held is not None
        with self._held.put_back():
            yield

    def _ask_others(self) -> dict[str, Any]:
        """What callbacks, the datamodule and the module want to be saved, and what was logged."""
        trainer = self._trainer
        datamodule = getattr(trainer, "datamodule", None)
        module: dict[str, Any] = {}
        trainer.lightning_module.on_save_checkpoint(module)
        # Copied, as they may give what they go on to change.
        others = copy.deepcopy(
            {
                "callbacks": {c.state_key: s for c in trainer.callbacks if (s := c.state_dict())},
                "datamodule": {} if datamodule is None else datamodule.state_dict(),
                "module": module,
            }
        )
        # EarlyStopping may look at old metrics.
        return {**others, "metrics": dict(trainer.callback_metrics)}

    # --- going on ------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what was saved; ``go_on`` gives it to the Trainer."""
        self._restored = state_dict

    def go_on(self) -> None:
        """Puts the Trainer where the restored step was; call it where Lightning restores loops.

        The loaders take their part when Lightning makes them; counters and random state are set
        right once more before the first batch.
        """
        trainer, restored = self._trainer, self._restored
        self._held = self._hold()
        self.moment = Moment(restored["moment"])
        self._loops = restored["loops"]
        self._fetched_ahead = restored["fetched_ahead"]
        self._others = {n: restored[n] for n in ("callbacks", "datamodule", "module", "metrics")}
        trainer.fit_loop.load_state_dict(restored["loops"])
        self.step = trainer.global_step
        # Also at the end of an epoch, where Lightning would not: restores loaders, and spares the
        # sanity check.
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
        """All is set up, and the first batch comes next: from here on nothing is drawn anew."""
        if self._held is None:
            return
        fit = self._trainer.fit_loop
        if self.moment is Moment.AFTER_EPOCH:
            # A new epoch, as in a run that was never interrupted: with a new iterator.
            _set_restarting(fit, False)
            fit._resuming_from_checkpoint = False
        elif self.moment is Moment.BEFORE_VALIDATION:
            validation = fit.epoch_loop.val_loop
            validation.restarting = False
            validation._restart_stage = "restarted_mid_evaluation"
        if self._fetched_ahead and self.moment is not Moment.AFTER_EPOCH:
            self._fetch_ahead(fit._data_fetcher)
        RandomState().load_state_dict(self._held.random_state)

    def _fetch_ahead(self, fetcher: Any) -> None:
        """Fetches the batch again that had been fetched ahead, with the noise it had."""
        loaders = fetcher.combined_loader
        loaders._load_state_dicts(self._fetched_ahead["loaders"])
        loaders._state_dicts()  # now they draw what they draw to go on; see ``attach``
        RandomState().load_state_dict(self._fetched_ahead["random_state"])
        iter(fetcher)

    def _note_fetch(self, fetcher: Any) -> None:
        """Called before a batch is fetched. Without a length Lightning fetches one ahead."""
        if fetcher.length is None:
            self._before_fetch = {
                "loaders": fetcher.combined_loader._state_dicts(),
                "random_state": RandomState().state_dict(),
            }

    def _start_epoch(self) -> None:
        if self.moment is Moment.WITHIN_EPOCH:
            # Its counters are back. Otherwise it would look for a validation that is done.
            self._trainer.fit_loop.epoch_loop.restarting = False

    # --- watching ------------------------------------------------------------------------------

    def watch(self, tell: Callable[[Moment], None]) -> None:
        """From now until ``unwatch``, calls ``tell`` at each moment."""
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop

        def run_started(original: Callable[[], None]) -> None:
            original()
            self._start()
            tell(Moment.START)

        def epoch_started(original: Callable[[Any], None], fetcher: Any) -> None:
            original(fetcher)
            self._start_epoch()
            self._note_fetch(fetcher)

        def batch_done(fetcher: Any) -> None:
            if not epoch._num_ready_batches_reached():
                tell(Moment.WITHIN_EPOCH)
                self._note_fetch(fetcher)

        def batch_ended(original: Callable[[Any], None], fetcher: Any) -> None:
            if epoch._should_check_val_fx(fetcher):
                tell(Moment.BEFORE_VALIDATION)
            try:
                original(fetcher)
            except SIGTERMException:
                if self._trainer.training:  # and not in the middle of a validation
                    batch_done(fetcher)
                raise
            batch_done(fetcher)

        def epoch_ended(original: Callable[[], None]) -> None:
            try:
                original()
            except SIGTERMException:
                tell(Moment.AFTER_EPOCH)
                raise
            tell(Moment.AFTER_EPOCH)

        _wrap(fit, "on_run_start", run_started)
        _wrap(fit, "on_advance_end", epoch_ended)
        _wrap(epoch, "on_run_start", epoch_started)
        _wrap(epoch, "on_advance_end", batch_ended)

    def unwatch(self) -> None:
        """Gives the loops back as they were."""
        fit = self._trainer.fit_loop
        for loop in (fit, fit.epoch_loop):
            for name in ("on_run_start", "on_advance_end"):
                vars(loop).pop(name, None)

    @property
    def is_over(self) -> bool:
        """Whether training ends here."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        epochs = fit.epoch_progress.current.processed
        return (
            (fit.max_steps != -1 and trainer.global_step >= fit.max_steps)
            or (fit.max_epochs not in (-1, None) and epochs >= fit.max_epochs)
            or (trainer.should_stop and fit._can_stop_early)
        )


def _wrap(loop: Any, name: str, wrapper: Callable[..., None]) -> None:
    """Has the loop call ``wrapper(method, ...)`` where it calls its own method."""
    method = getattr(loop, name)
    setattr(loop, name, lambda *args: wrapper(method, *args))


def _set_restarting(loop: Any, is_restarting: bool) -> None:
    # The property of the outermost loop makes up its own mind.
    loop._restarting = is_restarting
    for child in vars(loop).values():
        if hasattr(child, "_restarting"):
            _set_restarting(child, is_restarting)
