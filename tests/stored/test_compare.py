"""What two steps differ in: found, counted, and never found where there is nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import TESTS
from support.commands import run, run_json
from support.damage import damage
from support.steps import save_states
from typer.testing import CliRunner

from torchax_ckpt import CheckpointOptions
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app
from torchax_ckpt.storage.arrays import read_arrays
from torchax_ckpt.stored import compare
from torchax_ckpt.stored.compare import _difference

NAN = float("nan")
GOLDEN = TESTS / "golden/v1"


def save(directory: Path, state: Any, **options: Any) -> Path:
    return save_states(directory, {1: state}, options=CheckpointOptions(**options)) / "1"


def found(a: Any, b: Any) -> tuple[Any, ...] | None:
    result = _difference("x", np.asarray(a), np.asarray(b))
    if result is None:
        return None
    return result.what, result.num_elements, result.num_nan, result.max_abs


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float8_e5m2", "complex64"])
def test_floats_are_compared_by_value_and_bits(dtype: str) -> None:
    def array(*values: float) -> np.ndarray:
        return np.array(values, np.dtype(dtype))

    assert found(array(1, NAN, 0), array(1, NAN, 0)) is None
    assert found(array(1, NAN, 0.0), array(1, NAN, -0.0)) == ("bits", 0, 0, None)
    assert found(array(1, 2, 3), array(1, 2.5, 7)) == ("content", 2, 0, 4.0)
    assert found(array(1, NAN, NAN), array(1, NAN, 2)) == ("content", 1, 1, None)
    assert found(array(1, NAN), array(2, 2)) == ("content", 2, 1, 1.0)


def test_infinities_and_other_nans_are_told_apart() -> None:
    inf = float("inf")
    assert found(np.array([inf, -inf]), np.array([inf, -inf])) is None
    assert found(np.array([inf, 1.0]), np.array([1.0, 1.0])) == ("content", 1, 0, inf)
    assert found(np.array([inf]), np.array([-inf])) == ("content", 1, 0, inf)
    other_nan = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert found(np.array([NAN], np.float32), other_nan) == ("bits", 0, 0, None)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int8, np.bool_, ml_dtypes.int4])
def test_integers_differ_exactly(dtype: Any) -> None:
    low, high = (
        (0, 1) if dtype is np.bool_ else (ml_dtypes.iinfo(dtype).min, ml_dtypes.iinfo(dtype).max)
    )
    a, b = np.array([low, high], dtype), np.array([high, high], dtype)
    assert found(a, b) == found(b, a) == ("content", 1, 0, int(high) - int(low))


def test_large_leaves_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_CHUNK_ELEMENTS", 4)
    a = np.arange(11.0).reshape(1, 11)
    b = a.copy()
    b[0, [1, 5, 10]] += [1, 3, 2]
    assert found(a, b) == ("content", 3, 0, 3.0)
    assert found(np.zeros((0, 3)), np.zeros((0, 3))) is None
    assert found(np.float32(1), np.float32(3)) == ("content", 1, 0, 2.0)


def test_layouts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_arrays, "STREAMED_BYTES", 1)
    monkeypatch.setattr(compare, "_BATCH_BYTES", 100)  # several batches, within stacks too
    result = run_json("diff", GOLDEN / "flat/3", GOLDEN / "stacked")
    assert result["identical"]
    assert result["num_identical"] == run_json("show", GOLDEN / "flat")["num_leaves"]
    assert "identical to the bit" in run("diff", GOLDEN / "flat", GOLDEN / "compressed")


def test_every_kind_of_difference_is_listed(tmp_path: Path) -> None:
    layers = [{"w": np.full((2, 2), float(i))} for i in range(3)]
    first = {
        "layers": layers,
        "gone": np.zeros(1),
        "cast": np.zeros(2, np.float32),
        "cut": np.zeros(4),
        "far": np.array([np.inf]),
        "lr": 0.1,
        "flag": True,
        "names": ["x", ("y", 2)],
    }
    second = {
        "layers": [layers[0], {"w": layers[1]["w"] + [[0, 0], [0.5, 0]]}, layers[2]],
        "new": np.zeros(1),
        "cast": np.zeros(2, np.float16),
        "cut": np.zeros(3),
        "far": np.array([0.0]),
        "lr": 0.2,
        "flag": 1,
        "names": ["x", ("y", 3), None],
    }
    a, b = save(tmp_path / "a", first), save(tmp_path / "b", second, layout="flat")
    result = run_json("diff", a, b, "--filter", "state/*", code=exit_codes.FOUND)
    leaves = {d["name"]: d for d in result["leaves"]}
    assert {name: d["what"] for name, d in leaves.items()} == {
        "state/layers/1/w": "content",
        "state/gone": "only_in_a",
        "state/new": "only_in_b",
        "state/cast": "form",
        "state/cut": "form",
        "state/far": "content",
    }
    assert leaves["state/far"]["max_abs"] == "Infinity"
    assert leaves["state/layers/1/w"]["num_elements"] == 1
    assert leaves["state/layers/1/w"]["max_abs"] == 0.5
    assert (leaves["state/cast"]["a"], leaves["state/cast"]["b"]) == (
        "numpy float32[2]",
        "numpy float16[2]",
    )
    assert result["num_identical"] == 2
    assert {d["name"]: (d["what"], d["a"], d["b"]) for d in result["values"]} == {
        "state/lr": ("content", "0.1", "0.2"),
        "state/flag": ("content", "True", "1"),
        "state/names": ("content", "['x', ['y', 2]]", "['x', ['y', 3], None]"),
    }
    text = run("diff", a, b, "--filter", "state/*", code=exit_codes.FOUND)
    assert "1 element, by at most 0.5" in text
    assert "numpy float32[2] -> numpy float16[2]" in text
    assert text.splitlines()[-1] == (
        "2 leaves are identical to the bit; 6 leaves and 3 values differ"
    )


def test_damage_is_not_taken_for_a_difference(tmp_path: Path) -> None:
    state = {"w": np.random.default_rng(0).standard_normal((64, 64))}
    a = save(tmp_path / "a", state)
    b = Path(shutil.copytree(a.parent, tmp_path / "b")) / "1"
    damage(b, state["w"].tobytes()[:64])
    result = CliRunner().invoke(app, ["diff", str(a), str(b), "--json"])
    assert result.exit_code == exit_codes.FOUND
    assert result.stdout == ""
    assert "state/w: the stored bytes are not those that were saved" in result.stderr
