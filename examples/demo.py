"""Shows that a killed and resumed run ends with the same bits as an uninterrupted run.

    make demo

Trains on the digits without interruption in one directory. Meanwhile, in another directory, trains
until a SIGKILL at a random step, and then to the end in a new process with another seed. Exits with
1 if the two final states differ.
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
STEPS = 200


def train(name: str, *options: str) -> subprocess.Popen[str]:
    """Starts the example in a directory."""
    command = [str(EXAMPLE), "--directory", str(DIRECTORY / name), "--steps", str(STEPS), *options]
    # torchdata calls a function that torch has deprecated.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore:'set_vital' is deprecated:UserWarning"}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True
    )


def show(process: subprocess.Popen[str]) -> str:
    """Prints what the example prints, until it ends; returns the digest of its final state."""
    assert isinstance(process.args, list)
    print(f"\n$ python {' '.join(process.args[1:])}", flush=True)
    digest = ""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"  {line}", end="", flush=True)
        digest = line.partition("final state: ")[2].strip() or digest
    return digest if process.wait() == 0 else ""


def main() -> int:
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    crash_at = random.randrange(60, 160)
    # The few lines of the uninterrupted run wait in the pipe.
    with train("uninterrupted") as uninterrupted:
        with train("killed", "--crash-at", str(crash_at)) as killed:
            show(killed)
        if killed.returncode != -signal.SIGKILL:
            print(f"expected a death at step {crash_at}, found exit code {killed.returncode}")
            return 1
        print("  (killed)")
        with train("killed", "--seed", "1") as again:
            resumed = show(again)
        expected = show(uninterrupted)
    print(f"\nuninterrupted:       {expected}\nkilled and resumed:  {resumed}")
    if not expected or resumed != expected:
        print("DIFFERENT: the resumed run ended with other bits than the uninterrupted one.")
        return 1
    print("IDENTICAL: the resumed run ended with the same bits as the uninterrupted one.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
