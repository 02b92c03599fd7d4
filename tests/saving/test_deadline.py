"""A session that ends at a known time: the last step is durable before, on all processes alike."""

from __future__ import annotations

import datetime
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.group import Group
from support.processes import Running
from support.stages import fail_at
from support.training import mlp
from support.waiting import T0, Clock, wait_until

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import ArgumentError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.training_loop import deadline
from torchax_ckpt.saving.training_loop.deadline import Deadline

NEVER = policies.SpecificStepsPolicy(())
END = T0 + 1000
EXIT_CODE = 143
IMPORTED_AT = time.time()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(deadline, "time", made := Clock())
    return made


@pytest.fixture
def ckpt(directory: Path) -> Iterator[TorchaxCheckpointer]:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as made:
        made.attach(mlp())
        yield made


def train(ckpt: TorchaxCheckpointer, clock: Clock, total: int = 100, until: Any = END) -> list[int]:
    """Trains steps of 100 s; returns which."""
    trained = []
    for step in ckpt.steps(total, until=until):
        clock.sleep(100)
        trained.append(step)
    return trained


# --- when the last step is -----------------------------------------------------------------------


def test_a_load_between_steps_does_not_hide_how_long_they_take(
    directory: Path, clock: Clock
) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
        ckpt.attach(mlp())
        ckpt.save(0, force=True)
        ckpt.wait_until_finished()
        trained = []
        for step in ckpt.steps(100, until=clock.now + 1000):
            clock.sleep(100)
            ckpt.load(0)
            trained.append(step)
    assert trained == [*range(1, 10)], "a tenth would end at the deadline"


@pytest.mark.parametrize(
    ("secs", "save_secs", "last"),
    [
        ([100], 40.0, 9),  # 100 s are left, and 190 s needed
        ([100], 60.0, 8),  # 200 s are left, and 220 s needed
        ([400, 50], 20.0, 11),  # 100 s and 110 s: the first step, which compiles, does not count
        ([50, 50, 300, 50], 20.0, 8),  # 350 s and 360 s: one step took 300 s
        ([50] * 9 + [900], 20.0, 10),  # the last step took longer than what was left
    ],
)
def test_the_run_ends_while_the_longest_step_and_a_save_still_fit(
    secs: list[float], save_secs: float | None, last: int, clock: Clock, ckpt: TorchaxCheckpointer
) -> None:
    ckpt._run.deadline._longest_save_secs = lambda: save_secs
    trained = []
    for step in ckpt.steps(100, until=END):
        clock.sleep(secs[min(step, len(secs)) - 1])
        trained.append(step)
    assert trained == list(range(1, last + 1))
    assert ckpt.all_steps() == [last]  # durable already, whatever the policy says
    assert ckpt.reached_deadline()
    assert not ckpt.reached_preemption()


@pytest.mark.parametrize("num_failures", [0, 2])
def test_a_save_is_due_after_half_of_the_time_until_a_step_is_durable(
    num_failures: int, clock: Clock, ckpt: TorchaxCheckpointer
) -> None:
    for _ in range(num_failures):  # what fails at one of these is not seen by the next
        fail_at("write the arrays", OSError("failed"), number=1)
    for _ in ckpt.steps(100, until=END):
        clock.sleep(100)
        ckpt._saver.wait()
    assert ckpt.all_steps() == [5 + num_failures, 9]


def test_no_save_is_due_if_a_step_is_durable_or_no_deadline_is_known(
    clock: Clock, ckpt: TorchaxCheckpointer
) -> None:
    ckpt.save(1, force=True)
    train(ckpt, clock)
    assert ckpt.all_steps() == [1, 10]
    clock.now = 2 * T0
    for _ in ckpt.steps(13):
        clock.sleep(100)
    ckpt.wait_until_finished()
    assert ckpt.all_steps() == [1, 10, 13]


