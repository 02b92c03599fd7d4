"""The average of steps, bit for bit as numpy computes it, in any layout and any memory bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.compare import bits
from support.damage import damage
from support.training import fsdp_mesh, fsdp_rule

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import CorruptCheckpointError, MismatchError
from torchax_ckpt.storage.arrays import chunking, read_arrays
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored import averaged_step
from torchax_ckpt.stored.averaged_step import AveragedStep
from torchax_ckpt.stored.stored_step import StoredStep

FLOATS = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
WIDE = {"bfloat16": "float32", "float16": "float32"}
WEIGHTS = {1: 1.0, 2: 1.0, 5: 2.5}


def numbers(step: int, dtype: str, shape: tuple[int, ...] = (8, 6)) -> np.ndarray:
    draw = np.random.default_rng(step)
    found = draw.standard_normal(shape)
    if dtype.startswith("complex"):
        found = found + 1j * draw.standard_normal(shape)
    return np.asarray(found).astype(np.dtype(dtype))


def content(step: int) -> dict[str, np.ndarray]:
    """A state of one step; leaves of equal shape and dtype are stored together, as stacks."""
    state = {f"{dtype}.{i}": numbers(step + 10 * i, dtype) for dtype in FLOATS for i in range(3)}
    state["frozen"] = np.array([np.inf, -np.inf, -0.0, 0.0, 0.1, np.float32(1e-40)], np.float32)
    state["scalar"] = numbers(step, "float32", ())
    state["empty"] = np.zeros((0, 3), np.float32)
    state["large"] = numbers(step, "float32", (64, 32))
    state["count"] = np.array([step, 7], np.int64)
    state["flags"] = np.array([step > 1, True])
    state["same"] = np.array([3, -3], np.int8)
    return state


def saved(directory: Path, contents: dict[int, Any]) -> RunDirectory:
    """Saves each step on devices of its own and with a layout of its own."""
    for step, state in contents.items():
        packed = CheckpointOptions(layout="flat" if step == 2 else "auto")
        rule = fsdp_rule(fsdp_mesh(8 if step == 1 else 2))
        placed = {
            name: jax.device_put(array, rule(name, array)) if name.startswith("float32") else array
            for name, array in state.items()
        }
        with TorchaxCheckpointer(
            directory, options=packed, preservation_policy=policies.PreserveAll()
        ) as ckpt:
            ckpt.attach()
            ckpt.save(step, state=placed, force=True)
    return RunDirectory(directory, read_only=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return saved(tmp_path_factory.mktemp("averaged") / "run", {s: content(s) for s in WEIGHTS})


def averaged(run: RunDirectory, weights: dict[int, float], scratch: Path) -> AveragedStep:
    return AveragedStep({run.find(step): w for step, w in weights.items()}, scratch)


def as_documented(arrays: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """The formula of the documentation, on whole arrays."""
    total = sum(weights)
    average = arrays[0].astype(WIDE.get(arrays[0].dtype.name, arrays[0].dtype))
    reached = weights[0] / total
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        reached += weight / total
        newer = array.astype(average.dtype)
        share = average.real.dtype.type(weight / total / reached)
        with np.errstate(invalid="ignore"):
            moved = average + (newer - average) * share
        average = np.where(newer != average, moved, average)
    return average


@pytest.mark.parametrize("max_bytes", [1, 6000, None])
def test_averages_are_those_of_numpy(
    run: RunDirectory, tmp_path: Path, max_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    group = averaged_step._groups

    def groups(leaves: Any, limit: int) -> Any:
        for members in group(leaves, limit):
            held.append(sum(leaf.nbytes for leaf in members) if len(members) > 1 else 0)
            assert held[-1] <= limit
            yield members

    monkeypatch.setattr(averaged_step, "_groups", groups)
    step = averaged(run, WEIGHTS, tmp_path)
    found = step.read(step.leaves, CheckpointOptions(max_host_bytes=max_bytes))
    assert (len(held) > 1) == (max_bytes is not None)
    assert list(step.weights.values()) == [1 / 4.5, 1 / 4.5, 2.5 / 4.5]
    contents = [content(s) for s in WEIGHTS]
    for name, newest in contents[-1].items():
        arrays = [c[name] for c in contents]
        is_float = newest.dtype.kind not in "iub"
        expected = as_documented(arrays, list(WEIGHTS.values())) if is_float else newest
        leaf = step.leaves[f"state/{name}"]
        assert (leaf.dtype, leaf.shape) == (expected.dtype.name, newest.shape)
        assert bits(found[leaf.name]) == bits(expected), name
        if is_float and newest.size and name != "frozen":  # the formula is an average
            exact = np.average([a.astype(np.complex128) for a in arrays], 0, [1, 1, 2.5])
            ulp = np.finfo(expected.dtype).eps * np.abs(arrays).max()
            assert np.abs(found[leaf.name] - exact).max() <= 4 * ulp, name
    # Equal elements keep their bits: infinities, and the sign of zero.
    assert bits(found["state/frozen"]) == bits(contents[0]["frozen"])
    assert step.taken == {"state/count", "state/flags"}
    assert list(tmp_path.iterdir()) == []


def test_averages_of_finite_numbers_are_finite() -> None:
    average = np.array([2.0**127, 3e38, 1.0, 2.0], np.float32)
    newer = np.array([-(2.0**127), 3e38, -1.0, -np.inf], np.float32)
    averaged_step._move(average, newer, 0.25)
    assert bits(average) == bits(np.array([2.0**126, 3e38, 0.5, -np.inf], np.float32))


def test_only_pieces_with_asked_rows_are_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each group of averages would read whole stacks again."""
    monkeypatch.setattr(chunking, "MAX_BYTES", 100)  # three rows of the stack are a piece
    state = {str(i): numbers(i, "float32", (4, 3)) for i in range(6)}
    run = saved(directory, {1: state})
    stored = StoredStep(run.find(1))
    begun: list[int] = []

    class Arrival(read_arrays._Arrival):
        def __init__(self, committed: Any, target: Any, piece: Any, store: Any, *pace: Any) -> None:
            begun.append(piece.start[0])
            super().__init__(committed, target, piece, store, *pace)

    monkeypatch.setattr(read_arrays, "_Arrival", Arrival)
    found = stored.read(["state/3"], CheckpointOptions())
    assert bits(found["state/3"]) == bits(state["3"])
    assert begun == [3]


