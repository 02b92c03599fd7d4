"""Finds the weights of a step: their leaves, names in torch and ties; selects and casts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchax_ckpt.errors import (
    ArgumentError,
    CorruptCheckpointError,
    MismatchError,
    UnsupportedLeafError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.stored_entries import StoredModule
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep

MODEL = "model"
# The dtypes that a cast changes. Narrower ones are results of a quantization.
_FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of one model: torch's name -> leaf, in the model's order.

    A leaf may have another dtype than in the step; writers then cast it. ``ties`` is alias -> name
    in ``leaves``; ``left_out`` names the other leaves: unselected ones, and modules' extra state.
    """

    leaves: Mapping[str, StoredLeaf]
    ties: Mapping[str, str]
    left_out: tuple[str, ...]


def weights_at(
    stored: StoredStep, at: str | None = None, selection: Selection | None = None
) -> Weights:
    """Returns the leaves at or below a key path of a step; None for the one attached model."""
    if not isinstance(at, str | None):
        raise ArgumentError(f"at: expected a key path such as 'model/generator', found {at!r:.80}")
    place = at or MODEL
    component, *keys = names.split(place)
    attached = node_checks.members(stored.manifest.document.get(component), component)
    node: Any = attached.get("/".join(keys))
    is_module = isinstance(node, dict) and "ties" in node
    below = [name for name in stored.leaves if name == place or name.startswith(f"{place}/")]
    if not below or (at is None and not is_module):
        places = {"/".join(name.split("/")[:-1][:2]) or name for name in stored.leaves}
        raise MismatchError(
            f"step {stored.committed.step} in {stored.committed.path}: expected one attached model "
            f"at {place!r}, but no single model is there; found leaves at "
            f"{', '.join(sorted(places)[:10])}. Choose one of these key paths with at= (in a "
            "command, with --at).",
            missing=(place,),
            step=stored.committed.step,
            path=stored.committed.path,
        )
    module = StoredModule.of_node(node, place) if is_module else StoredModule({}, {})
    tensors, ties = dict(module.tensors), module.ties
    for name in () if is_module else below:
        torch_name = ".".join(names.split(name)[1 + len(keys) :]) or place
        if torch_name in tensors:
            raise UnsupportedLeafError(f"{name}: two leaves would be called {torch_name!r}")
        tensors[torch_name] = {"array": name}
    for alias, name in ties.items():
        if name not in tensors or alias in tensors:
            raise CorruptCheckpointError(
                f"{place}: {alias!r} is tied to {name!r}: expected that {name!r} is stored and "
                f"{alias!r} is not. The manifest is damaged: use another step",
                key_path=place,
            )
    module = StoredModule(tensors, ties)
    if selection is not None:
        module = module.selected(selection, ())
        selection.require_used()
    leaves = {name: stored.leaves[leaf["array"]] for name, leaf in module.tensors.items()}
    kept = {leaf.name for leaf in leaves.values()}
    return Weights(leaves, module.ties, tuple(name for name in below if name not in kept))


def cast(weights: Weights, dtype: str) -> Weights:
    """Returns the weights with another dtype for floating-point tensors, cast when written."""
    leaves = {
        name: dataclasses.replace(leaf, dtype=dtype) if leaf.dtype in _FLOATS else leaf
        for name, leaf in weights.leaves.items()
    }
    return dataclasses.replace(weights, leaves=leaves)


def as_dtype(content: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
    """Casts a part of a leaf; raises UnsupportedLeafError if a finite value would be infinite."""
    if content.dtype == dtype:
        return content
    with np.errstate(over="ignore"):
        changed = content.astype(dtype)
    if not np.array_equal(np.isfinite(changed), np.isfinite(content)):
        raise UnsupportedLeafError(
            f"{name}: has values that are too large for {dtype.name}; choose another dtype",
            key_path=name,
        )
    return changed
