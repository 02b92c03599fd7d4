"""A save takes over what did not change; every step stays complete, and no neighbours share."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hypothesis
import jax
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from orbax import checkpoint as v0
from orbax.checkpoint import v1 as ocp
from support.compare import entries, training_state
from support.damage import flip_bit
from support.device_memory import OFFLOAD
from support.linked import assert_holds, by_orbax, data_file, databases, files
from support.own_orbax import abstract
from support.stages import fail_at
from support.steps import save
from support.still import (
    ALL,
    REUSE,
    ROWS,
    assert_resumes,
    committed,
    run,
    save_all,
    still_state,
    train,
    tuned,
)
from support.training import P, fsdp_mesh, fsdp_rule

from torchax_ckpt import CheckpointOptions, Event, TorchaxCheckpointer, policies
from torchax_ckpt.errors import CorruptCheckpointError, SaveError
from torchax_ckpt.runtime import stages
from torchax_ckpt.saving.unchanged.reuse import Reuse
from torchax_ckpt.storage.medium import local_medium


def test_unchanged_arrays_are_written_twice_and_then_linked_in_turn(directory: Path) -> None:
    states = [still_state(x=step) for step in range(8)]
    save_all(directory, states, preservation_policy=policies.PreserveAll())
    used = {step: files(directory, step) for step in range(1, 9)}
    for step in range(5, 9):
        assert len(databases(directory, step)) == 1
        assert used[step] & used[step - 2]
        assert not used[step] & used[step - 1]


def leaf_names(directory: Path, step: int) -> list[set[str]]:
    """The leaves in the databases of unchanged arrays of a step."""
    manifest = json.loads((directory / str(step) / "manifest" / "data.json").read_text())
    return [
        {leaf for stored in entry["xxh3_128"] for leaf in manifest["stacks"].get(stored, [stored])}
        for entry in manifest["unchanged"].values()
    ]


def test_stacks_hold_either_leaves_that_change_or_leaves_that_do_not(directory: Path) -> None:
    """Also if only some layers are frozen, and if others are frozen later."""
    layers = {
        str(i): committed(np.random.default_rng(i).random((512, 256), np.float32)) for i in range(6)
    }

    def state(step: int, frozen: set[int]) -> Any:
        return {"h": {n: a if int(n) in frozen else a + step for n, a in layers.items()}}

    early, late = {0, 1, 2}, {2, 3, 4}
    states = [state(s, early) for s in range(6)] + [state(s, late) for s in range(6, 14)]
    save_all(directory, states, preservation_policy=policies.PreserveAll())
    for step, frozen in ((6, early), (14, late)):
        assert leaf_names(directory, step) == [{f"state/h/{n}" for n in frozen}]
        assert files(directory, step) & files(directory, step - 2)
        assert_holds(directory, step, states[step - 1])
    assert_holds(directory, 7, states[6])


def test_a_changed_array_is_written_even_if_its_shape_and_neighbours_stay(directory: Path) -> None:
    states = [still_state(x=step) for step in range(7)]
    for state in states[5:]:
        state["base"]["a"] = state["base"]["a"].at[0, 0].add(1)
    save_all(directory, states, preservation_policy=policies.PreserveAll())
    for step in (5, 6, 7):
        assert_holds(directory, step, states[step - 1])
    assert not files(directory, 6) & files(directory, 4)


def test_what_a_failed_save_wrote_is_no_base_of_the_next(directory: Path) -> None:
    """The array changes in a save that fails once it has written, so no step has the new values."""
    state = still_state(x=0)
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        for step in range(1, 10):
            if step == 7:
                state["base"]["a"] = state["base"]["a"].at[0, 0].add(1)
                fail_at("mark the step", OSError(28, "full"))
            ckpt.save(step, state=state, force=True)
            with contextlib.suppress(SaveError):
                ckpt.wait_until_finished()
            stages.observers.clear()
        assert ckpt.all_steps() == [1, 2, 3, 4, 5, 6, 8, 9]
    for step in (8, 9):
        assert not any(files(directory, step) & files(directory, old) for old in range(1, 7))
        assert_holds(directory, step, state)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_only_a_full_disk_leaves_the_next_save_its_base(directory: Path, number: int) -> None:
    """A full disk has no room to write the base again; after other failures it may be damaged."""
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        for step in range(1, 9):
            if step == 7:
                fail_at("mark the step", OSError(number, ""))
            ckpt.save(step, state=still_state(x=step), force=True)
            with contextlib.suppress(SaveError):
                ckpt.wait_until_finished()
            stages.observers.clear()
        assert ckpt.all_steps() == [1, 2, 3, 4, 5, 6, 8]
    assert bool(files(directory, 8) & files(directory, 5)) == (number == errno.ENOSPC)
    assert_holds(directory, 8, still_state(x=8))


def test_an_array_that_changes_under_its_identity_is_written(directory: Path) -> None:
    """On the CPU, an array may share memory with an array of numpy."""
    octets = np.zeros(64 * ROWS + 64, np.uint8)
    start = -octets.ctypes.data % 64  # JAX shares memory that is aligned like this
    host = octets[start : start + 64 * ROWS].view(np.float32).reshape(ROWS, 16)
    array = jax.device_put(host)
    with TorchaxCheckpointer(directory, options=REUSE) as ckpt:
        for step in range(1, 8):
            if step == 7:
                host[0] = 7
            save(ckpt, step, of={"w": array})
        expected = np.asarray(array).copy()
    assert (expected[0] == 7).all()
    for arrays in by_orbax(directory, 7):
        assert arrays["state/w"].tobytes() == expected.tobytes()


def test_a_frozen_parameter_is_written_by_the_first_two_saves_only(directory: Path) -> None:
    state = run(directory, range(1, 5), **ALL)
    assert files(directory, 3) & files(directory, 1)
    assert files(directory, 4) & files(directory, 2)
    assert_resumes(directory, 4, state)


@pytest.mark.parametrize("how", ["swap", "data"])
def test_a_frozen_parameter_that_is_replaced_is_written(how: str, directory: Path) -> None:
    model = tuned()
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, range(1, 6))
        ckpt.wait_until_finished()
        if how == "data":
            model.base.weight.data = model.base.weight.data + 1
        else:
            model.base.weight = torch.nn.Parameter(model.base.weight + 1, requires_grad=False)
        ckpt.save(6, force=True)
    assert_resumes(directory, 6, training_state(model))


def assert_goes_on(directory: Path, first: int, last: int) -> None:
    """Asserts that steps after a restart link from the third save on, and the second one restored.

    The first save has the copy that the restored step lacks, which nobody has read: it is written.
    """
    for step in range(first, last + 1):
        assert not files(directory, step) & files(directory, step - 1)
        assert bool(files(directory, step) & files(directory, step - 2)) == (step > first), step


def test_a_run_that_went_back_shares_nothing_with_the_step_before(directory: Path) -> None:
    state = run(directory, range(1, 6), **ALL)
    model = tuned()
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model, shardings=fsdp_rule(fsdp_mesh()))
        for first in (3, 4):
            ckpt.restore(first)
            train(ckpt, model, range(first + 1, first + 4))
            ckpt.wait_until_finished()
            assert_goes_on(directory, first + 1, first + 3)
        state = training_state(model)
    assert_resumes(directory, 7, state)


def test_a_restarted_run_takes_over_the_step_that_it_restored(directory: Path) -> None:
    """Damage of the other copy, which it has not read, reaches no new step."""
    run(directory, range(1, 5), **ALL)
    flip_bit(path := data_file(directory, 3), path.stat().st_size // 2)
    state = run(directory, range(5, 8), **ALL)
    assert_goes_on(directory, 5, 7)
    assert_resumes(directory, 7, state)


def test_a_run_on_another_mesh_writes_each_copy_once(directory: Path) -> None:
    """Its arrays are cut into other blocks."""
    run(directory, range(1, 5), **ALL)
    mesh = fsdp_mesh(2)
    state = run(directory, range(5, 9), mesh, **ALL)
    for step in (5, 6, 7, 8):
        assert not files(directory, step) & files(directory, step - 1)
        assert bool(files(directory, step) & files(directory, step - 2)) == (step > 6)
    assert_resumes(directory, 8, state, mesh)


def test_damage_in_a_shared_file_never_reaches_two_neighbours(directory: Path) -> None:
    run(directory, range(1, 6), **ALL)
    with TorchaxCheckpointer(directory, options=REUSE) as ckpt:
        flip_bit(path := data_file(directory, 5), path.stat().st_size // 2)
        for step in (5, 3, 1):
            with pytest.raises(CorruptCheckpointError, match="base.weight"):
                ckpt.verify(step)
        for step in (4, 2):
            ckpt.verify(step)
    assert run(directory, range(5, 6))  # resumes from step 4


@pytest.mark.parametrize("keep", [policies.PreserveAll(), policies.LatestN(1)])
def test_nothing_is_taken_over_from_a_step_found_damaged(keep: Any, directory: Path) -> None:
    state = still_state(x=0)
    with TorchaxCheckpointer(directory, options=REUSE, preservation_policy=keep) as ckpt:
        for step in range(1, 10):
            save(ckpt, step, of={**state, "x": committed(np.full((4,), step))})
            if step == 5:
                flip_bit(path := data_file(directory, 5), path.stat().st_size // 2)
                with pytest.raises(CorruptCheckpointError, match="base"):
                    ckpt.verify(5)
        for step in {6, 7, 8, 9}.intersection(ckpt.all_steps()):
            ckpt.verify(step)
        assert 9 in ckpt.all_steps()


def test_a_folder_of_another_owner_is_left_alone(directory: Path) -> None:
    (directory / "unchanged" / "notes").mkdir(parents=True)
    for reuse in (True, False):
        options = CheckpointOptions(reuse=reuse)
        with TorchaxCheckpointer(directory, options=options) as ckpt:
            for step in (1, 2):
                save(ckpt, step + 2 * reuse, of=still_state(x=step))
        shutil.rmtree(directory / "1", ignore_errors=True)
    assert (directory / "unchanged" / "notes").is_dir()


def test_nothing_is_taken_over_from_a_step_that_was_not_compared(directory: Path) -> None:
    run(directory, range(1, 5), **ALL)
    unread = CheckpointOptions(reuse=True, verify="never")
    run(directory, range(5, 7), options=unread, **ALL)
    for step in (5, 6):
        assert not any(files(directory, step) & files(directory, old) for old in (1, 2, 3, 4))


def test_a_process_that_does_not_know_the_named_step_takes_nothing_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Reuse.candidate

    def of_another_commit(self: Reuse, *args: Any) -> list[Any]:
        copy, key, folder = find(self, *args)
        return [copy, key and (key[0], key[1] + 1), folder]

    monkeypatch.setattr(Reuse, "candidate", of_another_commit)
    states = [still_state(x=step) for step in range(6)]
    save_all(directory, states, preservation_policy=policies.PreserveAll())
    for step, state in enumerate(states[2:], start=3):
        assert not files(directory, step) & files(directory, step - 2)
        assert_holds(directory, step, state)


def test_a_damaged_index_costs_one_save(directory: Path) -> None:
    """The database cannot be merged, so that save fails; the next one writes all arrays."""
    model = tuned()
    with TorchaxCheckpointer(directory, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, range(1, 5))
        ckpt.wait_until_finished()
        index = directory / "3" / "state" / databases(directory, 3)[0] / "manifest.ocdbt"
        index.write_bytes(bytes(index.stat().st_size))
        train(ckpt, model, range(5, 6))
        with pytest.raises(SaveError, match="step 5"):
            ckpt.wait_until_finished()
        train(ckpt, model, range(6, 7))
    assert_resumes(directory, 6, training_state(model))


def test_where_links_are_refused_files_are_copied(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """From step to step; none is kept aside."""
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "no")))
    monkeypatch.setattr(local_medium, "_has_warned", False)
    with caplog.at_level(logging.WARNING, "torchax_ckpt"):
        state = run(directory, range(1, 6), **ALL)
    assert caplog.text.count("Unchanged arrays are copied from step to step") == 1
    assert not files(directory, 5) & files(directory, 3)
    assert_resumes(directory, 5, state)
    last = directory.with_name("last")
    run(last, range(1, 6), preservation_policy=policies.LatestN(1))
    assert entries(last) == {"5"}


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "blosc-zstd"},
        {"max_host_bytes": 1 << 20},
        pytest.param({"read_back": True}, marks=pytest.mark.slow),
        *(pytest.param({"snapshot": mode}, marks=pytest.mark.slow) for mode in OFFLOAD),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_reuse_goes_with_other_options(settings: dict[str, Any], directory: Path) -> None:
    options = CheckpointOptions(reuse=True, **settings)
    state = run(directory, range(1, 6), options=options, **ALL)
    assert files(directory, 5) & files(directory, 3)
    assert_resumes(directory, 5, state)


def test_the_newest_verified_step_shares_nothing_with_the_newest_one(directory: Path) -> None:
    """It is kept beside the one that the policy keeps."""
    state = still_state(x=0)
    latest = {"preservation_policy": policies.LatestN(1)}
    save_all(directory, 6 * [state], **latest)
    with TorchaxCheckpointer(directory, options=REUSE, **latest) as ckpt:
        assert ckpt.verify() == 6
        for step in range(7, 11):
            save(ckpt, step, of=state)
            assert ckpt.all_steps() == [6, step]
            assert not files(directory, step) & files(directory, 6)
    assert_holds(directory, 10, state)
    assert_holds(directory, 6, state)  # the mark does not disturb Orbax


@pytest.mark.parametrize(
    "rules",
    [
        (policies.LatestN(1), policies.EveryNSteps(4)),
        pytest.param((policies.LatestN(1), policies.EveryNSteps(3)), marks=pytest.mark.slow),
        pytest.param((policies.LatestN(2), policies.EveryNSteps(4)), marks=pytest.mark.long),
        pytest.param((policies.LatestN(1), policies.BestN(metric="loss")), marks=pytest.mark.slow),
    ],
)
def test_no_neighbours_share_whatever_is_kept(rules: tuple[Any, ...], directory: Path) -> None:
    """And after the first saves of a program, no save writes the unchanged arrays again."""
    state, events = still_state(x=0), list[Event]()
    for first, last in ((1, 10), (10, 15)):
        settings = {"preservation_policy": policies.AnyPreservationPolicy(rules)}
        with TorchaxCheckpointer(
            directory, options=REUSE, on_event=events.append, **settings
        ) as ckpt:
            if ckpt.attach():
                ckpt.load(abstract_state=abstract(state))
            for step in range(first, last):
                loss = {3: 1.0, 6: 0.5}.get(step, 2.0 + step % 3)
                ckpt.save(step, state=state, metrics={"loss": loss}, force=True)
                ckpt.wait_until_finished()
                used = [files(directory, kept) for kept in ckpt.all_steps()[-2:]]
                assert len(used) == 1 or not used[0] & used[1], (step, ckpt.all_steps())
    new = {e.step: e.values["new_bytes"] for e in events if e.name == "durable"}
    assert all(new[step] < 1 << 20 for step in range(5, 10)), new
    assert sum(new[step] > 1 << 20 for step in range(10, 15)) <= 1, new
    assert_holds(directory, 14, state)


def test_a_copy_that_no_step_has_any_more_is_kept_aside(directory: Path) -> None:
    """If one step is kept; without use, the folder goes."""
    latest = {"preservation_policy": policies.LatestN(1)}

    def aside() -> set[int]:
        return {p.stat().st_ino for p in (directory / "unchanged").rglob("d/*")}

    model = tuned()
    with TorchaxCheckpointer(directory, options=REUSE, **latest) as ckpt:
        ckpt.attach(model, shardings=fsdp_rule(fsdp_mesh()))
        for step in range(1, 6):
            kept = aside()
            train(ckpt, model, range(step, step + 1))
            ckpt.wait_until_finished()
            assert not aside() & files(directory, step)
            assert step < 3 or (kept and kept <= files(directory, step))
    restored = files(directory, 5)
    state = run(directory, range(6, 7), **latest)
    assert aside() <= restored
    assert_resumes(directory, 6, state)
    run(directory, range(7, 10), **ALL)
    assert not (directory / "unchanged").exists()


def test_orbax_does_not_list_what_is_kept_aside(directory: Path) -> None:
    run(directory, range(1, 6), preservation_policy=policies.LatestN(1))
    assert (directory / "unchanged").is_dir()
    with ocp.training.Checkpointer(directory) as checkpointer:
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [5]
    with v0.CheckpointManager(directory) as manager:
        assert manager.all_steps() == [5]


# --- against an oracle ---------------------------------------------------------------------------

HOST = ("t", "u")
LEAVES = ("h.0", "h.1", "h.2", "w", *HOST)
ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.sets(st.sampled_from(LEAVES), max_size=2)),
    st.tuples(st.just("save"), st.integers(1, 4)),
    st.tuples(st.just("restart"), st.sampled_from([8, 4, 1])),
    st.tuples(st.just("back"), st.integers(0, 2)),
    st.tuples(st.just("delete"), st.integers(0, 2)),
)


class Oracle:
    """A run of functional state, and what each of its steps must hold."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep
        values = {n: np.random.default_rng(i).random(1 << 17) for i, n in enumerate(LEAVES)}
        self.values = {n: v.astype(np.float32) if n in HOST else v for n, v in values.items()}
        self.saved: dict[int, dict[str, np.ndarray]] = {}
        self.step, self.num_devices = 0, 8
        self.open()

    def open(self) -> None:
        rule = policies.LatestN(self.keep)
        self.ckpt = TorchaxCheckpointer(self.directory, options=REUSE, preservation_policy=rule)
        self.step = self.ckpt.attach()
        self.load()

    def load(self) -> None:
        if self.step:
            state = self.ckpt.load(self.step, abstract(self.state()))
            self.values = {name: np.asarray(array) for name, array in state.items()}
            assert {n: v.tobytes() for n, v in self.values.items()} == {
                n: v.tobytes() for n, v in self.saved[self.step].items()
            }

    def state(self) -> dict[str, Any]:
        where = NamedSharding(fsdp_mesh(self.num_devices), P("fsdp"))
        return {
            n: v if n in HOST else jax.device_put(v.astype(np.float32), where)
            for n, v in self.values.items()
        }

    def train(self, leaves: set[str]) -> None:
        for name in leaves:
            if name in HOST:
                self.values[name] += np.float32(1)  # in place
            else:
                self.values[name] = self.values[name] + 1

    def save(self, times: int) -> None:
        for _ in range(times):
            self.step += 1
            state = self.state()
            self.ckpt.save(self.step, state=state, force=True)
            self.saved[self.step] = {n: np.array(a) for n, a in state.items()}

    def restart(self, num_devices: int) -> None:
        self.ckpt.close()
        self.num_devices = num_devices
        self.open()

    def back(self, index: int) -> None:
        self.ckpt.wait_until_finished()
        if steps := self.ckpt.all_steps():
            self.step = steps[index % len(steps)]
            self.ckpt.restore(self.step)
            self.load()

    def delete(self, index: int) -> None:
        self.ckpt.wait_until_finished()
        if len(steps := self.ckpt.all_steps()) > 1:
            self.ckpt.delete(steps[index % (len(steps) - 1)])

    def check(self) -> None:
        self.ckpt.close()
        steps = TorchaxCheckpointer(self.directory, options=CheckpointOptions(read_only=True))
        numbers = steps.all_steps()
        for step in numbers:
            steps.verify(step)
            assert not files(self.directory, step) & files(self.directory, step - 1)
        for step in numbers[:-1]:
            shutil.rmtree(self.directory / str(step))
        for arrays in by_orbax(self.directory, numbers[-1]) if numbers else ():
            for name, value in self.saved[numbers[-1]].items():
                assert arrays[f"state/{name}"].tobytes() == value.tobytes()


@pytest.mark.slow
@hypothesis.settings(max_examples=12)
@hypothesis.given(
    actions=st.lists(ACTIONS, min_size=8, max_size=20), keep=st.sampled_from([1, 2, 3])
)
@hypothesis.example(
    actions=[("save", 7), ("restart", 4), ("save", 2), ("train", {"w"}), ("save", 1)], keep=2
)
@hypothesis.example(
    actions=[("save", 6), ("train", {"t"}), ("save", 1), ("restart", 4), ("save", 3)], keep=3
)
def test_any_sequence_of_changes_saves_and_restarts_stores_what_was_saved(
    actions: list[tuple[str, Any]], keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    oracle = Oracle(tmp_path_factory.mktemp("runs") / "run", keep)
    for action, argument in actions:
        getattr(oracle, action)(argument)
    oracle.check()


def test_what_is_kept_aside_goes_when_reuse_is_off(directory: Path) -> None:
    latest = {"preservation_policy": policies.LatestN(1)}
    run(directory, range(1, 6), **latest)
    assert "unchanged" in entries(directory)
    run(directory, range(6, 7), options=CheckpointOptions(), **latest)
    assert "unchanged" not in entries(directory)
