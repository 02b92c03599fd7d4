"""Two programs that write to one run in a bucket: processes of their own, killed and paused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gcs_proxy
import pytest
from support import PROGRAMS

ROOT = Path(__file__).parent.parent.parent
URL = "gs://bucket/run"
LEASE_SECS = 4.0


class Program:
    """A program that saves, and says how that went, when it is told to."""

    def __init__(
        self, gcs: gcs_proxy.FaultProxy, log: Path, name: str, number: int, lease_secs: float = 0
    ) -> None:
        self._log = log / f"{name}.log"
        own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        arguments = str(PROGRAMS / "told_to_save.py"), URL, name, str(number), str(lease_secs)
        with open(self._log, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, **gcs.environment(), **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log()[-3000:]
        said: dict[str, Any] = json.loads(line)
        return said

    def save(self, step: int) -> dict[str, Any]:
        """What becomes of a save."""
        self.tell(f"save {step}")
        first = self.hear()
        return self.hear() if "began" in first else first

    def look(self) -> list[tuple[int, float, list[int], str]]:
        """Every step there is, by what it holds."""
        self.tell("look")
        found = []
        while "end" not in (said := self.hear()):
            assert "error" not in said, said
            found.append((said["step"], said["first"], said["h"], said["by"]))
        return found

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> dict[str, Any]:
        """What it says at its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        said = self.hear()
        assert self._process.wait(60) == 0
        return said

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not flushed has nobody to read it
                pipe.close()


@pytest.fixture
def gcs() -> Iterator[gcs_proxy.FaultProxy]:
    with gcs_proxy.serving() as proxy:
        yield proxy


@pytest.fixture
def start(gcs: gcs_proxy.FaultProxy, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs, which end with the test."""
    programs: list[Program] = []

    def start(*args: Any, **kwargs: Any) -> Program:
        programs.append(Program(gcs, tmp_path, *args, **kwargs))
        return programs[-1]

    yield start
    for program in programs:
        program.end()


def content(gcs: gcs_proxy.FaultProxy) -> dict[str, str]:
    """Every object of the run's steps, and which generation of it."""
    objects = gcs.server.storage.objects["bucket"]
    return {
        name: found["generation"]
        for name, found in objects.items()
        if name.split("/")[1] not in ("lease", "events")
    }


def wait_until_still(gcs: gcs_proxy.FaultProxy) -> None:
    """Until nothing was written for a second."""
    seen: dict[str, str] = {"/": ""}
    while seen != (seen := content(gcs)):
        time.sleep(1)


def holds(step: int, number: int, name: str) -> tuple[int, float, list[int], str]:
    """What a program's step holds, as ``look`` says it."""
    return step, 1000.0 * number + step, [step] * 3, name


@pytest.mark.slow
def test_a_second_program_is_refused_and_takes_over_at_once_when_the_first_is_killed(
    gcs: gcs_proxy.FaultProxy, start: Callable[..., Program]
) -> None:
    first, second = start("first", 1), start("second", 2)
    assert (first.hear(), second.hear()) == ({"start": 0}, {"start": 0})
    assert first.save(1) == {"durable": 1}

    # In the middle of a save of the first's.
    arrived, go_on = gcs.pause("/3/manifest/data.json")
    first.tell("save 3")
    assert first.hear() == {"began": True}
    assert arrived.wait(60)
    wait_until_still(gcs)
    before = content(gcs)
    assert any("/3/" in name for name in before)
    for step in (2, 3, 4):
        refused = second.save(step)
        assert refused["error"] == "LeaseError"
        assert "another program writes to this directory: host" in refused["text"]
        assert f"pid {first.pid}," in refused["text"]
    assert content(gcs) == before
    assert second.look() == [holds(1, 1, "first")]  # reading needs no lease
    go_on.set()
    assert first.hear() == {"durable": 3}

    # Killed in the middle of another.
    arrived, go_on = gcs.pause("/4/manifest/data.json")
    first.tell("save 4")
    assert first.hear() == {"began": True}
    assert arrived.wait(60)
    first.end()
    go_on.set()
    late = start("late", 3)
    assert late.hear() == {"start": 3}
    for step in (4, 5):
        assert late.save(step) == {"durable": step}
    assert "Waiting to see" not in late.log()
    assert "taking over" in late.log()
    expected = [holds(s, 1, "first") for s in (1, 3)] + [holds(s, 3, "late") for s in (4, 5)]
    assert second.look() == late.look() == expected
    # The second has read and written nothing since it was refused; now others hold the lease.
    assert f"pid {late.pid}," in second.save(6)["text"]
    assert late.close() == second.close() == {"closed": True}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "at",
    [
        pytest.param("/2/manifest/data.json", marks=pytest.mark.long),
        "2%2Fstate%2Fmanifest.ocdbt&",
    ],
)
def test_a_program_that_lost_its_lease_while_paused_commits_nothing_and_spares_the_others_steps(
    at: str, gcs: gcs_proxy.FaultProxy, start: Callable[..., Program]
) -> None:
    first, reader = start("first", 1, LEASE_SECS), start("reader", 2, LEASE_SECS)
    assert (first.hear(), reader.hear()) == ({"start": 0}, {"start": 0})
    assert first.save(1) == {"durable": 1}
    successor = start("successor", 3, LEASE_SECS)
    assert successor.hear() == {"start": 1}

    arrived, go_on = gcs.pause(at)
    first.tell("save 2")
    assert first.hear() == {"began": True}
    assert arrived.wait(60)
    refused = successor.save(2)  # the first gives signs of life
    assert (refused["error"], f"pid {first.pid}," in refused["text"]) == ("LeaseError", True)
    first.signal(signal.SIGSTOP)
    go_on.set()
    for step in (2, 3):
        assert successor.save(step) == {"durable": step}
    assert "Waiting to see" in successor.log()
    assert (
        f"taking over the lease of host {socket.gethostname()}, pid {first.pid}," in successor.log()
    )
    expected = [holds(1, 1, "first"), holds(2, 3, "successor"), holds(3, 3, "successor")]
    assert reader.look() == expected

    first.signal(signal.SIGCONT)
    # What it was at: the commit, or files that its successor has removed meanwhile.
    assert first.hear()["error"] == "SaveError"
    # The first of these may only find out on its own thread.
    refusals = [first.save(step) for step in (2, 3, 4)]
    assert [refused["error"] for refused in refusals][1:] == ["LeaseError"] * 2
    for refused in refusals:
        assert "has lost its lease: it is held by host" in refused["text"]
        assert f"pid {successor.pid}," in refused["text"]
    first.close()

    assert reader.look() == expected
    assert successor.save(4) == {"durable": 4}
    assert successor.close() == {"closed": True}
    assert reader.look() == [*expected, holds(4, 3, "successor")]
