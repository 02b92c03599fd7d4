"""Arrays that are the same objects as at an earlier save, or as restored, are not looked at."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from support.compare import training_state
from support.device_memory import OFFLOAD
from support.linked import assert_holds, files
from support.steps import save
from support.still import (
    ALL,
    REUSE,
    ROWS,
    assert_resumes,
    committed,
    run,
    still_state,
    train,
    tuned,
)
from support.training import fsdp_mesh, fsdp_rule

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.snapshot import snapshotter


@pytest.mark.usefixtures("identity_proves")
@pytest.mark.parametrize(
    "mode",
    ["copy", *(pytest.param(m, marks=pytest.mark.slow) for m in ("reference", "auto", *OFFLOAD))],
)
def test_arrays_that_are_the_same_objects_are_neither_copied_nor_fetched(
    mode: Any, directory: Path, fetched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = still_state(x=0)
    options = CheckpointOptions(reuse=True, snapshot=mode)
    with TorchaxCheckpointer(directory, options=options, **ALL) as ckpt:
        for step in range(1, 9):
            state = {**state, "x": committed(np.full((4,), step))}
            if step == 7:
                fetched.clear()
                monkeypatch.setattr(snapshotter, "execute", only_small(snapshotter.execute))
            save(ckpt, step, of=state)
    assert (ROWS, 8) not in fetched
    assert fetched.count((4,)) == 2
    assert files(directory, 8) & files(directory, 6)
    assert not files(directory, 8) & files(directory, 7)
    assert_holds(directory, 8, state)


def only_small(execute: Any) -> Any:
    def checked(plan: Any, leaves: Any, **settings: Any) -> Any:
        assert all(leaf.size < ROWS for leaf in leaves.values())
        return execute(plan, leaves, **settings)

    return checked


@pytest.mark.usefixtures("identity_proves")
def test_an_equal_array_that_is_another_object_is_compared(
    directory: Path, fetched: list[tuple[int, ...]]
) -> None:
    state = still_state(x=0)
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        for step in range(1, 8):
            save(ckpt, step, of=state)
            if step == 6:
                fetched.clear()
                state["base"]["a"] = state["base"]["a"] + 0
    assert fetched.count((ROWS, 8)) == 2  # both arrays of the database; compared, not written
    assert files(directory, 7) & files(directory, 5)
    assert_holds(directory, 7, state)


@pytest.mark.usefixtures("identity_proves")
def test_no_buffer_is_kept_alive_between_saves(directory: Path) -> None:
    state = still_state(x=0)
    with TorchaxCheckpointer(directory, options=REUSE) as ckpt:
        save(ckpt, *range(1, 7), of=state)
        known = weakref.ref(state["base"]["a"])
        del state
        gc.collect()
        assert known() is None


def zeros(*shape: int, dtype: str = "float32") -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype), jax.devices()[0])


@pytest.mark.usefixtures("identity_proves")
def test_a_stack_is_taken_over_only_if_it_has_the_same_leaves(directory: Path) -> None:
    """Equal values in leaves of other names have equal digests."""
    layers = {str(i): zeros(1 << 18) + (i == 0) for i in range(3)}
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        for step in range(1, 14):
            if step < 5:
                layers["3"] = zeros(1 << 18) + step
            elif step == 5:
                layers["3"] = zeros(1 << 18)
            elif step == 6:
                layers["0"] = zeros(1 << 18)
            elif step > 6:
                layers["0"] = zeros(1 << 18) + step
            save(ckpt, step, of={"h": dict(layers)})
    assert_holds(directory, 13, {"h": layers})
    assert_holds(directory, 12, {"h": layers | {"0": zeros(1 << 18) + 12}})


@pytest.mark.usefixtures("identity_proves")
@pytest.mark.parametrize(("shape", "dtype"), [((1024, 512), "int32"), ((512, 1024), "float32")])
def test_an_array_of_another_form_and_equal_bytes_is_written(
    shape: tuple[int, ...], dtype: str, directory: Path
) -> None:
    state = {"w": zeros(1024, 512)}
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        for step in range(1, 12):
            state = {"w": zeros(*shape, dtype=dtype)} if step == 7 else state
            save(ckpt, step, of=state)
    for step in (7, 8, 9, 10, 11):
        assert_holds(directory, step, state)


@pytest.mark.usefixtures("identity_proves")
@pytest.mark.parametrize("how", ["restored", "loaded", "replaced"])
def test_after_a_restart_one_save_looks_at_the_arrays(
    how: str, directory: Path, fetched: list[tuple[int, ...]]
) -> None:
    """It writes the copy that the restored step lacks; from then on, both are known."""
    run(directory, range(1, 7), **ALL)
    model = tuned()
    shape = tuple(model.base.weight.shape)
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        assert ckpt.attach(model, shardings=fsdp_rule(fsdp_mesh())) == 6
        if how == "loaded":  # what a run looks at beside its state changes nothing
            ckpt.load(4)
            ckpt.load(6)
        elif how == "replaced":
            with torch.no_grad():
                model.base.weight.mul_(2)
        for step in (7, 8, 9):
            fetched.clear()
            train(ckpt, model, range(step, step + 1))
            ckpt.wait_until_finished()
            if how != "replaced":
                assert (shape in fetched) == (step == 7), step
            is_linked = bool(files(directory, step) & files(directory, step - 2))
            assert is_linked == (step > 7 and how != "replaced")
            assert not files(directory, step) & files(directory, step - 1)
    assert_resumes(directory, 9, training_state(model))
