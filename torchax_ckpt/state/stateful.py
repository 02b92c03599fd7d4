"""Captures and restores schedulers, loaders and other objects through methods like ``state_dict``.

Source: torchdata 0.11, datasets 5.2 and mosaicml-streaming (``state_dict``); grain 0.2.18
(``get_state``); megatron-energon (``save_state_rank``). None of them is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchax_ckpt.errors import AttachError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.state import per_process_state
from torchax_ckpt.state.component import (
    Captured,
    Combined,
    encoded,
    restore_by_call,
)
from torchax_ckpt.state.findings import type_name
from torchax_ckpt.state.functional import PytreeCapture
from torchax_ckpt.state.per_process_state import LOADER, STATE_DICT, SavedStates, methods_of
from torchax_ckpt.state.plans.restoration import Change, Restoration
from torchax_ckpt.state.stored_entries import SCHEDULER, SCHEDULER_CLASS, scheduler_class, takes

Redistribute = Callable[[list[Any], int], Sequence[Any]]
"""Maps the states of one loader on all processes that saved a step to as many new states."""

_REMEDY = "Give the loader worker_init_fn=lambda worker: torchax.disable_globally()"


class StatefulComponent:
    """The component of one attached object that returns and takes its state."""

    def __init__(
        self, value: Any, key_path: tuple[str, ...], redistribute: Redistribute | None = None
    ) -> None:
        self.value = value
        self.key_path = key_path
        self._redistribute = redistribute
        self._is_loader = key_path[0] == LOADER
        is_torchs = isinstance(value, torch.optim.lr_scheduler.LRScheduler)
        self._is_scheduler = is_torchs or key_path[0] == SCHEDULER
        methods = methods_of(value)
        if methods is None or not (self._is_loader or methods == STATE_DICT):
            where = names.join(key_path)
            hint = _alternatives(value) if self._is_loader else ""
            raise AttachError(
                f"{where}: expected an object with state_dict() and load_state_dict(), found "
                f"{type_name(value)}.{hint}",
                key_path=where,
            )
        self._methods = methods
        self._state = PytreeCapture(key_path)
        self._with_class = Combined(
            lambda nodes: {**nodes[0], SCHEDULER_CLASS: scheduler_class(value)}
        )
        if self._is_loader:
            _warn_of_workers(value, key_path)
        if isinstance(value, torch.utils.data.DataLoader):
            _warn_of_iterator(value, key_path)

    def capture(self) -> Captured:
        """Asks the object for its state, and returns it as captured state."""
        captured = self._state.capture(self._present_state())
        has_class = self._is_scheduler and isinstance(captured.form.node, dict)
        return self._with_class([captured]) if has_class else captured

    def _present_state(self) -> Any:
        state = getattr(self.value, self._methods[0])()
        return state if self._methods == STATE_DICT else _plain(state)

    def prepare(self, node: Node | SavedStates, plan: Restoration) -> None:
        """Plans to give the object its stored state; a failure puts the old one back."""
        load = getattr(self.value, self._methods[1])
        where = names.join(self.key_path)

        def take(state: Any) -> None:
            load(state)
            if self._is_loader and self._methods == STATE_DICT:
                # torchdata's loader draws from torch's random state when it first uses a loaded
                # state. This call makes it draw now, before the random state is restored, instead
                # of in the middle of the resumed run.
                self._present_state()

        is_shared = isinstance(node, SavedStates)
        # Leaves that are not put back may have been donated.
        state = self._present_state()
        live = encoded(state, self.key_path)
        if not (is_shared or takes(self.value, state, node, where, plan.findings)):
            return

        def take_stored(state: Any) -> None:
            if isinstance(node, SavedStates):
                assert self._redistribute is not None
                take(node.share(self._redistribute(state, node.count)))
                return
            take(state)
            if (warning := per_process_state.end_of_epoch(where, self.value, state)) is not None:
                # A change is made only if all processes restore the step.
                plan.changes.append(Change(lambda values: user_messages.warn(warning)))

        restore_by_call(
            list(node.nodes) if isinstance(node, SavedStates) else node,
            live,
            plan,
            where=where,
            owner=self.value,
            take=take_stored,
            put_back=take,
        )


def _plain(state: Any) -> Any:
    """Returns a state in which Energon's FlexState, a subclass of dict, is a dict."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return type(state)(map(_plain, state)) if type(state) in (list, tuple) else state


def _alternatives(value: object) -> str:
    """Returns what to attach instead of a loader that has no state, as the end of a message."""
    if isinstance(value, torch.utils.data.DataLoader):
        return (
            " torch.utils.data.DataLoader cannot report its position; use "
            "torchdata.stateful_dataloader.StatefulDataLoader, which takes the same arguments."
        )
    if type(value).__module__.partition(".")[0] == "grain":
        return (
            " Grain keeps the position in iterators: attach the iterator that the program draws "
            "from, iterator = iter(loader)."
        )
    return (
        " Or attach a loader with get_state() and set_state(), as Grain's iterators have them, or "
        "with save_state_rank() and restore_state_rank()."
    )


def _warn_of_workers(value: Any, key_path: tuple[str, ...]) -> None:
    """Warns of a torch loader whose worker processes run torch's operations through torchax."""
    workers, collate = getattr(value, "num_workers", 0), getattr(value, "collate_fn", None)
    has_init = getattr(value, "worker_init_fn", None) is not None
    if not workers or has_init or collate is not torch.utils.data.default_collate:
        return
    user_messages.warn(
        f"{names.join(key_path)}: {type(value).__name__} has {workers} workers, in which torchax "
        f"is enabled as it is here. There torch's default_collate hangs or fails. {_REMEDY}"
    )


def _warn_of_iterator(loader: Any, key_path: tuple[str, ...]) -> None:
    """Warns of an iterator over a torch loader that the program made before, and still uses."""
    # The loader and the call itself hold two references.
    if getattr(loader, "_iterator", None) is None or sys.getrefcount(loader._iterator) <= 2:
        return
    user_messages.warn(
        f"{names.join(key_path)}: an iterator over this loader was made before attach, and is "
        "still held. A restore moves the loader, but not this iterator, which gives the first "
        "batches of the epoch again; the positions that later saves store are then wrong too. Call "
        "iter(loader) after attach."
    )


def explain_worker_error(error: BaseException) -> None:
    """Adds the remedy to an error of torch's ``default_collate`` in a worker of a loader."""
    text = str(error)
    if "DataLoader worker" in text and "set_.source_Storage" in text:
        error.add_note(f"torchax is enabled in the loader's workers. {_REMEDY}")
