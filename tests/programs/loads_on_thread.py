"""Several processes load a step on another thread than the one that trains.

python loads_on_thread.py INDEX COUNT PORT FOLDER
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import torchax
from processes_program import INDEX, report

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer

torchax.enable_globally()
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one reads for all": {
        "options": CheckpointOptions(single_replica_restore=True, process_timeout_secs=60)
    },
    "a local tier": {"local": LocalTier(f"{sys.argv[4]}/ramdisk-{INDEX}")},
}


def load(ckpt: TorchaxCheckpointer, found: list[Any]) -> None:
    try:
        found.append(ckpt.load()["w"].tolist())
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")


for name, settings in SETTINGS.items():
    with TorchaxCheckpointer(f"{sys.argv[4]}/{name}", **settings) as ckpt:
        ckpt.save(1, state={"w": np.arange(3)}, force=True)
        ckpt.wait_until_finished()
        found: list[Any] = []
        thread = threading.Thread(target=load, args=(ckpt, found), name="other")
        thread.start()
        thread.join()
        report(name=name, found=found[0], here=ckpt.load()["w"].tolist())
