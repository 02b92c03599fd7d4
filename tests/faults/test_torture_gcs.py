"""Killed while saving to a bucket: a short form of ``torture_gcs.py``, and that it can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import run_torture

PROGRAM = Path(__file__).parent / "torture_gcs.py"


@pytest.mark.long
@pytest.mark.slow
def test_killed_at_random_moments_under_faults_a_bucket_loses_nothing() -> None:
    code, table, output = run_torture(
        PROGRAM,
        *("--saves", "6", "--processes", "2", "--seed", "3"),
        *("--rate", "0.02", "--outage-secs", "0"),
        *("--kill-every", "1", "--kill-within", "3"),
    )
    assert code == 0, output
    assert table["killed on the way"] >= 2, output
    assert table["steps restored exactly"] >= 2, output


@pytest.mark.slow
@pytest.mark.long
def test_a_server_that_lies_is_found_out() -> None:
    code, table, output = run_torture(
        PROGRAM,
        *("--saves", "3", "--processes", "1"),
        *("--rate", "0", "--outage-secs", "0"),
        *("--kill-every", "0", "--lie", "flip"),
    )
    assert code == 1, output
    assert table["durable"] == 3, output
    assert table["killed on the way"] == 0, output
    assert table["lost or wrong steps"] == 1, output
