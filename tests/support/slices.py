"""A run with a local tier on every host: killed, resumed, or uninterrupted."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import PROGRAMS
from support.processes import Running, run_processes


def killed(
    directory: Path | str,
    ramdisks: Path,
    count: int,
    *,
    at: int,
    seed: int = 0,
    env: Mapping[str, str] = {},
    fresh: bool = False,
) -> None:
    """Runs processes that kill themselves after step ``at``; asserts which steps are local."""
    arguments = str(directory), str(ramdisks), str(at), str(seed)
    with Running(PROGRAMS / "two_tiers.py", count, *arguments, env=env, fresh=fresh) as running:
        assert running.wait() == [-signal.SIGKILL] * count, running.output(0)[1][-3000:]
        for index in range(count):
            assert running.reports(index) == [{"start": 0, "tier": None, "local": [at - 1, at]}]


def resumed(
    directory: Path | str,
    ramdisks: Path,
    count: int,
    env: Mapping[str, str] = {},
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """Resumes a run and trains to its end; returns the reports of the processes.

    The run starts with other seeds, so that any state that is not restored differs.
    """
    arguments = str(directory), str(ramdisks), "0", "77"
    reports = run_processes(PROGRAMS / "two_tiers.py", count, *arguments, env=env, fresh=fresh)
    return [report for (report,) in reports]


def straight(tmp_path: Path, count: int) -> list[dict[str, Any]]:
    places = str(tmp_path / "straight"), str(tmp_path / "straight-ramdisks")
    return [
        report for (report,) in run_processes(PROGRAMS / "two_tiers.py", count, *places, "0", "0")
    ]


def assert_ends_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for here, there in zip(found, expected, strict=True):
        assert here["whole"] == there["whole"]
        assert here["own"] == there["own"]
    # Random state and loaders must differ between processes, or the comparison proves nothing.
    assert len({report["own"]["torch"] for report in expected}) == len(expected)
