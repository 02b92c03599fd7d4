"""Remembers a completed step, so that a save can store this step until the next step begins."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchax_ckpt import RandomState


class HeldStep:
    """The state of modules, optimizers, schedulers and random generators at a completed step.

    ``HeldStep`` does not copy tensors, but detects a change to a tensor. ``HeldStep`` copies the
    random state and the settings, which are the state of schedulers and the hyperparameters of
    parameter groups, because these can change before the next step. Within a ``with`` block of
    ``put_back``, random state and settings have the values that they had at the completed step.

    Args:
      module: the module in training.
      optimizers, schedulers: the optimizers and schedulers of the module.

    Attributes:
      random_state: the state that ``RandomState`` returned at the step.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
    ) -> None:
        self._module, self._optimizers, self._schedulers = module, optimizers, schedulers
        self._values = [(weakref.ref(value), version) for value, version in self._values_now()]
        self._settings = copy.deepcopy(self._settings_now())
        self.random_state = RandomState().state_dict()

    @property
    def is_unchanged(self) -> bool:
        """True if no tensor changed and no parameter group was added since the completed step."""
        now = list(self._values_now())
        return (
            len(now) == len(self._values)
            and all(
                then() is value and before == version
                for (then, before), (value, version) in zip(self._values, now, strict=True)
            )
            # Callbacks that unfreeze layers add groups.
            and len(self._groups) == len(self._settings["groups"])
        )

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Restores settings and random state of the completed step until the ``with`` block ends.

        Settings are the state of schedulers and the hyperparameters of parameter groups. The end of
        the block sets them and the random state to their values before the block.
        """
        rng = RandomState()
        random_state, settings = rng.state_dict(), self._settings_now()
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

    def _values_now(self) -> Iterator[tuple[Any, int]]:
        """Yields an object and a number for each tensor; a change of its value changes one of them.

        Tensors of optimizer state are included, because an optimizer may fail in the middle of a
        step.
        """
        of_optimizers = (
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        for tensor in (*self._module.parameters(), *self._module.buffers(), *of_optimizers):
            if tensor.device.type == "jax":
                yield tensor.jax(), 0  # type: ignore[attr-defined]  # arrays are immutable
            else:
                yield tensor, tensor._version

    def _settings_now(self) -> dict[str, list[Any]]:
        """Returns the state of schedulers and the hyperparameters of parameter groups.

        The result may share objects with schedulers and groups, so it may change with them.
        """
        return {
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "groups": [{n: v for n, v in g.items() if n != "params"} for g in self._groups],
        }

    def _set(self, settings: dict[str, list[Any]]) -> None:
        for scheduler, state in zip(self._schedulers, settings["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for group, values in zip(self._groups, settings["groups"], strict=True):
            group.update(values)
