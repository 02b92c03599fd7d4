"""Host leaves that did not change are taken over as device arrays are: their bytes decide."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from support.compare import assert_trees_identical
from support.linked import assert_holds, by_orbax, databases, files
from support.models import Tuned
from support.own_orbax import abstract
from support.still import ALL, REUSE, ROWS
from support.training import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import SaveError
from torchax_ckpt.storage.medium.local_medium import LocalMedium


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((ROWS, 8), np.float32)


def host_state(**more: Any) -> dict[str, Any]:
    """A table, and four leaves that are stacked on the host; 2 MiB that do not change."""
    layers = {str(i): np.full((256, 256), i, np.float32) for i in range(4)}
    return {"h": layers, "table": table(), **more, "x": np.zeros(3, np.float32)}


def save_all(directory: Path, state: Any, steps: range, **settings: Any) -> None:
    """Saves a state at each step with another ``x``, changed in place."""
    with TorchaxCheckpointer(directory, **{"options": REUSE, **ALL, **settings}) as ckpt:
        for step in steps:
            state["x"][...] = step
            ckpt.save(step, state=state, force=True)
        ckpt.wait_until_finished()


def arrays_in(directory: Path, step: int) -> list[set[str]]:
    """The arrays in each database of unchanged arrays of a step."""
    manifest = json.loads((directory / str(step) / "manifest" / "data.json").read_text())
    return [set(entry["xxh3_128"]) for entry in manifest.get("unchanged", {}).values()]


def test_unchanged_host_leaves_are_written_twice_and_then_linked_in_turn(directory: Path) -> None:
    state = host_state()
    save_all(directory, state, range(1, 9))
    for step in range(5, 9):
        assert arrays_in(directory, step) == [{"state/table", "state/h/*"}]
        assert files(directory, step) & files(directory, step - 2)
        assert not files(directory, step) & files(directory, step - 1)
    for step in range(1, 8):
        shutil.rmtree(directory / str(step))
    assert_holds(directory, 8, state)


def files_by_database(directory: Path, step: int) -> list[set[int]]:
    """The files in each database of unchanged arrays of a step, as ``files`` gives them."""
    folders = (directory / str(step) / "state" / name for name in databases(directory, step))
    return [{path.stat().st_ino for path in folder.rglob("d/*")} for folder in folders]


@pytest.mark.parametrize("mode", ["copy", "reference"])
def test_a_host_leaf_that_changes_in_place_is_written(mode: Any, directory: Path) -> None:
    """The array stays the same object, and the program changes it as soon as ``save`` returns."""
    state, expected = host_state(), {}
    options = CheckpointOptions(reuse=True, snapshot=mode)
    with TorchaxCheckpointer(directory, options=options, **ALL) as ckpt:
        for step in range(1, 13):
            if step in (7, 8):
                state["table"][-1, -1] += 1
            expected[step] = jax.tree.map(np.copy, state)
            ckpt.save(step, state=state, force=True)
            if step == 6:
                state["table"][0, 0] += 1
    for step in (6, 7, 8, 9, 12):
        assert_holds(directory, step, expected[step])
    assert files(directory, 6) & files(directory, 4)
    assert not files(directory, 7) & files(directory, 5)
    assert files(directory, 12) & files(directory, 10)


def test_device_arrays_and_host_leaves_have_databases_of_their_own(directory: Path) -> None:
    """A change of one kind does not write the other kind again."""
    state = host_state(w=jax.device_put(table(1), NamedSharding(fsdp_mesh(), P("fsdp"))))
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        for step in range(1, 8):
            state["table"][0, 0] += step == 7
            ckpt.save(step, state=state, force=True)
            ckpt.wait_until_finished()
    on_devices, on_host = arrays_in(directory, 6)
    assert on_devices == {"state/w"}
    assert "state/table" in on_host
    first, second = files_by_database(directory, 7)
    assert first <= files(directory, 5)
    assert not second & files(directory, 5)
    assert_holds(directory, 7, state)


def test_small_host_leaves_and_few_of_them_are_always_written(directory: Path) -> None:
    """Each below 16 KiB, or together below 1 MiB, whatever the device arrays have."""
    where = NamedSharding(fsdp_mesh(), P("fsdp"))
    state = {
        "w": jax.device_put(table(), where),
        "few": np.ones(1 << 16, np.float32),
        "x": np.zeros(3, np.float32),
    }
    save_all(directory, state, range(1, 6))
    assert arrays_in(directory, 5) == [{"state/w"}]
    small = {str(i): np.full(4095, i, np.float32) for i in range(80)}  # 1.25 MiB
    save_all(directory, state | {"small": small}, range(6, 11))
    assert arrays_in(directory, 10) == [{"state/w"}]


def resumed(directory: Path, state: Any, step: int, steps: range, **settings: Any) -> None:
    """Loads a step as a new program does, compares it, and saves it again."""
    with TorchaxCheckpointer(directory, options=REUSE, **{**ALL, **settings}) as ckpt:
        assert ckpt.attach() == step
        loaded = ckpt.load(step, abstract(state))
        assert_trees_identical(loaded, state)
        for new in steps:
            loaded["x"][...] = state["x"][...] = new
            ckpt.save(new, state=loaded, force=True)


def test_host_leaves_are_taken_over_after_a_restart(directory: Path) -> None:
    """Also with device arrays that come back on another mesh, which are written anew."""
    state = host_state(w=jax.device_put(table(1), NamedSharding(fsdp_mesh(), P("fsdp"))))
    save_all(directory, state, range(1, 6))
    state["w"] = jax.device_put(state["w"], NamedSharding(fsdp_mesh(2), P("fsdp")))
    resumed(directory, state, 5, range(6, 10))
    for step in (7, 8, 9):
        number = [("state/table" in arrays) for arrays in arrays_in(directory, step)].index(True)
        assert files_by_database(directory, step)[number] & files(directory, step - 2)
        assert not files(directory, step) & files(directory, step - 1)
    assert not files(directory, 6) & files(directory, 4)
    assert_holds(directory, 9, state)


def test_tensors_of_a_module_on_the_cpu_are_taken_over(directory: Path) -> None:
    model = Tuned(16).to("jax")
    with torchax_backend.native_torch():
        model.register_buffer("table", torch.from_numpy(table()))
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        for step in range(1, 9):
            if step == 8:
                with torchax_backend.native_torch():
                    model.get_buffer("table")[0, 0] += 1
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
    assert arrays_in(directory, 7)[-1] == {"model/table"}
    assert files_by_database(directory, 7)[-1] == files_by_database(directory, 5)[-1]
    assert not files_by_database(directory, 8)[-1] & files(directory, 6)
    expected = table()
    expected[0, 0] += 1
    for arrays in by_orbax(directory, 8):
        assert arrays["model/table"].tobytes() == expected.tobytes()


def test_a_save_without_its_links_is_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = host_state()
    save_all(directory, state, range(1, 6))
    monkeypatch.setattr(LocalMedium, "take_over", lambda *_: None)
    with pytest.raises(SaveError, match="state/table: expected . chunks? in the new step, found 0"):
        resumed(directory, state, 5, range(6, 8))
    assert not (directory / "7").exists()
