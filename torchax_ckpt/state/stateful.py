"""Captures and restores objects through their methods, such as ``state_dict``.

A checkpointer saves learning-rate schedulers, data loaders and the objects that the user passes as
``stateful`` through these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchax_ckpt.errors import AttachError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.state.component import Captured, Restoration, encoded, restore_by_call
from torchax_ckpt.state.findings import Findings, type_name
from torchax_ckpt.state.functional import PytreeCapture
from torchax_ckpt.state.loaders import protocols
from torchax_ckpt.state.loaders.saved_states import SavedStates

Redistribute = Callable[[list[Any], int], Sequence[Any]]
"""Maps the states of one loader on all processes that saved a step to as many new states."""


class StatefulComponent:
    """The component of one attached object that returns and takes its state.

    Args:
      value: the object.
      key_path: prefix of the leaves' names: ``("lr_scheduler",)``, ``("stateful", name)``, ...
      redistribute: makes the states for another number of processes, for a loader.
    """

    def __init__(
        self, value: Any, key_path: tuple[str, ...], redistribute: Redistribute | None = None
    ) -> None:
        self.value = value
        self.key_path = key_path
        self._redistribute = redistribute
        is_loader = key_path[0] == "dataloader"
        methods = protocols.methods_of(value)
        if methods is None or not (is_loader or methods == protocols.STATE_DICT):
            where = names.join(key_path)
            hint = protocols.remedy(value) if is_loader else ""
            raise AttachError(
                f"{where}: expected an object with state_dict() and load_state_dict(), found "
                f"{type_name(value)}.{hint}",
                key_path=where,
            )
        self._methods = methods
        self._state = PytreeCapture(key_path)
        if is_loader:
            protocols.warn_of_workers(value, key_path)

    def capture(self) -> Captured:
        """Asks the object for its state, and returns it as captured state."""
        return self._state.capture(protocols.state_of(self.value, self._methods))

    def prepare(
        self, node: Node | SavedStates, findings: Findings, selection: Selection
    ) -> Restoration:
        """Returns the plan to give the object the stored state.

        This method also captures the object's state before the restore. If the restore fails, the
        object gets the captured state back.

        Args:
          node: the stored state; or the states of all processes, to redistribute.
          findings, selection: as for every component.
        """
        restoration = Restoration()
        load = getattr(self.value, self._methods[1])

        def take(state: Any) -> None:
            load(state)
            if self.key_path[0] == "dataloader" and self._methods == protocols.STATE_DICT:
                # torchdata's loader draws from torch's random state when it first uses a loaded
                # state. This call makes it draw now, before the random state is restored, instead
                # of in the middle of the resumed run.
                protocols.state_of(self.value, self._methods)

        def take_share(states: list[Any]) -> None:
            assert isinstance(node, SavedStates)
            assert self._redistribute is not None
            take(node.share(self._redistribute(states, node.count)))

        is_shared = isinstance(node, SavedStates)
        write = restore_by_call(
            list(node.nodes) if isinstance(node, SavedStates) else node,
            # Of a state that was donated, the leaves that are not put back need not be alive.
            encoded(protocols.state_of(self.value, self._methods), self.key_path),
            restoration,
            where=names.join(self.key_path),
            owner=self.value,
            take=take_share if is_shared else take,
            put_back=take,
        )
        restoration.calls.append(write)
        return restoration
