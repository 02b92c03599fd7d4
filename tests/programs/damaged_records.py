"""Two processes meet damaged records of steps, alike.

    python damaged_records.py INDEX COUNT PORT DIRECTORY PHASE

PHASE is ``save``, ``fall back``, ``fail`` or ``prune``.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from processes_program import MESH, P, report

from torchax_ckpt import TorchaxCheckpointer, errors, policies

directory, phase = sys.argv[4:6]
rows = NamedSharding(MESH, P("fsdp"))


def state(step: int) -> dict[str, Any]:
    full = np.full((8, 4), step, np.float32)
    return {"w": jax.make_array_from_callback(full.shape, rows, lambda index: full[index])}


keep = policies.LatestN(2) if phase == "prune" else policies.PreserveAll()
ckpt = TorchaxCheckpointer(directory, preservation_policy=keep)
if phase == "save":
    for step in (1, 2):
        ckpt.save(step, state=state(step), force=True)
elif phase == "fall back":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ckpt.load(None, state(0))
    parts = [float(np.asarray(s.data).mean()) for s in found["w"].addressable_shards]
    said = any("_CHECKPOINT_METADATA" in str(w.message) for w in caught)
    report(parts=parts, said=said, steps=ckpt.all_steps())
elif phase == "prune":
    for step in (3, 4):
        ckpt.save(step, state=state(step), force=True)
        ckpt.wait_until_finished()
    report(steps=ckpt.all_steps())
else:
    try:
        ckpt.load(None, state(0))
    except errors.CorruptCheckpointError as error:
        report(refused="_CHECKPOINT_METADATA" in str(error))
ckpt.close()
