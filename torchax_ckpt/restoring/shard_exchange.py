"""Plans the exchange of parts of the state: which host sends its part to which other host.

A host that lacks the part that it needs receives this part from one other host. The exchange
neither sums nor gathers values, and a host that receives nothing keeps its part. ``move_shards``
transfers the parts.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from torchax_ckpt.snapshot.move_shards import Rounds

Runs = list[list[tuple[int, int, int]]]
"""Permutes, each as (first sender, first receiver, number): the next pair has both indices + 1."""


def routes(needs: Sequence[str], holds: Sequence[str | None], slices: Sequence[int]) -> Rounds:
    """Returns permutes that, executed one after another, give each process the part that it needs.

    A permute is a tuple of pairs (index of the sender, index of the receiver). In one permute, a
    process sends to at most one process, and receives from at most one process. A received part
    replaces the part that the receiving process had. No part is lost while a process still needs
    the part: a process that has the part that it needs receives no other part, and can send its
    part to another process in the next permute.

    Args:
      needs: for each process, the part that it needs.
      holds: for each process, the part that it has; None if it has no part.
      slices: for each process, the index of its slice. A process receives from a process of its own
        slice if one can send, because the connection to another slice is slower.

    Raises:
      LookupError: no process has a part that is needed.
    """
    if not set(needs) <= set(holds):
        raise LookupError(
            "no process has a part of the state that another process needs; restore another step"
        )
    holds, rounds = list(holds), []
    while lacking := [i for i, part in enumerate(needs) if holds[i] != part]:
        free: dict[str | None, list[int]] = collections.defaultdict(list)
        for i, part in enumerate(holds):
            free[part].append(i)
        pairs: list[tuple[int, int]] = []
        for is_near in (True, False):
            for i in lacking:
                senders = [j for j in free[needs[i]] if not is_near or slices[j] == slices[i]]
                if senders and holds[i] != needs[i]:
                    free[needs[i]].remove(senders[0])
                    pairs.append((senders[0], i))
                    holds[i] = needs[i]
        rounds.append(tuple(pairs))
    return tuple(rounds)


def runs(rounds: Rounds) -> Runs:
    """Returns the permutes as runs of pairs, because all processes get a message with them.

    A slice that is lost as a whole gets its parts in one run. Only hosts that have changed places
    without any order take a run each.
    """
    found: Runs = []
    for pairs in rounds:
        found.append([])
        for sender, receiver in pairs:
            if found[-1]:
                first, to, number = found[-1][-1]
                if (sender, receiver) == (first + number, to + number):
                    found[-1][-1] = first, to, number + 1
                    continue
            found[-1].append((sender, receiver, 1))
    return found


def rounds_of(found: Runs) -> Rounds:
    """Returns the permutes that ``runs`` has described."""
    return tuple(
        tuple((first + i, to + i) for first, to, number in permute for i in range(number))
        for permute in found
    )
