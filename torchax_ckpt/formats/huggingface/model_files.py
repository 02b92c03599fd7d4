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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchax_ckpt.errors import AttachError
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.storage.medium import assets
from torchax_ckpt.storage.medium.assets import Assets

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
        self._of_tokenizer = _Collected()
        if tokenizer is not None:
            trying = self._of_tokenizer.trying("the tokenizer's files")
            with trying, tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                for path in sorted(Path(folder).rglob("*")):
                    if path.is_file():
                        name = path.relative_to(folder).as_posix()
                        self._of_tokenizer.add(f"{TOKENIZER}/{name}", path.read_bytes())
        self._found = _Collected()
        self._assets: Assets | None = None
        # Encodes the files of a tokenizer, which takes long, before the first save needs them.
        self._form: Any = object()
        self.encoded(None)

    def encoded(self, form: Any) -> Assets | None:
        """Returns the files as they are now; None if there are none."""
        # Reading a config takes a blocking save a millisecond. ``form`` is another object if the
        # models' tensors changed in number, name, shape or dtype.
        if form is not self._form:
            found = copy.deepcopy(self._of_tokenizer)
            for key_path, model in self._models.items():
                with found.trying("a model's config"):
                    self._add_model(found, (MODEL, *map(assets.part_of, key_path)), model)
            if found.left_out and found.left_out != self._found.left_out:
                user_messages.warn(
                    "the steps of this run are saved without these files of the model, so that a "
                    f"folder exported from them may lack them: {'; '.join(found.left_out)}",
                    stacklevel=3,
                )
            if found.files != self._found.files:
                self._assets = Assets.of(found.files) if found.files else None
            self._found, self._form = found, form
        return self._assets

    def _add_model(self, found: _Collected, place: tuple[str, ...], model: Any) -> None:
        from torchax_ckpt import torchax_backend  # not for reading the files

        root: Any
        root, _ = torchax_backend.unwrap_jittable(model)
        root = getattr(root, "_orig_mod", root)  # what torch.compile wraps
        base: Any = getattr(root, "get_base_model", lambda: root)()
        for name, attribute in ((CONFIG, "config"), (GENERATION_CONFIG, "generation_config")):
            value = getattr(base, attribute, None)
            if callable(getattr(value, "to_json_string", None)):
                where = "/".join((*place, name))
                with found.trying(where):
                    found.add(where, _config(value, base))
        adapters = getattr(root, "peft_config", None)
        for name, value in (adapters if isinstance(adapters, Mapping) else {}).items():
            where = "/".join((*place, ADAPTERS, assets.part_of(name), ADAPTER_CONFIG))
            with found.trying(where):
                found.add(where, _adapter_config(value, base))


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
