"""N steps straight equal k steps, a fresh process with other seeds, and N - k steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from support import PROGRAMS
from support.processes import Started

from torchax_ckpt.options import Layout, SnapshotMode

SLOW = pytest.mark.slow
PROGRAM = PROGRAMS / "resume_program.py"
LAST = 12  # more than two epochs of five steps


def start(
    style: str, directory: Path | str, first: int, last: int, seed: int, *ways: str
) -> Started:
    arguments = (str(PROGRAM), style, str(directory), str(first), str(last), str(seed), *ways)
    return Started(*arguments)


def result(started: Started) -> Any:
    ended = started.result(200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("style", "cut", "seeds"),
    [
        pytest.param(
            "a", 4, (1, 22), id="eager-optimizer-mid-epoch-raw-key", marks=pytest.mark.slow
        ),
        pytest.param(
            "a", 5, (2, 11), id="eager-optimizer-epoch-end-typed-key", marks=pytest.mark.slow
        ),
        pytest.param("b", 4, (2, 11), id="optax-functional-donated"),
        pytest.param("c", 7, (1, 22), id="whole-step-jitted-donated", marks=SLOW),
        pytest.param("d", 4, (2, 22), id="fsdp-on-8-devices", marks=SLOW),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "donates"),
    [
        pytest.param("a", False, id="eager-optimizer", marks=pytest.mark.long),
        pytest.param("b", True, id="optax-functional-donated"),
        pytest.param("c", True, id="whole-step-jitted-donated"),
        pytest.param("d", False, id="fsdp-on-8-devices", marks=pytest.mark.long),
    ],
)
def test_so_does_one_saved_in_every_way(style: str, donates: bool, directory: Path) -> None:
    """One run saves in all ways at once, which keeps the saves waiting for each other."""
    modes = [m for m in get_args(SnapshotMode) if not (donates and m == "reference")]
    ways = [f"{layout}-{mode}" for layout in get_args(Layout) for mode in modes]
    straight = start(style, "-", 0, 6, 1)
    began = result(start(style, directory, 0, 3, 1, *ways))
    resumed = result(start(style, directory, 3, 6, 23, *ways))
    expected = result(straight)
    assert len(resumed) == len(ways)
    for way, found in zip(ways, resumed, strict=True):
        assert began["seen"] + found["seen"] == expected["seen"], way
        assert found["state"] == expected["state"], way
