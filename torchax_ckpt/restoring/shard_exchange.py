"""Which host sends its part of the state to which other, where hosts lack the part they need.

A host receives what one other has. Nothing is added up or gathered, and a host that need not send
or receive keeps what it has. ``move_shards`` sends.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from torchax_ckpt.snapshot.move_shards import Rounds


def routes(needs: Sequence[str], holds: Sequence[str | None], slices: Sequence[int]) -> Rounds:
    """How every process gets the part that it needs, in few rounds.

    In one round a process sends to one other, and receives from one. What it receives takes the
    place of what it had. A part stays somewhere until all have it: who has got the part that it
    needs receives no more, and sends on.

    Args:
      needs: by process, which part it needs.
      holds: by process, which part it has; None for none.
      slices: by process, in which slice it lies. In each round, who can receive from its own slice
        does: the way from another is longer.

    Raises:
      LookupError: a part that is needed is nowhere.
    """
    if not set(needs) <= set(holds):
        raise LookupError("a part that is needed is nowhere")
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
