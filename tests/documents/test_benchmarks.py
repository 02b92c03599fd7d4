"""The programs of `make bench`: what they keep, what they compute, and that they run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import PROGRAMS, ROOT
from support.compare import assert_trees_identical
from support.processes import run_python

BENCHMARKS = ROOT / "benchmarks"
RESULTS = json.loads((BENCHMARKS / "results.json").read_text())
PEERS = ("article", "orbax_v0", "orbax_v1", "torch_save", "torchax_ckpt")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_pages_show_the_figures_that_are_kept(tmp_path: Path) -> None:
    page, command = importlib.import_module("page"), "python benchmarks/run.py --report-only"
    page.write(RESULTS, tmp_path)
    kept, readme = (folder.joinpath("README.md").read_text() for folder in (BENCHMARKS, ROOT))
    assert (tmp_path / "README.md").read_text() == kept, command
    assert kept.count("\n") <= 120  # a page
    assert page.rewritten(readme, RESULTS) == readme, command


def test_times_are_shown_with_two_digits_and_their_spread() -> None:
    page = importlib.import_module("page")
    assert page.spread([0.0123, 0.0456, 0.789]) == "46 ms (12 - 789)"
    assert page.spread([0.0123, 0.456, 6.78]) == "456 ms (12 ms - 6.8 s)"


@pytest.mark.parametrize("peer", PEERS)
def test_peers_save_what_a_functional_state_was_before_a_step_donated_it(
    peer: str, tmp_path: Path
) -> None:
    states, peers = (importlib.import_module(name) for name in ("states", "peers"))
    training = states.training("tiny-functional")

    def opened() -> Any:
        return peers.PEERS[peer](tmp_path / "run", None, None, training.arrays, keep=1)

    saver, expected = opened(), jax.tree.map(np.array, training.arrays())
    saver.save(1)
    training.update()
    saver.wait()
    saver.close()
    restorer = opened()
    restored = restorer.restore()
    restorer.close()
    assert_trees_identical(jax.tree.map(np.array, restored), expected)


@pytest.mark.long
@pytest.mark.slow
def test_the_measurements_run(tmp_path: Path) -> None:
    ran = run_python(PROGRAMS / "tiny_measurements.py", str(BENCHMARKS), str(tmp_path))
    found = json.loads(ran.stdout.split("FOUND ")[1])
    for peer in PEERS:
        assert found[f"{peer}, tiny"] == [8, 2, 1]
    assert found["torchax_ckpt, tiny-functional"] == [7, 2, 1]
    for state in ("tiny", "tiny-donated", "tiny-functional"):
        intervals, has_blocking, gone = found[f"loop of {state}"]
        assert (intervals, has_blocking) == (3, True)
        assert gone == [state != "tiny"] * len(gone)
    assert found["stopped"] == []
    assert found["modes"] == ["copy, busy", "copy, idle", "reference, busy", "reference, idle"]
    assert found["digests"] == [1, 1, 1, 1]
    assert {name.partition(",")[0] for name in found["declined"]} == {
        "fixed interval", "minimum interval", "optimal interval", "a save in flight"
    }  # fmt: skip
    assert "4 forced CPU devices, no accelerator" in found["machine"]["machine"]
