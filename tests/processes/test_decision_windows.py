"""Several processes agree on when to save, though none waits for another at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support import PROGRAMS
from support.group import Group
from support.processes import run_processes

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


@pytest.mark.parametrize("odd", [0, 1])
def test_who_leaves_steps_out_and_who_does_not_ask_for_the_same_ones_again(odd: int) -> None:
    def act(member: Processes) -> list[Any]:
        asked = windows(member, lambda step, coming: step % 2 == 0)
        answers: list[Any] = []
        for step in [1, 2, 5, 6, 7, 8] if member.index == odd else range(1, 9):
            try:
                answers.append(asked.ask(step))
            except ProcessError as error:
                answers.append(str(error))
        asked.close()
        return answers

    for answers in Group(timeout_secs=5)(act):
        assert answers[-3:] == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("paces", ["[0.001, 0.004]", "[0.004, 0.001]"], ids=["second", "first"])
def test_two_processes_save_the_same_steps_though_one_is_slow(paces: str) -> None:
    (first,), (second,) = run_processes(PROGRAMS / "unequal_paces.py", 2, paces, devices=1)
    print(first, second)
    assert first["saves"] == second["saves"]
    assert first["saves"][0] == 1
    # A policy that names steps gets just those, decided ahead or not, each time they come.
    assert first["saves"].count(123) == 1
    assert first["saves"].count(777) == 1
    # Going back from 499 to 200 and longer strides from 700 on neither stop saving nor part them.
    for part in (range(2, 500), range(700, 2500)):
        assert len(set(first["saves"]) & set(part)) > 1
    assert first["saves"] != sorted(set(first["saves"]))
    # 20 us is what it may take; the rest is for a machine that is busy with other things.
    assert max(first["median"], second["median"]) < 10 * 20e-6
    assert first["keys"] < 200  # of the latest, not of all
