"""Killed at any moment: a short form of ``torture_kill.py``, and that it can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import run_torture

PROGRAM = Path(__file__).parent / "torture_kill.py"


@pytest.mark.slow
def test_killed_at_random_moments_nothing_durable_is_lost_and_nothing_wrong_restored() -> None:
    assert_nothing_is_lost("--kills", "15", "--seconds", "45", "--seed", "4", at_least=3)


def test_a_few_kills_at_random_moments_lose_nothing() -> None:
    assert_nothing_is_lost("--kills", "2", "--seconds", "6", "--seed", "5", at_least=1)


def assert_nothing_is_lost(*args: str, at_least: int) -> None:
    code, table, output = run_torture(PROGRAM, *args)
    assert code == 0, output
    assert table["SIGKILLs"] >= at_least, output
    assert table["states restored and compared"] >= at_least, output
    for finding in (
        "durable steps lost",
        "wrong or failed restores",
        "times leftovers piled up",
        "failures of the program",
    ):
        assert table[finding] == 0, output


@pytest.mark.slow
def test_two_processes_that_are_killed_lose_nothing_and_keep_neighbours_apart() -> None:
    """They take over what does not change from earlier steps."""
    arguments = "--processes", "2", "--kills", "2", "--seconds", "4", "--seed", "6"
    assert_nothing_is_lost(*arguments, at_least=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weakening", "findings"),
    [
        pytest.param("delete-first", ["durable steps lost"], marks=pytest.mark.long),
        pytest.param("mixed", ["wrong or failed restores"], marks=pytest.mark.long),
        # It depends on the moment of a kill: half a step, or a step of the same number gone.
        pytest.param(
            "copy", ["wrong or failed restores", "durable steps lost"], marks=pytest.mark.long
        ),
    ],
)
def test_a_program_that_writes_less_carefully_is_found_out(
    weakening: str, findings: list[str]
) -> None:
    code, table, output = run_torture(PROGRAM, "--kills", "60", "--weakened", weakening)
    assert code == 1, output
    assert sum(table[finding] for finding in findings) > 0, output


@pytest.mark.long
@pytest.mark.slow
def test_neighbours_that_share_files_are_found_out() -> None:
    arguments = "--processes", "2", "--kills", "9", "--weakened", "one-copy"
    code, table, output = run_torture(PROGRAM, *arguments)
    assert code == 1, output
    assert table["wrong or failed restores"] > 0, output
    assert "share files" in output
