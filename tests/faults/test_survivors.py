"""Who survives another process keeps the step that both may have: it may be the newest there is.

Real processes, and a real SIGKILL of one after the step was committed, while the other asks it how
that went. Where process 0 dies JAX ends the other as soon as it notices, which leaves it a moment
to do wrong; where another one does, process 0 waits for it, and has all the time.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support import PROGRAMS
from support.processes import Running, run_processes

PROGRAM = PROGRAMS / "group.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "victim"),
    [
        pytest.param("local", 0, id="part"),
        pytest.param("durable", 1, id="read_back", marks=pytest.mark.long),
    ],
)
def test_a_step_that_all_have_outlives_a_process(tier: str, victim: int, tmp_path: Path) -> None:
    directory, ramdisks = tmp_path / "run", tmp_path / "ramdisks"
    options = {"process_timeout_secs": 60, "read_back": tier == "durable"}
    given: dict[str, Any] = {"directory": str(directory), "options": options}
    given |= {"every": 99, "ramdisks": str(ramdisks)} if tier == "local" else {"every": 1}
    do = "attach", ["train", 1], "wait", ["die_once_all_have", 2, 1], ["train", 2, 2], "wait"
    with Running(PROGRAM, 2, {**given, "do": do}) as running:
        codes = running.wait()
        assert codes.pop(victim) == -signal.SIGKILL
        # By JAX, or before it could by this package.
        assert codes[0] in (-signal.SIGABRT, 3), running.output(1 - victim)[1][-3000:]
        saved = [running.reports(i)[2] for i in range(2)]
    parts = [ramdisks / "0", ramdisks / "1"] if tier == "local" else [directory]
    assert [(part / "2").is_dir() for part in parts] == [True] * len(parts)

    for index, reports in enumerate(run_processes(PROGRAM, 2, {**given, "do": ["attach"]})):
        (found,) = reports
        assert found["start"] == 2
        assert (found["whole"], found["own"]) == (saved[index]["whole"], saved[index]["own"])
