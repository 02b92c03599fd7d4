"""Two tiers: a local one for frequent saves in front of the durable one; together one run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
import signal
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import PROGRAMS
from support.compare import assert_trees_identical, folders, training_state
from support.damage import flip_arrays
from support.processes import run_python
from support.stages import Gate, at, fail_at
from support.steps import ALWAYS, save, save_due, state, two_tiers
from support.training import adamw, mlp, train_step

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.cli.show import steps_of
from torchax_ckpt.errors import (
    DirectoryError,
    LeaseError,
    SaveError,
    SaveTimeoutError,
    StepNotFoundError,
    TierError,
)
from torchax_ckpt.storage.directory import run_identity
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.telemetry.events import Event

KEEP_ALL = policies.PreserveAll()


@pytest.fixture
def ramdisk() -> Iterator[Path]:
    """A directory for the local tier, which does not exist yet."""
    there = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=there if there.is_dir() else None) as path:
        yield Path(path) / "steps"


# --- where steps go, and where they come from ----------------------------------------------------


def test_each_tier_has_policies_and_the_newest_step_wins(directory: Path, ramdisk: Path) -> None:
    model = mlp()
    optimizer = adamw(model)
    held = {}
    every_four = policies.FixedIntervalPolicy(4)
    with two_tiers(directory, ramdisk, durable=every_four, keep=2) as ckpt:
        assert ckpt.attach(model, optimizer) == 0
        for step in range(1, 8):
            train_step(model, optimizer, step)
            save_due(ckpt, step, of=None)
            held[step] = training_state(model, optimizer)
        assert ckpt.all_steps("durable") == [4]
        assert ckpt.all_steps("local") == [6, 7]
        assert ckpt.all_steps() == [4, 6, 7]
        assert (ckpt.latest_step(), ckpt.latest_step("durable")) == (7, 4)
    fresh = mlp()
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    with two_tiers(directory, ramdisk, durable=every_four, keep=2) as ckpt:
        assert ckpt.attach(fresh, fresh_optimizer) == 7
        assert_trees_identical(training_state(fresh, fresh_optimizer), held[7])
        assert ckpt.restore().tier == "local"
        report = ckpt.restore(tier="durable")
        assert (report.step, report.tier, report.skipped_steps) == (4, "durable", ())
        assert_trees_identical(training_state(fresh, fresh_optimizer), held[4])


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [re.sub("saved [0-9]+ s ago", "saved 0 s ago", m) for m in caplog.messages]


def test_a_restore_says_which_tier_has_served_it(
    directory: Path, ramdisk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with two_tiers(directory, ramdisk, durable=(1,)) as ckpt:
        ckpt.attach(stateful={})
        save_due(ckpt, 1, 2)
    events: list[Event] = []
    with (
        TorchaxCheckpointer(directory, local=LocalTier(ramdisk), on_event=events.append) as ckpt,
        caplog.at_level(logging.INFO, "torchax_ckpt"),
    ):
        assert ckpt.attach(stateful={}) == 2
        assert f"resumed from step 2 of {ramdisk} (local tier), saved 0 s ago" in messages(caplog)
        ckpt.restore(1)
        assert f"restored step 1 of {ramdisk} (local tier), saved 0 s ago" in messages(caplog)
        ckpt.restore(1, tier="durable")
        assert f"restored step 1 of {directory} (durable tier), saved 0 s ago" in messages(caplog)
    read = [Event.of_line(event.to_line()) for event in events]
    said = [event.values["tier"] for event in read if event and event.name == "restored"]
    assert said == ["local", "local", "durable"]


def test_a_step_that_both_tiers_want_is_captured_once(directory: Path, ramdisk: Path) -> None:
    taken: list[None] = []
    at("take the snapshot", lambda: taken.append(None))
    with two_tiers(directory, ramdisk, durable=ALWAYS) as ckpt:
        save_due(ckpt, 1, 2)
        assert len(taken) == 2
        for tier in ("durable", "local"):
            assert ckpt.all_steps(tier) == [1, 2]
            np.testing.assert_array_equal(ckpt.load(2, tier=tier)["w"], state(2)["w"])
        assert not ckpt.save(2, state=state(2), force=True)


def test_without_a_local_tier_there_is_none(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1)
        with pytest.raises(TierError, match="expected one of durable, found 'local'"):
            ckpt.all_steps("local")
        with pytest.raises(TierError, match="found 'ramdisk'"):
            ckpt.load(1, tier="ramdisk")  # type: ignore[arg-type]
    assert not (directory / run_identity.NAME).exists()


def test_a_step_is_found_verified_deleted_in_either_tier(directory: Path, ramdisk: Path) -> None:
    with two_tiers(directory, ramdisk, durable=policies.FixedIntervalPolicy(2)) as ckpt:
        save_due(ckpt, 1, 2, 3)
        assert ckpt.verify() == 3
        assert ckpt.verify(2) == 2
        assert (directory / "2" / "verified").exists()
        assert (ramdisk / "2" / "verified").exists()
        for place, spares in ((directory, True), (ramdisk, False)):
            kept = [rule for s in steps_of(RunDirectory(place))[0] for rule in s["kept_by"] or ()]
            assert ("newest verified" in kept) == spares
        ckpt.delete(2, tier="local")
        assert (ckpt.all_steps("local"), ckpt.all_steps("durable")) == ([1, 3], [2])
        with pytest.raises(StepNotFoundError, match=re.escape(f"{ramdisk}: no checkpoint at step")):
            ckpt.delete(2, tier="local")
        ckpt.delete(2)
        with pytest.raises(StepNotFoundError, match=r"run and .*steps: no .* 2; there are: 1, 3"):
            ckpt.load(2)


def test_a_local_tier_holds_one_step_more_than_it_keeps_and_never_two(
    directory: Path, ramdisk: Path
) -> None:
    """Though a restore has verified one; the durable tier spares that."""
    held: list[int] = []
    at("write the arrays", lambda: held.append(len(folders(ramdisk))), when="after", below=ramdisk)
    model = mlp()
    for start in (0, 4, 8):
        with TorchaxCheckpointer(
            directory,
            save_decision_policy=ALWAYS,
            preservation_policy=policies.LatestN(2),
            local=LocalTier(ramdisk, save_decision_policy=ALWAYS, keep=2),
        ) as ckpt:
            assert ckpt.attach(model) == start
            if start:
                assert ckpt.restore(tier="durable").is_verified
                report = ckpt.restore()
                assert (report.tier, report.is_verified) == ("local", True)
            save_due(ckpt, *range(start + 1, start + 5), of=None)
            assert ckpt.all_steps("local") == [start + 3, start + 4]
            kept = [start] if start else []
            assert ckpt.all_steps("durable") == [*kept, start + 3, start + 4]
    assert max(held) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": 3}, "expected a path on this host, found 3"),
        ({"path": "x", "keep": 0}, "keep: expected a positive int, found 0"),
        ({"path": "x", "keep": True}, "keep: expected a positive int, found True"),
        ({"path": "x", "replica_axis": ""}, "replica_axis: expected the name of a mesh axis"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalTier(**arguments)


def test_a_local_tier_in_a_bucket_is_refused(directory: Path) -> None:
    with pytest.raises(
        DirectoryError, match="LocalTier: path: expected a path on this host; found"
    ):
        TorchaxCheckpointer(directory, local=LocalTier("gs://bucket/x"))
    assert not directory.exists()


# --- what is lost, and what survives -------------------------------------------------------------


@pytest.mark.slow
def test_after_a_kill_the_newest_step_is_resumed(directory: Path, ramdisk: Path) -> None:
    def run(at: Path, kill_at: int, *, check: bool = True) -> list[str]:
        arguments = "killed_with_two_tiers", str(at), str(ramdisk), "9", str(kill_at)
        result = run_python(PROGRAMS / "saves.py", *arguments, devices=8, check=check)
        assert check or result.returncode == -signal.SIGKILL, result.stderr[-2000:]
        return result.stdout.splitlines()

    (_, never_killed) = run(directory.with_name("straight"), 0)
    shutil.rmtree(ramdisk)
    assert run(directory, 6, check=False) == ["start 0 None"]
    assert run(directory, 7, check=False) == ["start 6 local"]
    shutil.rmtree(ramdisk)  # as with the loss of the host
    assert run(directory, 0) == ["start 4 durable", never_killed]


def test_a_damaged_local_step_falls_back_to_a_durable_one(directory: Path, ramdisk: Path) -> None:
    with two_tiers(directory, ramdisk, durable=policies.FixedIntervalPolicy(3)) as ckpt:
        save_due(ckpt, 1, 2, 3)
    flip_arrays(ramdisk / "3")
    with two_tiers(directory, ramdisk) as ckpt:
        for step in (None, 3):
            with pytest.warns(UserWarning, match=re.escape(f"step 3 in {ramdisk}/3")):
                found = ckpt.load(step)
            np.testing.assert_array_equal(found["w"], state(3)["w"])
        flip_arrays(directory / "3")
        with pytest.warns(UserWarning, match="step 3 in"):
            np.testing.assert_array_equal(ckpt.load()["w"], state(2)["w"])


def test_a_full_local_tier_costs_its_own_saves_only(directory: Path, ramdisk: Path) -> None:
    free = fail_at("write the arrays", OSError(28, "No space left on device"), below=ramdisk)
    with two_tiers(directory, ramdisk, durable=ALWAYS) as ckpt:  # closes without raising
        assert ckpt.save(1, state=state(1))
        with pytest.raises(SaveError, match=rf"step 1 to {ramdisk} failed: .* No space left"):
            ckpt.wait_until_finished()
        assert (ckpt.all_steps("durable"), ckpt.all_steps("local")) == ([1], [])
        free()
        save_due(ckpt, 2)
        assert ckpt.all_steps("local") == [2]


def test_a_slow_durable_tier_does_not_hold_up_the_local_one(directory: Path, ramdisk: Path) -> None:
    gate = Gate("write the arrays", when="after", below=directory)
    try:
        with two_tiers(directory, ramdisk, durable=(1,)) as ckpt:
            assert ckpt.save(1, state=state(1))
            assert gate.entered.wait(60)
            for step in range(2, 6):
                assert ckpt.save(step, state=state(step))
            with pytest.raises(SaveTimeoutError, match=f"the save of step 1 to {directory}"):
                ckpt.wait_until_finished(timeout_secs=2)
            assert ckpt._run.local is not None
            ckpt._run.local.wait()
            assert (ckpt.all_steps("durable"), ckpt.all_steps("local")) == ([], [1, 2, 3, 4, 5])
            gate.opened.set()
            ckpt.wait_until_finished()
            assert ckpt.all_steps("durable") == [1]
            assert ckpt.verify(1) == 1
    finally:
        gate.opened.set()


def test_a_preemption_saves_to_the_durable_tier(
    directory: Path, ramdisk: Path, preempt: Callable[[], None]
) -> None:
    with two_tiers(directory, ramdisk) as ckpt:
        save_due(ckpt, 1, 2)
        preempt()
        assert ckpt.save(3, state=state(3))
        assert (ckpt.all_steps("durable"), ckpt.all_steps("local")) == ([3], [1, 2])


# --- going back ----------------------------------------------------------------------------------


def test_going_back_abandons_what_is_newer_in_both_tiers(directory: Path, ramdisk: Path) -> None:
    model = mlp()
    with two_tiers(directory, ramdisk, durable=(2, 4)) as ckpt:
        ckpt.attach(model)
        save_due(ckpt, *range(1, 6), of=None)
        ckpt.restore(3)
        assert ckpt.all_steps() == [1, 2, 3, 4, 5]  # until something new is there
        assert ckpt.save(4, force=False)  # both tiers, of the new branch
        ckpt.wait_until_finished()
        assert folders(directory) == {"2", "4", "abandoned-4"}
        assert folders(ramdisk) == {"1", "2", "3", "4"}  # whose room is needed


def test_a_durable_step_abandoned_locally_never_comes_back(directory: Path, ramdisk: Path) -> None:
    """Though it is in place until something new is durable, and its number is below the newest."""
    rare = types.SimpleNamespace(steps=(1, 3))
    rare.should_save = lambda step, previous_steps, context: step.step in rare.steps
    with two_tiers(directory, ramdisk, durable=rare, keep=2) as ckpt:
        ckpt.attach(stateful={})
        save_due(ckpt, 1, 2, 3)
        ckpt.restore(2)
        rare.steps = ()
        save_due(ckpt, *range(3, 9), of=lambda step: {"w": np.full(3, -step)})
        assert folders(directory) == {"1", "3"}
        assert (ckpt.all_steps("durable"), ckpt.all_steps("local")) == ([1], [7, 8])
    with two_tiers(directory, ramdisk, durable=rare, keep=2) as ckpt:
        assert ckpt.attach(stateful={}) == 8
        save_due(ckpt, 9, 10, 11)  # by now nothing is left that was saved right after going back
        assert (ckpt.all_steps("durable"), ckpt.all_steps("local")) == ([1], [10, 11])
        save(ckpt, 12)
        assert folders(directory) == {"1", "12", "abandoned-3"}


def test_deleting_a_step_brings_nothing_abandoned_back(directory: Path, ramdisk: Path) -> None:
    rare = 3, 5, 10
    only = policies.SpecificStepsPolicy((6, 7))
    with two_tiers(directory, ramdisk, durable=rare, local=only, keep=1) as ckpt:
        ckpt.attach(stateful={})
        save_due(ckpt, 3, 5, 10)
        ckpt.restore(5)
        save_due(ckpt, 6)  # locally, where it says that 10 is abandoned
        ckpt.delete(3)
        save_due(ckpt, 7)
    with two_tiers(directory, ramdisk) as ckpt:
        assert ckpt.all_steps() == [5, 7]
        assert ckpt.attach(stateful={}) == 7


# --- whose ramdisk it is -------------------------------------------------------------------------


def test_a_removed_run_is_not_resumed_from_its_ramdisk(directory: Path, ramdisk: Path) -> None:
    with two_tiers(directory, ramdisk) as ckpt:
        save_due(ckpt, 1, 2)
    shutil.rmtree(directory)
    with two_tiers(directory, ramdisk) as ckpt:
        assert ckpt.attach(stateful={}) == 0
        assert ckpt.all_steps() == []
        assert folders(ramdisk) == {"1", "2"}  # reading changes nothing
        save_due(ckpt, 1)
        assert folders(ramdisk) == {"1"}
        assert ckpt.all_steps() == [1]


def test_the_ramdisk_of_another_run_is_not_taken_over(directory: Path, ramdisk: Path) -> None:
    with two_tiers(directory, ramdisk) as ckpt:
        save_due(ckpt, 1, 2)
        with two_tiers(directory.with_name("other"), ramdisk) as other:
            assert other.all_steps() == []
            with pytest.raises(LeaseError, match=re.escape(f"{ramdisk}: another program writes")):
                other.save(1, state=state(1))
        assert ckpt.all_steps() == [1, 2]
    with two_tiers(directory.with_name("other"), ramdisk) as other:
        save(other, 7)
        assert other.all_steps() == [7]
    with two_tiers(directory, ramdisk) as ckpt:
        assert ckpt.all_steps() == []  # nothing of it was durable


def test_what_an_absent_host_has_kept_is_not_resumed_from(directory: Path, ramdisk: Path) -> None:
    """The run goes on without it, from an older step, on another host or without a local tier."""
    elsewhere = ramdisk.with_name("elsewhere")
    with two_tiers(directory, ramdisk, durable=(1,)) as ckpt:
        save_due(ckpt, 1, 2, 3)
    with two_tiers(directory, elsewhere) as ckpt:
        assert ckpt.load()["w"].tolist() == [1, 1, 1]
        assert ckpt.all_steps("local") == []
    with two_tiers(directory, ramdisk) as ckpt:
        assert ckpt.all_steps() == [1, 2, 3], "only who saves goes on"
    with two_tiers(directory, elsewhere) as ckpt:
        save_due(ckpt, 2)
    with two_tiers(directory, ramdisk) as ckpt:
        assert ckpt.all_steps() == [1]
    with two_tiers(directory, elsewhere) as ckpt:
        assert ckpt.all_steps() == [1, 2]
        save_due(ckpt, 3)
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as alone:
        alone.delete(1)
    with two_tiers(directory, elsewhere) as ckpt:
        assert ckpt.all_steps() == [2, 3], "who deletes does not"
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as alone:
        save(alone, 4)
    with two_tiers(directory, elsewhere) as ckpt:
        assert ckpt.all_steps() == [4]
        save_due(ckpt, 5)
        assert ckpt.all_steps("local") == [5]


def test_what_users_call_run_is_left_alone(directory: Path, ramdisk: Path) -> None:
    directory.mkdir()
    (directory / "run").write_text("#!/bin/sh\n")
    with TorchaxCheckpointer(directory) as alone:
        save(alone, 1)
    assert (directory / "run").read_text() == "#!/bin/sh\n"
    with (
        two_tiers(directory, ramdisk) as ckpt,
        pytest.raises(DirectoryError, match="expected the name of a run, found something else"),
    ):
        ckpt.save(2, state=state(2))
    assert (directory / "run").read_text() == "#!/bin/sh\n"


@pytest.mark.parametrize("call", [1, 2, 3])
def test_killed_while_the_run_is_named_anew_no_local_step_is_lost(
    call: int, directory: Path, ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_tiers(directory, ramdisk) as ckpt:
        save_due(ckpt, 1)
    replace, count = os.replace, itertools.count(1)

    def killed(draft: Any, path: Any) -> None:
        if Path(path).name == run_identity.NAME and next(count) == call:
            raise KeyboardInterrupt
        replace(draft, path)

    monkeypatch.setattr(os, "replace", killed)
    with contextlib.suppress(KeyboardInterrupt), two_tiers(directory, ramdisk) as ckpt:
        save_due(ckpt, 2)
    monkeypatch.undo()
    with two_tiers(directory, ramdisk) as ckpt:
        assert ckpt.all_steps() == ([1] if call < 3 else [1, 2])
        save_due(ckpt, 3)
    assert sorted(c.name for c in ramdisk.iterdir() if c.name.startswith("run")) == ["run"]
    with two_tiers(directory, ramdisk) as ckpt:
        assert ckpt.latest_step() == 3


def test_the_first_save_says_that_a_tier_cannot_be_created(directory: Path, ramdisk: Path) -> None:
    ramdisk.parent.mkdir(exist_ok=True)
    with two_tiers(directory, ramdisk / "below") as ckpt:
        ramdisk.write_text("in the way")
        said = re.escape(f"cannot create and write {ramdisk}/below")
        with pytest.raises(DirectoryError, match=said):
            ckpt.save(1, state=state(1))
    with pytest.raises(DirectoryError, match="expected a directory, found a file"):
        two_tiers(directory, ramdisk)


def test_a_late_first_save_mixes_in_neither_tier(directory: Path, ramdisk: Path) -> None:
    with two_tiers(directory, ramdisk) as ckpt:
        save_due(ckpt, 1)
        ckpt.wait_until_finished()
    late = two_tiers(directory, ramdisk)
    assert late.attach() == 1
    with two_tiers(directory, ramdisk) as ckpt:
        save_due(ckpt, 2, 3, 4)
    found = folders(directory), folders(ramdisk)
    for _ in range(2):
        with pytest.raises(LeaseError, match="has saved steps"):
            late.save(2, state=state(2), force=True)
    late.close()
    assert (folders(directory), folders(ramdisk)) == found
    with two_tiers(directory, ramdisk) as ckpt:
        assert ckpt.attach() == 4
