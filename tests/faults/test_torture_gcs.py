"""Killed while saving to a bucket: a short form of ``torture_gcs.py``, and that it can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "torture_gcs.py"


def torture(*args: str) -> tuple[int, dict[str, int], str]:
    """Exit code, table and output of the harness."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), "--outage-secs", "0", *args],
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    table = {
        name.strip(): int(value)
        for name, value in re.findall(r"^(.+?) +(\d+)$", result.stdout, re.MULTILINE)
    }
    return result.returncode, table, result.stdout + result.stderr[-4000:]


def test_killed_at_random_moments_under_faults_a_bucket_loses_nothing() -> None:
    args = ("--saves", "6", "--processes", "2", "--rate", "0.02", "--seed", "3")
    code, table, output = torture(*args, "--kill-every", "1", "--kill-within", "3")
    assert code == 0, output
    assert table["killed on the way"] >= 2, output
    assert table["steps restored exactly"] >= 2, output


def test_a_server_that_lies_is_found_out() -> None:
    args = ("--saves", "3", "--processes", "1", "--rate", "0", "--kill-every", "0")
    code, table, output = torture(*args, "--lie", "flip")
    assert code == 1, output
    assert table["durable"] == 3, output
    assert table["killed on the way"] == 0, output
    assert table["lost or wrong steps"] == 1, output
