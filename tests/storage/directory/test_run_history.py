"""What a run knows of its steps, and that knowing many costs a declined save nothing."""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from support.waiting import wait_until

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.processes.coordination import SINGLE_PROCESS
from torchax_ckpt.storage.directory.abandonment import Branches
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.storage.writing import array_writer

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


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A save does not get on until it is let go, and fails then."""
    go = threading.Event()

    def wait(*args: Any, **kwargs: Any) -> None:
        assert go.wait(60)
        raise OSError("let go")

    monkeypatch.setattr(array_writer, "write_arrays", wait)
    yield go
    go.set()


def wait_until_stuck(ckpt: TorchaxCheckpointer) -> None:
    """Waits until the thread of the save does nothing more that a declined save may notice."""
    save = ckpt._saver._in_flight
    assert save is not None
    wait_until(lambda: save.where().startswith("transferring the arrays"))


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


def median_secs(ckpt: TorchaxCheckpointer, first: int) -> float:
    taken = []
    for step in range(first, first + 1000):
        began = time.thread_time()  # the machine may have other work
        assert not ckpt.save(step, state=STATE)
        taken.append(time.thread_time() - began)
    return statistics.median(taken)


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("is_saving", [False, True], ids=["idle", "in_flight"])
def test_a_declined_save_costs_the_same_however_many_steps_are_kept(
    policy: str,
    is_saving: bool,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    stuck: threading.Event,
) -> None:
    counts = []
    for kept in (3, 10_000):
        known_steps(monkeypatch, directory, kept)
        ckpt = TorchaxCheckpointer(directory, save_decision_policy=copy.deepcopy(POLICIES[policy]))
        if is_saving:
            stuck.clear()
            assert ckpt.save(kept + 1, state=STATE, force=True)
            wait_until_stuck(ckpt)
        assert not ckpt.save(kept + 2, state=STATE)  # lists the directory
        counts.append(opcodes(ckpt, kept + 3))
        # 20 us is what it may take; the rest is for a machine that is busy with other things.
        assert median_secs(ckpt, kept + 4) < 10 * 20e-6
        if is_saving:
            assert ckpt._saver.is_saving
            stuck.set()
            with pytest.raises(SaveError, match="let go"):
                ckpt.close()
    assert 0 < counts[0] == counts[1] < 2000


def test_a_policy_is_shown_the_steps_themselves_and_no_copy(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Copying is one instruction of Python's, so that counting these does not see it.
    shown = []

    class Declines:
        def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
            shown.append(previous_steps)
            return False

    known_steps(monkeypatch, directory, 10_000)
    with TorchaxCheckpointer(directory, save_decision_policy=Declines()) as ckpt:
        for step in (10_001, 10_002):
            assert not ckpt.save(step, state=STATE)
    assert len(shown[0]) == 10_000
    assert shown[0] is shown[1]


def committed(directory: Path, step: int) -> CommittedStep:
    return CommittedStep(step, epath.Path(directory) / str(step), step)


def test_what_some_host_lacks_is_removed_but_no_summary_says_it_is_abandoned(
    directory: Path,
) -> None:
    """The hosts together may have all of it, and need it until a new step is on all of them."""
    durable, local = RunDirectory(directory), RunDirectory(directory.with_name("local"))
    of_durable = RunHistory(durable, SINGLE_PROCESS)
    history = RunHistory(local, SINGLE_PROCESS, of_durable)
    for step in (1, 2, 3, 4):
        history.begin(step)
        history.end(committed(directory, step))
    history.keep_only({(1, 1)})
    assert [c.step for c in history.checkpoints()] == [1]
    assert history.abandons() == of_durable.abandons() == []
    assert [s.step for s in history.branches.unwanted] == [2, 3, 4]
    history.refresh(committed(directory, step) for step in (1, 2, 4))
    assert [s.step for s in history.branches.unwanted] == [2, 4]
    history.begin(3)
    assert history.abandons() == [[4, 4]], "of a branch that the run has left"
    history.end(committed(directory, 3))
    assert [s.step for s in history.branches.unwanted] == [4, 2]
    history.clear_unwanted()
    assert [s.step for s in history.branches.in_place] == [1, 3]
