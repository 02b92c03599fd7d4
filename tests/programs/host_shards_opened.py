"""What programs of hosts that save their own shards share: the model, and how to open a run.

python PROGRAM INDEX COUNT PORT DIRECTORY RAMDISKS SEED ...
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from processes_program import INDEX, Training

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies

directory, mine = sys.argv[4], pathlib.Path(sys.argv[5], str(INDEX))
training = Training(int(sys.argv[6]))


def opened(durable: Any, keep: int = 2) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        directory,
        save_decision_policy=durable,
        local=LocalTier(mine, save_decision_policy=policies.FixedIntervalPolicy(1), keep=keep),
        # In several batches, of which the later are begun while the other tier's save goes on.
        options=CheckpointOptions(process_timeout_secs=60, max_host_bytes=1000),
    )
