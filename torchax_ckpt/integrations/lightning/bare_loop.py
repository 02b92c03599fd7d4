"""Owns ``BareLoop``, a training without a Trainer, and where it was when it completed a step."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchax_ckpt.integrations.lightning.held_step import HeldStep


@dataclasses.dataclass(kw_only=True)
class BareLoop:
    """What the hooks are given in place of a Trainer, in a loop of one's own.

    Attributes:
      optimizers: one or several, in an order that stays.
      lr_schedulers: the same.
      train_dataloader: a ``StatefulDataLoader``, or a dict of them, as ``on_fit_start`` finds it;
        None where position in the data is not saved.
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
      dataloader: the loop's, or a dict of them, as it is saved: within ``as_held`` where it was.
    """

    def __init__(self, loop: BareLoop, module: torch.nn.Module) -> None:
        self._loop, self._module = loop, module
        self._held: HeldStep | None = None
        self._of_loaders: list[Any] = []
        self.step = 0
        self._wrapped: list[_Loader] = []
        loader = loop.train_dataloader
        if isinstance(loader, Mapping):
            self.dataloader: Any = {name: self._wrap(value) for name, value in loader.items()}
        else:
            self.dataloader = self._wrap(loader)

    @property
    def is_current(self) -> bool:
        """Whether what it was when it was held is still there, or can be put back."""
        return self._held is not None and self._held.is_there

    def hold(self) -> None:
        """Takes down where the loop is now."""
        loop = self._loop
        self.step = loop.global_step
        self._held = HeldStep(self._module, loop.optimizers, loop.lr_schedulers)
        self._of_loaders = [copy.deepcopy(loader.state_dict()) for loader in self._wrapped]

    @contextlib.contextmanager
    def as_held(self) -> Iterator[None]:
        """Puts back for a while what has moved on since."""
        assert self._held is not None
        with self._held.put_back():
            for loader, state in zip(self._wrapped, self._of_loaders, strict=True):
                loader.held = state
            yield

    def _wrap(self, loader: Any) -> Any:
        """One that cannot say where it is goes to ``attach`` itself, which says what to take."""
        if not all(callable(getattr(loader, n, None)) for n in ("state_dict", "load_state_dict")):
            return loader
        self._wrapped.append(_Loader(loader))
        return self._wrapped[-1]


class _Loader:
    """A stateful loader, or what it said of itself earlier."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.held: Any = None

    def state_dict(self) -> Any:
        return self._loader.state_dict() if self.held is None else self.held

    def load_state_dict(self, state_dict: Any) -> None:
        self._loader.load_state_dict(state_dict)
