"""The programs of `make bench`: what they keep, what they compute, and that they run."""

from __future__ import annotations

import importlib
import json
import re
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


def test_a_verdict_holds_a_median_against_the_better_bare_orbax() -> None:
    targets = importlib.import_module("targets")
    bare = {"orbax_v0": {"blocking": [2.0] * 3}, "orbax_v1": {"blocking": [1.0, 1.0, 9.0]}}
    for ours, said in ((0.1, "1/10 (target 1/10: met)"), (0.5, "1/2 (target 1/10: missed)")):
        peers = {**bare, "torchax_ckpt": {"blocking": [0.0, ours, 9.0]}}
        assert targets.of_bare("wide", peers, "blocking") == said
    rounded = targets.at_most(0.0501, 0.05, targets.more)
    assert rounded == "+5.0% (target +5.0%: missed)"  # a rounding above


def test_the_page_shows_the_figures_that_are_kept(tmp_path: Path) -> None:
    marked = re.compile(r"(?<=<!-- results -->).*(?=<!-- end of results -->)", re.DOTALL)
    kept = (BENCHMARKS / "README.md").read_text()
    page = tmp_path / "README.md"
    page.write_text(marked.sub("\nold\n", kept))
    importlib.import_module("report").write_report(RESULTS, tmp_path)
    assert page.read_text() == kept, "python benchmarks/run.py --report-only"


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
