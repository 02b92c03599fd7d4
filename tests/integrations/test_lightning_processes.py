"""Lightning on several processes: each Trainer sees one device, and JAX those of all.

They are processes of their own, because Lightning leaves variables in the environment.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from support import PROGRAMS
from support.processes import Running, run_processes
from support.waiting import wait_until

PROGRAM = PROGRAMS / "lightning_on_processes.py"


@pytest.mark.long
@pytest.mark.slow
def test_a_fit_on_two_processes_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    ends = [end for (end,) in run_processes(PROGRAM, 2, str(straight), "0", "8")]
    # After the fifth step an epoch ends, which gives the monitored loss.
    assert [end["steps"] for end in ends] == [[2, 4, 5, 6, 8]] * 2
    assert ends[0]["whole"] == ends[1]["whole"]
    assert not set(ends[0]["seen"]) & set(ends[1]["seen"])

    # From within the second epoch, of five batches each, in processes with other random state.
    shutil.copytree(straight / "6", resumed / "6")
    found = [end for (end,) in run_processes(PROGRAM, 2, str(resumed), "50", "8")]
    for there, here in zip(ends, found, strict=True):
        assert here == {**there, "seen": there["seen"][6:], "steps": [6, 8]}
        assert here["ranks"] == [0, 1]  # as Lightning sees it
        assert here["is_sigterm_as_before"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "told",
    [
        pytest.param((1,), marks=pytest.mark.long, id="one is told"),
        pytest.param((0, 1), id="all are told"),
    ],
)
def test_at_a_sigterm_all_processes_save_one_step(told: tuple[int, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Running(PROGRAM, 2, str(run), "0", "1000", env={"STEP_SECS": "0.1"}) as running:
        wait_until(lambda: all(len(running.reports(index)) >= 3 for index in (0, 1)), 120)
        for index in told:
            running.processes[index].send_signal(signal.SIGTERM)
        assert running.wait() == [143, 143], running.output(0)[1] + running.output(1)[1]
        last = [running.reports(index)[-1]["step"] for index in (0, 1)]
    newest = max(int(path.name) for path in run.iterdir() if path.name.isdigit())
    assert last == [newest, newest]
