"""Runs every measurement of the benchmarks on a tiny model and prints what is there to count.

python tiny_measurements.py BENCHMARKS FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, sys.argv[1])
import measure
import peers

root = Path(sys.argv[2])
found: dict[str, Any] = {}
for peer in peers.PEERS:
    saved = measure.save("tiny", peer, root / peer, 2)
    restored = measure.restore("tiny", peer, root / peer, 1)
    found[peer] = [saved["leaves"], len(saved["durable"]), len(restored["restore"])]


class Watched(peers.Ours):
    arrays: ClassVar[list[Any]] = []
    gone: ClassVar[list[bool | None]] = []

    def save(self, step: int) -> None:
        self.gone.append(all(a.is_deleted() for a in self.arrays) if self.arrays else None)
        self.arrays[:] = [v for v in self._flat().values() if hasattr(v, "is_deleted")]
        super().save(step)


peers.PEERS["watched"] = Watched
for donate in (False, True):
    Watched.arrays, Watched.gone = [], []
    ran = measure.loop(
        "tiny",
        "watched",
        root / f"loop-{donate}",
        3,
        max_secs=100,
        compute_secs=0.01,
        device_secs=0.01 if donate else None,
        donate=donate,
    )
    found[f"donate {donate}"] = [len(ran["intervals"]), len(ran["blocking"]) > 2, Watched.gone[1:]]
stopped = measure.loop(
    "tiny",
    "orbax_v1",
    root / "stopped",
    3,
    max_secs=0,
    compute_secs=None,
    device_secs=None,
    donate=True,
)
found["stopped"] = stopped["intervals"]
found["modes"] = sorted(measure.modes("tiny", "-", root / "modes", 1))
found["digests"] = [len(t) for t in measure.digests("tiny", "-", root / "digests", 1).values()]
found["declined"] = sorted(measure.declined("-", "-", root / "declined", 10))
found["machine"] = measure.machine("-", "-", root, 0)
print("FOUND " + json.dumps(found))
