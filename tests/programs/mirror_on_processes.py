"""Several processes that train a run with a mirror; see ``tests/saving/test_mirror.py``.

python mirror_on_processes.py INDEX COUNT PORT FOLDER {"own": ..., "saves": [...], "local": ...}
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torchax
from processes_program import INDEX, report, spread
from support.stages import at

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.storage.medium.local_medium import LocalMedium

torchax.enable_globally()
folder, settings = Path(sys.argv[4]), json.loads(sys.argv[5])
read = LocalMedium.read


def read_own(self: LocalMedium, path: Path, *more: int) -> bytes:
    """Reads as on a host that does not see what process 0 writes at the same path."""
    if settings["own"] and INDEX == 1 and path.parent.name == "run":
        raise FileNotFoundError(path)
    return read(self, path, *more)


# Longer than others wait for one message.
at("fetch from the mirror", lambda: time.sleep(settings.get("slow_secs", 0)))
options = CheckpointOptions(process_timeout_secs=settings.get("timeout_secs", 60))
more: dict[str, Any] = {}
if settings.get("local"):  # the step that is not forced is in the local tier only
    rule = policies.FixedIntervalPolicy(1)
    more["local"] = LocalTier(folder / f"local-{INDEX}", save_decision_policy=rule)
    more["save_decision_policy"] = policies.SpecificStepsPolicy(())
try:
    with (
        mock.patch.object(LocalMedium, "read", read_own),
        TorchaxCheckpointer(
            folder / "run", mirror=folder / "mirror", options=options, **more
        ) as ckpt,
    ):
        start = ckpt.attach(stateful={})
        for step in settings["saves"]:
            w = np.arange(8.0) + step  # each host has all of it in its local tier
            state = {"w": w if settings.get("local") else spread(w)}
            ckpt.save(step, state=state, force=not settings.get("local"))
            ckpt.wait_until_finished()
    report(start=start, steps=ckpt.all_steps(), num_mirrored=ckpt.stats().num_mirrored)
except CheckpointError as error:
    report(kind=type(error).__name__, message=str(error))
