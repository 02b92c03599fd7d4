"""Folders of a model: which files, what is refused, what is said when a folder will not load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from support.commands import run, run_json
from support.damage import edit_json
from support.described import AdapterConfig, Config, Described, Tokenizer
from support.steps import save_states
from torchax.interop import JittableModule
from typer.testing import CliRunner

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app
from torchax_ckpt.errors import AttachError, UnsupportedLeafError
from torchax_ckpt.formats.huggingface.model_files import ModelFiles
from torchax_ckpt.formats.huggingface.model_folder import adapter_names, names_in_file
from torchax_ckpt.storage.directory import assets

NAMES = ["m.q.base_layer.weight", "m.q.lora_A.default.weight", "m.q.lora_B.b.weight", "m.k.weight"]


def saved(directory: Path, model: Any, **attached: Any) -> Path:
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        ckpt.attach(model.to("jax"), **attached)
        ckpt.save(1, force=True)
    return directory


def texts(folder: Path) -> dict[str, str]:
    """The text files in a folder, by relative path."""
    found = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".safetensors")
    return {p.relative_to(folder).as_posix(): p.read_text() for p in found}


def test_a_folder_has_the_weights_and_what_the_model_is(directory: Path, tmp_path: Path) -> None:
    model = Described(tie_word_embeddings=False)
    saved(directory, model, tokenizer=Tokenizer({"tokenizer.json": "{}", "x/y.jinja": "{{ x }}"}))
    out = tmp_path / "out"
    result = run_json("export", directory, out, "--format", "hf", "--dtype", "bf16")
    found = texts(out)
    assert {str(out / name) for name in found} | {str(out / "model.safetensors")} == set(
        result["files"]
    )
    assert json.loads(found["config.json"])["dtype"] == "bfloat16"
    assert found["x/y.jinja"] == "{{ x }}"
    assert sorted(found) == ["config.json", "generation_config.json", "tokenizer.json", "x/y.jinja"]
    said = run("export", directory, out, "--format", "hf", code=exit_codes.UNAVAILABLE)
    assert "exists already; nothing was written" in said
    assert texts(out) == found


def test_a_folder_that_will_not_load_is_said_to(directory: Path, tmp_path: Path) -> None:
    saved(directory, torch.nn.Linear(2, 2))
    arguments = ["export", str(directory), str(tmp_path / "out"), "--format", "hf"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "out will not load: step 1 stores no config of the model" in result.stderr
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text('{"model_type": "linear"}')
    (tmp_path / "config/trainer_state.json").write_text("{}")
    (tmp_path / "config/model.safetensors.index.json").write_text("{}")
    (tmp_path / "config/modeling.py").write_text("raise SystemExit")
    arguments[2] = str(tmp_path / "b")
    result = CliRunner().invoke(app, [*arguments, "--config", str(tmp_path / "config")])
    assert (result.exit_code, result.stderr) == (0, "")
    assert texts(tmp_path / "b").keys() == {"config.json"}
    missing = run(*arguments, "--config", tmp_path / "no", code=exit_codes.UNAVAILABLE)
    assert "expected a folder with config.json" in missing


def test_weights_are_chosen_and_named(directory: Path, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    saved(directory, model)

    def names(*options: str) -> list[str]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        run("export", directory, "1", out, *options)
        return sorted(safetensors.numpy.load_file(out))

    assert names("--include", "a") == ["a.bias", "a.weight"]
    assert names("--exclude", "*.bias", "--rename", "a=c") == ["b.weight", "c.weight"]
    for options, said in (
        (("--include", "z"), "nothing matches include: 'z'"),
        (("--rename", "a=b"), "would both be named"),
        (("--rename", "a"), "rename: 'a': expected a name"),
    ):
        out = tmp_path / "none"
        assert said in run("export", directory, out, *options, code=exit_codes.USAGE)


def test_a_cast_that_would_lose_a_number_is_refused(directory: Path, tmp_path: Path) -> None:
    state = {"w": np.array([1e5, np.inf], np.float32), "n": np.arange(3)}
    save_states(directory, {1: state})
    arguments = ("export", directory, tmp_path / "x", "--at", "state")
    said = run(*arguments, "--dtype", "fp16", code=exit_codes.USAGE)
    assert "state/w: has values that are too large for float16" in said
    assert not list((tmp_path / "x").iterdir())
    run(*arguments, "--dtype", "bf16")
    found = safetensors.numpy.load_file(tmp_path / "x/model.safetensors")
    assert found["n"].dtype == np.int64


def test_options_and_steps_that_do_not_fit_are_refused(directory: Path, tmp_path: Path) -> None:
    saved(directory, Described())
    out = tmp_path / "x"
    for arguments, said in (
        ((out, "--format", "pt", "--dtype", "bf16"), "--dtype needs --format"),
        ((out, "--config", tmp_path), "--config: needs the format hf or peft"),
        (("x.safetensors", "--format", "hf"), "expected the name of a directory"),
        ((out, "--format", "hf", "--optimizer"), "--optimizer needs --format pt or dcp"),
        (("1", "2", out), "expected [STEP] OUT, found 3 arguments"),
        (
            ("newest", out),
            "expected a number, latest, best:METRIC or best:METRIC:max, found 'newest'",
        ),
        (("best:accuracy", out), "no step has the metric 'accuracy'"),
        (
            ("best:loss:least", out),
            "expected best:METRIC, or best:METRIC:max if large values are good",
        ),
        (("7", out), "step 7"),
        ((out, "--format", "peft"), "expected tensors of PEFT's adapters, found none"),
    ):
        assert said in run("export", directory, *arguments, code=exit_codes.USAGE)
        assert not out.exists()


def test_a_step_is_found_by_its_metric(directory: Path, tmp_path: Path) -> None:
    metrics = {step: {"loss": loss} for step, loss in enumerate((3.0, 1.0, 2.0), 1)}
    save_states(directory, {step: {"w": np.full(2, step)} for step in metrics}, metrics)
    for text, step in (("best:loss", 2), ("best:loss:max", 1), ("3", 3)):
        out = tmp_path / f"{step}.safetensors"
        assert run_json("export", directory, text, out, "--at", "state")["step"] == step


class Adapted(Described):
    """A layer with two adapters, ``default`` and ``b``."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = torch.nn.ModuleDict(
            {n: torch.nn.Linear(2, 1, False) for n in ("default", "b")}
        )
        config = {"peft_type": "LORA", "bias": "none"}
        self.peft_config = {"default": AdapterConfig(**config), "b": AdapterConfig(**config)}


