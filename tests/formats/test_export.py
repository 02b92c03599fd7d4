"""Steps in other programs' forms: read back with the libraries those programs use."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from support import PROGRAMS, TESTS
from support.commands import run, run_json
from support.damage import damage, edit_json
from support.models import Plain, Tied, values
from support.processes import run_python
from support.training import before_enabling, save

from torchax_ckpt import (
    CheckpointOptions,
    TorchaxCheckpointer,
    load_torch_state_dict,
    torchax_backend,
)
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import (
    CorruptCheckpointError,
    MismatchError,
    StepNotFoundError,
    UnsupportedLeafError,
)
from torchax_ckpt.formats import safetensors_io
from torchax_ckpt.storage.arrays import read_arrays


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A saved model in two dtypes, and what its state dict was."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    torch.manual_seed(1)
    model = Tied()
    model.layers[1].bfloat16()
    model.to("jax")
    model.head.weight = model.embed.weight  # moving a module unties it
    save(directory, model, torch.optim.SGD(model.parameters(), lr=0.1), step=3)
    return directory, values(model.state_dict())


def without_alias(expected: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in expected.items() if name != "head.weight"}


def test_a_safetensors_file_holds_the_weights(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = trained
    out = tmp_path / "weights.safetensors"
    monkeypatch.setattr(read_arrays, "STREAMED_BYTES", 1)
    result = run_json("export", directory, 3, out)
    assert result["files"] == [str(out)]
    assert result["ties"] == {"head.weight": "embed.weight"}
    assert result["left_out"] == ["model/%/_extra_state/calls"]
    with before_enabling():
        loaded = safetensors.torch.load_file(out)
        assert values(loaded) == without_alias(expected)
        # A tied model takes it, as one that safetensors has saved itself.
        fresh = Plain()
        fresh.layers[1].bfloat16()
        missing, unexpected = safetensors.torch.load_model(fresh, str(out))
        assert not missing
        assert not unexpected
        assert values(fresh.state_dict()) == expected
    assert list(tmp_path.iterdir()) == [out]


def test_shards_are_written_as_hugging_face_does(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, expected = trained
    out = tmp_path / "model"
    result = run_json("export", directory, 3, out, "--max-shard-size", "600")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    assert shards == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert sorted(Path(path).name for path in result["files"]) == sorted(
        [*shards, "model.safetensors.index.json"]
    )
    loaded: dict[str, Any] = {}
    with before_enabling():
        for shard in shards:
            part = safetensors.torch.load_file(out / shard)
            assert {index["weight_map"][name] for name in part} == {shard}
            nbytes = sum(t.numel() * t.element_size() for t in part.values())
            assert nbytes <= 600 or len(part) == 1
            loaded |= part
            with safetensors.safe_open(out / shard, "pt") as opened:
                assert opened.metadata()["format"] == "pt"
    assert values(loaded) == without_alias(expected)
    assert index["metadata"]["total_size"] == result["num_bytes"]


def test_every_dtype_that_safetensors_has_comes_through(directory: Path, tmp_path: Path) -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    state = {name: numbers.astype(np.dtype(name)) for name in safetensors_io.NAMES_OF_DTYPES}
    state |= {"empty": np.zeros((0, 3), np.float32), "scalar": np.array(7, np.int64)}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=state, force=True)
    out = tmp_path / "x.safetensors"
    run("export", directory, 1, out, "--at", "state")
    with before_enabling():
        loaded = safetensors.torch.load_file(out)
        assert loaded.keys() == state.keys()
        for name, array in state.items():
            octets = loaded[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert octets == array.tobytes(), name
            assert tuple(loaded[name].shape) == array.shape
            assert name in ("empty", "scalar") or str(loaded[name].dtype) == f"torch.{name}"


def test_a_leaf_comes_together_from_the_chunks_of_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = TESTS / "golden/v1/flat"
    out = tmp_path / "x.safetensors"
    monkeypatch.setattr(read_arrays, "STREAMED_BYTES", 1)
    run("export", golden, 3, out, "--at", "state/layers")
    with TorchaxCheckpointer(golden, options=CheckpointOptions(read_only=True)) as ckpt:
        expected = {f"{i}.w": layer["w"] for i, layer in enumerate(ckpt.load(3)["layers"])}
    with before_enabling():
        loaded = safetensors.torch.load_file(out)
    assert {n: t.numpy().tobytes() for n, t in loaded.items()} == {
        n: np.asarray(a).tobytes() for n, a in expected.items()
    }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of 256 MiB."""
    directory = tmp_path_factory.mktemp("large") / "run"
    values = np.random.default_rng(0).standard_normal(2 << 20).astype(np.float32)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={f"w{i}": values + i for i in range(32)}, force=True)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "bound", "is_held"),
    [
        pytest.param("safetensors", 16 << 20, False, marks=pytest.mark.long),
        ("pt", 16 << 20, False),
        pytest.param("dcp", 16 << 20, False, marks=pytest.mark.long),
        # So that it would be seen.
        pytest.param("pt", 1 << 30, True, marks=pytest.mark.long),
    ],
)
def test_an_export_larger_than_the_bound_takes_no_memory_for_it(
    form: str, bound: int, is_held: bool, large: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"out.{form}"
    args = (str(bound), "export", str(large), "1", str(out), "--format", form, "--at", "state")
    result = run_python(PROGRAMS / "memory.py", "of_command", *args, fresh=True)
    grown = int(result.stdout.split("grown:")[1])
    assert sum(f.stat().st_size for f in [out, *out.rglob("*")] if f.is_file()) > 256 << 20
    assert (grown > 200 << 20) == is_held, grown
    assert is_held or grown < 150 << 20


def test_nothing_is_overwritten_and_nothing_left_behind(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = trained
    out = tmp_path / "model.safetensors"
    out.write_text("mine")
    for target in (out, tmp_path):
        said = run("export", directory, 3, target, code=exit_codes.UNAVAILABLE)
        assert "exists already; nothing was written" in said
    assert out.read_text() == "mine"
    out.unlink()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_io.os, "posix_fallocate", full)
    said = run("export", directory, 3, tmp_path, code=exit_codes.UNAVAILABLE)
    assert "No space left on device" in said
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_step_is_not_exported(directory: Path, tmp_path: Path) -> None:
    state = {"w": np.random.default_rng(0).standard_normal((64, 64))}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=state, force=True)
    damage(directory / "1", state["w"].tobytes()[:64])
    for name in ("x.safetensors", "x.pt"):
        form = name.rpartition(".")[2]
        out = tmp_path / "out" / name
        run("export", directory, 1, out, "--at", "state", "--format", form, code=exit_codes.FOUND)
        assert not out.exists()
    with pytest.raises(CorruptCheckpointError, match="state/w"):
        load_torch_state_dict(directory, at="state")


