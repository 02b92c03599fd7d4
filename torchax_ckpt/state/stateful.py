"""Captures and restores objects with ``state_dict`` and ``load_state_dict``.

A checkpointer saves learning-rate schedulers, data loaders and the objects that the user passes as
``stateful`` through these methods.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torchax_ckpt.errors import AttachError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.state.component import Captured, Restoration, encoded, restore_by_call
from torchax_ckpt.state.findings import Findings, type_name


@runtime_checkable
class Stateful(Protocol):
    """An object whose ``state_dict`` and ``load_state_dict`` return and set its whole state."""

    def state_dict(self) -> Any:
        """Returns the whole state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Loads a state that the object's ``state_dict`` returned earlier."""


class StatefulComponent:
    """The component of one attached object with ``state_dict`` and ``load_state_dict``.

    Args:
      value: the object.
      key_path: prefix of the leaves' names: ``("lr_scheduler",)``, ``("stateful", name)``, ...
    """

    def __init__(self, value: Any, key_path: tuple[str, ...]) -> None:
        self.value = value
        self.key_path = key_path
        if isinstance(value, type) or not isinstance(value, Stateful):
            where = names.join(key_path)
            hint = ""
            if key_path[0] == "dataloader":
                hint = (
                    " torch.utils.data.DataLoader cannot report its position; use "
                    "torchdata.stateful_dataloader.StatefulDataLoader, which takes the same "
                    "arguments."
                )
            raise AttachError(
                f"{where}: expected an object with state_dict() and load_state_dict(), found "
                f"{type_name(value)}.{hint}",
                key_path=where,
            )

    def capture(self) -> Captured:
        """Calls the object's ``state_dict``, and returns the result as captured state."""
        return encoded(self.value.state_dict(), self.key_path)

    def prepare(self, node: Node, findings: Findings, selection: Selection) -> Restoration:
        """Returns the plan to call ``load_state_dict`` with the stored state.

        This method also captures the object's state before the restore. If the restore fails, the
        object gets the captured state back.
        """
        restoration = Restoration()

        def take(state: Any) -> None:
            self.value.load_state_dict(state)
            if self.key_path[0] == "dataloader":
                # torchdata's loader draws from torch's random state when it first uses a loaded
                # state. This call makes it draw now, before the random state is restored, instead
                # of in the middle of the resumed run.
                self.value.state_dict()

        where = names.join(self.key_path)
        restoration.calls.append(
            restore_by_call(
                node, self.capture(), restoration, where=where, owner=self.value, take=take
            )
        )
        return restoration
