"""What is taken from attached models and tokenizers, and what is left out and said."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.described import AdapterConfig, Described, Tokenizer
from torchax.interop import JittableModule

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import AttachError
from torchax_ckpt.formats.huggingface.model_files import ModelFiles
from torchax_ckpt.storage.medium import assets


def files(*args: Any) -> dict[str, str]:
    found = ModelFiles(*args).encoded(None)
    return {} if found is None else json.loads(found.content)["files"]


def test_wrappers_are_looked_into_and_a_plain_module_has_no_files() -> None:
    model = Described().to("jax")
    wrapped = torch.nn.Module()
    wrapped._orig_mod = model  # as torch.compile wraps it
    assert files(JittableModule(model)) == files(wrapped) == files(model) != {}
    assert files(torch.nn.Linear(2, 2)) == {}


def test_several_models_have_places_of_their_own() -> None:
    found = files({"a/b": Described(x=1), "d": Described(x=2), "plain": torch.nn.Linear(1, 1)})
    names = ("model/a%2Fb", "model/d")
    configs = {f"{n}/{c}.json" for n in names for c in ("config", "generation_config")}
    assert found.keys() == configs
    assert json.loads(found["model/d/config.json"])["x"] == 2


def test_adapters_are_described_as_peft_does() -> None:
    model: Any = Described()
    model.peft_config = {
        "default": AdapterConfig(target_modules={"b", "a"}),
        "../x": AdapterConfig(),
    }
    found = files(model)
    config = json.loads(found["model/adapters/default/adapter_config.json"])
    assert config == {
        "auto_mapping": {"base_model_class": "Described", "parent_library": "support.described"},
        "base_model_name_or_path": None,
        "inference_mode": True,
        "target_modules": ["a", "b"],
    }
    assert "model/adapters/%2E.%2Fx/adapter_config.json" in found
    assert model.peft_config["default"].inference_mode is False  # the live one is as it was


def test_what_is_no_text_is_left_out_and_said() -> None:
    tokenizer = Tokenizer(
        {
            "tokenizer.json": "{}",
            "tokenizer.model": b"\xff\xfe",
            "code.py": "print()",
            "binary.json": b"\xff",
            "extra/b.jinja": "{{ x }}",
        }
    )
    with pytest.warns(UserWarning, match="without these files of the model") as caught:
        found = files(None, tokenizer)
    assert found == {"tokenizer/extra/b.jinja": "{{ x }}", "tokenizer/tokenizer.json": "{}"}
    (warning,) = caught
    assert "tokenizer/binary.json is not text" in str(warning.message)
    assert "tokenizer/code.py does not end in" in str(warning.message)
    assert "tokenizer/tokenizer.model does not end in" in str(warning.message)


def test_what_would_be_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "MAX_BYTES", 10)
    with pytest.warns(UserWarning, match=r"tokenizer/b\.json would make the assets larger"):
        found = files(None, Tokenizer({"a.json": "12345", "b.json": "123456", "c.txt": "12345"}))
    assert found.keys() == {"tokenizer/a.json", "tokenizer/c.txt"}


def test_a_config_that_fails_stops_no_training(directory: Path) -> None:
    model = Described().to("jax")
    model.config.content["x"] = object()
    with TorchaxCheckpointer(directory) as ckpt:
        with pytest.warns(UserWarning, match=r"model/config\.json cannot be read: TypeError"):
            ckpt.attach(model)
        assert ckpt.save(1, force=True)  # and says it once


def test_a_tokenizer_that_cannot_be_saved_is_refused_by_type(directory: Path) -> None:
    with (
        TorchaxCheckpointer(directory) as ckpt,
        pytest.raises(AttachError, match="tokenizer: expected a tokenizer .* found a dict"),
    ):
        ckpt.attach(Described().to("jax"), tokenizer={})


def test_configs_are_read_again_when_the_tensors_change(directory: Path) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2)).to("jax")
    model.config = Described(vocab_size=2).config
    with TorchaxCheckpointer(directory) as ckpt, warnings.catch_warnings():
        ckpt.attach(model)
        ckpt.save(1, force=True)
        reads = model.config.num_reads
        ckpt.save(2, force=True)
        assert model.config.num_reads == reads > 0
        model.append(torch.nn.Linear(2, 3).to("jax"))
        model.config.content["vocab_size"] = 3
        ckpt.save(3, force=True)
    found = [
        json.loads(json.loads((directory / f"{n}/assets/data.json").read_text())["files"][
            "model/config.json"
        ])["vocab_size"]
        for n in (1, 2, 3)
    ]  # fmt: skip
    assert found == [2, 2, 3]


def test_a_model_that_loses_its_config_has_no_files_then() -> None:
    model: Any = Described()
    found = ModelFiles(model)
    assert found.encoded("before") is not None
    model.config = model.generation_config = None
    assert found.encoded("before") is not None
    assert found.encoded("after") is None