def test_a_torch_file_is_read_without_trust(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, expected = trained
    out = tmp_path / "weights.pt"
    said = run("export", directory, 3, out, "--format", "safetensors", code=exit_codes.USAGE)
    assert "expected a directory, or a name that ends in .safetensors" in said
    run("export", directory, 3, out)  # the name says the format
    with before_enabling():
        loaded = torch.load(out, weights_only=True)
        assert values(loaded) == expected
        assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
        fresh = Tied()
        fresh.layers[1].bfloat16()
        fresh.load_state_dict(loaded, strict=False)
        assert values(fresh.state_dict()) == expected
    again = run("export", directory, 3, out, "--format", "pt", code=exit_codes.UNAVAILABLE)
    assert "exists already" in again
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_state_dict_holds_plain_tensors(
    trained: tuple[Path, dict[str, Any]], is_enabled: bool
) -> None:
    directory, expected = trained
    with contextlib.nullcontext() if is_enabled else before_enabling():
        loaded = load_torch_state_dict(directory)
        assert values(loaded) == expected
        assert all(type(tensor) is torch.Tensor for tensor in loaded.values())
        assert loaded["head.weight"] is loaded["embed.weight"]
        assert not any(torchax_backend.is_device_tensor(tensor) for tensor in loaded.values())


@pytest.mark.slow
def test_a_program_without_torchax_loads_weights(trained: tuple[Path, dict[str, Any]]) -> None:
    program = """
        import sys
        import jax, torch
        from torchax_ckpt import load_torch_state_dict
        state = load_torch_state_dict(sys.argv[1], 3)
        assert state["layers.1.weight"].dtype == torch.bfloat16
        model = torch.nn.Linear(8, 8)
        model.load_state_dict({k: state[f"layers.0.{k}"] for k in ("weight", "bias")})
        assert model(torch.ones(8)).sum().isfinite()
        assert "torchax" not in sys.modules
        assert not jax._src.xla_bridge.backends_are_initialized()
    """
    run_python(program, str(trained[0]), env={"JAX_PLATFORMS": "tpu"}, fresh=True)


def test_where_the_weights_are_must_be_known(directory: Path) -> None:
    models = {"g": torch.nn.Linear(2, 2).to("jax"), "d": torch.nn.Linear(2, 3).to("jax")}
    save(directory, models)
    with pytest.raises(MismatchError, match=r"found leaves at model/d, model/g, rng"):
        load_torch_state_dict(directory)
    assert set(load_torch_state_dict(directory, 1, at="model/d")) == {"weight", "bias"}
    with pytest.raises(MismatchError, match="nowhere"):
        load_torch_state_dict(directory, at="model/nowhere")
    with pytest.raises(StepNotFoundError):
        load_torch_state_dict(directory, 2)
    with pytest.raises(StepNotFoundError):
        load_torch_state_dict(directory / "1" / "state")
    assert "--at" in run("export", directory, 1, directory / "x", code=exit_codes.USAGE)


def test_names_and_dtypes_that_a_form_lacks_are_refused(directory: Path, tmp_path: Path) -> None:
    state = {
        "a": {"b.c": np.zeros(1), "b": {"c": np.ones(1)}},
        "i": np.zeros(2, ml_dtypes.int4),
        "reserved": {"__metadata__": np.zeros(1)},
    }
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=state, force=True)
    with pytest.raises(UnsupportedLeafError, match=r"two leaves would be called 'b\.c'"):
        load_torch_state_dict(directory, at="state/a")
    with pytest.raises(UnsupportedLeafError, match="state/i: torch has no dtype int4"):
        load_torch_state_dict(directory, at="state/i")
    for at, message in (
        ("state/i", "state/i: safetensors has no dtype int4"),
        ("state/reserved", "no tensor can have the name __metadata__"),
    ):
        out = tmp_path / "x"
        assert message in run("export", directory, 1, out, "--at", at, code=exit_codes.USAGE)
        assert not out.exists()


def test_ties_that_no_release_writes_are_damage(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory = shutil.copytree(trained[0], tmp_path / "run")
    path = directory / "3" / "manifest" / "data.json"
    for ties in (5, [["a"]], [["head.weight", 3]], [["a", "not there"]]):
        edit_json(path, lambda manifest, ties=ties: manifest["document"]["model"].update(ties=ties))
        with pytest.raises(CorruptCheckpointError, match="tie"):
            load_torch_state_dict(directory)


def test_wrong_use_of_export_is_told(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    directory, _ = trained
    for args, message in (
        ((3, tmp_path / "x.safetensors", "--max-shard-size", "1GB"), "a directory as OUT"),
        ((3, tmp_path, "--max-shard-size", "many"), "expected a size"),
        ((3, tmp_path, "--format", "pt"), "the name of a file"),
        ((9, tmp_path / "x"), "no checkpoint at step 9"),
        ((3, "gs://bucket/x"), "locally only"),
        ((3, tmp_path / "x", "--format", "zip"), "zip"),
    ):
        assert message in run("export", directory, *args, code=exit_codes.USAGE)
    assert list(tmp_path.iterdir()) == []