def test_a_restore_within_the_loop_is_no_long_step(clock: Clock, ckpt: TorchaxCheckpointer) -> None:
    trained = []
    for step in ckpt.steps(100, until=END):
        clock.sleep(50)
        trained.append(step)
        if step == 2:
            ckpt.save(2, force=True)
            ckpt.wait_until_finished()
        if len(trained) == 4:
            clock.sleep(200)
            ckpt.restore(2)
    assert len(trained) == 15
    assert trained[3:6] == [4, 3, 4]


# --- what the end of the run is ------------------------------------------------------------------


def test_a_run_that_ends_before_its_deadline_exits_for_a_restart_which_finishes_it(
    clock: Clock, directory: Path
) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
        ckpt.attach(mlp())
        assert train(ckpt, clock, 12) == list(range(1, 10))
    with pytest.raises(SystemExit) as exited:
        ckpt.exit_if_preempted()
    assert exited.value.code == EXIT_CODE
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        # The deadline comes while the last step is trained: the run is finished all the same.
        assert train(ckpt, clock, 12, until=clock.now + 340) == [10, 11, 12]
        ckpt.exit_if_preempted()
        assert train(ckpt, clock, 12, until=T0) == []
        ckpt.exit_if_preempted()
    assert not ckpt.reached_deadline()


@pytest.mark.parametrize("left_secs", [-70, 29])
def test_without_time_for_a_step_there_is_none_and_a_warning(
    left_secs: float, clock: Clock, ckpt: TorchaxCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(ckpt, clock, until=clock.now + left_secs) == []
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (
        f"no step is trained: {left_secs} s are left before the deadline, and 30 s are needed"
        in (warned.getMessage())
    )
    with pytest.raises(SystemExit):
        ckpt.exit_if_preempted()


def test_a_loop_of_ones_own_ends_by_the_deadline_of_the_options(
    clock: Clock, directory: Path
) -> None:
    options = CheckpointOptions(deadline=END, deadline_margin_secs=230)
    ckpt = TorchaxCheckpointer(directory, save_decision_policy=NEVER, options=options)
    asked = []
    with pytest.raises(SystemExit):
        for step in range(1, 100):
            clock.sleep(100)
            must_save = ckpt.should_save(step)
            asked.append((ckpt.reached_deadline(step), must_save))
            ckpt.save(step, state={"x": 1.5})
            ckpt.exit_if_preempted(step)
    assert step == 7
    assert asked == [(False, False)] * 5 + [(False, True), (True, True)]
    assert TorchaxCheckpointer(directory).all_steps() == [6, 7]


@pytest.mark.parametrize(("noticed_at", "last"), [(3, 3), (9, 9)])
def test_the_earlier_of_a_sigterm_and_the_deadline_ends_the_run(
    noticed_at: int,
    last: int,
    clock: Clock,
    ckpt: TorchaxCheckpointer,
    preempt: Callable[[], None],
) -> None:
    steps = ckpt.steps(100, until=END)
    for step in steps:
        clock.sleep(100)
        if step == noticed_at:
            preempt()
    assert (step, max(ckpt.all_steps())) == (last, last)
    assert ckpt.reached_preemption()
    assert ckpt.reached_deadline() is (last == 9)
    with pytest.raises(SystemExit):
        ckpt.exit_if_preempted()


# --- times ---------------------------------------------------------------------------------------


def test_a_deadline_is_a_point_in_time_or_counts_from_the_start_of_the_process(
    directory: Path,
) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=5))
    at = datetime.datetime(2026, 12, 1, 17, 30, tzinfo=zone)
    assert deadline._unix_time("until", at) == 1796128200
    assert deadline._unix_time("until", 1796128200) == 1796128200
    stat, boot = Path("/proc/self/stat").read_text(), Path("/proc/stat").read_text()
    booted = int(re.findall(r"^btime (\d+)$", boot, re.M)[0])  # in whole seconds
    started = booted + int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    found = deadline._unix_time("until", datetime.timedelta(hours=9)) - 9 * 3600
    assert abs(found - started) < 1.5
    assert found < IMPORTED_AT


