"""A run that programs on several processes share: its model, its checkpointer, and its loop.

    python PROGRAM INDEX COUNT PORT DIRECTORY SEED

A step is saved every four.
"""

from __future__ import annotations

import sys

from processes_program import COUNT, Training, report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies

directory, seed = sys.argv[4], int(sys.argv[5])
training = Training(seed)
# Four processes write in batches, each in as many as it needs.
max_host_bytes = 1000 if COUNT == 4 else None
ckpt = TorchaxCheckpointer(
    directory,
    options=CheckpointOptions(process_timeout_secs=60, max_host_bytes=max_host_bytes),
    save_decision_policy=policies.FixedIntervalPolicy(4),
    preservation_policy=policies.PreserveAll(),
)


def train(first: int, last: int) -> None:
    training.seen.clear()
    for step in range(first, last + 1):
        loss = training.step()
        ckpt.save(step, metrics={"loss": loss})
    report(seen=training.seen, whole=training.whole(), own=training.own())
