"""Runs every measurement of the benchmarks on a tiny model and prints what is there to count.

python tiny_measurements.py BENCHMARKS FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, sys.argv[1])
import jax
import measure
import peers

root = Path(sys.argv[2])
found: dict[str, Any] = {}
for peer, state in [*((peer, "tiny") for peer in peers.PEERS), ("torchax_ckpt", "tiny-functional")]:
    directory = root / f"{state}-{peer}"
    saved = measure.save(state, peer, directory, 2)
    restored = measure.restore(state, peer, directory, 1)
    found[f"{peer}, {state}"] = [saved["leaves"], len(saved["durable"]), len(restored["restore"])]


class Watched(peers.Ours):
    arrays: ClassVar[list[Any]] = []
    gone: ClassVar[list[bool | None]] = []

    def save(self, step: int) -> None:
        self.gone.append(all(a.is_deleted() for a in self.arrays) if self.arrays else None)
        self.arrays[:] = [v for v in jax.tree.leaves(self._flat()) if isinstance(v, jax.Array)]
        super().save(step)


peers.PEERS["watched"] = Watched
for state, device_secs in (("tiny", None), ("tiny-donated", 0.01), ("tiny-functional", 0.01)):
    Watched.arrays, Watched.gone = [], []
    ran = measure.loop(
        state,
        "watched",
        root / f"loop-{state}",
        3,
        max_secs=100,
        compute_secs=0.01,
        device_secs=device_secs,
    )
    found[f"loop of {state}"] = [len(ran["intervals"]), len(ran["blocking"]) > 2, Watched.gone[1:]]
stopped = measure.loop(
    "tiny-donated", "orbax_v1", root / "stopped", 3, max_secs=0, compute_secs=None, device_secs=None
)
found["stopped"] = stopped["intervals"]
found["modes"] = sorted(measure.modes("tiny", "-", root / "modes", 1))
found["digests"] = [len(t) for t in measure.digests("tiny", "-", root / "digests", 1).values()]
found["declined"] = sorted(measure.declined("-", "-", root / "declined", 10))
found["machine"] = measure.machine("-", "-", root, 0)
print("FOUND " + json.dumps(found))
