"""Averages of steps: files that loaders take, and a new run that training takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
from support.commands import run, run_json
from support.compare import bits
from support.described import Described, Tokenizer
from support.models import Tied, WithExtraState, values
from support.training import fsdp_mesh, fsdp_rule
from typer.testing import CliRunner

from torchax_ckpt import TorchaxCheckpointer, policies, torchax_backend, warm_start
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app

pytestmark = pytest.mark.slow

ALIAS = "head.weight"
STEPS = (800, 900, 1000)


def model_of(step: int) -> Any:
    """A tied model with layers in two dtypes, integers and extra state, with values of a step."""
    torch.manual_seed(step)
    model = Tied()
    model.layers[1].bfloat16()
    model.register_buffer("count", torch.tensor(step, dtype=torch.int32))
    model.to("jax")
    model.head.weight = model.embed.weight  # moving a module unties it
    return model


def arrays_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    found = {name: t for name, t in model.state_dict().items() if not name.endswith("_extra_state")}
    return {name: np.asarray(torchax_backend.buffer(tensor)) for name, tensor in found.items()}


def average(weights: tuple[float, ...]) -> dict[str, np.ndarray]:
    """The averages that are expected, without the names of tied weights."""
    every = [arrays_of(model_of(step)) for step in STEPS]
    found = {}
    for name, newest in every[-1].items():
        value, total = every[0][name].astype(np.float32), weights[0] / sum(weights)
        for arrays, weight in zip(every[1:], weights[1:], strict=True):
            total += weight / sum(weights)
            newer = arrays[name].astype(np.float32)
            share = np.float32(weight / sum(weights) / total)
            value = np.where(newer != value, value + (newer - value) * share, value)
        found[name] = newest if name == "count" else value.astype(newest.dtype)
    assert bits(found[ALIAS]) == bits(found["embed.weight"])
    return found


def files(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: bits(array) for name, array in arrays.items() if name != ALIAS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose steps were saved on different meshes."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    for step in STEPS:
        model, rule = model_of(1), fsdp_rule(fsdp_mesh(8 if step == 900 else 2))
        with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
            ckpt.attach(model)
            live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, array in arrays_of(model_of(step)).items():
                if name != ALIAS:
                    torchax_backend.set_buffer(live[name], jax.device_put(array, rule(name, array)))
            ckpt.save(step, force=True)
    return directory


def test_a_file_has_the_average(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "average.safetensors"
    arguments = ["merge", trained, out, "--steps", "1000,800,900", "--weights", "2,1,1"]
    result = run_json(*arguments, "--max-bytes", 100)
    assert result["steps"] == [800, 900, 1000]
    assert result["weights"] == [0.25, 0.25, 0.5]
    assert result["ties"] == {ALIAS: "embed.weight"}
    assert result["taken_from_newest"] == ["model/count"]
    expected = average((1, 1, 2))
    found = safetensors.numpy.load_file(out)
    assert files(found) == files(expected)
    assert list(tmp_path.iterdir()) == [out]
    said = run(*arguments, code=exit_codes.UNAVAILABLE)
    assert "exists already; nothing was written" in said
    # Without rounding to the weights' own dtype, the average is that in float32.
    wide = tmp_path / "wide"
    run("merge", trained, wide, "--steps", "800,900", "--dtype", "fp32")
    exact = safetensors.numpy.load_file(wide / "model.safetensors")["layers.1.weight"]
    a, b = (arrays_of(model_of(s))["layers.1.weight"].astype(np.float32) for s in (800, 900))
    assert bits(exact) == bits(a + (b - a) * np.float32(0.5))


def test_a_new_run_has_the_average(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    result = CliRunner().invoke(
        app, ["merge", str(trained), str(out), "--steps", "800,900,1000", "--format", "run"]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("the average of steps 800, 900, 1000: 9 tensors, 1 tied names")
    assert "taken from step 1000, because integers have no average: model/count" in result.stderr
    assert "left out" not in result.stderr
    run("verify", out)
    expected = {name: bits(array)[1:] for name, array in average((1, 1, 1)).items()}
    model = model_of(1)
    with TorchaxCheckpointer(out) as ckpt:
        assert ckpt.attach(model, torch.optim.AdamW(model.parameters())) == 0
    assert values(model.state_dict()) == expected
    assert model.head.weight is model.embed.weight
    other = model_of(2)
    warm_start(other, out)
    assert values(other.state_dict()) == expected
    arguments = ["merge", trained, out, "--steps", "800,900", "--format", "run"]
    said = run(*arguments, code=exit_codes.UNAVAILABLE)
    assert "expected a directory without checkpoints, found step 0" in said


def test_a_new_run_has_the_extra_state_of_the_newest_step(directory: Path, tmp_path: Path) -> None:
    def layer(step: int, dtype: torch.dtype = torch.bfloat16) -> WithExtraState:
        model = WithExtraState(2, 2).to("jax")
        model.extra = {"scale": torch.full((3,), step / 3, dtype=dtype, device="jax"), "n": step}
        return model

    models = {"a/b": layer(0), "plain": torch.nn.Linear(2, 2).to("jax")}
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        ckpt.attach(models)
        for step in (1, 2):
            models["a/b"].extra = layer(step).extra
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
    for name in ("a%2Fb", "plain"):
        arguments = ["--steps", "1,2", "--format", "run", "--dtype", "fp32", "--max-bytes", 8]
        run("merge", directory, tmp_path / name, *arguments, "--at", f"model/{name}")
    again = layer(0)
    with TorchaxCheckpointer(tmp_path / "a%2Fb") as ckpt:
        ckpt.attach(again)
    assert again.extra["n"] == 2
    assert bits(again.extra["scale"]) == bits(layer(2).extra["scale"])
    with TorchaxCheckpointer(tmp_path / "plain") as ckpt:
        ckpt.attach(torch.nn.Linear(2, 2).to("jax"))


def test_a_folder_says_what_the_model_is(directory: Path, tmp_path: Path) -> None:
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        model = Described().to("jax")
        ckpt.attach({"a/b": model}, tokenizer=Tokenizer({"tokenizer.json": "{}"}))
        for step in (1, 2):
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
    expected = {name: bits(array) for name, array in arrays_of(model).items()}
    arguments = ["--steps", "1,2", "--at", "model/a%2Fb", "--format"]
    run("merge", directory, tmp_path / "hf", *arguments, "hf")
    run("merge", directory, tmp_path / "new", *arguments, "run")
    run("export", tmp_path / "new", tmp_path / "again", "--format", "hf")
    for folder in (tmp_path / "hf", tmp_path / "again"):
        found = {p.name: p.read_text() for p in folder.glob("*.json")}
        assert sorted(found) == ["config.json", "generation_config.json", "tokenizer.json"]
        assert json.loads(found["config.json"])["model_type"] == "linear"
        weights = safetensors.numpy.load_file(folder / "model.safetensors")
        assert {name: bits(array) for name, array in weights.items()} == expected


def test_arguments_that_make_no_average_are_refused(trained: Path, tmp_path: Path) -> None:
    for arguments, said in (
        (["--steps", "800,901"], "no checkpoint at step 901; there are: 800, 900, 1000"),
        (["--steps", "800"], "expected at least two steps, each once, found '800'"),
        (["--steps", "800,800"], "expected at least two steps, each once"),
        (["--steps", "800,newest"], "--steps: expected numbers such as 800,900"),
        (["--steps", "800,900", "--weights", "1"], "--weights: expected 2 positive numbers"),
        (["--steps", "800,900", "--weights", "1,-1"], "--weights: expected 2 positive numbers"),
        (["--steps", "800,900", "--weights", "0,nan"], "--weights: expected 2 positive numbers"),
        (["--steps", "800,900", "--at", "optimizer"], "expected one attached model"),
        (["--steps", "800,900", "--format", "run", "--max-shard-size", "1GB"], "needs --format"),
        (["--steps", "800,900", "--format", "run", "--config", "x"], "--config needs hf or peft"),
    ):
        out = tmp_path / "out"
        assert said in run("merge", trained, out, *arguments, code=exit_codes.USAGE)
        assert not out.exists()


def test_any_path_may_be_given_as_out(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--steps", "800,900", "--format", "run"]
    assert "found an empty string" in run("merge", trained, "", *arguments, code=exit_codes.USAGE)
    monkeypatch.chdir(tmp_path)
    run("merge", trained, ".", *arguments)
    assert (tmp_path / "0").is_dir()


def test_steps_of_different_models_are_refused(directory: Path, tmp_path: Path) -> None:
    def saved(step: int, model: Any) -> Path:
        other = tmp_path / str(step)
        with TorchaxCheckpointer(other) as ckpt:
            ckpt.attach(model.to("jax"))
            ckpt.save(step, force=True)
        return other

    def layer(size: int, **tensors: torch.Tensor) -> torch.nn.Module:
        model = torch.nn.Linear(2, size)
        for name, tensor in tensors.items():
            model.register_buffer(name, tensor)
        return model

    tied = layer(2).to("jax")
    tied.again = tied.weight
    for step, model in enumerate((layer(3), layer(2, more=torch.ones(1)), tied, layer(2)), 1):
        run("copy", saved(step, model), directory)
    for step, said in (
        (1, "model/weight in step 1: expected float32[2, 2], found float32[3, 2]"),
        (2, "step 2 has weights that step 4 lacks: model/more"),
        (3, "step 3: expected the ties of step 4, {}, found {'again': 'weight'}"),
    ):
        arguments = ["merge", directory, tmp_path / "x", "--steps", f"{step},4"]
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == exit_codes.FOUND, result.output
        assert said in result.stderr
        assert not (tmp_path / "x").exists()
