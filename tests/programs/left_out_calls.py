"""Processes one of which leaves out a save, with one tier and with two.

python left_out_calls.py INDEX COUNT PORT FOLDER CASES

CASES are pairs of digits: the number of tiers, and the process that leaves out step 3.
"""

from __future__ import annotations

import contextlib
import sys
import time

import jax
import numpy as np
import torchax
from jax.sharding import NamedSharding, PartitionSpec
from processes_program import COUNT, INDEX, MESH, report

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.errors import ProcessError, SaveError

torchax.enable_globally()
folder, cases = sys.argv[4:6]
every = policies.FixedIntervalPolicy(1)


def state(step: int) -> dict[str, jax.Array]:
    values = np.arange(16 * COUNT, dtype=np.float32) + step
    sharding = NamedSharding(MESH, PartitionSpec("fsdp"))
    return {"w": jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])}


def is_whole(step: int) -> bool:
    found, expected = (x["w"].addressable_shards for x in (ckpt.load(step, state(0)), state(step)))
    return all(np.array_equal(a.data, b.data) for a, b in zip(found, expected, strict=True))


for case in cases.split(","):
    num_tiers, odd = map(int, case)
    local = None
    if num_tiers == 2:
        local = LocalTier(f"{folder}/{INDEX}/{case}", save_decision_policy=every, keep=9)
    ckpt = TorchaxCheckpointer(
        f"{folder}/{case}",
        save_decision_policy=every,
        preservation_policy=policies.PreserveAll(),
        local=local,
        options=CheckpointOptions(process_timeout_secs=60),
    )
    told: dict[int, tuple[float, str]] = {}
    for step in [1, 4, 5, 6, 7] if odd == INDEX else [1, 3, 4, 5, 6, 7]:
        began, error = time.monotonic(), ""
        try:
            ckpt.save(step, state=state(step))
            ckpt.wait_until_finished()
        except (ProcessError, SaveError) as problem:
            error = str(problem)
        told[step] = time.monotonic() - began, error
        with contextlib.suppress(SaveError):  # of the other tier
            ckpt.check_for_errors()
    steps = ckpt.all_steps("durable")
    local_steps = ckpt.all_steps("local") if local is not None else steps
    report(case=case, told=told, steps=steps, local=local_steps, whole=[*map(is_whole, steps)])
    ckpt.close()
