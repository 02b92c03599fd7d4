"""Files that weights are imported from, and the forms of files, for ``fault_fuzz.py``."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from fuzz_damage import Form

from torchax_ckpt import torchax_backend, warm_start
from torchax_ckpt.formats.state_dict import save_dcp


class Lines(Form):
    """A document on every line, as a list."""

    def load(self, raw: bytes) -> Any:
        return [json.loads(line) for line in raw.splitlines()]

    def dump(self, text: str, raw: bytes) -> bytes:
        # Between the documents of the list, wherever else that text may be: it is damage anyhow.
        return re.sub(rb"}, {", b"}\n{", super().dump(text, raw).strip(b"[]"))


class Header(Form):
    """What safetensors begin with: the length of a document, and it; tensors follow."""

    def load(self, raw: bytes) -> Any:
        return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])

    def dump(self, text: str, raw: bytes) -> bytes:
        header = super().dump(text, raw)
        data = raw[8 + int.from_bytes(raw[:8], "little") :]
        return len(header).to_bytes(8, "little") + header + data


class NoForm(Form):
    """No JSON at all."""

    def load(self, raw: bytes) -> Any:
        raise ValueError("bytes")


@dataclasses.dataclass(frozen=True)
class Fed:
    """What a reader is fed with: a real file, which is damaged, how often, and its form."""

    raw: bytes
    read: Callable[[bytes], None]
    weight: float
    form: Form = dataclasses.field(default_factory=Form)


@contextlib.contextmanager
def replaced(path: Path, raw: bytes) -> Iterator[None]:
    """A file with other content for a while."""
    before = path.read_bytes()
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.write_bytes(before)


def foreign(folder: Path) -> dict[str, Fed]:
    """Readers of other programs' files, up to a model that begins with their weights."""
    tensors: dict[str, np.ndarray] = {
        "a.w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(3),
    }
    model = torch.nn.Module()
    model.a = torch.nn.Module()
    model.a.w = torch.nn.Parameter(torch.zeros(3, 4, device="jax"))
    model.register_buffer("b", torch.zeros(3, dtype=torch.int64))
    (folder / "indexed").mkdir(parents=True)
    plain, index = folder / "w.safetensors", folder / "indexed" / "model.safetensors.index.json"
    for path in (plain, folder / "indexed" / "one.safetensors"):
        path.write_bytes(safetensors.numpy.save(tensors, {"c": "a.w"}))
    weights = dict.fromkeys(tensors, "one.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    with torchax_backend.native_torch():
        state = {name: torch.from_numpy(array) for name, array in tensors.items()}
        torch.save({**state, "tied": state["b"], "epoch": 3}, archive := folder / "w.pt")
        save_dcp(state, folder / "dcp")
    with zipfile.ZipFile(archive) as members:
        content = {name: members.read(name) for name in members.namelist()}
    (pickled,) = (name for name in content if name.endswith("/data.pkl"))
    (chunk,) = (folder / "dcp").glob("*.distcp")

    def through(path: Path, whole: Path) -> Callable[[bytes], None]:
        def read(raw: bytes) -> None:
            with replaced(path, raw):
                warm_start(model, whole, strict=False)

        return read

    def pickle(raw: bytes) -> None:
        """What an archive describes its tensors by, with nothing else of it damaged."""
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as members:
            for name, octets in {**content, pickled: raw}.items():
                members.writestr(name, octets)
        through(archive, archive)(made.getvalue())

    files: dict[str, tuple[Path, Path, float, Form]] = {
        "safetensors": (plain, plain, 0.12, Header()),
        "index": (index, index.parent, 0.10, Form()),
        "torch archive": (archive, archive, 0.10, NoForm()),
        "dcp metadata": (folder / "dcp/.metadata", folder / "dcp", 0.08, NoForm()),
        "dcp chunk": (chunk, folder / "dcp", 0.06, NoForm()),
    }
    for path, whole, *_ in files.values():
        through(path, whole)(path.read_bytes())
    return {"torch pickle": Fed(content[pickled], pickle, 0.12, NoForm())} | {
        name: Fed(path.read_bytes(), through(path, whole), weight, form)
        for name, (path, whole, weight, form) in files.items()
    }
