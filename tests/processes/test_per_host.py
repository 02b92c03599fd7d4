"""What the processes of a run send each other grows in proportion to their number."""

from __future__ import annotations

import agreement
from support.group import Group

from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.per_host import Keepers, keeper_distances


def test_requests_and_bytes_of_every_call_grow_in_proportion_to_the_processes() -> None:
    few, many = agreement.traffic(4), agreement.traffic(32)
    for call in many:
        for part, unit in enumerate(("requests", "bytes")):
            before, then = few[call][part] / 3, many[call][part] / 31  # of each other process
            # As much if the traffic is linear, ten times as much if it is a square. Process 0 lists
            # what has arrived at most twice, so the order of the processes cannot do more.
            assert then < 2.5 * before, (call, unit, few[call], many[call])
    # Of each other process: two values gathered, and four shared. The rest is of process 0.
    assert 31 * 5 <= many["durable tier: save"][0] < 32 * 9


def test_keepers_lie_far_apart_and_never_on_the_process_itself() -> None:
    assert [keeper_distances(count) for count in (1, 2, 3, 4, 8)] == [
        [],
        [1],
        [1, 2],
        [1, 2, 3],
        [2, 4, 6],
    ]


def test_only_messages_that_a_keeper_lacks_are_sent() -> None:
    """Processes 0 and 1 have equal parts, and process 2 has another one."""
    group, sent = Group(), set[tuple[int, int]]()
    keepers = [Keepers() for _ in group.members]
    messages = [[b"0", b"1", b"2"], [b"0", b"new", b"2"], [b"0", b"0", b"2"]]

    def act(member: Processes) -> list[dict[int, bytes]]:
        found = []
        for save, of_all in enumerate(messages):

            def posting(topic: str, value: bytes, save: int = save) -> None:
                sent.add((save, member.index))
                Processes.post(member, topic, value)

            member.post = posting  # type: ignore[method-assign]
            group_name = str(member.index == 2)
            with member.round(f"saving step {save}"):
                keeper = keepers[member.index]
                found.append(keeper.exchange(member, of_all[member.index], group_name))
        return found

    assert group(act) == [
        [{1: b"1"}, {1: b"new"}, {1: b"0"}],
        [{0: b"0"}, {0: b"0"}, {0: b"0"}],
        [{}, {}, {}],
    ]
    # Unchanged messages are known, and so is one that equals the keeper's own.
    assert sent == {(0, 0), (0, 1), (1, 1)}
