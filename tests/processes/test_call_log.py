"""Processes learn at once which calls of theirs differ, and wait for those that are only behind."""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from support.group import Group
from support.held import held

from torchax_ckpt.errors import ProcessError
from torchax_ckpt.processes.call_log import Call, CallLog, Kind, _instead
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.decision_windows import DecisionWindows


def save(step: int, lane: str = "durable") -> Call:
    return Call(lane, f"save({step})", 1, Kind.SAVE, step)


def call(text: str, kind: Kind = Kind.CALL, *, after: int | None = None, number: int = 1) -> Call:
    return Call("calls", text, number, kind, after)


def at(step: int) -> Call:
    return Call("at", f"save({step})", 1, Kind.AT, step)


RESTORE, LOAD = call("restore(5)"), call("load(5)", Kind.LOAD)
END = call("close()", Kind.END, after=9)


@pytest.mark.parametrize(
    ("mine", "own", "theirs"),
    [
        (save(10), [save(8)], []),
        (save(10), [save(8)], [save(8)]),
        (save(10), [save(8)], [save(8), save(10), save(12)]),
        (save(10), [], [save(10), *(save(step, "local") for step in range(11, 15))]),
        (save(10), [RESTORE], [RESTORE]),
        # The same calls in another order, each of which waits for nobody else.
        (save(10), [save(10), LOAD], [LOAD]),
        (save(10), [], [at(9)]),
        (call("restore(5)", after=9), [], [at(9)]),
        (at(12), [save(10)], [save(10)]),
        (at(12), [RESTORE], [RESTORE]),
        (at(12), [], [save(12)]),
        (at(12), [], [at(10)]),
    ],
)
def test_who_is_behind_or_busy_is_waited_for(
    mine: Call, own: Sequence[Call], theirs: Sequence[Call]
) -> None:
    made = own if mine in own or mine.kind is Kind.AT else [*own, mine]
    assert _instead(mine, made, theirs) is None


@pytest.mark.parametrize(
    ("mine", "own", "theirs"),
    [
        (save(10), [save(8)], [save(8), save(12)]),
        (save(12), [save(8)], [save(8), save(10)]),
        (save(10), [save(10), save(12)], [save(8), save(12)]),  # left out
        (save(10), [save(10), RESTORE], [RESTORE]),
        (save(10), [], [RESTORE]),
        (save(10), [], [LOAD]),
        (save(10), [], [END]),
        (RESTORE, [], [save(10)]),
        (RESTORE, [], [END]),
        (RESTORE, [], [call("restore(7)")]),
        (RESTORE, [], [LOAD]),
        (call("restore(5)", number=2), [RESTORE], [RESTORE, save(10)]),
        (save(10), [], [at(11)]),
        (call("restore(5)", after=9), [], [at(10)]),
        (call("attach()"), [], [at(10)]),
        (at(12), [], [save(10)]),
        (at(12), [], [call("restore(5)", after=11)]),
        (at(12), [], [END]),
    ],
)
def test_a_call_that_rules_out_the_awaited_one_is_found(
    mine: Call, own: Sequence[Call], theirs: Sequence[Call]
) -> None:
    made = own if mine in own or mine.kind is Kind.AT else [*own, mine]
    assert _instead(mine, made, theirs) == theirs[-1]


def with_logs(group: Group) -> Group:
    for member in group.members:
        member.log = CallLog(member)
    return group


def outcome(action: Any) -> str:
    try:
        return repr(action())
    except ProcessError as error:
        return str(error)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_of_three_that_makes_another_call_costs_all_that_call_only(odd: int) -> None:
    # Otherwise the odd one, if told first, makes the same call while the others still wait.
    all_are_told = threading.Barrier(3)

    def act(member: Processes) -> list[str]:
        def calling(text: str) -> Any:
            all_are_told.wait(60)
            with member.log.calling(text, Kind.CALL), member.round("beginning"):
                return member.share(b"done")

        first = "delete(3)" if member.index == odd else "restore(5)"
        texts = first, "restore(5)", "verify(5)"
        return [outcome(lambda text=text: calling(text)) for text in texts]

    began = time.monotonic()
    told = with_logs(Group())(act)
    assert time.monotonic() - began < 25, "the timeout is 30 s"
    for index, (differing, *after) in enumerate(told):
        assert "the processes do not make the same calls" in differing
        assert f"process {odd} called delete(3)" in differing, index
        assert "called restore(5)" in differing
        assert after == [repr(b"done")] * 2


def test_process_0_tells_its_step_only_if_no_call_has_told_it() -> None:
    first = with_logs(Group()).members[0]

    def notes() -> list[str]:
        first.log.tell_step()
        return [text for note in first.notes("calls") for _, text, *_ in json.loads(note)[1:]]

    assert notes() == []  # before the first save
    first.log.step = 1
    assert notes() == ["save(1)"]
    with first.log.calling("restore(5)", Kind.CALL):  # stays the newest call
        assert notes() == notes() == ["save(1)", "restore(5)"]
    for step in range(6, 200):
        first.log.step = step
        notes()
    assert notes() == ["save(1)", "restore(5)", "save(199)"][1:]


