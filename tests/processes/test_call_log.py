"""Processes learn at once which calls of theirs differ, and wait for those that are only late."""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.group import Group
from support.held import held

from torchax_ckpt.errors import ProcessError
from torchax_ckpt.processes import call_log
from torchax_ckpt.processes.call_log import CallLog, Kind
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.decision_windows import DecisionWindows

# A call of a test: a step to save, a text of another call, or one of these with a step.
Made = int | str | tuple[str, Any]


def with_logs(group: Group) -> Group:
    for member in group.members:
        member.log = CallLog(member)
    return group


def opened(log: CallLog, text: str, kind: Kind) -> contextlib.AbstractContextManager[None]:
    """A call by its text: ``restore(5)``."""
    name, _, argument = text.removesuffix(")").partition("(")
    return log.calling(name, kind, ast.literal_eval(argument) if argument else None)


@contextlib.contextmanager
def calling(log: CallLog, made: Made) -> Iterator[None]:
    """Is in a call: ``save`` if it is a step. It is not published if it is only ``asked`` about."""
    how, call = made if isinstance(made, tuple) else ("", made)
    kind = Kind.SAVE if isinstance(call, int) else Kind.END if call == "close()" else Kind.CALL
    with opened(log, f"save({call})" if kind is Kind.SAVE else str(call), kind):
        if isinstance(call, int) and how != "refused":
            log.at(call)
        if how == "refused":
            raise TypeError
        if how == "passing":
            log.pass_by()
        elif how != "asked":
            log.publish()
        yield


def make(log: CallLog, calls: Sequence[Made]) -> None:
    for each in calls:
        with contextlib.suppress(TypeError), calling(log, each):
            if not isinstance(each, int) and each in ("attach()", "restore(5)"):
                log.go_on_from(5)


LATE: list[tuple[Sequence[Made], Sequence[Made]]] = [
    ([10], []),
    ([8, 10], [8]),
    ([8, 10], [8, 10]),
    ([8, 10], [8, 10, 12, "restore(5)", 7]),  # a save in the background
    (["restore(5)", 10], ["restore(5)"]),
    ([10, "load(5)"], [10]),
    ([10, "delete(5)", 12, "restore(5)", 6], [10, "delete(5)", 12]),
    # Declined saves are nobody's business, also if one process leaves them out.
    ([("asked", 9), 10], [("asked", 7), ("asked", 8)]),
    (["restore(5)"], [("asked", 9)]),
    # Whose decisions are read from process 0, which has made them and gone on.
    ([("asked", 12)], [("asked", 12), "restore(5)"]),
    ([("asked", 12)], [("asked", 12), 13]),
    ([10, ("asked", 12)], [10]),
    ([10, ("asked", 12)], [10, 12]),
    # What one process refuses has failed on the other one, and both have gone on.
    ([10, 12], [("refused", 10)]),
    ([10, 12], [("refused", 10), 12]),
    ([("refused", 10), 12], [10]),
    (["restore(5)", 6], [("refused", "restore('5')")]),
    ([("refused", "restore('5')"), "load(5)"], ["restore(5)"]),
    ([10, 12, 14], [("refused", 10), ("refused", 12)]),
    ([10, 12, 14], [("refused", 10), ("refused", 12), 14]),
    ([("refused", 10), 12], [("refused", 10)]),
    (["restore(5)", 6, 8, 10], ["restore(5)", ("refused", 6), ("refused", 8)]),
    # It has left out 9, which was declined.
    ([8, ("asked", 10), ("refused", 12), 14], [8, ("asked", 9), ("asked", 10), 12]),
    # All have left out a step that was decided, and this process has not yet begun the next one.
    ([8, 12], [8, ("passing", 12)]),
    # Many saves to one tier while one to another tier goes on.
    ([10, *range(11, 40)], [10, *range(11, 50)]),
]
DIFFERING: list[tuple[Sequence[Made], Sequence[Made], str, str]] = [
    ([8, 10], [8, 12], "save(10)", "save(12)"),
    ([8, 12], [8, 10], "save(12)", "save(10)"),
    ([10], ["restore(5)"], "save(10)", "restore(5)"),
    ([10], ["load(5)", 10], "save(10)", "load(5)"),
    ([10], ["close()"], "save(10)", "close()"),
    (["restore(5)"], [10], "restore(5)", "save(10)"),
    (["restore(5)"], ["close()"], "restore(5)", "close()"),
    (["restore(5)"], ["restore(7)"], "restore(5)", "restore(7)"),
    (["restore(5)", "restore(5)"], ["restore(5)", 10], "restore(5)", "save(10)"),
    ([8, 10], [8, ("passing", 11)], "save(10)", "save(11)"),
    ([("asked", 12)], [10], "save(12)", "save(10)"),
    ([("asked", 12)], [14], "save(12)", "save(14)"),
    ([("asked", 12)], [("asked", 11), "restore(5)"], "save(12)", "restore(5)"),
    ([("asked", 12)], ["close()"], "save(12)", "close()"),
    ([10, 12], [("refused", 10), "restore(5)"], "save(12)", "restore(5)"),
    ([8, 10, 12], [8, ("refused", 10), 14], "save(12)", "save(14)"),
]


