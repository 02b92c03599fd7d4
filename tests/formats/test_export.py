"""Steps in other programs' forms, read with their libraries, and weights from elsewhere."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from support import PROGRAMS
from support.commands import run, run_json
from support.damage import damage, edit_json
from support.models import Plain, Tied, WithExtraState, live, plain, values
from support.processes import run_python
from support.steps import save_states
from support.training import before_enabling, resume, save

from torchax_ckpt import TorchaxCheckpointer, load_torch_state_dict, torchax_backend
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import (
    CorruptCheckpointError,
    MismatchError,
    StepNotFoundError,
    UnsupportedLeafError,
)
from torchax_ckpt.formats import safetensors_io
from torchax_ckpt.storage.arrays import read_arrays

pytest_plugins = ("support.tied_fixtures",)


def without_alias(expected: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in expected.items() if name != "head.weight"}


def test_a_safetensors_file_holds_the_weights(
    tied: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = tied
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
    tied: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, expected = tied
    out, name = tmp_path / "model", "model.safetensors.index.json"
    result = run_json("export", directory, 3, out, "--max-shard-size", "600")
    index = json.loads((out / name).read_text())
    shards = sorted(set(index["weight_map"].values()))
    count = len(shards)
    assert count > 1
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert sorted(Path(path).name for path in result["files"]) == sorted([*shards, name])
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
    save_states(directory, {1: state})
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


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of 256 MiB."""
    directory = tmp_path_factory.mktemp("large") / "run"
    values = np.random.default_rng(0).standard_normal(2 << 20).astype(np.float32)
    return save_states(directory, {1: {f"w{i}": values + i for i in range(32)}})


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
    tied: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = tied
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
    save_states(directory, {1: state})
    damage(directory / "1", state["w"].tobytes()[:64])
    for name in ("x.safetensors", "x.pt"):
        form = name.rpartition(".")[2]
        out = tmp_path / "out" / name
        run("export", directory, 1, out, "--at", "state", "--format", form, code=exit_codes.FOUND)
        assert not out.exists()
    with pytest.raises(CorruptCheckpointError, match="state/w"):
        load_torch_state_dict(directory, at="state")


def test_a_torch_file_is_read_without_trust(
    tied: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, expected = tied
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
    tied: tuple[Path, dict[str, Any]], is_enabled: bool
) -> None:
    directory, expected = tied
    with contextlib.nullcontext() if is_enabled else before_enabling():
        loaded = load_torch_state_dict(directory)
        assert values(loaded) == expected
        assert all(type(tensor) is torch.Tensor for tensor in loaded.values())
        assert loaded["head.weight"] is loaded["embed.weight"]
        assert not any(torchax_backend.is_device_tensor(tensor) for tensor in loaded.values())


@pytest.mark.slow
def test_a_program_without_torchax_loads_weights(tied: tuple[Path, dict[str, Any]]) -> None:
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
    run_python(program, str(tied[0]), env={"JAX_PLATFORMS": "tpu"}, fresh=True)


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
        load_torch_state_dict(directory / "nothing")
    assert "--at" in run("export", directory, 1, directory / "x", code=exit_codes.USAGE)


def test_names_and_dtypes_that_a_form_lacks_are_refused(directory: Path, tmp_path: Path) -> None:
    state = {
        "a": {"b.c": np.zeros(1), "b": {"c": np.ones(1)}},
        "i": np.zeros(2, ml_dtypes.int4),
        "reserved": {"__metadata__": np.zeros(1)},
    }
    save_states(directory, {1: state})
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
    tied: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory = shutil.copytree(tied[0], tmp_path / "run")
    path = directory / "3" / "manifest" / "data.json"
    wrong: list[Any] = [5, [["a"]], [["head.weight", 3]], [["a", "not there"]]]
    for ties in wrong:
        edit_json(path, lambda m, ties=ties: m["document"]["model"].update(ties=ties))  # type: ignore[misc]
        with pytest.raises(CorruptCheckpointError, match="tie"):
            load_torch_state_dict(directory)


def test_wrong_use_of_export_is_told(tied: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    directory, _ = tied
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


# --- weights from elsewhere ---


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
        ((tmp_path / "none",), "found a directory without them", exit_codes.USAGE),
        ((source[0], "--tie", "a"), "ALIAS=NAME", exit_codes.USAGE),
        ((source[0], "--tie", "a=gone"), "cannot be tied", exit_codes.USAGE),
    ):
        first, *rest = args
        assert message in run("import", first, directory, *rest, code=code)
    assert not directory.exists()
