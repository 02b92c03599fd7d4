"""What a run knows of its steps, and that knowing many costs a declined save nothing."""

from __future__ import annotations

import copy
import gc
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from support.held import held

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.processes.coordination import SINGLE_PROCESS
from torchax_ckpt.saving import run_history
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.storage.directory.abandonment import Branches
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import bucket_medium
from torchax_ckpt.storage.medium.bucket_medium import BucketMedium

STATE = {"w": np.zeros(4)}
NEVER = 10**9


def optimal() -> policies.OptimalIntervalPolicy:
    policy = policies.OptimalIntervalPolicy(mtbf_secs=NEVER)
    policy.observe_save(blocking_secs=NEVER, durable_secs=1)
    return policy


POLICIES = {
    "fixed": policies.FixedIntervalPolicy(NEVER),
    "continuous": policies.ContinuousCheckpointingPolicy(minimum_interval_secs=NEVER),
    "optimal": optimal(),
}


def known_steps(monkeypatch: pytest.MonkeyPatch, directory: Path, count: int) -> None:
    """As if the directory held this many steps, the newest of this moment."""
    now = time.time_ns()
    path = epath.Path(directory)
    steps = tuple(CommittedStep(s, path / str(s), now - count + s) for s in range(1, count + 1))
    monkeypatch.setattr(RunDirectory, "branches", lambda self: Branches(steps))


def opcodes(ckpt: TorchaxCheckpointer, step: int) -> int:
    """How many instructions Python carries out for one save that declines."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection would call what others have registered for it
    sys.settrace(trace)
    try:
        began = ckpt.save(step, state=STATE)
    finally:
        sys.settrace(before)
        gc.enable()
    assert not began
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_declined_save_costs_the_same_however_many_steps_are_kept(
    policy: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for kept in (3, 10_000):
        known_steps(monkeypatch, directory, kept)
        ckpt = TorchaxCheckpointer(directory, save_decision_policy=copy.deepcopy(POLICIES[policy]))
        assert not ckpt.save(kept + 2, state=STATE)  # lists the directory
        counts.append(opcodes(ckpt, kept + 3))
    assert 0 < counts[0] == counts[1] < 2150


def committed(directory: Path, step: int) -> CommittedStep:
    return CommittedStep(step, epath.Path(directory) / str(step), step)


def test_what_some_host_lacks_is_removed_but_not_abandoned(directory: Path) -> None:
    """The hosts together may have all of it, and need it until a new step is on all of them."""
    durable, local = RunDirectory(directory), RunDirectory(directory.with_name("local"))
    of_run: list[RunHistory] = []
    of_durable = RunHistory(durable, SINGLE_PROCESS, of_run)
    history = RunHistory(local, SINGLE_PROCESS, of_run)
    for step in (1, 2, 3, 4):
        history.begin(step)
        history.succeed(committed(directory, step), {})
    history.keep_only({(1, 1)})
    assert [c.step for c in history.checkpoints()] == [1]
    assert history.abandons() == of_durable.abandons() == []
    assert [s.step for s in history.branches.unwanted] == [2, 3, 4]
    history.refresh(committed(directory, step) for step in (1, 2, 4))
    assert [s.step for s in history.branches.unwanted] == [2, 4]
    history.begin(3)
    assert history.abandons() == [[4, 4]], "of a branch that the run has left"
    history.succeed(committed(directory, 3), {})
    assert [s.step for s in history.branches.unwanted] == [4, 2]
    history.refresh(history.branches.committed)
    assert [s.step for s in history.branches.in_place] == [1, 3]


def test_a_listing_that_fails_costs_the_run_no_step(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = RunDirectory(directory)
    history = RunHistory(steps, SINGLE_PROCESS)
    there = Branches(tuple(committed(directory, step) for step in (2, 3)))

    def refuse() -> Branches:
        raise OSError(5, "no answer")

    monkeypatch.setattr(steps, "branches", lambda: there)
    history.open()
    monkeypatch.setattr(steps, "branches", refuse)
    with pytest.raises(OSError, match="no answer"):
        history.go_on_from(2)
    with pytest.raises(OSError, match="no answer"):
        history.begin(4)
    history.fail(4, None)
    assert [s.step for s in history.branches.in_place] == [2, 3]
    monkeypatch.setattr(steps, "branches", lambda: there)
    history.begin(5)
    assert [c.step for c in history.checkpoints()] == [2, 3, 5]


@pytest.mark.parametrize("is_tidying", [True, False])
def test_a_save_that_ends_while_the_other_tier_goes_back_loses_nothing(
    is_tidying: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread begins a save to one tier; the thread of the other's save ends it."""
    of_run: list[RunHistory] = []
    local = RunHistory(RunDirectory(directory), SINGLE_PROCESS, of_run)
    other = RunHistory(RunDirectory(directory.with_name("local")), SINGLE_PROCESS, of_run)
    for step in (2, 5):
        local.begin(step)
        local.succeed(committed(directory, step), {})
    local.begin(6)
    describe, going_back = run_history.checkpoint_info, list[threading.Thread]()

    def meanwhile(*args: Any) -> Any:
        if not going_back:
            going_back.append(threading.Thread(target=other.begin, args=(3,)))
            going_back[0].start()
            going_back[0].join(0.1)  # as far as it comes
        return describe(*args)

    monkeypatch.setattr(run_history, "checkpoint_info", meanwhile)
    if is_tidying:
        local.refresh(local.branches.in_place)
    else:
        local.succeed(committed(directory, 6), {})
    going_back[0].join()
    assert not local.has(5), "a save of this step would be declined"
    assert [c.step for c in local.checkpoints() if c.step != 6] == [2]
    assert [s.step for s in local.branches.committed] == [2]
    left = [5] if is_tidying else [5, 6]
    assert [s.step for s in local.branches.abandoned] == left