@pytest.mark.parametrize(
    "until",
    [
        datetime.datetime(2030, 1, 1),  # in which time zone?
        datetime.date(2030, 1, 1),
        9 * 3600,
        1.8e12,  # milliseconds
        float("nan"),
        True,
        datetime.timedelta(0),
        "1796128200",
    ],
    ids=str,
)
def test_what_cannot_be_such_a_time_is_refused_with_what_to_give(
    until: Any, ckpt: TorchaxCheckpointer
) -> None:
    said = (
        f"expected a datetime with a time zone, a .* found {re.escape(repr(until))}. For a local "
        r"time give its astimezone\(\), for a duration datetime.timedelta\(seconds=...\), and in a "
        r"job of Slurm int\(os.environ\['SLURM_JOB_END_TIME'\]\)"
    )
    with pytest.raises(ArgumentError, match=f"^until: {said}"):
        ckpt.steps(3, until=until)
    with pytest.raises(ArgumentError, match=f"^CheckpointOptions: deadline: {said}"):
        TorchaxCheckpointer(ckpt.directory, options=CheckpointOptions(deadline=until))


# --- several processes ---------------------------------------------------------------------------


class Members:
    """Three processes as threads. Process 0 alone knows the time, which ends at its step 30."""

    def __init__(self, clock: Clock) -> None:
        self.group, self.asked, self.is_over = Group(timeout_secs=20), [0] * 3, [False] * 3
        self._clock = clock

    def __call__(self, total: int, train: Callable[[int, int], None]) -> list[Any]:
        """Trains as ``train(index, step)`` says; returns each last step, negative at ``total``."""

        def act(member: Processes) -> int:
            until, index = END if member.is_first else T0 + 1e8, member.index
            ending = Deadline(member, None, 30, lambda: None)
            ending.begin(until, 0, total)
            for step in range(1, total + 1):
                train(index, step)
                if index == 0 and step == 30:
                    self._clock.now = END - 20
                self.asked[index] = step
                if ending.reached(step):
                    break
            self.is_over[index] = True
            ending.close()
            return step if ending.reached() else -step

        return self.group(act)


@pytest.fixture
def members(clock: Clock) -> Members:
    return Members(clock)


def test_processes_that_are_many_steps_apart_end_after_the_same_step(members: Members) -> None:
    furthest = 0

    def train(index: int, step: int) -> None:
        nonlocal furthest
        asked, is_over = members.asked, members.is_over
        ahead = (0, 20, -5)[index]  # of process 0, which at first waits for the others to be so
        if index:
            wait_until(lambda: is_over[0] or asked[0] > step - 1 - ahead)
        elif step <= 30:
            wait_until(lambda: asked[1] >= step + 19)
            furthest = max(asked)

    first, *others = members(10_000, train)
    assert others == [first, first]
    assert 49 <= furthest < first <= furthest + 3


def test_a_process_in_a_long_step_keeps_no_other_from_ending_and_ends_after_the_same_step(
    members: Members,
) -> None:
    def train(index: int, step: int) -> None:
        if (index, step) == (2, 5):
            wait_until(lambda: members.is_over[0] and members.is_over[1])
        if index == 1:
            wait_until(lambda: members.asked[0] >= step)

    first, *others = members(10_000, train)
    assert others == [first, first]
    assert first in (31, 32)