def compared(mine: Sequence[Made], theirs: Sequence[Made]) -> list[str]:
    """What process 0, and then 1, finds in the last of its calls, if it waits for the other."""
    found = []
    for index, other in ((0, 1), (1, 0)):
        log, others_log = (with_logs(Group()).members[i].log for i in (index, other))
        others_log._channel = log._channel and _at(log._channel, other)
        make(others_log, theirs)
        make(log, mine[:-1])
        with calling(log, mine[-1]):
            error = log.difference([other])
        found.append("" if error is None else str(error))
    return found


def _at(channel: Any, index: int) -> Any:
    """The channel of another process of the same group."""
    found = Processes("other", 1, channel._client, index=index, count=3)
    found._place = channel._place
    return found


@pytest.mark.parametrize(("mine", "theirs"), LATE)
def test_who_is_late_or_ahead_or_has_refused_is_waited_for(
    mine: Sequence[Made], theirs: Sequence[Made]
) -> None:
    assert compared(mine, theirs) == ["", ""]


@pytest.mark.parametrize(("mine", "theirs", "named", "other"), DIFFERING)
def test_two_calls_that_cannot_follow_each_other_are_named(
    mine: Sequence[Made], theirs: Sequence[Made], named: str, other: str
) -> None:
    for index, error in enumerate(compared(mine, theirs)):
        assert f"process {index} called {named} at {__file__}:" in error
        assert f"process {1 - index} called {other} at {__file__}:" in error
        assert "This checkpointer makes no more calls" in error


def outcome(action: Callable[[], Any]) -> str:
    try:
        return repr(action())
    except ProcessError as error:
        return str(error)


def call_all(member: Processes, text: str) -> str:
    with opened(member.log, text, Kind.CALL), member.round("beginning"):
        return member.share(text.encode()).decode()


def save_all(member: Processes, step: int, before: Callable[[], None] = lambda: None) -> int:
    """Saves a step as a saver does; the parts that process 0 gets are all of this save."""
    with opened(member.log, f"save({step})", Kind.SAVE):
        member.log.at(step)
        member.log.publish()
        before()
        with member.round(f"saving step {step}", is_met=False) as saved:
            saved.value = [part.decode() for part in member.gather(str(step).encode())]
    assert saved.value == [str(step)] * member.count
    return step


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_if_one_of_three_makes_another_call_all_raise_one_error_from_then_on(
    odd: int, caplog: pytest.LogCaptureFixture
) -> None:
    def act(member: Processes) -> tuple[list[str], float]:
        first = "delete(3)" if member.index == odd else "restore(5)"
        began = time.monotonic()
        told = [outcome(lambda: call_all(member, first))]
        secs = time.monotonic() - began
        told += [outcome(functools.partial(call_all, member, text)) for text in ("load()", first)]
        return [*told, outcome(lambda: save_all(member, 9))], secs

    found = with_logs(Group())(act)
    error = found[odd][0][-1]
    assert f"process {odd} called delete(3) at" in error
    assert "called restore(5) at" in error
    for told, secs in found:
        assert told == [error] * 4
        assert secs < 2, "the timeout is 30 s"
    logged = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert [record.getMessage() for record in logged] == [error] * 3  # each process once


@pytest.mark.parametrize("odd", [0, 1])
def test_a_call_that_one_process_refuses_fails_on_all_and_the_next_is_whole(odd: int) -> None:
    def refuse(member: Processes, text: str, kind: Kind) -> None:
        with contextlib.suppress(TypeError), opened(member.log, text, kind):
            raise TypeError

    def act(member: Processes) -> list[str]:
        told = []
        for step in (1, 3):
            if member.index == odd:
                refuse(member, "save('x')", Kind.SAVE)
                refuse(member, "restore('x')", Kind.CALL)
            else:
                told += [outcome(functools.partial(save_all, member, step))]
                told += [outcome(lambda: call_all(member, "restore(0)"))]
            told.append(outcome(functools.partial(save_all, member, step + 1)))
        return told

    found = with_logs(Group())(act)
    for told in found[:odd] + found[odd + 1 :]:
        assert [text for text in told if text.isdigit()] == ["2", "4"]
        for text, mine in (("save('x')", "save("), ("restore('x')", "restore(0)")):
            failed = [t for t in told if f"process {odd} called {text}" in t and mine in t]
            assert len(failed) == 2
            assert "makes no more calls" not in failed[0]
    assert found[odd] == ["2", "4"]