def test_each_adapter_gets_a_folder(directory: Path, tmp_path: Path) -> None:
    saved(directory, Adapted())
    out = tmp_path / "out"
    run("export", directory, out, "--format", "peft")
    for folder in (out, out / "b"):
        found = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
        assert list(found) == ["base_model.model.lora_A.weight"]
        assert json.loads((folder / "adapter_config.json").read_text())["inference_mode"] is True
    assert {p.name for p in out.iterdir()} == {
        "b",
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_a_model_with_adapters_is_no_plain_model(directory: Path, tmp_path: Path) -> None:
    saved(directory, Adapted())
    arguments = ("export", directory, tmp_path / "out", "--format", "hf")
    said = run(*arguments, code=exit_codes.USAGE)
    assert "found tensors of its adapters b, default" in said
    assert not (tmp_path / "out").exists()
    run(*arguments, "--exclude", "lora_A")


def test_an_adapter_without_config_takes_one_from_a_folder(directory: Path, tmp_path: Path) -> None:
    model: Any = Adapted()
    del model.peft_config["b"]
    saved(directory, model)
    arguments = ("export", directory, tmp_path / "out", "--format", "peft")
    said = run(*arguments, code=exit_codes.USAGE)
    assert "the adapter 'b' has no adapter_config.json" in said
    assert not (tmp_path / "out").exists()
    (tmp_path / "c/b").mkdir(parents=True)
    (tmp_path / "c/b/adapter_config.json").write_text('{"peft_type": "LORA"}')
    run(*arguments, "--config", tmp_path / "c")
    assert json.loads((tmp_path / "out/b/adapter_config.json").read_text()) == {"peft_type": "LORA"}


def test_a_config_that_is_no_json_object_is_refused(directory: Path, tmp_path: Path) -> None:
    saved(directory, Described())
    path = directory / "1/assets/data.json"
    edit_json(path, lambda content: content["files"].update({"model/config.json": "[]"}))
    seal = json.loads(path.read_text())["xxh3_64"]
    edit_json(directory / "1/manifest/data.json", lambda content: content.update(assets=seal))
    said = run("export", directory, tmp_path / "x", "--format", "hf", code=exit_codes.USAGE)
    assert "config.json: expected a JSON object" in said
    assert not (tmp_path / "x").exists()


def test_adapters_are_told_apart_by_name() -> None:
    assert adapter_names(NAMES) == {"default", "b"}
    assert names_in_file(NAMES, "b", {"peft_type": "LORA"}) == {
        "base_model.model.m.q.lora_B.weight": "m.q.lora_B.b.weight"
    }
    unknown = "found 'PREFIX_TUNING', whose tensors only PEFT"
    with pytest.raises(UnsupportedLeafError, match=unknown):
        names_in_file(NAMES, "b", {"peft_type": "PREFIX_TUNING"})


# --- files of models and tokenizers ---


def files(*args: Any) -> dict[str, str]:
    found = ModelFiles(*args).encoded()
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


def test_a_step_has_the_files_as_they_are_when_it_is_saved(directory: Path) -> None:
    """However they change: within a value, by another object, in an adapter or a tokenizer."""

    class Words(Tokenizer):
        chat_template = "a"

        def __len__(self) -> int:
            return len(self.files)

    def rename(label: str) -> None:
        model.config.content["id2label"]["0"] = label

    model: Any = Described(id2label={"0": "LABEL_0"}).to("jax")
    model.peft_config = {"default": AdapterConfig(r=1)}
    tokenizer: Any = Words({"a.json": "{}"})
    changes: dict[str, Callable[[], None]] = {
        "model/config.json": lambda: rename("cat"),
        "model/generation_config.json": lambda: model.generation_config.content.clear(),
        "model/adapters/default/adapter_config.json": lambda: model.peft_config.update(
            default=AdapterConfig(r=2)
        ),
        "tokenizer/b.json": lambda: tokenizer.files.update({"b.json": "{}"}),
    }
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        ckpt.attach(model, tokenizer=tokenizer)
        ckpt.save(0, force=True)
        for step, change in enumerate(changes.values(), 1):
            change()
            ckpt.save(step, force=True)
        reads = Config.num_reads
        for step in (5, 6):
            ckpt.save(step, force=True)
        assert Config.num_reads == reads, "what has not changed is read once"
        model.config = Described().config
        ckpt.save(7, force=True)
    files = [
        json.loads((directory / f"{n}/assets/data.json").read_text())["files"] for n in range(8)
    ]
    for step, name in enumerate(changes, 1):
        changed = {n for n in files[step] if files[step][n] != files[step - 1].get(n)}
        assert changed == {name}
    assert json.loads(files[1]["model/config.json"])["id2label"] == {"0": "cat"}
    assert files[4] == files[5] == files[6]
    assert "id2label" not in json.loads(files[7]["model/config.json"])


def test_a_model_that_loses_its_config_has_no_files_then() -> None:
    model: Any = Described()
    found = ModelFiles(model)
    assert found.encoded() is not None
    model.config = model.generation_config = None
    assert found.encoded() is None


def test_the_size_of_texts_counts_in_bytes(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(directory, Described())
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    for name in "ab":
        (config / f"{name}.txt").write_text("\N{GREEK SMALL LETTER ALPHA}" * 100)
    monkeypatch.setattr(assets, "MAX_BYTES", 350)
    words = ("export", directory, tmp_path / "out", "--format", "hf", "--config", config)
    said = run(*words, code=exit_codes.UNAVAILABLE)
    assert "'b.txt': expected at most 150 bytes, found a file of 200 bytes" in said
