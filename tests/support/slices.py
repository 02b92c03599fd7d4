"""A run with a local tier on every host: killed, resumed, or uninterrupted."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from support import PROGRAMS
from support.live import Together
from support.processes import Running

PROGRAM = PROGRAMS / "group.py"


def settings(directory: Path | str, ramdisks: Path, *do: Any, **more: Any) -> dict[str, Any]:
    """The settings of ``group.py`` for two slices."""
    places = {"directory": str(directory), "ramdisks": str(ramdisks)}
    return {**places, "slices": 2, "do": do, **more}


def killed(
    directory: Path | str, ramdisks: Path, count: int, *, at: int, seed: int = 0, **how: Any
) -> None:
    """Runs processes that kill themselves after step ``at``; asserts which steps are local."""
    do = "attach", ["train", at], "wait", "steps", "die"
    given = settings(directory, ramdisks, *do, seed=seed)
    with Running(PROGRAM, count, given, **how) as running:
        assert running.wait() == [-signal.SIGKILL] * count, running.output(0)[1][-3000:]
        for index in range(count):
            first, _, last = running.reports(index)
            assert (first["start"], last["local"]) == (0, [at - 1, at])


def resumed(
    run: Together, directory: Path | str, ramdisks: Path, count: int, seed: int = 77, **how: Any
) -> list[dict[str, Any]]:
    """Resumes a run and trains to its end; returns the reports of the processes.

    The run starts with other seeds, so that any state that is not restored differs.
    """
    given = settings(directory, ramdisks, "attach", ["train", 7], "close", seed=seed)
    reports = run(PROGRAM, count, given, **how)
    kept = ("start", "tier")
    return [{**end, **{name: first[name] for name in kept}} for first, end, _ in reports]


def straight(run: Together, tmp_path: Path, count: int) -> list[dict[str, Any]]:
    return resumed(run, tmp_path / "straight", tmp_path / "straight-ramdisks", count, seed=0)


def assert_ends_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for here, there in zip(found, expected, strict=True):
        assert here["whole"] == there["whole"]
        assert here["own"] == there["own"]
    # Random state and loaders must differ between processes, or the comparison proves nothing.
    assert len({report["own"]["torch"] for report in expected}) == len(expected)
