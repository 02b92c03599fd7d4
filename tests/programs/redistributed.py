"""Draws samples, each process from its shard, and goes on where other processes stopped.

python redistributed.py INDEX COUNT PORT DIRECTORY
"""

from __future__ import annotations

import sys
from typing import Any

from processes_program import COUNT, INDEX, report

from torchax_ckpt import TorchaxCheckpointer


class Samples:
    """The numbers ``INDEX``, ``INDEX + COUNT``, ... from ``start`` on."""

    start = read = 0

    def get_state(self) -> dict[str, int]:
        return {"start": self.start, "read": self.read}

    def set_state(self, state: dict[str, int]) -> None:
        self.start, self.read = state["start"], state["read"]

    def __next__(self) -> int:
        self.read += 1
        return self.start + INDEX + COUNT * (self.read - 1)


def redistribute(states: list[Any], count: int) -> list[Any]:
    start = states[0]["start"] + sum(state["read"] for state in states)
    return [{"start": start, "read": 0} for _ in range(count)]


loader = Samples()
with TorchaxCheckpointer(sys.argv[4]) as ckpt:
    start = ckpt.attach(dataloader=loader, redistribute=redistribute)
    report(samples=[next(loader) for _ in range(8 // COUNT)])
    ckpt.save(start + 1, force=True)
