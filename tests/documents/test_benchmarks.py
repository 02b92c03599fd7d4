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
CPU = {"date": "2020-01-01", "platform": "cpu", "machine": "a machine", "jax": "1.2.3"}
PEERS = ("article", "orbax_v0", "orbax_v1", "torch_save", "torchax_ckpt")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def saves(secs: float) -> dict[str, Any]:
    """What is measured of one peer whose times are all the same."""
    times = [secs] * 5
    return {
        "leaves": 1000, "bytes": 10**6, "first": secs + 0.5, "blocking": times, "durable": times,
        "write": [1.0] * 5, "read": [1.0] * 5, "restore": times,
    }  # fmt: skip


def state(ours: float, bare: float) -> dict[str, Any]:
    peers = {row: saves(bare) for row in (*PEERS, "functional")} | {"torchax_ckpt": saves(ours)}
    digests = {
        "taken": [1.05] * 5, "not taken": [1.0] * 5, "first, compared": [1.2] * 5,
        "first, trusted": [1.0] * 5, "compared": [1.0] * 5, "trusted": [1.0] * 5,
    }  # fmt: skip
    modes = {"reference, idle": [0.0015] * 5, "copy, busy": [0.011] * 5}
    return {"taken": CPU, "peers": peers, "modes": modes, "digests": digests}


def loop(ours: float, bare: float, **taken: str) -> dict[str, Any]:
    """Steps take 1 s without checkpoints, so long with them, and every interval is that long."""

    def figures(secs: float) -> dict[str, Any]:
        return {
            "bytes": 10**10, "step": [secs] * 9, "blocking": [secs / 10], "intervals": [secs] * 3
        }  # fmt: skip

    peers = {
        "orbax_v0": figures(bare),
        "orbax_v1": figures(bare + 1),
        "torchax_ckpt": figures(ours),
    }
    none = {"step": [1.0] * 9, "intervals": [], "blocking": []}
    return {
        "taken": {**CPU, **taken},
        "wanted": 3,
        "max_secs": 60.0,
        "peers": {"none": none, **peers},
    }


def written(results: dict[str, Any], folder: Path) -> str:
    """The page that is made of figures."""
    page = folder / "README.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    importlib.import_module("report").write_report(results, folder)
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    return page.read_text()


def cells(page: str, first: str) -> list[str]:
    """The cells of every row that begins like this, but the first of each."""
    rows = re.findall(rf"^\| {re.escape(first)} \| (.*) \|$", page, re.MULTILINE)
    return [cell for row in rows for cell in row.split(" | ")]


def test_verdicts_are_computed_for_every_target(tmp_path: Path) -> None:
    page = written({"states": {"wide": state(0.5, 1.0), "deep": state(0.02, 1.0)}}, tmp_path)
    assert cells(page, "wide") == [
        "1/2 (target 1/10: missed)", "1/2 (target 1/1.5: met)", "0.50 (target 1.50: met)",
        "1/2 (target 1/1: met)",
        # 0.5 ms and 1 us for each of 1,000 leaves.
        "1.5 ms (target 1.5 ms: met)", "11.0 ms (target 10.0 ms: missed)",
        "x 0.50 (target x 1.15: met)", "500.0 ms (target 1.00 s: met)",
        "+5.0% (target +5.0%: missed)",  # a rounding above
        "+20.0% (target +10.0%: missed)",
    ]  # fmt: skip
    assert cells(page, "deep")[:2] == ["1/50 (target 1/40: met)", "1/50 (target 1/15: met)"]


@pytest.mark.parametrize(
    ("ours", "steps", "longer"),
    [
        (2.0, "1/2 (target 1/2: met)", "+100.0% (target bare Orbax's +300.0%: met)"),
        (2.1, "1/1.9 (target 1/2: missed)", "+110.0% (target bare Orbax's +300.0%: met)"),
        (4.5, "1/0.889 (target 1/2: missed)", "+350.0% (target bare Orbax's +300.0%: missed)"),
    ],
)
def test_a_loop_is_held_against_the_better_bare_orbax(
    ours: float, steps: str, longer: str, tmp_path: Path
) -> None:
    page = written({"loops": {"deep": loop(ours, 4.0)}}, tmp_path)
    assert f"- steps between durable checkpoints, of bare Orbax's: {steps}\n" in page
    assert f"- steps take longer by {longer}\n" in page
    assert "accelerator" not in page
    assert "Fewer" not in page


def test_a_loop_says_what_its_own_circumstances_ask_for(tmp_path: Path) -> None:
    page = written({"loops": {"big-donated": loop(1.02, 61.2, platform="tpu")}}, tmp_path)
    assert "- on an accelerator, blocking, of bare Orbax's: 1/60 (target 1/50: met)\n" in page
    assert "- on an accelerator, steps take longer by +2.0% (target +3.0%: met)\n" in page

    measured = loop(1.001, 4.0)
    measured["peers"]["orbax_v0"]["intervals"] = []
    measured["peers"]["none"]["processor"] = 0.9  # 0.1 s a step
    measured["peers"]["torchax_ckpt"] |= {"processor": 1.2, "intervals": [3] * 3}
    page = written({"loops": {"deep, waiting 50 ms for a device": measured}}, tmp_path)
    assert "- added to training per durable step: 3.0 ms (target 12.0 ms: met)\n" in page
    assert "- processor time per save: 100.0 ms (target 50.0 ms: missed)\n" in page
    assert (
        "**Fewer than 3 intervals** within 60 s, thus imprecise: bare Orbax v0, async (0)" in page
    )


def test_the_page_shows_the_figures_that_are_kept(tmp_path: Path) -> None:
    marked = re.compile(r"<!-- results -->.*<!-- end of results -->", re.DOTALL)
    page = marked.search((BENCHMARKS / "README.md").read_text())
    made = marked.search(written(RESULTS, tmp_path))
    assert page is not None
    assert made is not None
    assert page[0] == made[0], "python benchmarks/run.py --report-only"


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
