"""Weights from elsewhere: what attach goes on from, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from support.commands import run, run_json
from support.models import WithExtraState, live, plain, values
from support.training import before_enabling, resume

from torchax_ckpt import TorchaxCheckpointer, load_torch_state_dict
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import MismatchError


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A file that safetensors itself has written, and what is in the model."""
    model = plain()
    path = tmp_path / "weights.safetensors"
    with before_enabling():
        safetensors.torch.save_model(model, str(path))
        return path, values(model.state_dict())


def test_attach_goes_on_from_imported_weights(
    source: tuple[Path, dict[str, Any]], directory: Path
) -> None:
    path, expected = source
    result = run_json("import", path, directory)
    assert result["step"] == 0
    # Which of the names is the first is safetensors' choice.
    assert {*result["ties"], *result["ties"].values()} == {"embed.weight", "head.weight"}
    model = live()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.attach(model, optimizer) == 0
        assert values(model.state_dict()) == expected
        assert model.head.weight is model.embed.weight
        assert not optimizer.state
        for _ in ckpt.steps(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    again = live()
    assert resume(directory, again, torch.optim.AdamW(again.parameters(), lr=0.1)) == 2
    assert values(again.state_dict()) == values(model.state_dict()) != expected


def test_what_was_exported_is_imported_again(
    source: tuple[Path, dict[str, Any]], directory: Path, tmp_path: Path
) -> None:
    path, expected = source
    run("import", path, directory)
    run("export", directory, 0, tmp_path / "hub", "--max-shard-size", "600")
    index = tmp_path / "hub" / "model.safetensors.index.json"
    for number, origin in enumerate((tmp_path / "hub", index)):
        result = run_json("import", origin, tmp_path / f"run{number}")
        assert len(result["files"]) > 1
        assert values(load_torch_state_dict(tmp_path / f"run{number}")) == expected
    assert run_json("verify", tmp_path / "run1", "--read-only")["steps"][0]["ok"]


def test_ties_can_be_named(directory: Path, tmp_path: Path) -> None:
    model = plain()
    with before_enabling():
        state = dict(model.state_dict())
        del state["head.weight"]
        (tmp_path / "hub").mkdir()
        safetensors.torch.save_file(state, tmp_path / "hub" / "model.safetensors")
    run("import", tmp_path / "hub", tmp_path / "untied")
    with TorchaxCheckpointer(tmp_path / "untied") as ckpt, pytest.raises(MismatchError):
        ckpt.attach(live())
    run("import", tmp_path / "hub", directory, "--tie", "head.weight=embed.weight")
    assert resume(directory, live()) == 0


def test_modules_keep_their_extra_state(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {"weight": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
    safetensors.numpy.save_file(arrays, path)
    run("import", path, directory)
    model = WithExtraState(2, 2).to("jax")
    assert resume(directory, model) == 0
    assert model.extra == "live"
    assert values(model.state_dict()).keys() == arrays.keys()


def test_wide_integers_are_narrowed_only_where_they_fit(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"count": np.array(7), "w": np.zeros((0, 3), np.float32)}, path)
    run("import", path, directory)
    loaded = load_torch_state_dict(directory)
    assert loaded["count"].dtype == torch.int32
    assert tuple(loaded["w"].shape) == (0, 3)
    for name, array in (("big", np.array([2**40])), ("wide", np.zeros(2))):
        safetensors.numpy.save_file({name: array}, path)
        said = run("import", path, tmp_path / name, code=exit_codes.USAGE)
        assert f"{name}: the tensor is {array.dtype}" in said
        assert not (tmp_path / name).exists()


def test_a_directory_with_steps_is_left_alone(
    source: tuple[Path, dict[str, Any]], directory: Path
) -> None:
    run("import", source[0], directory)
    before = sorted(directory.rglob("*"))
    said = run("import", source[0], directory, code=exit_codes.UNAVAILABLE)
    assert "expected a directory without checkpoints, found step 0" in said
    assert sorted(directory.rglob("*")) == before
    assert not (directory / "lease").exists()


def test_damaged_files_and_an_index_that_does_not_fit_its_files_are_a_finding(
    directory: Path, tmp_path: Path
) -> None:
    for name in "ab":
        safetensors.numpy.save_file({"w": np.zeros(1, np.float32)}, tmp_path / name)
    (tmp_path / "x.safetensors").write_bytes(b"")
    run("import", tmp_path / "x.safetensors", directory, code=exit_codes.FOUND)
    index = tmp_path / "model.safetensors.index.json"
    for weight_map in (None, {"w": "gone"}, {"w": "a", "v": "a"}, {"w": "a", "v": "b"}):
        index.write_text("[]" if weight_map is None else json.dumps({"weight_map": weight_map}))
        for source in (tmp_path, index):
            run("import", source, directory, code=exit_codes.FOUND)
            assert not directory.exists()


def test_wrong_use_of_import_is_told(
    source: tuple[Path, dict[str, Any]], directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "none").mkdir()
    for args, message, code in (
        ((tmp_path / "nowhere",), "no such file", exit_codes.USAGE),
        ((tmp_path / "none",), "model.safetensors: no such file", exit_codes.UNAVAILABLE),
        ((source[0], "--tie", "a"), "ALIAS=NAME", exit_codes.USAGE),
        ((source[0], "--tie", "a=gone"), "cannot be tied", exit_codes.USAGE),
    ):
        first, *rest = args
        assert message in run("import", first, directory, *rest, code=code)
    assert not directory.exists()
