"""Of several processes one is killed; a clean start goes on from what is durable.

Real processes, real SIGKILLs. Whoever survives is told within seconds, by this package or by JAX.
The processes would wait for each other for 600 s.
"""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from support import PROGRAMS
from support.processes import Running, run_processes

pytest_plugins = ("gcs_fixtures", "s3_fixtures")
HOST = socket.gethostname()
KNOWN_SECS = 60
PROGRAM = PROGRAMS / "group.py"


@pytest.mark.slow
@pytest.mark.parametrize("call", ["restore", "close", "warm_start"])
def test_all_survivors_are_told_who_died(call: str, directory: Path) -> None:
    program = PROGRAMS / "calls_on_processes.py"
    with Running(program, 3, "killed_in", directory, call) as running:
        assert running.wait() == [3, -signal.SIGKILL, 3]
        ends = [running.reports(index)[-1] for index in (0, 2)]
    for end in ends:
        assert end["kind"] == "SaveError" if call == "close" else "ProcessError"
        assert f"process 1 of 3, on host {HOST}, died" in end["told"]
        assert end["secs"] < KNOWN_SECS


def settings(directory: Path, *do: Any) -> dict[str, Any]:
    options = {"process_timeout_secs": 600}
    common = {"directory": str(directory), "every": 99, "keep": 3, "options": options}
    return {**common, "do": ["attach", *do]}


@pytest.mark.slow
def test_a_killed_process_fails_the_save_by_name_and_a_clean_start_goes_on(directory: Path) -> None:
    # Process 1 stops for 5 s in a save, and is waited for. In the next save it dies, but not a
    # process forked from it. Process 0 names it, and removes what was half written.
    do: Any = ["save", 1], ["stop_in_save", 1, 5], ["save", 2], ["die_in_save", 1], ["save", 3]
    with Running(PROGRAM, 2, settings(directory, *do)) as running:
        assert running.wait() == [3, -signal.SIGKILL]
        *_, saved, end = running.reports(0)
        own = [running.reports(i)[2]["own"] for i in (0, 1)]
    assert saved["saved"] == 2
    assert saved["secs"] > 4
    assert end["cause"] == "ProcessError"
    assert f"saving step 3: process 1 of 2, on host {HOST}, died" in end["failed"]
    assert end["secs"] < KNOWN_SECS
    assert end["files"] == ["1", "2"]

    # Both start again, and go on from the last durable step. Then process 0 dies, and JAX ends the
    # other, which had nobody left to speak to.
    do = ["save", 3], ["die_in_save", 0], ["save", 4]
    with Running(PROGRAM, 2, settings(directory, *do)) as running:
        running.processes[0].wait(100)
        died = time.monotonic()
        codes = running.wait()
        assert time.monotonic() - died < 90, "JAX's heartbeat timeout is 100 s"
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
    given = settings(directory, ["save", 4], "steps", "close")
    for first, last, end, _ in run_processes(PROGRAM, 2, given):
        assert first["start"] == 3
        assert last["saved"] == 4
        assert end["files"] == ["2", "3", "4"]


@pytest.mark.slow
def test_a_host_that_vanishes_is_named_before_jax_ends_the_survivor(directory: Path) -> None:
    do = ["save", 1], ["save", 2], ["die_in_save", 1], ["save", 3]
    given = {**settings(directory, *do), "vanishes": True}
    with Running(PROGRAM, 2, given, env={"HEARTBEAT_SECS": "10"}) as running:
        code = running.processes[0].wait(120)
        # Not by this package, which would have exited with 3.
        assert code == -signal.SIGABRT, running.output(0)[1][-3000:]
        named, ended = (
            running.output(0)[1].find(text)
            for text in (f"process 1 of 2, on host {HOST}, does not answer", "Terminating process")
        )
        assert 0 <= named < ended
        saved = [running.reports(index)[2] for index in (0, 1)]
    assert [report["saved"] for report in saved] == [2, 2]

    given = settings(directory, ["save", 3], ["save", 4], "steps", "close")
    for index, reports in enumerate(run_processes(PROGRAM, 2, given)):
        first, again, last, end, _ = reports
        assert first["start"] == 2
        assert (first["whole"], first["own"]) == (saved[index]["whole"], saved[index]["own"])
        assert (again["saved"], last["saved"]) == (3, 4)
        assert end["files"] == ["2", "3", "4"]


@pytest.mark.slow
@pytest.mark.parametrize(("server", "place"), [("gcs", "url"), ("s3", "s3_url")])
def test_two_processes_on_a_bucket_resume_bit_for_bit_after_both_were_killed(
    server: str, place: str, request: pytest.FixtureRequest
) -> None:
    environment = request.getfixturevalue(server).environment()
    url: str = request.getfixturevalue(place)
    do: Any = ["attach", ["train", 7], "wait", "steps", ["begin", 7], "die"]
    given = {"directory": url, "do": do}
    with Running(PROGRAM, 2, given, env=environment) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output(0)[1][-3000:]
        before = [running.reports(index) for index in range(2)]
    assert [end["steps"] for *_, end in before] == [[4]] * 2
    do = ["attach", ["train", 7], ["begin", 7], "wait", "verify", "warm_starts", "close"]
    given = {"directory": url, "seed": 77, "do": do}
    resumed = run_processes(PROGRAM, 2, given, env=environment)
    for (first, found, verified, after, _), (_, expected, _) in zip(resumed, before, strict=True):
        assert first["start"] == 4
        assert (found["whole"], found["own"]) == (expected["whole"], expected["own"])
        assert found["seen"] == expected["seen"][4:]
        assert verified == {"verify": 7}
        assert after == {"step": 7, "alike": True, "count": 10}


@pytest.mark.slow
def test_a_local_step_that_all_have_outlives_a_process(tmp_path: Path) -> None:
    """Process 0 dies after its commit, while the other asks it how that went."""
    ramdisks = tmp_path / "ramdisks"
    given: dict[str, Any] = {"directory": str(tmp_path / "run"), "ramdisks": str(ramdisks)}
    given |= {"every": 99, "options": {"process_timeout_secs": 60}}
    do = "attach", ["train", 1], "wait", ["die_once_all_have", 2, 1], ["train", 2, 2], "wait"
    with Running(PROGRAM, 2, {**given, "do": do}) as running:
        codes = running.wait()
        assert codes[0] == -signal.SIGKILL
        # By JAX, or before it could by this package.
        assert codes[1] in (-signal.SIGABRT, 3), running.output(1)[1][-3000:]
        saved = [running.reports(i)[2] for i in range(2)]
    assert [(ramdisks / str(i) / "2").is_dir() for i in range(2)] == [True] * 2
    for index, (found,) in enumerate(run_processes(PROGRAM, 2, {**given, "do": ["attach"]})):
        assert found["start"] == 2
        assert (found["whole"], found["own"]) == (saved[index]["whole"], saved[index]["own"])
