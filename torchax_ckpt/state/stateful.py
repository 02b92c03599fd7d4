"""Owns whatever has ``state_dict`` and ``load_state_dict``: schedulers, loaders, users' objects."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torchax_ckpt.errors import AttachError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.state.component import Captured, Findings, Restoration, encoded, restore_by_call


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its whole state."""

    def state_dict(self) -> Any:
        """The whole state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Takes what ``state_dict`` gave."""


class StatefulComponent:
    """One object with ``state_dict`` and ``load_state_dict``.

    Args:
      value: the object.
      key_path: where its leaves stand: ``("lr_scheduler",)``, ``("stateful", name)``, ...
    """

    def __init__(self, value: Any, key_path: tuple[str, ...]) -> None:
        self.value = value
        self.key_path = key_path
        if isinstance(value, type) or not isinstance(value, Stateful):
            where = names.join(key_path)
            hint = ""
            if key_path[0] == "dataloader":
                hint = (
                    " torch's own DataLoader cannot say where it is; use "
                    "torchdata.stateful_dataloader.StatefulDataLoader, which takes the same "
                    "arguments."
                )
            raise AttachError(
                f"{where}: expected an object with state_dict() and load_state_dict(), found "
                f"{value!r:.100}.{hint}",
                key_path=where,
            )

    def capture(self) -> Captured:
        """The object's state dict."""
        return encoded(self.value.state_dict(), self.key_path)

    def prepare(self, node: Node, findings: Findings, selection: Selection) -> Restoration:
        """A call of ``load_state_dict``, undone with the present state if a later one fails."""
        restoration = Restoration()

        def take(state: Any) -> None:
            self.value.load_state_dict(state)
            if self.key_path[0] == "dataloader":
                # torchdata's loader draws from torch's random state when it first acts on a
                # loaded state. Asked for its state it does so now, before the random state is
                # restored, and not in the middle of the resumed run.
                self.value.state_dict()

        where = names.join(self.key_path)
        restoration.calls.append(
            restore_by_call(
                node, self.capture(), restoration, where=where, owner=self.value, take=take
            )
        )
        return restoration
