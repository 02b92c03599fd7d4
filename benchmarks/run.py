"""Runs every measurement, each in a process of its own, and writes the tables and plots.

    python benchmarks/run.py [--states deep,gpt2] [--repeats 5] [--loop deep,gpt2] [--report-only]
    python benchmarks/run.py --declined

Raw figures go to results.json beside this file, tables into README.md, plots into PNG files.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = ("article", "orbax_v0", "orbax_v1", "torch_save", "torchax_ckpt")
RESULTS = HERE / "results.json"


def measure(
    what: str, state: str, peer: str, directory: Path, repeats: int, **env: str
) -> dict[str, Any]:
    """One measurement in a fresh process."""
    print(f"  {what:8} {state:5} {peer}", flush=True)
    done = subprocess.run(
        [sys.executable, HERE / "measure.py", what, state, peer, str(directory), str(repeats)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{what} {state} {peer} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def measure_state(
    state: str, peers: list[str], repeats: int, restores: int, root: Path
) -> dict[str, Any]:
    """Saves and restores of one state under every peer, and the medium beside them."""
    results: dict[str, Any] = {}
    for peer in peers:
        directory = root / f"{state}-{peer}"
        results[peer] = measure("save", state, peer, directory, repeats)
        results[peer]["restore"] = [
            measure("restore", state, peer, directory, 1)["restore"][0] for _ in range(restores)
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
    return {"peers": results, "modes": modes, "digests": digests}


def measure_loop(state: str, intervals: int, root: Path) -> dict[str, Any]:
    """A training loop under continuous saving, and without."""
    results = {"none": measure("loop", state, "none", root, 100)}
    for peer in ("orbax_v0", "orbax_v1", "torchax_ckpt"):
        directory = root / f"loop-{state}-{peer}"
        results[peer] = measure("loop", state, peer, directory, intervals)
        shutil.rmtree(directory)
    return results


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    libraries = ("torch", "torchax", "jax", "orbax-checkpoint", "tensorstore")
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), {memory / 2**30:.0f} GiB "
        "memory, local disk, 4 forced CPU devices, no accelerator",
        "python": platform.python_version(),
        **{library: importlib.metadata.version(library) for library in libraries},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", default="deep,gpt2,wide,moe")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--loop", default="deep,gpt2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--restores", type=int, default=3)
    parser.add_argument("--intervals", type=int, default=30)
    parser.add_argument("--directory", help="where checkpoints go; default: a temporary one")
    parser.add_argument("--declined", action="store_true", help="only saves that do not save")
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.declined:
        with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
            directory = Path(temporary) / "run"
            results["declined"] = measure("declined", "-", "torchax_ckpt", directory, 5000)
        RESULTS.write_text(json.dumps(results, indent=1))
    elif not args.report_only:
        with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
            root = Path(temporary)
            results["machine"] = machine()
            for state in filter(None, args.states.split(",")):
                print(state, flush=True)
                results.setdefault("states", {})[state] = measure_state(
                    state, args.peers.split(","), args.repeats, args.restores, root
                )
                RESULTS.write_text(json.dumps(results, indent=1))
            for state in filter(None, args.loop.split(",")):
                results.setdefault("loops", {})[state] = measure_loop(state, args.intervals, root)
                RESULTS.write_text(json.dumps(results, indent=1))
    from report import write_report

    write_report(results, HERE)
    print(HERE / "README.md")


if __name__ == "__main__":
    main()
