"""Measures what the page of benchmarks shows, in one sitting, and writes the page.

    python benchmarks/run.py [--into FOLDER]        the whole page: about an hour on two cores
    python benchmarks/run.py --report-only          only writes the page again

Each measurement is a process of its own, which `measure.py` or `unchanged.py` describes. Peers take
turns, so that a machine that becomes slower does so for all of them. The raw figures go to
results.json; page.py makes README.md and results.png of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import page

HERE = Path(__file__).parent
BEGAN = time.monotonic()
# How a row of the page is measured: the suffix of its state, and the peer of peers.py.
ROWS = {
    "article": ("", "article"),
    "orbax_v1": ("", "orbax_v1"),
    "torch_save": ("", "torch_save"),
    "torchax_ckpt": ("", "torchax_ckpt"),
    "donated": ("-functional", "torchax_ckpt"),
}
# The loops of the page wait for a device, as the host of an accelerator does.
IN_LOOPS = ("orbax_v1", "torchax_ckpt", "donated")
FROZEN = ("by identity", "reuse", "no reuse", "Orbax v1")


def run(program: str, *arguments: Any) -> Any:
    """Runs a program of this folder in a new process; returns the result that it prints."""
    minutes, secs = divmod(round(time.monotonic() - BEGAN), 60)
    print(f"{minutes:3}:{secs:02}  {' '.join(map(str, arguments))}", flush=True)
    done = subprocess.run(
        [sys.executable, HERE / program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{program} {arguments} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def measured_states(names: Sequence[str], rounds: int, saves: int, root: Path) -> dict[str, Any]:
    """Measures saves, and the first restore of a process, of each state under each peer."""
    results: dict[str, Any] = {}
    for name in names:
        rows = results[name] = {row: dict[str, Any]() for row in ROWS}
        for row, (suffix, peer) in [*ROWS.items()] * rounds:
            directory, state = root / f"{name}-{row}", name + suffix
            found = run("measure.py", "save", state, peer, directory, saves)
            found |= run("measure.py", "restore", state, peer, directory, 1)
            shutil.rmtree(directory)
            for what, value in found.items():
                is_series = isinstance(value, list)
                rows[row][what] = [*rows[row].get(what, ()), *value] if is_series else value
    return results


def measured_loops(
    names: Sequence[str], flags: Sequence[str], saves: int, root: Path
) -> dict[str, Any]:
    """Measures how much longer the steps of a loop take that always has a save in flight."""
    results: dict[str, Any] = {}
    for name in names:
        rows = results[name] = dict[str, Any]()
        for row in IN_LOOPS:
            suffix, peer = ROWS[row]
            directory, state = root / f"loop-{name}{suffix}-{peer}", name + suffix
            alone = run("measure.py", "loop", state, "none", directory, 100, *flags)["step"]
            found = run("measure.py", "loop", state, peer, directory, saves, *flags)
            steps, between = found["step"], found["intervals"]
            rows[row] = {
                "alone": statistics.mean(alone),
                "mean": statistics.mean(steps),
                "steps": len(steps),
                "saves": len(between),
                "between": statistics.median(between) if between else None,
            }
            shutil.rmtree(directory)
    return results


def measured_floor(names: Sequence[str], rounds: int, saves: int, root: Path) -> dict[str, Any]:
    """Measures saves beside the least program that stacks, fetches, digests and writes as much."""
    results: dict[str, Any] = {name: {"torchax_ckpt": [], "floor": []} for name in names}
    for name in names:
        for peer, durable in [*results[name].items()] * rounds:
            directory = root / f"floor-{name}-{peer}"
            durable += run("measure.py", "save", name, peer, directory, saves)["durable"]
            shutil.rmtree(directory)
    return results


def measured_frozen(names: Sequence[str], root: Path) -> dict[str, Any]:
    """Measures saves of states of which a part is frozen."""
    return {
        name: {
            peer: run("unchanged.py", "--states", name, "--one", peer, "--directory", root)
            for peer in FROZEN
        }
        for name in names
    }


def machine() -> dict[str, str]:
    """Returns the date, the commit, the machine and the versions of this sitting."""
    git = ["git", "-C", str(HERE)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True
    )
    changed = subprocess.run([*git, "status", "--porcelain", ".."], capture_output=True, text=True)
    name = commit.stdout.strip() or "unknown"
    if any(not line.endswith(page.WRITTEN) for line in changed.stdout.splitlines()):
        name += " with changes"
    return {"commit": name, **run("measure.py", "machine", "-", "-", HERE, 0)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", default="deep,moe,wide,gpt2", help="'' for none")
    parser.add_argument("--loops", default="deep,broad", help="states to train; '' for none")
    parser.add_argument("--floors", default="deep,middle,large", help="'' for none")
    parser.add_argument("--frozen", default="lora", help="a state of unchanged.py; '' for none")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each peer")
    parser.add_argument("--saves", type=int, default=2, help="saves of a turn, after a warm-up")
    parser.add_argument("--loop-saves", type=int, default=30, help="saves of each peer in a loop")
    parser.add_argument("--loop-flags", default="--device-secs 0.05 --max-secs 90")
    parser.add_argument("--directory", help="folder of the checkpoints; default: a temporary one")
    parser.add_argument("--into", type=Path, default=HERE, help="folder of the page")
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args(argv)
    kept = args.into / "results.json"
    if not args.report_only:
        states, loops, floors, frozen = (
            [*filter(None, text.split(","))]
            for text in (args.states, args.loops, args.floors, args.frozen)
        )
        with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
            root, rounds = Path(temporary), args.rounds
            results = {
                "taken": machine(),
                "states": measured_states(states, rounds, args.saves, root),
                "loops": measured_loops(loops, args.loop_flags.split(), args.loop_saves, root),
                "floors": measured_floor(floors, rounds, args.saves, root),
                "frozen": measured_frozen(frozen, root),
                "declined": run("measure.py", "declined", "-", "-", root / "declined", 5000),
            }
        results["taken"]["minutes"] = round((time.monotonic() - BEGAN) / 60)
        kept.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(kept.read_text())
    page.write(results, args.into)
    if args.into == HERE:
        readme = HERE.parent / "README.md"
        readme.write_text(page.rewritten(readme.read_text(), results))
    print(args.into / "README.md")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
