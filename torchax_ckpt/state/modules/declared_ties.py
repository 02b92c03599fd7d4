"""Reads which weights a model declares as tied, and warns of ties that the live tensors lack.

Models of ``transformers`` declare their ties: ``all_tied_weights_keys`` maps each alias to the name
that it is tied to, with the ties that the configuration switches off left out. Until version 5,
``_tied_weights_keys`` lists the aliases of the input embeddings, and
``config.tie_word_embeddings`` says whether they are tied. This module reads these attributes by
name and does not import ``transformers``.

Source: transformers 5.23, ``PreTrainedModel.get_expanded_tied_weights_keys``; 4.57,
``PreTrainedModel.tie_weights``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.layout import names
from torchax_ckpt.runtime import user_warnings

_MAX_LISTED = 3


def declared_ties(root: torch.nn.Module) -> dict[str, str]:
    """Returns alias -> name for all live ties that a model or its submodules declare."""
    declared: dict[str, str] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for alias, name in _declared_by(module).items():
            alias, name = (names.without_compile(f"{prefix}{n}") for n in (alias, name))
            declared[alias] = name
    live = _tensors(root) if declared else {}
    return {alias: name for alias, name in declared.items() if alias in live and name in live}


def lost_ties(module: torch.nn.Module) -> dict[str, str]:
    """Returns the declared ties, alias -> name, whose live tensors are separate tensors."""
    root, _ = torchax_backend.unwrap_jittable(module)
    declared = declared_ties(root)
    live = _tensors(root) if declared else {}
    return {alias: name for alias, name in declared.items() if live[alias] is not live[name]}


def warn_of_lost_ties(module: torch.nn.Module, key_path: tuple[str, ...]) -> None:
    """Warns once, on process 0, if tensors that the model declares as tied are separate."""
    lost = [f"{alias} (tied to {name})" for alias, name in lost_ties(module).items()]
    if not lost or jax.process_index() != 0:
        return
    more = f" and {len(lost) - _MAX_LISTED} more" if len(lost) > _MAX_LISTED else ""
    root, _ = torchax_backend.unwrap_jittable(module)
    user_warnings.warn(
        f"{names.join(key_path)}: {type(root).__name__} declares tied weights that are separate "
        f"tensors: {', '.join(lost[:_MAX_LISTED])}{more}. They train apart and are stored apart. "
        "model.to('jax') unties weights: call model.tie_weights() after it, and build the "
        "optimizer after that.",
        stacklevel=2,
    )


def _tensors(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = root.named_parameters(remove_duplicate=False)
    live = (*root.named_buffers(remove_duplicate=False), *parameters)
    return {names.without_compile(name): tensor for name, tensor in live}


def _declared_by(module: torch.nn.Module) -> Mapping[str, str]:
    """Returns the ties that one module declares for itself, by names below the module."""
    ties: Any = getattr(module, "all_tied_weights_keys", None)
    if isinstance(ties, Mapping):
        return ties
    aliases: Any = getattr(module, "_tied_weights_keys", None)
    is_on = getattr(getattr(module, "config", None), "tie_word_embeddings", False)
    if not (is_on and isinstance(aliases, (list, tuple))):
        return {}
    embedding = module.get_input_embeddings()  # type: ignore[operator]
    source = next((f"{p}.weight" for p, m in module.named_modules() if m is embedding), None)
    return {} if source is None else {alias: source for alias in aliases if alias != source}
