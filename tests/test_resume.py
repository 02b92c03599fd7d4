"""N steps straight equal k steps, a fresh process with other seeds, and N - k steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "resume_program.py"
LAST = 12  # more than two epochs of five steps


def start(style: str, directory: Path | str, first: int, last: int, seed: int) -> Any:
    return subprocess.Popen(
        [sys.executable, PROGRAM, style, str(directory), str(first), str(last), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parent)},
    )


def result(process: Any) -> Any:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("style", "cut", "seeds"),
    [
        pytest.param("a", 4, (1, 22), id="eager-optimizer-mid-epoch-raw-key"),
        pytest.param("a", 5, (2, 11), id="eager-optimizer-epoch-end-typed-key"),
        pytest.param("b", 4, (2, 11), id="optax-functional-donated"),
        pytest.param("c", 7, (1, 22), id="whole-step-jitted-donated"),
        pytest.param("d", 4, (2, 22), id="fsdp-on-8-devices"),
    ],
)
def test_a_resumed_run_ends_on_the_same_bits(
    style: str, cut: int, seeds: tuple[int, int], directory: Path
) -> None:
    straight = start(style, "-", 0, LAST, seeds[0])
    began = result(start(style, directory, 0, cut, seeds[0]))
    resumed = result(start(style, directory, cut, LAST, seeds[1]))
    expected = result(straight)
    assert began["seen"] + resumed["seen"] == expected["seen"]
    assert resumed["state"] == expected["state"]
    assert began["state"] != expected["state"]
