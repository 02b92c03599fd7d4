"""Shows that a run which is killed and resumed ends on the same bits as one that is not.

    make demo

Trains the digits uninterrupted in one directory; in another one until a SIGKILL at a random step,
and then, in a fresh process with another seed, to the end. Exits 1 if the two differ.
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
    """Runs the example, showing what it prints; returns its exit code and digest."""
    command = [str(EXAMPLE), "--directory", str(directory), "--steps", str(STEPS), *options]
    print(f"\n$ python {' '.join(command)}", flush=True)
    # torchdata makes a call that torch has deprecated.
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
        print(f"expected the run to be killed at step {crash_at}, but it exited with {code}")
        return 1
    print("  (killed)")
    code, resumed = train(DIRECTORY / "killed", "--seed", "1")
    if code != 0:
        return 1
    print(f"\nuninterrupted:       {uninterrupted}\nkilled and resumed:  {resumed}")
    if resumed != uninterrupted:
        print("DIFFERENT: the resumed run did not end on the same bits.")
        return 1
    print("IDENTICAL: the resumed run ended on the same bits as the uninterrupted one.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
