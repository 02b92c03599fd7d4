"""A run with a local tier on every host, whose processes may all be killed after a step.

    python two_tiers.py INDEX COUNT PORT DIRECTORY RAMDISKS KILL_AT SEED

KILL_AT 0 kills none.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import processes_program as program
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes_program import INDEX, Training, die, report

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies

directory, ramdisks = sys.argv[4:6]
kill_at, seed = map(int, sys.argv[6:8])
program.MESH = MESH = Mesh(np.array(jax.devices()).reshape(2, -1), ("replica", "fsdp"))


def rule(name: Any, abstract: Any) -> Any:
    for dim, length in enumerate(abstract.shape):
        if length and length % MESH.shape["fsdp"] == 0:
            return NamedSharding(MESH, P(*[None] * dim, "fsdp"))
    return NamedSharding(MESH, P())


program.rule = rule
training = Training(seed)
every = policies.FixedIntervalPolicy
ckpt = TorchaxCheckpointer(
    directory,
    save_decision_policy=every(4),
    local=LocalTier(f"{ramdisks}/{INDEX}", save_decision_policy=every(1)),
    options=CheckpointOptions(process_timeout_secs=60),
)
start = training.attach(ckpt)
tier = ckpt.restore().tier if start else None
for step in range(start + 1, 8):
    training.step()
    ckpt.save(step)
    if step == kill_at:
        ckpt.wait_until_finished()
        report(start=start, tier=tier, local=ckpt.all_steps("local"))
        die()
ckpt.close()
report(start=start, tier=tier, own=training.own(), whole=training.whole())