def test_who_asks_for_another_step_than_process_0_is_told_and_catches_up() -> None:
    at_step_5 = threading.Barrier(3)

    def act(member: Processes) -> list[str]:
        windows = DecisionWindows(member, lambda step, coming: step % 3 == 0)
        steps = [1, 2, 12, 13, 14, 15] if member.index == 1 else [1, 2, 10, 13, 14, 15]
        answers = []
        for step in steps:
            if step == 13:
                at_step_5.wait(60)
            answers.append(outcome(lambda step=step: windows.ask(step)))
        windows.close()
        return answers

    first, odd, other = with_logs(Group())(act)
    assert first == other == ["False", "False", "False", "False", "False", "True"]
    assert "process 0 called save(10), but process 1 called save(12)" in odd[2]
    assert [*odd[:2], *odd[3:]] == ["False", "False", "False", "False", "True"]


def test_who_waits_for_a_decision_learns_what_process_0_called_instead() -> None:
    def act(member: Processes) -> list[str]:
        windows = DecisionWindows(member, lambda step, coming: False)
        answers = []
        for step in (1, 2):
            member.log.step = step
            answers.append(outcome(lambda step=step: windows.ask(step)))
        if member.is_first:

            def restoring() -> None:
                with member.log.calling("restore(1)", Kind.CALL), member.round("beginning"):
                    pass

            answers.append(outcome(restoring))
        else:
            for step in range(3, 300):
                answers.append(outcome(lambda step=step: windows.ask(step)))
                if answers[-1] != "False":
                    break
        windows.close()
        return answers

    began = time.monotonic()
    for answers in with_logs(Group())(act):
        named = [a for a in answers if "process 0 called restore(1), but process" in a]
        assert named, answers[-1]
    assert time.monotonic() - began < 25, "the timeout is 30 s"


def save_all(member: Processes, step: int) -> int:
    """Saves a step as a saver does; the parts that process 0 gets are all of this save."""
    call = member.log.publish("durable", f"save({step})", Kind.SAVE, step)
    with member.round(f"saving step {step}", call, is_met=False) as saved:
        saved.value = [part.decode() for part in member.gather(str(step).encode())]
    assert saved.value == [str(step)] * member.count
    return step


def call_all(member: Processes, text: str) -> str:
    with member.log.calling(text, Kind.CALL), member.round("beginning"):
        assert member.share(text.encode()) == text.encode()
        if text.startswith("restore"):
            member.log.go_on_from(0)
    return text


@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("calls", "of_odd", "num_done"),
    [
        ([1, 3, 4, 5, 6], [1, 5, 6], 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ([3, 4, 5, 6, "verify(1)", 7], [6, "verify(1)", 7], 1),
                (["verify(1)", "verify(2)", "load(1)", 2], ["verify(2)", "load(1)", 2], 2),
                # Once all have gone back, the steps are others.
                ([3, "restore(0)", 3, 4], [4, "restore(0)", 3, 4], 3),
                # Who left the call out makes it later, and was never told.
                ([1, "verify(1)", 2, 3, "verify(1)", 4], [1, 2, 3, "verify(1)", 4], 3),
            )
        ),
    ],
)
def test_who_leaves_calls_out_stalls_nobody(
    calls: Sequence[Any], of_odd: Sequence[Any], num_done: int, odd: int
) -> None:
    def act(member: Processes) -> list[tuple[str, float]]:
        def timed(each: Any) -> tuple[str, float]:
            began = time.monotonic()
            action = save_all if isinstance(each, int) else call_all
            return outcome(lambda: action(member, each)), time.monotonic() - began

        return [timed(each) for each in (of_odd if member.index == odd else calls)]

    for told in with_logs(Group())(act):
        assert max(secs for _, secs in told) < 5, "the timeout is 30 s"
        assert [text for text, _ in told[-num_done:]] == [repr(c) for c in calls[-num_done:]]


def test_a_run_of_many_saves_and_reads_keeps_nothing_of_old_ones() -> None:
    group = with_logs(Group())
    first = group.members[0]

    def going_on(steps: range) -> dict[str, int]:
        def act(member: Processes) -> None:
            for step in steps:
                member.log.step = step
                with member.log.calling(f"save({step})", Kind.SAVE), member.round("raising"):
                    pass
                save_all(member, step)
                with member.log.calling("verify()", Kind.READ), member.round("reading"):
                    pass

        # As if the reads of before had ended a minute ago, twice the timeout.
        first._read = collections.deque((ended - 61, place) for ended, place in first._read)
        assert group(act) == [None] * 3
        return held([group.members, group.service.known])

    going_on(range(70))
    assert going_on(range(70, 140)) == going_on(range(140, 210))