def test_what_process_0_has_deleted_is_forgotten_by_all(directory: Path) -> None:
    """Only process 0 deletes. The others go on for millions of saves too."""
    steps = RunDirectory(directory)
    history = RunHistory(steps, SINGLE_PROCESS)
    sizes = []
    for step in range(1, 9):
        history.begin(step)
        history.succeed(committed(directory, step), {"metrics": {"loss": step}})
        steps.verified.note(committed(directory, step), is_sound=True)
        history.refresh(history.branches.committed[-2:])
        sizes.append(held([steps, history]))
    assert sizes[3] == sizes[-1]
    assert steps.metrics(committed(directory, 8)) == {"loss": 8}


@pytest.mark.parametrize("gap", [1, 3])
def test_a_program_writes_no_two_saves_under_one_name_of_a_bucket(
    gap: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late request of the one could overwrite a file of the other; nor does it keep all names."""
    monkeypatch.setattr(bucket_medium, "_USED_NAMES", 5)
    storage = BucketMedium(epath.Path(directory))
    # Straight on, then back to the start, with steps of other numbers, and the same one repeatedly.
    numbers = [*range(1, 40), *range(1, 40, gap), *[7] * 8, *range(38, 60)]
    names = [storage.begin(number, "token").name for number in numbers]
    assert len(set(names)) == len(names)
    assert all(
        re.fullmatch(rf"(incoming-)?{n}(-\d+)?", name)
        for n, name in zip(numbers, names, strict=True)
    )
    assert names[:39] == [str(number) for number in range(1, 40)]
    assert names[-20:] == [str(number) for number in range(40, 60)]
    assert len(storage._used_names) == 5


def test_no_age_is_negative_if_the_clock_of_the_host_that_committed_is_ahead() -> None:
    ahead = time.time_ns() + 3600 * 10**9
    assert CommittedStep(1, epath.Path("1"), ahead).age_secs == 0
