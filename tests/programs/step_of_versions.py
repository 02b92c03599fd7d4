"""Writes steps of every dtype and of a training, or compares them with what was written.

python step_of_versions.py write|read FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torchax
from make_golden import STEP, fingerprint, write_first

from torchax_ckpt import TorchaxCheckpointer

torchax.enable_globally()
folder = Path(sys.argv[2])
found = {}
for kind in ("attached", "stacked", "compressed"):
    if sys.argv[1] == "write":
        write_first(folder / kind, kind)
    with TorchaxCheckpointer(folder / kind) as ckpt:
        ckpt.verify(STEP)
        found[kind] = fingerprint(ckpt.load(STEP))
expected = folder / "expected.json"
if sys.argv[1] == "write":
    expected.write_text(json.dumps(found))
assert json.loads(json.dumps(found)) == json.loads(expected.read_text()), folder.name
