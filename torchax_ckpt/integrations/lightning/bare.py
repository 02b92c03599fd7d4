"""Owns ``BareLoop``, a training without a Trainer, and where it was when it completed a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from torchax_ckpt.integrations.lightning.held import Held


@dataclasses.dataclass(kw_only=True)
class BareLoop:
    """What the hooks are given in place of a Trainer, in a loop of one's own.

    Attributes:
      optimizers: one or several, in an order that stays.
      lr_schedulers: the same.
      train_dataloader: a ``StatefulDataLoader``, or None where position in the data is not saved.
      global_step: completed optimizer steps. Set by ``on_fit_start``, then counted by the loop.
      callback_metrics: saved with the step, and ranked by ``monitor``.
    """

    optimizers: list[torch.optim.Optimizer]
    lr_schedulers: list[Any] = dataclasses.field(default_factory=list)
    train_dataloader: Any = None
    global_step: int = 0
    callback_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


class BarePosition:
    """Where a loop was when it completed its last step: with the next batch the loader moves on.

    Attributes:
      step: ``loop.global_step`` of what is held.
      dataloader: the loop's, as it is saved: within ``as_held`` where it was.
    """

    def __init__(self, loop: BareLoop, module: torch.nn.Module) -> None:
        self._loop, self._module = loop, module
        self._held: Held | None = None
        self.step = 0
        loader = loop.train_dataloader
        # One that cannot say where it is goes to ``attach`` itself, which says what to take.
        self.dataloader = _Loader(loader) if hasattr(loader, "state_dict") else loader

    @property
    def is_current(self) -> bool:
        """Whether what it was when it was held is still there, or can be put back."""
        return self._held is not None and self._held.is_there

    def hold(self) -> None:
        """Takes down where the loop is now."""
        loop = self._loop
        self.step = loop.global_step
        self._held = Held(self._module, loop.optimizers, loop.lr_schedulers)
        self._of_loader = None if loop.train_dataloader is None else self.dataloader.state_dict()

    @contextlib.contextmanager
    def as_held(self) -> Iterator[None]:
        """Puts back for a while what has moved on since."""
        assert self._held is not None
        with self._held.put_back():
            if self.dataloader is not None:
                self.dataloader.held = self._of_loader
            yield


class _Loader:
    """A stateful loader, or what it said of itself earlier."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.held: Any = None

    def state_dict(self) -> Any:
        return self._loader.state_dict() if self.held is None else self.held

    def load_state_dict(self, state_dict: Any) -> None:
        self._loader.load_state_dict(state_dict)
