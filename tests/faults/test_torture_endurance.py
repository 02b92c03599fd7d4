"""Many saves in one process: a short form of ``torture_endurance.py``, and that it can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import run_torture

PROGRAM = Path(__file__).parent / "torture_endurance.py"


@pytest.mark.long
@pytest.mark.slow
def test_many_saves_leave_threads_files_and_arrays_as_they_were() -> None:
    code, _, output = run_torture(PROGRAM, "--saves", "60")
    assert code == 0, output
    assert "grown: nothing" in output


@pytest.mark.slow
@pytest.mark.long
def test_a_leak_is_found() -> None:
    code, _, output = run_torture(PROGRAM, "--saves", "30", "--leak")
    assert code == 1, output
    for what in ("resident_bytes", "threads", "open_files", "live_arrays"):
        assert f"'{what}'" in output.rpartition("grown: ")[2], output
