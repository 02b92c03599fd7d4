"""Collects the text files that say what an attached model is; steps store them as assets.

They are the configs of models, generation and adapters and the files of tokenizers, as transformers
and PEFT write them. Objects are recognized by their methods, without importing either library.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchax_ckpt.errors import AttachError
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.storage.directory import assets
from torchax_ckpt.storage.directory.assets import Assets

MODEL, TOKENIZER, ADAPTERS = "model", "tokenizer", "adapters"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"


class ModelFiles:
    """The files of attached models and of a tokenizer, which has ``save_pretrained(folder)``."""

    def __init__(self, model: Any = None, tokenizer: Any = None) -> None:
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise AttachError(
                "tokenizer: expected a tokenizer or processor with the method save_pretrained, "
                f"found a {type(tokenizer).__name__}"
            )
        self._models = (
            {(): model} if not isinstance(model, Mapping) else {(k,): m for k, m in model.items()}
        )
        self._tokenizer = tokenizer
        self._of_tokenizer = self._found = _Collected()
        self._assets: Assets | None = None
        self._state: tuple[str | None, str | None] | None = None
        # Encodes the files of a tokenizer, which takes long, before the first save needs them.
        self.encoded()

    def encoded(self) -> Assets | None:
        """Returns the files as they are now; None if there are none."""
        # To make the files of a model of transformers takes 0.4 ms, and those of a tokenizer much
        # longer; to compare what they are made of takes 0.04 ms.
        state = _state(_tokenizer, self._tokenizer), _state(_described, *self._models.values())
        before, self._state = self._state, state
        if state == before and state[1] is not None:
            return self._assets
        if before is None or state[0] != before[0]:
            self._of_tokenizer = self._tokenizer_files()
        found = copy.deepcopy(self._of_tokenizer)
        for key_path, model in self._models.items():
            with found.trying("a model's config"):
                self._add_model(found, (MODEL, *map(assets.part_of, key_path)), model)
        if found.left_out and found.left_out != self._found.left_out:
            user_messages.warn(
                "the steps of this run are saved without these files of the model, so that a "
                f"folder exported from them may lack them: {'; '.join(found.left_out)}"
            )
        if found.files != self._found.files:
            self._assets = Assets.of(found.files) if found.files else None
        self._found = found
        return self._assets

    def _tokenizer_files(self) -> _Collected:
        found = _Collected()
        if self._tokenizer is not None:
            trying = found.trying("the tokenizer's files")
            with trying, tempfile.TemporaryDirectory() as folder:
                self._tokenizer.save_pretrained(folder)
                for path in sorted(Path(folder).rglob("*")):
                    if path.is_file():
                        name = path.relative_to(folder).as_posix()
                        found.add(f"{TOKENIZER}/{name}", path.read_bytes())
        return found

    def _add_model(self, found: _Collected, place: tuple[str, ...], model: Any) -> None:
        base, adapters = _unwrapped(model)
        for name, attribute in ((CONFIG, "config"), (GENERATION_CONFIG, "generation_config")):
            value = getattr(base, attribute, None)
            if callable(getattr(value, "to_json_string", None)):
                where = "/".join((*place, name))
                with found.trying(where):
                    found.add(where, _config(value, base))
        for name, value in adapters.items():
            where = "/".join((*place, ADAPTERS, assets.part_of(name), ADAPTER_CONFIG))
            with found.trying(where):
                found.add(where, _adapter_config(value, base))


def _state(describe: Callable[[Any], Any], *values: Any) -> str | None:
    """Returns what the files of live objects are made of, as JSON; None if that is not known."""
    try:
        return json.dumps([describe(value) for value in values], default=_plain)
    except Exception:  # the libraries raise errors of many types
        return None


def _tokenizer(value: Any) -> list[Any]:
    words = getattr(value, "tokenizer", value)  # of a processor
    names = ("special_tokens_map", "chat_template", "padding_side", "model_max_length")
    return [words is None or len(words), *(getattr(words, name, None) for name in names)]


def _described(model: Any) -> list[Any]:
    base, adapters = _unwrapped(model)
    configs = [getattr(base, name, None) for name in ("config", "generation_config")]
    known = [config for config in configs if hasattr(config, "to_json_string")]
    return [type(base).__name__, getattr(base, "name_or_path", None), known, adapters]


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict") or hasattr(value, "to_json_string"):
        return [type(value).__name__, vars(value)]
    return sorted(value) if isinstance(value, set) else id(value)  # repr() may wait for a device


def _unwrapped(model: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the model within its wrappers, and the configs of its adapters by name."""
    from torchax_ckpt import torchax_backend  # not for reading the files

    root: Any
    root, _ = torchax_backend.unwrap_jittable(model)
    root = getattr(root, "_orig_mod", root)  # what torch.compile wraps
    adapters = getattr(root, "peft_config", None)
    base = getattr(root, "get_base_model", lambda: root)()
    return base, adapters if isinstance(adapters, Mapping) else {}


@dataclasses.dataclass
class _Collected:
    """Files by name, and why others were left out."""

    files: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)
    num_bytes: int = 0

    def add(self, name: str, content: bytes) -> None:
        """Adds a file, or notes why no asset can hold it."""
        why = assets.why_refused(name)
        if why is None and self.num_bytes + len(content) > assets.MAX_BYTES:
            why = f"would make the assets larger than {assets.MAX_BYTES // 10**6} MB"
        try:
            text = content.decode()
        except UnicodeDecodeError:
            why = why or "is not text"
        if why is not None:
            self.left_out.append(f"{name} {why}")
            return
        self.files[name] = text
        self.num_bytes += len(content)

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Notes a failure of the ``with`` block, because no config may keep a run from training."""
        try:
            yield
        except Exception as error:  # the libraries raise errors of many types
            self.left_out.append(f"{what} cannot be read: {error!r:.200}")


def _config(config: Any, base: Any) -> bytes:
    """Returns a config as JSON; that of a model names the model's class, as when it is saved."""
    text = config.to_json_string()
    if config is not getattr(base, "config", None):
        return str(text).encode()
    content = {**json.loads(text), "architectures": [type(base).__name__]}
    return _as_json(content)


def _adapter_config(config: Any, base: Any) -> bytes:
    """Returns an adapter's config as JSON, changed as by ``save_pretrained`` of peft 0.21.2."""
    config = copy.copy(config)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    content = dict(config.to_dict())
    if config.task_type is None:
        kind = type(base)
        content["auto_mapping"] = {
            "base_model_class": kind.__name__,
            "parent_library": kind.__module__,
        }
    return _as_json(content)


def _as_json(content: Mapping[str, Any]) -> bytes:
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in content.items()}
    return (json.dumps(plain, indent=2, sort_keys=True) + "\n").encode()
