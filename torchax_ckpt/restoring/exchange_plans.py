"""Plans which host sends what to which other host, in a restore from a local tier.

A host that lacks the part of the leaves that it needs receives it from one other host, through
``move_shards``. The exchange neither sums nor gathers values.

The state of a process is in the copy of its own host, and in those of a few others. That a copy is
damaged in this state shows only when it is read; the next host that has the state is then asked.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from torchax_ckpt.snapshot.move_shards import Rounds

Runs = list[list[tuple[int, int, int]]]
"""Permutes, each as (first sender, first receiver, number): the next pair has both indices + 1."""


def routes(needs: Sequence[str], holds: Sequence[str | None], slices: Sequence[int]) -> Rounds:
    """Returns permutes that, executed one after another, give each process the part that it needs.

    A permute is a tuple of pairs (sender, receiver), with each process at most once on each side;
    what is received replaces the receiver's part. No needed part is lost: a process that has the
    part that it needs receives no other. ``needs``, ``holds`` and ``slices`` have a value for each
    process; the connection to another slice is slower. Raises LookupError if no process has a
    needed part.
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
    """Returns the permutes as runs of pairs, for a short message: a slice's parts are one run."""
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


Answer = tuple[int | None, list[int], bool]
"""For one process: who sends its state (None: nobody), whose states it sends, and whether any
process sends a state, so that all processes report again whether they lack theirs."""


class StateSenders:
    """Decides, on process 0, who sends which process its state; call ``answers`` until none lacks.

    ``hosts`` has, for each process, the processes to ask for its state, in this order.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], lacking: Sequence[bool]) -> None:
        self.lacking = lacking
        self._hosts = hosts
        self._senders: list[int | None] = [None] * len(hosts)
        self._damaged: set[int] = set()

    @classmethod
    def of_equal(cls, has_copy: Iterable[bool]) -> StateSenders:
        """Returns the plan if all processes have equal states, so that each copy has all."""
        lacking = [not has for has in has_copy]
        hosts = [index for index, lacks in enumerate(lacking) if not lacks]
        return cls([hosts] * len(lacking), lacking)

    @classmethod
    def of_states(cls, states: Sequence[Sequence[int]]) -> StateSenders:
        """Returns the plan, given for each process those whose states its host has."""
        hosts: list[list[int]] = [[] for _ in states]
        for host, indices in enumerate(states):
            for index in indices:
                if index < len(hosts):  # a manifest may name any process
                    hosts[index].append(host)
        return cls(hosts, [index not in with_state for index, with_state in enumerate(hosts)])

    def answers(self, lacking: Sequence[int]) -> list[Answer]:
        """Returns the answer for each process, given whether it lacks its state.

        A process that still lacks its state was sent a damaged one. The sender ignores its whole
        copy from then on, so it is asked for no other state. Raises LookupError, with the index of
        a process whose state no host has undamaged.
        """
        for sender, lacks in zip(self._senders, lacking, strict=True):
            if lacks and sender is not None:
                self._damaged.add(sender)
        posts: list[list[int]] = [[] for _ in lacking]
        self._senders = [None] * len(lacking)
        for index, lacks in enumerate(lacking):
            if lacks:
                sender = next((i for i in self._hosts[index] if i not in self._damaged), None)
                if sender is None:
                    raise LookupError(index)
                self._senders[index] = sender
                posts[sender].append(index)
        is_any = any(lacking)
        return [
            (sender, indices, is_any) for sender, indices in zip(self._senders, posts, strict=True)
        ]