def test_a_save_that_all_have_begun_becomes_durable_after_calls_have_differed() -> None:
    """Process 2 saves slowly, while the others wait for it, and process 1 finds a difference."""
    group = with_logs(Group())
    have_begun = threading.Barrier(3)

    def act(member: Processes) -> list[str]:
        def wait() -> None:
            have_begun.wait(30)
            if member.index == 1:
                member.log.differ(0, "delete(1) at a line")
            if member.index == 2:
                time.sleep(1.5)

        return [outcome(lambda: save_all(member, 1, wait)), outcome(lambda: save_all(member, 2))]

    for saved, later in group(act):
        assert saved == "1"
        assert "process 0 called delete(1) at a line, but process 1 called save(1)" in later


@pytest.mark.parametrize("odd", [0, 1])
def test_who_asks_for_another_step_than_one_that_is_saved_ends_the_run(odd: int) -> None:
    def act(member: Processes) -> list[str]:
        windows = DecisionWindows(member, lambda step, coming: step in (10, 20))

        def ask(step: int) -> bool:
            with opened(member.log, f"save({step})", Kind.SAVE):
                member.log.at(step)
                return windows.ask(step) and bool(save_all(member, step))

        steps = [1, 2, 12] if member.index == odd else [1, 2, 10]
        told = [outcome(functools.partial(ask, step)) for step in [*steps, 20]]
        windows.close()
        return told

    one, other = ("10", "12") if odd else ("12", "10")
    for told in with_logs(Group())(act):
        assert told[:2] == ["False", "False"]
        assert f"process 0 called save({one}) at {__file__}:" in told[-1]
        assert f"called save({other}) at {__file__}:" in told[-1]
        assert told[2] in ("False", told[-1])


def test_who_leaves_out_steps_that_are_not_saved_differs_from_nobody() -> None:
    """Each decision is published when process 0 asks for it."""

    def act(member: Processes) -> list[int]:
        windows, saved = DecisionWindows(member, lambda step, coming: step % 5 == 0), []
        for step in range(1, 30):
            if member.index == 1 and step % 5 in (1, 2):
                continue
            with opened(member.log, f"save({step})", Kind.SAVE):
                member.log.at(step)
                is_saved = windows.ask(step, looks_ahead=False)
            if is_saved:
                saved.append(save_all(member, step))
        windows.close()
        return saved

    assert with_logs(Group())(act) == [[5, 10, 15, 20, 25]] * 3


def test_equal_calls_after_a_refused_one_of_one_process_are_said_to_be_equal() -> None:
    told = compared([10], [("refused", "restore('5')"), 10])
    assert all("after another call that only one of them made" in each for each in told)


def test_who_waits_for_a_decision_learns_what_process_0_called_instead() -> None:
    def act(member: Processes) -> list[str]:
        windows = DecisionWindows(member, lambda step, coming: False)

        def ask(step: int) -> bool:
            with opened(member.log, f"save({step})", Kind.SAVE):
                member.log.at(step)
                return windows.ask(step)

        told = [outcome(functools.partial(ask, step)) for step in (1, 2)]
        if member.is_first:
            told.append(outcome(lambda: call_all(member, "restore(1)")))
        while told[-1] == "False":
            told.append(outcome(lambda: ask(len(told) + 1)))
        windows.close()
        return told

    began = time.monotonic()
    for told in with_logs(Group())(act):
        assert "process 0 called restore(1) at" in told[-1]
    assert time.monotonic() - began < 5, "the timeout is 30 s"


def test_the_line_of_a_call_is_that_of_the_user_behind_all_libraries() -> None:
    log = with_logs(Group()).members[0].log
    lightning = """
def fit(log, kind, lines):
    with log.calling("restore", kind, 1):
        lines.append(log.publish().where)
"""
    train = """
def main(fit, *args):
    fit(*args)
"""
    library, user = {"__name__": "lightning.loops"}, {"__name__": "__main__"}
    exec(compile(lightning, "/lightning/loops.py", "exec"), library)
    exec(compile(train, "/train.py", "exec"), user)
    lines: list[str] = []
    main: Any = user["main"]
    main(library["fit"], log, Kind.CALL, lines)
    assert lines == ["/train.py:3"]


def test_a_run_of_many_saves_and_reads_keeps_nothing_of_old_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_log, "_READS", 16)
    group = with_logs(Group())
    first = group.members[0]

    def going_on(steps: range) -> dict[str, int]:
        def act(member: Processes) -> None:
            for step in steps:
                save_all(member, step)
                with member.log.calling("verify", Kind.READ, step), member.round("reading"):
                    pass
                with contextlib.suppress(TypeError), member.log.calling("save", Kind.SAVE):
                    raise TypeError

        # As if the reads of before had ended a minute ago, twice the timeout.
        first._read = collections.deque((ended - 61, place) for ended, place in first._read)
        assert group(act) == [None] * 3
        return held([group.members, group.service.known])

    going_on(range(70))
    assert going_on(range(70, 140)) == going_on(range(140, 210))
