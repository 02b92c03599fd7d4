"""Disturbed runs of several processes: a short form of ``torture_hosts.py``, and that it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import run_torture

PROGRAM = Path(__file__).parent / "torture_hosts.py"


@pytest.mark.slow
def test_disturbed_hosts_lose_nothing_and_restore_nothing_wrong() -> None:
    code, table, output = run_torture(PROGRAM, "--rounds", "9", "--seconds", "15", "--seed", "1")
    assert code == 0, output
    assert table["rounds"] >= 1, output
    assert table["states restored and compared"] >= 4, output
    for finding in (
        "durable steps lost",
        "wrong or failed restores",
        "starts with a process that hung",
        "times leftovers piled up",
        "failures of the program",
    ):
        assert table[finding] == 0, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weakening", "kind", "finding"),
    [
        pytest.param(
            "delete-local-first",
            "SIGKILL to all",
            "durable steps lost",
            marks=pytest.mark.long,
        ),
        pytest.param("mixed", "nothing", "wrong or failed restores", marks=pytest.mark.long),
        pytest.param(
            "patient",
            "SIGKILL to one",
            "starts with a process that hung",
            marks=pytest.mark.long,
        ),
    ],
)
def test_hosts_that_are_less_careful_are_found_out(weakening: str, kind: str, finding: str) -> None:
    arguments = "--rounds", "30", "--limit-secs", "20", "--seed", "1", "--kinds", kind
    code, table, output = run_torture(PROGRAM, *arguments, "--weakened", weakening)
    assert code == 1, output
    assert table[finding] > 0, output
