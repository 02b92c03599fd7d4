"""The coordination of processes for a local tier, where each host writes its own directory."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torchax_ckpt.processes.coordination import Outcome, Processes
from torchax_ckpt.runtime.stages import stage

Part = TypeVar("Part")

# How many other processes keep a copy of a message.
NUM_KEEPERS = 3
_TOPIC = "copies"


class PerHostProcesses(Processes):
    """A channel on which each process does the work of process 0, in its own directory.

    ``count`` is 1 and ``index`` is 0 on each process, so that every process does what process 0
    would do. The processes still enter the same rounds, of the channel ``hosts``.
    """

    def __init__(self, processes: Processes) -> None:
        super().__init__("", 0, None, index=0, count=1)
        self._processes = processes
        self.hosts = processes if processes.count > 1 else None
        self.log = processes.log

    @contextlib.contextmanager
    def round(self, what: str, *, is_met: bool = True) -> Iterator[Outcome]:
        """Runs a round of all; its value, and an error after its success, are of this process."""
        outcome, failure = Outcome(), None
        with self._processes.round(what, is_met=is_met):
            try:
                yield outcome
            except BaseException as error:
                failure = error
                raise
        if failure is not None:
            raise failure

    def refuse(self, what: str, error: BaseException) -> None:
        """Makes the round ``what`` fail on the other processes; does not wait for them."""
        self._processes.refuse(what, error)

    def meet(self) -> None:
        """Waits until all processes have called ``meet``."""
        self._processes.meet()


@stage("commit a part")
def commit_part(
    hosts: Processes, commit: Callable[[], Part], delete: Callable[[Part], object]
) -> Part:
    """Commits this host's part of a step; deletes it if another host reports a failure."""
    try:
        part = commit()
    except Exception:
        with contextlib.suppress(Exception):  # the failed commit is the error to report
            hosts.any(flag=True)
        raise
    # Raises if a host died before it reported: that one may have committed, so the part stays.
    if hosts.any(flag=False):  # another host has failed
        delete(part)  # later cleanups would not find this part
        hosts.meet()  # raises the other host's error
    return part


class Keepers:
    """Exchanges messages with other processes, which keep copies in case a process is lost.

    The processes of a group have equal parts of the state. The keepers of a message are other
    processes of its group, as far from each other as possible, because neighbours are often lost
    together. The processes exchange digests first, and send a message only if one of its keepers
    lacks it. So messages and bytes grow in proportion to the number of processes.
    """

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}  # digest -> message, of the exchange before

    def exchange(self, processes: Processes, message: bytes, group: str) -> dict[int, bytes]:
        """Returns, within a round, the messages that this process keeps for others, by index."""
        mine = hashlib.sha256(message).hexdigest()
        known = {**self._known, mine: message}
        report = json.dumps([group, mine, list(known)]).encode()
        must_send, kept = json.loads(processes.answer(report, answers))
        if must_send:
            processes.post(_TOPIC, message)
        for index, digest in kept:
            if digest not in known:
                known[digest] = processes.posted(_TOPIC, index)
        self._known = {digest: known[digest] for digest in (mine, *(d for _, d in kept))}
        return {index: known[digest] for index, digest in kept}


def keeper_distances(count: int) -> list[int]:
    """Returns how far from a process its keepers are, in a ring of ``count`` processes."""
    parts = NUM_KEEPERS + 1
    return sorted({-(-part * count // parts) for part in range(1, parts)} - {count})


def answers(reports: Sequence[bytes]) -> list[bytes]:
    """Returns, for each process, whether it must send its message, and which messages it keeps."""
    groups, digests, known = zip(*map(json.loads, reports), strict=True)
    members: dict[str, list[int]] = collections.defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    must_send = [False] * len(reports)
    kept: list[list[tuple[int, str]]] = [[] for _ in reports]
    for ring in members.values():
        for place, index in enumerate(ring):
            for distance in keeper_distances(len(ring)):
                keeper = ring[(place + distance) % len(ring)]
                kept[keeper].append((index, digests[index]))
                must_send[index] |= digests[index] not in known[keeper]
    return [json.dumps(answer).encode() for answer in zip(must_send, kept, strict=True)]
