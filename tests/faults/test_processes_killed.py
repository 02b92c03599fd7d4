"""Of two processes one is killed while it saves; a clean start goes on from what is durable.

Real processes, real SIGKILLs. Whoever survives is told, by this package or by JAX, and never waits
for ever.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from support import PROGRAMS
from support.processes import Running


@pytest.mark.slow
def test_a_killed_process_fails_the_save_by_name_and_a_clean_start_goes_on(directory: Path) -> None:
    # Process 1 dies. Process 0 waits, names it, and removes what was half written.
    with Running(PROGRAMS / "killed_in_save.py", 2, str(directory), "1", "3", "3") as running:
        assert running.wait() == [3, -signal.SIGKILL]
        *_, saved, end = running.reports(0)
        own = [next(r["own"] for r in running.reports(i)[::-1] if "own" in r) for i in (0, 1)]
    assert saved["saved"] == 2
    assert end["cause"] == "ProcessTimeoutError"
    assert (
        "saving step 3: process 1 of 2 did not arrive within 3 s after process 0" in end["failed"]
    )
    assert 3 <= end["secs"] < 60
    assert end["files"] == ["1", "2"]

    # Both start again, and go on from the last durable step. Then process 0 dies, and JAX ends the
    # other, which had nobody left to speak to.
    with Running(PROGRAMS / "killed_in_save.py", 2, str(directory), "0", "4", "3") as running:
        running.processes[0].wait(100)
        died = time.monotonic()
        codes = running.wait()
        assert time.monotonic() - died < 30
        assert codes[0] == -signal.SIGKILL
        assert codes[1] not in (0, None)
        for index in (0, 1):
            first, second, *_ = running.reports(index)
            assert first["start"] == 2
            assert first["whole"] == saved["whole"]
            assert first["own"] == own[index]
            assert second["saved"] == 3
    assert {"1", "2", "3"} < {path.name for path in directory.iterdir()}
    assert any(path.name.startswith("writing-4-") for path in directory.iterdir())

    # And once more. What the killed one left is gone once the next save is durable.
    with Running(PROGRAMS / "killed_in_save.py", 2, str(directory), "-1", "4", "3") as running:
        assert running.wait() == [0, 0]
        for index in (0, 1):
            first, last = running.reports(index)
            assert first["start"] == 3
            assert last == {"durable": 4, "files": ["2", "3", "4"]}


@pytest.mark.slow
def test_where_jax_ends_the_survivor_after_its_heartbeat_a_clean_start_goes_on(
    directory: Path,
) -> None:
    """The last process dies, and the first would wait for it much longer than JAX does."""
    patient = "600"
    env = {"HEARTBEAT_SECS": "10"}
    with Running(
        PROGRAMS / "killed_in_save.py", 2, str(directory), "1", "3", patient, env=env
    ) as running:
        running.processes[1].wait(100)
        died = time.monotonic()
        codes = running.wait()
        assert codes[1] == -signal.SIGKILL
        # Not by this package, which would have named the process and exited with 3.
        assert codes[0] == -signal.SIGABRT, running.output(0)[1][-3000:]
        assert time.monotonic() - died < 120
        saved = [running.reports(index)[-2 if index else -1] for index in (0, 1)]
    assert [report["saved"] for report in saved] == [2, 2]

    with Running(PROGRAMS / "killed_in_save.py", 2, str(directory), "-1", "4", patient) as running:
        assert running.wait() == [0, 0], running.output(0)[1][-3000:]
        for index in (0, 1):
            first, again, last = running.reports(index)
            assert first["start"] == 2
            assert (first["whole"], first["own"]) == (saved[index]["whole"], saved[index]["own"])
            assert again["saved"] == 3
            assert last == {"durable": 4, "files": ["2", "3", "4"]}
