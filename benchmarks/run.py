"""Runs the measurements of `make bench`, each in its own process; writes tables and a plot.

    python benchmarks/run.py [--states deep,gpt2] [--loop deep,deep-functional] [--repeats 5]
    python benchmarks/run.py --report-only

Raw figures go to results.json in this folder, with the date and the versions of each run. Figures
that are not measured again stay. Tables go into README.md, the plot into results.png.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = ("article", "orbax_v0", "orbax_v1", "torch_save", "torchax_ckpt")
RESULTS = HERE / "results.json"
BEGAN = time.monotonic()


def measure(
    what: str, state: str, peer: str, directory: Path, repeats: int,
    flags: Sequence[str] = (), **env: str,
) -> dict[str, Any]:  # fmt: skip
    """Runs measure.py in a new process; returns its result."""
    minutes, secs = divmod(round(time.monotonic() - BEGAN), 60)
    print(f"{minutes:3}:{secs:02}  {what:8} {state:16} {peer:12}", end="", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, HERE / "measure.py", what, state, peer, directory, str(repeats), *flags],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    print(f" {time.monotonic() - began:6.1f} s", flush=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{what} {state} {peer} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def taken(root: Path) -> dict[str, Any]:
    """Returns the date, machine and versions of the following measurements."""
    return measure("machine", "-", "-", root, 0)


def measure_state(state: str, repeats: int, restores: int, root: Path) -> dict[str, Any]:
    """Measures saves and restores of one state under every peer, and the medium."""
    when, results = taken(root), {}
    rows = {peer: (state, peer) for peer in PEERS}
    rows["functional"] = f"{state}-functional", "torchax_ckpt"
    for row, measured in rows.items():
        directory = root / f"{state}-{row}"
        results[row] = measure("save", *measured, directory, repeats)
        results[row]["restore"] = [
            measure("restore", *measured, directory, 1)["restore"][0] for _ in range(restores)
        ]
        shutil.rmtree(directory)
    directory = root / f"{state}-modes"
    modes = measure("modes", state, "-", directory, repeats)
    shutil.rmtree(directory)
    digests = measure("digests", state, "-", directory, 4 * repeats)
    for name, verify in (("first, trusted", "never"), ("first, compared", "restore")) * repeats:
        found = measure("restore", state, "torchax_ckpt", directory, 1, VERIFY=verify)
        digests.setdefault(name, []).extend(found["restore"])
    shutil.rmtree(directory)
    return {"taken": when, "peers": results, "modes": modes, "digests": digests}


def measure_loop(
    state: str, intervals: int, max_secs: float, flags: Sequence[str], root: Path
) -> dict[str, Any]:
    """Measures a training loop under continuous saving by each peer, and without saving."""
    when = taken(root)
    results = {"none": measure("loop", state, "none", root, 100, flags)}
    for peer in PEERS:
        directory = root / f"loop-{state}-{peer}"
        bound = ["--max-secs", str(max_secs)]
        results[peer] = measure("loop", state, peer, directory, intervals, [*flags, *bound])
        shutil.rmtree(directory)
    return {"taken": when, "wanted": intervals, "max_secs": max_secs, "peers": results}


def measure_declined(root: Path) -> dict[str, Any]:
    """Measures saves that the policy declines."""
    when = taken(root)
    return {"taken": when, "times": measure("declined", "-", "torchax_ckpt", root / "run", 5000)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--states", default="deep,gpt2,wide,moe", help="states to save and restore; '' for none"
    )
    parser.add_argument(
        "--loop",
        default="deep,gpt2",
        help="states to train, as modules, as modules whose step donates their arrays "
        "('deep-donated') or as donated pytrees ('deep-functional'); '' for none",
    )
    parser.add_argument("--declined", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=5, help="number of saves by each peer")
    parser.add_argument("--restores", type=int, default=5, help="number of restoring processes")
    parser.add_argument("--intervals", type=int, default=30, help="intervals in each peer's loop")
    parser.add_argument("--max-secs", type=float, default=450, help="limit of each peer's loop")
    parser.add_argument("--compute-secs", type=float, help="compute time of a loop's step")
    parser.add_argument("--device-secs", type=float, help="wait of a loop's step for a device")
    parser.add_argument("--directory", help="folder of the checkpoints; default: a temporary one")
    parser.add_argument("--report-only", action="store_true", help="only rewrite tables and plot")
    args = parser.parse_args(argv)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def write() -> None:
        RESULTS.write_text(json.dumps(results, indent=1))

    if not args.report_only:
        flags = []
        if args.compute_secs is not None:
            flags += ["--compute-secs", str(args.compute_secs)]
        if args.device_secs is not None:
            flags += ["--device-secs", str(args.device_secs)]
        with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
            root = Path(temporary)
            for state in filter(None, args.states.split(",")):
                found = measure_state(state, args.repeats, args.restores, root)
                results.setdefault("states", {})[state] = found
                write()
            for state in filter(None, args.loop.split(",")):
                found = measure_loop(state, args.intervals, args.max_secs, flags, root)
                name = state
                if args.device_secs is not None:
                    name += f", waiting {args.device_secs * 1e3:.0f} ms for a device"
                results.setdefault("loops", {})[name] = found
                write()
            if args.declined:
                results["declined"] = measure_declined(root)
                write()
    from report import write_report

    write_report(results, RESULTS.parent)
    print(RESULTS.parent / "README.md")


if __name__ == "__main__":
    main()
