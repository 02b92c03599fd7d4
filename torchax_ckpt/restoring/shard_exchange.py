"""The exchange of parts between hosts: which host sends its part of the state to which other host.

A host that lacks the part it needs receives that part from one other host. Nothing is summed or
gathered, and a host that neither sends nor receives keeps its part. ``move_shards`` does the
transfer.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from torchax_ckpt.snapshot.move_shards import Rounds


def routes(needs: Sequence[str], holds: Sequence[str | None], slices: Sequence[int]) -> Rounds:
    """Returns permutes, in few rounds, that give each process the part that it needs.

    In one round a process sends to at most one process and receives from at most one. The received
    part replaces the part that the process had. No part is lost before all processes that need it
    have it: a process that has received the part it needs receives no other, and sends it on.

    Args:
      needs: by process, the part that it needs.
      holds: by process, the part that it has; None if it has no part.
      slices: by process, the slice that it is in. In each round a process receives from its own
        slice if a process there can send, because the connection to another slice is slower.

    Raises:
      LookupError: no process has a part that is needed.
    """
    if not set(needs) <= set(holds):
        raise LookupError("no process has a part that is needed")
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
