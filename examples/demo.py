"""Shows that a killed and resumed run ends with the same bits as an uninterrupted run.

    make demo

Trains on the digits without interruption in one directory. In another directory, trains until a
SIGKILL at a random step, and then to the end in a new process with another seed. Exits with 1 if
the two final states differ.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).with_name("train_digits.py")
DIRECTORY = Path(".demo")
STEPS = 300


def train(directory: Path, *options: str) -> tuple[int, str]:
    """Runs the example and prints its output; returns its exit code and final digest."""
    command = [str(EXAMPLE), "--directory", str(directory), "--steps", str(STEPS), *options]
    print(f"\n$ python {' '.join(command)}", flush=True)
    # torchdata calls a function that torch has deprecated.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore:'set_vital' is deprecated:UserWarning"}
    with subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        digest = ""
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            digest = line.partition("final state: ")[2].strip() or digest
    return process.returncode, digest


def main() -> int:
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    code, uninterrupted = train(DIRECTORY / "uninterrupted")
    if code != 0:
        return 1
    crash_at = random.randrange(100, 250)
    code, _ = train(DIRECTORY / "killed", "--crash-at", str(crash_at))
    if code != -signal.SIGKILL:
        print(f"expected the run to die at step {crash_at}, but it exited with code {code}")
        return 1
    print("  (killed)")
    code, resumed = train(DIRECTORY / "killed", "--seed", "1")
    if code != 0:
        return 1
    print(f"\nuninterrupted:       {uninterrupted}\nkilled and resumed:  {resumed}")
    if resumed != uninterrupted:
        print("DIFFERENT: the resumed run ended with other bits than the uninterrupted one.")
        return 1
    print("IDENTICAL: the resumed run ended with the same bits as the uninterrupted one.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
