"""The content of folders that transformers, PEFT and vLLM load: weights, configs, tokenizer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchax_ckpt.errors import DirectoryError, MismatchError, UnsupportedLeafError
from torchax_ckpt.formats.huggingface.model_files import (
    ADAPTER_CONFIG,
    ADAPTERS,
    CONFIG,
    GENERATION_CONFIG,
    MODEL,
    TOKENIZER,
)
from torchax_ckpt.formats.tensor_files import require_regular
from torchax_ckpt.formats.weights import Weights
from torchax_ckpt.layout import names
from torchax_ckpt.storage.directory import assets
from torchax_ckpt.storage.directory.assets import Assets
from torchax_ckpt.stored.stored_step import StoredStep

ADAPTER_WEIGHTS = "adapter_model.safetensors"
# What programs that train write beside a model, and no loader reads.
_OF_TRAINERS = ("trainer_state.json", "all_results.json", "eval_results.json", "train_results.json")
# PEFT writes the adapter of this name into the folder itself, and others into subfolders.
_DEFAULT_ADAPTER = "default"
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


@dataclasses.dataclass(frozen=True)
class FolderFiles:
    """The text files of a model's folder, by name, and the config of each adapter, by its name."""

    texts: Mapping[str, str]
    adapters: Mapping[str, str]

    @property
    def has_config(self) -> bool:
        """Whether the folder says what the model is, as transformers needs."""
        return CONFIG in self.texts


def files_of(stored: StoredStep, at: str | None, config: Path | None = None) -> FolderFiles:
    """Returns the text files of a model: those in its step, replaced by those in ``config``."""
    component, *keys = names.split(at or MODEL)
    place = "/".join([MODEL, *map(assets.part_of, keys if component == MODEL else ())])
    texts: dict[str, str] = {}
    adapters: dict[str, str] = {}
    for name, text in stored.read_assets().items():
        if name.startswith(f"{TOKENIZER}/"):
            texts[name.partition("/")[2]] = text
        elif name.rpartition("/")[0] == place:
            texts[name.rpartition("/")[2]] = text
        elif name.startswith(f"{place}/{ADAPTERS}/") and name.endswith(f"/{ADAPTER_CONFIG}"):
            adapters[name.split("/")[-2]] = text
    for name, text in () if config is None else _texts_in(config).items():
        folder, _, last = name.rpartition("/")
        if last == ADAPTER_CONFIG:
            adapters[folder or _DEFAULT_ADAPTER] = text
        else:
            texts[name] = text
    return FolderFiles(texts, adapters)


def assets_of(folder: Path) -> Assets | None:
    """Returns the text files of a model's folder as a step stores them; None without a config."""
    if not (folder / CONFIG).is_file():
        return None
    found = _texts_in(folder)
    places = dict.fromkeys((CONFIG, GENERATION_CONFIG), MODEL)
    return Assets.of({f"{places.get(n, TOKENIZER)}/{n}": text for n, text in found.items()})


def _texts_in(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    size = 0
    try:
        paths = sorted([*folder.glob("*"), *folder.glob("*/*")])
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        for path in paths:
            name = path.relative_to(folder).as_posix()
            is_index = name.endswith(".index.json") or name in _OF_TRAINERS
            if not path.is_file() or is_index or assets.why_refused(name):
                continue
            require_regular(path, may_be_link=True, max_bytes=assets.MAX_BYTES - size)
            content = path.read_bytes()
            found[name] = content.decode()
            size += len(content)
    except (OSError, ValueError) as error:
        raise DirectoryError(
            f"{folder}: expected a folder with config.json and other text files: {error}",
            path=folder,
        ) from error
    return found


def model_in(out: Path, weights: Weights, files: FolderFiles) -> tuple[Weights, dict[Path, str]]:
    """Returns weights and texts of a folder for ``from_pretrained``; MismatchError for adapters."""
    if adapters := adapter_names(weights.leaves):
        raise MismatchError(
            f"expected the weights of a model, found tensors of its adapters "
            f"{', '.join(sorted(adapters))}: transformers would load the model without them. "
            "Either export the adapters with --format peft, to load them onto the base model; or "
            "merge them into the weights first: restore the step, call the model's "
            "merge_and_unload() and save the result"
        )
    texts = dict(files.texts)
    if files.has_config:
        config = _parsed(CONFIG, texts[CONFIG])
        texts[CONFIG] = json.dumps({**config, **_dtype_of(weights, config)}, indent=2) + "\n"
        if not _ties(config):
            untied = {a: weights.leaves[n] for a, n in weights.ties.items()}
            weights = dataclasses.replace(weights, leaves={**weights.leaves, **untied}, ties={})
    return weights, {out / name: text for name, text in texts.items()}


def adapters_in(
    out: Path, weights: Weights, files: FolderFiles
) -> dict[Path, tuple[Weights, dict[Path, str]]]:
    """Returns each adapter's file, weights and config; only ``default`` is in no subfolder."""
    found = sorted(adapter_names(weights.leaves))
    if not found:
        raise MismatchError("expected tensors of PEFT's adapters, found none; omit --format peft")
    pieces = {}
    every = {**weights.leaves, **{a: weights.leaves[n] for a, n in weights.ties.items()}}
    for name in found:
        part = assets.part_of(name)
        if (text := files.adapters.get(part)) is None:
            raise MismatchError(
                f"the adapter {name!r:.80} has no {ADAPTER_CONFIG}, without which PEFT cannot load "
                "it: give a folder that has the file with --config"
            )
        in_file = names_in_file(every, name, _parsed(ADAPTER_CONFIG, text))
        tensors = Weights({file: every[fqn] for file, fqn in in_file.items()}, {}, ())
        folder = out if name == _DEFAULT_ADAPTER else out / part
        pieces[folder / ADAPTER_WEIGHTS] = tensors, {folder / ADAPTER_CONFIG: text}
    return pieces


def _parsed(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsupportedLeafError(f"{name}: expected JSON: {error!s:.100}") from error
    if not isinstance(found, dict):
        raise UnsupportedLeafError(f"{name}: expected a JSON object, found {text!r:.40}")
    return found


def _dtype_of(weights: Weights, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the entry of a config for the dtype of the model's first floating-point tensor."""
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    found = [leaf.dtype for leaf in weights.leaves.values() if "float" in leaf.dtype]
    return {key: found[0]} if found else {}


def _ties(config: Mapping[str, Any]) -> bool:
    """Returns whether the model ties weights; transformers' default is True."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any(part.get("tie_word_embeddings", part is config) is True for part in parts)


def adapter_names(fqns: Iterable[str]) -> set[str]:
    """Returns the names of the adapters that tensors of a model belong to."""
    return {parts[at] for name in fqns for parts in [name.split(".")] for at in _places(parts)}


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


def names_in_file(fqns: Iterable[str], adapter: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns name in PEFT's file -> name in the model, for the tensors of an adapter.

    ``q_proj.lora_A.default.weight`` of a model is ``q_proj.lora_A.weight`` in a file.
    Source: ``get_peft_model_state_dict`` of peft 0.21.2.
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
    named = [(name, name.split(".")) for name in fqns]
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
