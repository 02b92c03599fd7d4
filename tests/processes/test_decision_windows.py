"""Several processes agree on when to save, though none waits for another at every step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import pytest
from support.group import Group

from torchax_ckpt.errors import PolicyError, ProcessError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.decision_windows import DecisionWindows


def windows(member: Processes, decide: Any) -> DecisionWindows:
    def never(step: int, coming: Sequence[int]) -> bool:
        raise AssertionError("only process 0 decides")

    return DecisionWindows(member, decide if member.is_first else never)


@pytest.mark.parametrize("kind", [ZeroDivisionError, PolicyError])
def test_a_policy_that_fails_does_so_on_all_at_the_same_step(kind: type[Exception]) -> None:
    def decide(step: int, coming: Sequence[int]) -> bool:
        if step == 5:
            raise kind("cannot decide")
        return step % 2 == 0

    def act(member: Processes) -> list[Any]:
        asked = windows(member, decide)
        answers: list[Any] = []
        for step in (1, 2, 3, 4, 5, 5, 6, 7):
            try:
                answers.append(asked.ask(step))
            except Exception as error:
                answers.append(error)
        asked.close()
        return answers

    first, *others = Group(timeout_secs=5)(act)
    decided = [step % 2 == 0 for step in (1, 2, 3, 4, 6, 7)]
    for answers in (first, *others):
        assert [a for a in answers if isinstance(a, bool)] == decided
    assert [(type(error), str(error)) for error in first[4:6]] == [(kind, "cannot decide")] * 2
    told = "process 0: " + ("" if kind is PolicyError else "ZeroDivisionError: ") + "cannot decide"
    told_kind = PolicyError if kind is PolicyError else ProcessError
    for answers in others:
        assert [(type(error), str(error)) for error in answers[4:6]] == [(told_kind, told)] * 2


def test_a_step_whose_save_has_begun_is_asked_about_only_after_going_back() -> None:
    """Else processes that learn at different times that it failed would decide differently."""

    def act(member: Processes) -> list[bool]:
        asked, answers = windows(member, lambda step, coming: True), list[bool]()
        for step in (1, 2, 3, 3, 4):
            answers.append(asked.ask(step))
            asked.begun(step)
        member.log.go_on_from(2)
        answers += [asked.ask(3), asked.ask(4)]
        asked.close()
        return answers

    assert Group()(act) == [[True, True, True, False, True, True, True]] * 3


@pytest.mark.parametrize("slow", [0, 1])
def test_what_only_process_0_knows_at_a_step_decides_for_all(slow: int) -> None:
    """It decides ahead while it may, and at each step itself while it may not."""

    def act(member: Processes) -> list[int]:
        asked, saves = windows(member, lambda step, coming: step % 50 == 0), []
        for step in range(1, 160):
            is_due = member.is_first and step % 7 == 0 and step < 100
            if asked.ask(step, is_due=is_due, looks_ahead=step >= 100):
                saves.append(step)
            time.sleep(0.002 * (member.index == slow))
        asked.close()
        return saves

    expected = sorted({*range(7, 100, 7), 50, 100, 150})
    assert Group()(act) == [expected] * 3


@pytest.mark.parametrize("slow", [0, 1])
def test_processes_save_the_same_steps_though_one_is_slow(slow: int) -> None:
    """They are never more than some steps apart, as collectives have it."""
    together = threading.Barrier(3)
    asked_for = [*range(1, 200), *range(100, 200), *range(300, 900, 7)]

    def decide(step: int, coming: Sequence[int]) -> bool:
        return step in (1, 23, 377) or step % 5 == 0

    group = Group()

    def act(member: Processes) -> list[int]:
        asked, saves = windows(member, decide), []
        for number, step in enumerate(asked_for):
            if number % 20 == 0:
                together.wait(60)
            if asked.ask(step):
                saves.append(step)
            assert asked.ask(step) == (saves[-1:] == [step])
            time.sleep(0.002 * (member.index == slow))
        together.wait(60)
        return saves

    first, *others = group(act)
    assert others == [first, first]
    # A policy that names steps gets just those, decided ahead or not, each time they come.
    assert first.count(1) == first.count(23) == first.count(377) == 1
    # Going back from 199 to 100 and longer strides from 300 on neither stop saving nor part them.
    for part in (range(2, 200), range(300, 900)):
        assert len(set(first) & set(part)) > 1
    assert first != sorted(set(first))
    assert len(group.service.known) < 200  # the answers of the latest steps, not of all


def test_decisions_that_could_not_be_sent_fail_the_next_call_and_are_sent_again() -> None:
    group = Group()
    first = group.members[0]
    send, has_failed = first.put_note, threading.Event()

    def failing(key: str, message: bytes) -> None:
        if key == "2" and not has_failed.is_set():
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        send(key, message)

    first.put_note = failing  # type: ignore[method-assign]

    def act(member: Processes) -> tuple[list[int], list[str]]:
        asked, saves, errors = windows(member, lambda step, _: step % 5 == 0), [], list[str]()
        step = 1
        while step < 300:
            try:
                saves += [step] * asked.ask(step)
                step += 1
            except ProcessError as error:
                errors.append(str(error))
                has_failed.set()
            time.sleep(0.001)
        asked.close()
        return saves, errors

    began = time.monotonic()
    (saves, errors), *others = group(act)
    assert others == [(saves, [])] * 2
    assert saves[-1] == 295
    assert 0 < len(errors) <= 2
    assert "process 0 could not send the others its save decisions" in errors[0]
    assert "UNAVAILABLE" in errors[0]
    assert time.monotonic() - began < 25, "the timeout is 30 s"
