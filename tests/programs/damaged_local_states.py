"""Hosts that hold the same restore it, with the state of each process, though a copy is damaged.

python damaged_local_states.py INDEX COUNT PORT DIRECTORY RAMDISKS lost|exchanged

Either the last two hosts have lost the newest step and the copy of the first host is damaged in the
states that it keeps for others; or the two hosts have exchanged their ramdisks and the copy of the
second host is damaged.
"""

from __future__ import annotations

import pathlib
import shutil
import sys

import jax
import numpy as np
import processes_program as program
from jax.experimental.multihost_utils import process_allgather, sync_global_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes_program import INDEX, Training, report
from support.damage import damage, flip_arrays

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

directory, ramdisks, way = sys.argv[4], pathlib.Path(sys.argv[5]), sys.argv[6]
count = jax.process_count()
program.MESH = MESH = Mesh(np.array(jax.devices()).reshape(count, -1), ("replica", "data"))
program.rule = lambda name, abstract: NamedSharding(MESH, P())


def opened(mine: pathlib.Path) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        directory,
        save_decision_policy=policies.SpecificStepsPolicy((1,)),
        local=LocalTier(mine, save_decision_policy=policies.FixedIntervalPolicy(1)),
    )


mine = ramdisks / str(INDEX)
training = Training()
with opened(mine) as ckpt:
    training.attach(ckpt)
    training.step()
    ckpt.save(1)
    ckpt.wait_until_finished()
    training.step()
    ckpt.save(2)
    own = training.own()
keys = process_allgather(np.random.get_state(legacy=False)["state"]["key"])
sync_global_devices("saved")
if way == "lost":
    if count - 2 <= INDEX:
        shutil.rmtree(mine / "2")
    if INDEX == 0:
        damage(mine / "2", keys[-1].tobytes()[:64])
else:
    mine = ramdisks / f"new {INDEX}"
    shutil.copytree(ramdisks / str(1 - INDEX), mine)
    if INDEX == 1:
        flip_arrays(mine / "2")
sync_global_devices("damaged")
fresh = Training(77)
with opened(mine) as ckpt:
    start = fresh.attach(ckpt)
    is_own = fresh.own() == own
    report(start=start, tier=ckpt.restore().tier, alike=is_own)
