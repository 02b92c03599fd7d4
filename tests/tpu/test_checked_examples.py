"""The examples compile their steps for a TPU topology."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support import ROOT
from support.processes import Started

pytestmark = pytest.mark.tpu

EXAMPLES = ROOT / "examples"


def check(name: str, topology: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs an example as a user does; other tests of this process have loaded libtpu."""
    return Started(
        *(EXAMPLES / name, "--directory", folder / "run", "--check-topology", topology),
        devices=None,
        env={"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
    ).result(240)


def table(result: subprocess.CompletedProcess[str], folder: Path) -> dict[str, str]:
    """The rows that an example printed; it must have ended well and written nothing."""
    assert result.returncode == 0, result.stderr
    assert not list(folder.iterdir())
    return dict(re.findall(r"^(.+?): +(.+)$", result.stdout, re.MULTILINE))


def numbers(row: str) -> list[int]:
    return [int(found.replace(",", "")) for found in re.findall(r"\b\d[\d,]*", row)]


def test_the_step_of_gpt_donates_its_state(tmp_path: Path) -> None:
    rows = table(check("train_gpt.py", "v5e:2x4", tmp_path), tmp_path)
    donated, arguments = numbers(rows["donated"])
    copies, state = numbers(rows["a snapshot"])
    assert donated == state == copies  # the whole state, which has no stacks of more than it
    assert donated < arguments < donated + 4096  # the key and a part of the batch
    (step,), (together, usable) = numbers(rows["the step"]), numbers(rows["together"])
    assert step > arguments
    assert together == step + copies < usable
    assert "nothing was measured" in rows["compiled"]


@pytest.mark.parametrize(
    ("name", "num_trees"),
    [("train_digits.py", 3), ("train_lightning.py", 2)],  # the parameters, their momentum, ...
)
def test_gradients_are_compiled_for_a_chip_beside_the_other_state(
    tmp_path: Path, name: str, num_trees: int
) -> None:
    rows = table(check(name, "v5e:2x4", tmp_path), tmp_path)
    donated, arguments = numbers(rows["donated"])
    copies, state = numbers(rows["a snapshot"])
    assert rows["chips"].startswith("1 of v5e:2x4")
    assert donated == 0
    (step,) = numbers(rows["the step"])
    assert copies == state
    inputs = 64 * 128 * 4 + 512 + 512  # images [64, 64] in tiles, labels and the key
    parameters = state // num_trees
    assert arguments == parameters + inputs
    assert step > arguments + state - parameters


def test_chips_that_make_no_mesh_of_the_example_are_refused(tmp_path: Path) -> None:
    for topology, code, said in (
        (
            "v5e:4x8",
            2,
            "--check-topology: expected a number of chips that divides the batch size 16; found "
            "v5e:4x8 with 32 chips",
        ),
        ("v5litepod-8", 1, "give v5e:2x4"),
    ):
        result = check("train_gpt.py", topology, tmp_path)
        assert result.returncode == code
        assert said in result.stderr.splitlines()[-1]
        assert not list(tmp_path.iterdir())
