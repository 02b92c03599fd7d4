"""Lets a training loop without a Trainer call the hooks of ``TorchaxCheckpoint``."""

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
    """Takes the place of a Trainer in the hooks of ``TorchaxCheckpoint``, for a loop of your own.

    Attributes:
      optimizers: one optimizer or several, in the same order in every run.
      lr_schedulers: any number of schedulers, in the same order in every run.
      train_dataloader: a ``StatefulDataLoader`` or a dict of them, set before ``on_fit_start``;
        None if the position in the data is not to be saved.
      global_step: completed optimizer steps. ``on_fit_start`` sets it, then the loop counts it.
      callback_metrics: metrics that are saved with the step; ``monitor`` of ``TorchaxCheckpoint``
        names the metric that ranks steps.
    """

    optimizers: list[torch.optim.Optimizer]
    lr_schedulers: list[Any] = dataclasses.field(default_factory=list)
    train_dataloader: Any = None
    global_step: int = 0
    callback_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


class BarePosition:
    """The state of loaders, schedulers and random generators after a loop's last completed step.

    ``hold`` records this state, because the loop may fetch the next batch, which advances the
    loader, before the completed step is saved.

    Attributes:
      step: ``loop.global_step`` at the last ``hold``.
      dataloader: a wrapper of the loop's loader, or a dict of wrappers. Until the first call of
        ``as_held``, a wrapper's ``state_dict`` returns the loader's present state; from then on,
        ``state_dict`` returns the loader's state at the last ``hold`` before ``as_held``.
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
        """True if the step that ``hold`` recorded last can still be saved.

        The step can be saved until a tensor of the module or of an optimizer changes.
        """
        return self._held is not None and self._held.is_unchanged

    def hold(self) -> None:
        """Records the loop's present position."""
        loop = self._loop
        self.step = loop.global_step
        self._held = HeldStep(self._module, loop.optimizers, loop.lr_schedulers)
        self._of_loaders = [copy.deepcopy(loader.state_dict()) for loader in self._wrapped]

    @contextlib.contextmanager
    def as_held(self) -> Iterator[None]:
        """Restores the state at the last call of ``hold`` until the ``with`` block ends.

        In the block, schedulers, parameter groups and random generators have the state that they
        had at that call; the end of the block undoes this. In the block and after it, wrappers of
        loaders return the loaders' state at that call from ``state_dict``.
        """
        assert self._held is not None
        with self._held.put_back():
            for loader, state in zip(self._wrapped, self._of_loaders, strict=True):
                loader.held = state
            yield

    def _wrap(self, loader: Any) -> Any:
        """Wraps a loader that has ``state_dict`` and ``load_state_dict``; returns others unchanged.

        ``TorchaxCheckpointer.attach`` refuses a loader without ``state_dict``; its error says which
        loader to use instead.
        """
        if not all(callable(getattr(loader, n, None)) for n in ("state_dict", "load_state_dict")):
            return loader
        self._wrapped.append(_Loader(loader))
        return self._wrapped[-1]


class _Loader:
    """Wraps a loader; ``state_dict`` returns ``held`` if set, else the loader's present state."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.held: Any = None

    def state_dict(self) -> Any:
        return self._loader.state_dict() if self.held is None else self.held

    def load_state_dict(self, state_dict: Any) -> None:
        self._loader.load_state_dict(state_dict)
