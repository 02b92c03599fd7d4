"""Four hosts that hold the same restore it, though the copies of two are damaged.

python equal_local_steps.py INDEX COUNT PORT DIRECTORY RAMDISKS
"""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np
import processes_program as program
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes_program import INDEX, Training, digest, report
from support.damage import flip_arrays

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

directory, mine = sys.argv[4], pathlib.Path(sys.argv[5], str(INDEX))
program.MESH = MESH = Mesh(np.array(jax.devices()).reshape(2, -1), ("replica", "data"))
program.rule = lambda name, abstract: NamedSharding(MESH, P())


def opened() -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        directory,
        save_decision_policy=policies.SpecificStepsPolicy(()),
        local=LocalTier(mine, save_decision_policy=policies.FixedIntervalPolicy(1)),
    )


def held(training: Training) -> dict[str, str]:
    return {n: digest(np.asarray(a.addressable_data(0))) for n, a in training.arrays().items()}


training = Training()
with opened() as ckpt:
    training.attach(ckpt)
    training.step()
    ckpt.save(1)
    own = training.own()
if INDEX in (0, 3):
    flip_arrays(mine / "1")
fresh = Training(77)
with opened() as ckpt:
    start = fresh.attach(ckpt)
    tier = ckpt.restore().tier
    found = held(fresh)
    is_own = fresh.own() == own
    ckpt.save(2)
    ckpt.wait_until_finished()
    is_verified = (mine / "1" / "verified").exists()
report(start=start, tier=tier, alike=found == held(training), own=is_own, verified=is_verified)
