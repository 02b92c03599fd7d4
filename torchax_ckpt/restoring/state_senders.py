"""Plans which host sends which process its per-process state, in a restore from a local tier.

The state of a process is in the copy of its own host, and in those of a few others. That a copy is
damaged in this state shows only when the copy is read. The next host that has the state is then
asked, so a step is lost only if all copies of a state are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Answer = tuple[int | None, list[int], bool]
"""For one process: who sends its state (None: nobody), whose states it sends, and whether any
process sends a state, so that all processes report again whether they lack theirs."""


class StateSenders:
    """Decides, on process 0, who sends which process its state; call ``answers`` until none lacks.

    Attributes:
      lacking: for each process, whether its own host lacks its state.

    Args:
      hosts: for each process, the processes whose hosts have its state, in the order in which they
        are asked.
      lacking: see above.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], lacking: Sequence[bool]) -> None:
        self.lacking = lacking
        self._hosts = hosts
        self._senders: list[int | None] = [None] * len(hosts)
        self._damaged: set[int] = set()

    @classmethod
    def of_equal(cls, has_copy: Iterable[bool]) -> StateSenders:
        """Returns the plan if all processes have equal states, so that each copy has all of them.

        Args:
          has_copy: for each process, whether its host has a copy.
        """
        lacking = [not has for has in has_copy]
        hosts = [index for index, lacks in enumerate(lacking) if not lacks]
        return cls([hosts] * len(lacking), lacking)

    @classmethod
    def of_states(cls, held: Sequence[Sequence[int]]) -> StateSenders:
        """Returns the plan, given for each process those whose states its host has."""
        hosts: list[list[int]] = [[] for _ in held]
        for host, its_states in enumerate(held):
            for index in its_states:
                if index < len(hosts):  # a manifest may name any process
                    hosts[index].append(host)
        return cls(hosts, [index not in its_hosts for index, its_hosts in enumerate(hosts)])

    def answers(self, lacking: Sequence[int]) -> list[Answer]:
        """Returns the answer for each process.

        Args:
          lacking: for each process, whether it lacks its state. A process that was sent its state
            and still lacks it was sent a damaged one. That host then ignores its whole copy, so it
            is asked for no other state either.

        Raises:
          LookupError: no host has the state of a process undamaged; has the index of the process.
        """
        asked = zip(self._senders, lacking, strict=True)
        self._damaged.update(sender for sender, lacks in asked if lacks and sender is not None)
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
        return [(sender, its, is_any) for sender, its in zip(self._senders, posts, strict=True)]