@pytest.mark.parametrize("leaving", [0, 1])
def test_if_a_process_has_ended_its_loop_the_others_come_to_its_end_too(
    leaving: int, members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    def train(index: int, step: int) -> None:
        if index != leaving and step == 30:
            wait_until(lambda: members.is_over[leaving])
            if leaving:
                time.sleep(0.6)  # until it has closed

    began = time.monotonic()
    total = 40 if leaving else 29
    assert members(total, train) == [-total] * 3
    assert time.monotonic() - began < 15, "the timeout is 20 s"
    assert [record.levelname for record in caplog.records if record.levelname != "INFO"] == []


def test_if_a_process_has_died_the_others_go_on_and_say_so(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    def train(index: int, step: int) -> None:
        if index == 1:
            wait_until(lambda: members.asked[0] >= step)
        if (index, step) == (2, 5):
            wait_until(lambda: members.is_over[0] and members.is_over[1])

    dead = members.group.members[2]
    dead.wait_for_note = lambda key: time.sleep(0.1)  # type: ignore[method-assign]
    for member in members.group.members:
        died = {2: "process 2 of 3, on host a, died"}
        member.liveness.ended = died.copy  # type: ignore[method-assign]
    assert members(40, train) == [-40] * 3
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2
    for record in warned:
        text = "the run goes on without its deadline: .*process 2 of 3, on host a, died"
        assert re.match(text, record.getMessage())


def test_training_threads_send_no_messages_until_the_end(members: Members) -> None:
    speaking: list[str] = []
    service = members.group.service

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            speaking.append(threading.current_thread().name)
            return method(*args, **options)

        return call

    def train(index: int, step: int) -> None:
        if step == 1:
            for name in ("key_value_set_bytes", "blocking_key_value_get_bytes"):
                setattr(service, name, noting(getattr(service, name)))

    assert members(29, train) == [-29] * 3
    assert set(speaking) == {"last-step"}


def test_the_last_step_may_come_after_going_back(clock: Clock) -> None:
    together = threading.Barrier(3)

    def act(member: Processes) -> tuple[int, int]:
        ending = Deadline(member, None, 30, lambda: None)
        ending.begin(END)
        for position in ((0, 3), (0, 4), (1, 2), (1, 3), (1, 4), (1, 5)):
            together.wait(60)
            member.log.num_restores, step = position
            if position == (0, 4) and member.is_first:
                clock.now = END - 20
            if ending.reached(step):
                break
        ending.close()
        return position

    first, *others = Group()(act)
    assert others == [first, first]
    assert first in ((1, 2), (1, 3)), "the run has come to (0, 4)"


TWO = """
    import os, signal, sys, time
    from processes_program import INDEX, report
    import torchax
    from support.waiting import Clock
    from torchax_ckpt import TorchaxCheckpointer, policies
    from torchax_ckpt.saving.training_loop import deadline

    class Counted:
        def state_dict(self): return {"step": step}
        def load_state_dict(self, state): pass

    torchax.enable_globally()
    place, told_at, secs = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
    deadline.time = clock = Clock()
    until = clock.now + secs
    clock.now += 1e8 * INDEX
    with TorchaxCheckpointer(place, save_decision_policy=policies.SpecificStepsPolicy(())) as ckpt:
        ckpt.attach(stateful={"counted": Counted()})
        for step in ckpt.steps(100_000, until=until):
            clock.sleep(10)
            time.sleep(0.002 if INDEX else 0.01)
            if step == told_at and INDEX == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        ended = [ckpt.reached_deadline(), ckpt.reached_preemption()]
        report(step=step, steps=ckpt.all_steps(), ended=ended)
    ckpt.exit_if_preempted()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told_at", "secs", "ended"), [(0, 1000, [True, False]), (3, 200_000, [False, True])]
)
def test_two_processes_end_after_the_same_durable_step_at_a_sigterm_or_the_deadline_if_earlier(
    told_at: int, secs: int, ended: list[bool], directory: Path
) -> None:
    with Running(TWO, 2, directory, told_at, secs) as running:
        assert running.wait() == [EXIT_CODE] * 2, running.output(0)
        (first,), (second,) = running.reports(0), running.reports(1)
    assert first == second
    assert first["ended"] == ended
    assert first["steps"][-1] == first["step"]
    if not told_at:  # process 0, whose clock counts, looks at step 94
        assert first["step"] >= 95
        assert first["steps"][0] >= 50
        assert len(first["steps"]) == 2
