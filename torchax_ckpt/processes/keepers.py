"""Copies of each process's message on a few other processes, so that the loss of one loses none.

A message belongs to a group; the processes of a group are those that have equal parts of the state.
The keepers of a message are other processes of its group, as far from each other as possible,
because neighbours are often lost together. The processes exchange digests first. A message is sent
only if one of its keepers does not have it, neither as its own message nor from the exchange
before. So the messages and bytes of an exchange grow in proportion to the number of processes.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Sequence

from torchax_ckpt.processes.per_host import PerHostProcesses

# How many other processes keep a copy of a message.
NUM_KEEPERS = 3
_TOPIC = "copies"


class Keepers:
    """Exchanges messages with the processes that keep copies of them."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}  # digest -> message, of the exchange before

    def exchange(self, processes: PerHostProcesses, message: bytes, group: str) -> dict[int, bytes]:
        """Returns the messages that this process keeps for others, by the index of the process.

        Call ``exchange`` within a round, on all processes.

        Args:
          processes: the processes of the run.
          message: the message of this process.
          group: names the group that this process and its message belong to.
        """
        mine = hashlib.sha256(message).hexdigest()
        known = {**self._known, mine: message}
        told = json.dumps([group, mine, list(known)]).encode()
        must_send, kept = json.loads(processes.answer(told, answers))
        if must_send:
            processes.post(_TOPIC, message)
        for index, digest in kept:
            if digest not in known:
                known[digest] = processes.posted(_TOPIC, index)
        self._known = {digest: known[digest] for digest in (mine, *(d for _, d in kept))}
        return {index: known[digest] for index, digest in kept}


def distances(count: int) -> list[int]:
    """Returns how far from a process its keepers are, in a ring of ``count`` processes."""
    parts = NUM_KEEPERS + 1
    return sorted({-(-part * count // parts) for part in range(1, parts)} - {count})


def answers(told: Sequence[bytes]) -> list[bytes]:
    """Returns, for each process, whether it must send its message, and which messages it keeps.

    Args:
      told: for each process its group, the digest of its message and the digests that it knows.
    """
    groups, digests, known = zip(*map(json.loads, told), strict=True)
    members: dict[str, list[int]] = collections.defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    must_send = [False] * len(told)
    kept: list[list[tuple[int, str]]] = [[] for _ in told]
    for ring in members.values():
        for place, index in enumerate(ring):
            for distance in distances(len(ring)):
                keeper = ring[(place + distance) % len(ring)]
                kept[keeper].append((index, digests[index]))
                must_send[index] |= digests[index] not in known[keeper]
    return [json.dumps(answer).encode() for answer in zip(must_send, kept, strict=True)]
