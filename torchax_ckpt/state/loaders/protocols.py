"""The methods by which data loaders give and take their state; imports no loader's library.

Source: torchdata 0.11, datasets 5.2 and mosaicml-streaming (``state_dict``); grain 0.2.18
(``get_state``); megatron-energon (``save_state_rank``).
"""

from __future__ import annotations

from typing import Any

import torch

from torchax_ckpt.layout import names
from torchax_ckpt.runtime import user_warnings

STATE_DICT = ("state_dict", "load_state_dict")
_PAIRS = (STATE_DICT, ("get_state", "set_state"), ("save_state_rank", "restore_state_rank"))

_REMEDY = "Give the loader worker_init_fn=lambda worker: torchax.disable_globally()"


def methods_of(value: object) -> tuple[str, str] | None:
    """Returns the names of the methods that return and set an object's state; None without any."""
    if isinstance(value, type):
        return None
    for pair in _PAIRS:
        if all(callable(getattr(value, name, None)) for name in pair):
            return pair
    return None


def state_of(value: object, methods: tuple[str, str]) -> Any:
    """Returns an object's state; Energon's FlexState, a subclass of dict, becomes a dict."""
    state = getattr(value, methods[0])()
    return state if methods == STATE_DICT else _plain(state)


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return type(state)(map(_plain, state)) if type(state) in (list, tuple) else state


def remedy(value: object) -> str:
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


def warn_of_workers(value: Any, key_path: tuple[str, ...]) -> None:
    """Warns of a torch loader whose worker processes run torch's operations through torchax."""
    workers, collate = getattr(value, "num_workers", 0), getattr(value, "collate_fn", None)
    has_init = getattr(value, "worker_init_fn", None) is not None
    if not workers or has_init or collate is not torch.utils.data.default_collate:
        return
    user_warnings.warn(
        f"{names.join(key_path)}: {type(value).__name__} has {workers} workers, in which torchax "
        f"is enabled as it is here. There torch's default_collate hangs or fails. {_REMEDY}",
        stacklevel=2,
    )


def explain(error: BaseException) -> None:
    """Adds the remedy to an error of torch's ``default_collate`` in a worker of a loader."""
    text = str(error)
    if "DataLoader worker" in text and "set_.source_Storage" in text:
        error.add_note(f"torchax is enabled in the loader's workers. {_REMEDY}")
