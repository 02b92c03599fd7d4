"""Reads the events of a directory and prints MiB that it took, how many there are, and the runs.

python reads_events.py DIRECTORY
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from etils import epath

from torchax_ckpt.telemetry.journal import read_events


def most_kib() -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


before = most_kib()
runs = read_events(epath.Path(sys.argv[1]))
print(json.dumps([(most_kib() - before) >> 10, sum(map(len, runs.values())), sorted(runs)]))
