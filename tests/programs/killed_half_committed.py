"""The run of two_tiers.py; every second host commits a local step, then all hosts are killed.

python killed_half_committed.py INDEX COUNT PORT DIRECTORY RAMDISKS STEP SEED
"""

from __future__ import annotations

import importlib
import pathlib
import sys
import time
from typing import Any

from processes_program import INDEX, die

from torchax_ckpt.storage.directory.run_directory import RunDirectory

count, ramdisks, fatal = int(sys.argv[2]), pathlib.Path(sys.argv[5]), int(sys.argv[6])
sys.argv[6] = "0"  # two_tiers.py is to kill nobody
commit = RunDirectory.commit


def killed(self: Any, step: int, *args: Any) -> Any:
    if step != fatal or self.path != ramdisks / str(INDEX):
        return commit(self, step, *args)
    if INDEX % 2:
        commit(self, step, *args)
    committing = [ramdisks / str(index) / str(step) for index in range(1, count, 2)]
    while not all(path.exists() for path in committing):
        time.sleep(0.01)
    die()
    return None


RunDirectory.commit = killed  # type: ignore[method-assign,assignment]
importlib.import_module("two_tiers")