def test_steps_of_other_weights_are_refused(directory: Path, tmp_path: Path) -> None:
    state = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    other = {"a": np.ones((3, 1), np.float32), "c": np.ones(2, np.float32)}
    run = saved(directory, {1: other, 2: state})
    with pytest.raises(MismatchError) as raised:
        list(
            averaged(run, {1: 1, 2: 1}, tmp_path).stream(
                ["state/a", "state/b"], CheckpointOptions()
            )
        )
    assert raised.value.mismatched == {
        "state/a in step 1": "expected float32[3], found float32[3, 1]",
        "state/b in step 1": "expected float32[2], found no such leaf",
    }
    assert "expected float32[3], found float32[3, 1]" in str(raised.value)


def test_quantized_leaves_must_be_equal(directory: Path, tmp_path: Path) -> None:
    run = saved(directory, {s: {"q": np.array([1, s], np.int8)} for s in (1, 2)})
    with pytest.raises(MismatchError, match=r"step 2.*state/q: .* because int8 mostly holds quant"):
        averaged(run, {1: 1, 2: 1}, tmp_path).read(["state/q"], CheckpointOptions())


def test_damage_of_any_step_is_found(directory: Path, tmp_path: Path) -> None:
    contents = {s: {"w": numbers(s, "float32", (64, 32))} for s in (1, 2)}
    run = saved(directory, contents)
    damage(directory / "1", contents[1]["w"].tobytes()[:64])
    with pytest.raises(CorruptCheckpointError, match=r"step 1 in .*state/w"):
        averaged(run, {1: 1, 2: 1}, tmp_path).read(["state/w"], CheckpointOptions())
