"""Finds the tensors of PEFT's adapters in a step, and names them as PEFT does in its files.

Source: ``get_peft_model_state_dict`` of peft 0.21.2. The names of tensors in a model contain the
name of the adapter, those in a file do not: ``q_proj.lora_A.default.weight`` is stored as
``q_proj.lora_A.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchax_ckpt.errors import UnsupportedLeafError

PREFIXES: Mapping[str, str] = {
    "IA3": "ia3_", "LOHA": "hada_", "LOKR": "lokr_", "LORA": "lora_", "OFT": "oft_",
}  # fmt: skip
"""Method of PEFT -> what the names of its parameters begin with. PEFT has methods whose tensors
have names of other forms; ``names_in_file`` refuses these."""

# The names of layers whose base weights PEFT stores with an adapter of them.
_EMBEDDINGS = ("embed_tokens", "lm_head")
_TRAINED_COPY, _TRAINED_TOKENS = "modules_to_save", "trainable_tokens_delta"
# PeftModel holds the base model under this name, and files always have it.
_BASE = "base_model.model."


def adapters_among(names: Iterable[str]) -> set[str]:
    """Returns the names of the adapters that tensors of a model belong to."""
    return {parts[at] for name in names for parts in [name.split(".")] for at in _places(parts)}


def _places(parts: list[str]) -> Iterator[int]:
    # The indices of an adapter's name among the parts of a tensor's name.
    prefixes = tuple(PREFIXES.values())
    for at, part in enumerate(parts[:-1], 1):
        if part.startswith(prefixes) or part in (_TRAINED_COPY, _TRAINED_TOKENS):
            yield at


def _is_stored_too(parts: list[str], layers: set[str], bias: str) -> bool:
    """Returns whether PEFT stores a tensor of the base model with an adapter of these layers."""
    if parts[-1] == "bias" and bias == "all":
        return True
    layer = ".".join(parts[:-2])
    if parts[-2:-1] != ["base_layer"] or layer not in layers:
        return False
    return bias.endswith("_only") if parts[-1] == "bias" else parts[-3] in _EMBEDDINGS


def names_in_file(names: Iterable[str], adapter: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns name in PEFT's file -> name in the model, for the tensors of an adapter.

    Raises UnsupportedLeafError if the adapter's method is not one of ``PREFIXES``.
    """
    method = str(getattr(config.get("peft_type"), "value", config.get("peft_type")))
    if method not in PREFIXES:
        raise UnsupportedLeafError(
            f"the adapter {adapter!r:.80}: expected one of PEFT's methods {', '.join(PREFIXES)}, "
            f"found {method!r:.40}, whose tensors only PEFT can name. Restore the step into the "
            "model, and call its save_pretrained"
        )
    prefix = PREFIXES[method]
    found: dict[str, str] = {}
    layers: set[str] = set()  # those with tensors of the adapter
    named = [(name, name.split(".")) for name in names]
    for name, parts in named:
        for at in _places(parts):
            kind = parts[at - 1]
            if parts[at] != adapter:
                continue
            if kind.startswith(prefix):
                layers.add(".".join(parts[: at - 1]))
                rest = parts[at + 1 :]
                # PEFT keeps the form of the files of earlier releases, in which this was no module.
                if config.get("use_dora") and kind == "lora_magnitude_vector":
                    rest = []
                found[".".join([*parts[:at], *rest])] = name
            elif kind == _TRAINED_COPY:
                found[".".join([*parts[: at - 1], *parts[at + 1 :]])] = name
            elif kind == _TRAINED_TOKENS:
                found[".".join(parts[:at])] = name
    for name, parts in named:
        if not any(_places(parts)) and _is_stored_too(parts, layers, config.get("bias", "none")):
            found[name] = name
    return {
        file if file.startswith(_BASE) else f"{_BASE}{file}": name for file, name in found.items()
    }
