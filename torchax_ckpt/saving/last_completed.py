"""Saves the last completed step when a training loop ends early: by ``break``, or by Ctrl-C."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax

from torchax_ckpt.runtime.call_guard import Calls, guarded
from torchax_ckpt.saving.save_calls import SaveCalls
from torchax_ckpt.state.component import Captured
from torchax_ckpt.state.training_state import TrainingState

logger = logging.getLogger(__name__)


class _CompletedState(TrainingState):
    """The attached state as it was at a completed step, while all its arrays exist.

    Values on the host are copied. Device arrays, which never change, are referred to weakly, so the
    state takes no memory on devices; once the training replaces or donates one, the state is gone.
    """

    def __init__(self, attached: TrainingState) -> None:
        self._attached = attached
        self.components = attached.components
        self._parts = {
            # Nothing else keeps the data of a random key alive.
            name: (part.form, [_reference(a, is_weak=name != "rng") for a in part.arrays])
            for name, part in attached.capture().items()
        }

    def capture(self, state: Any = None) -> dict[str, Captured]:
        """Returns the state of the completed step; call it only if ``is_whole``."""
        return {
            name: Captured(form, [reference() for reference in references])
            for name, (form, references) in self._parts.items()
        }

    def frozen(self) -> frozenset[str]:
        """See ``TrainingState.frozen``."""
        return self._attached.frozen()

    @property
    def is_whole(self) -> bool:
        """Whether all arrays of the completed step still exist."""
        arrays = [a for part in self.capture().values() for a in part.arrays]
        return not any(a is None or (isinstance(a, jax.Array) and a.is_deleted()) for a in arrays)


def _reference(array: Any, *, is_weak: bool) -> Callable[[], Any]:
    return weakref.ref(array) if is_weak and isinstance(array, jax.Array) else lambda: array


class LastCompleted:
    """Remembers the last completed step of a loop if no policy saved it, and saves it at the end.

    Args:
      attached: the attached state.
      saves: saves the step.
      calls: the calls of the checkpointer, which refuse a save that cannot work.
      require_open: raises if the checkpointer is closed.
    """

    def __init__(
        self,
        attached: TrainingState,
        saves: SaveCalls,
        calls: Calls,
        require_open: Callable[[], None],
    ) -> None:
        self._attached = attached
        self._saves = saves
        self._calls = calls
        self._require_open = require_open
        self._held: tuple[int, _CompletedState, Mapping[str, Any]] | None = None

    def hold(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Remembers a step that is completed now and was not saved, with its metrics."""
        self._held = step, _CompletedState(self._attached), metrics

    def drop(self) -> None:
        """Forgets the step: it was saved, or is no longer the last."""
        self._held = None

    def save(self) -> None:
        """Begins a save of the step if there is one to save and its arrays still exist.

        Logs errors and does not raise them, because what ended the loop must reach the caller.
        """
        if self._held is None:
            return
        step, completed, metrics = self._held
        self._held = None
        try:
            if completed.is_whole:
                self._begin(step, completed, metrics)
                return
            logger.warning(
                "the loop ended early; step %d is not saved, because the body after it had changed "
                "the state already. To save the step of a body that ends with break, call "
                "save(step, force=True) before break",
                step,
            )
        except Exception:
            logger.exception("the loop ended early, and step %d could not be saved", step)

    @guarded(trains=True)
    def _begin(self, step: int, completed: _CompletedState, metrics: Mapping[str, Any]) -> None:
        self._require_open()
        self._saves.save(step, completed, None, metrics, force=True)
