"""The two copies of a run's unchanged arrays: which databases hold them, and which step has which.

Two steps that follow each other have different copies, so they share no files. What counts is which
steps follow each other once the preservation policy has deleted others: with ``LatestN(1)`` and
``EveryNSteps(100)``, step 399 follows step 300 from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torchax_ckpt.saving.unchanged import known_databases
from torchax_ckpt.saving.unchanged.known_databases import KnownDatabase
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep


class Copies:
    """Knows the databases of each copy, and whose turn it is.

    Args:
      alternates: whether steps take the two copies in turn; if not, all steps share one copy.
      steps: returns the steps of the run, oldest first.

    Attributes:
      turn: the copy of the next save, 0 or 1, as ``take_turn`` last set it.
    """

    def __init__(self, alternates: bool, steps: Callable[[], Sequence[CommittedStep]]) -> None:
        self._alternates = alternates
        self._steps = steps
        # For each of the two copies: stored name -> database that holds the array.
        self._copies: tuple[dict[str, KnownDatabase], dict[str, KnownDatabase]] = ({}, {})
        self._copy_in: dict[Key, int] = {}  # key of a step -> which copy the step has
        self.turn = 0

    def take_turn(self, neighbour: Key | None) -> list[KnownDatabase]:
        """Sets ``turn``; returns the databases of this copy.

        Args:
          neighbour: the step that the next step will follow, and from which it must differ.
        """
        if neighbour and (copy := self._copy_in.get(neighbour)) is not None:
            self.turn = 1 - copy if self._alternates else copy
        return self.databases(self.turn)

    def databases(self, copy: int) -> list[KnownDatabase]:
        """Returns the databases of a copy."""
        return known_databases.distinct(self._copies[copy].values())

    @property
    def spare(self) -> int | None:
        """The copy that the newest step of the run does not have; None if there is no other one."""
        steps = self._steps()
        copy = self._copy_in.get(steps[-1].key) if steps and self._alternates else None
        return None if copy is None else 1 - copy

    @property
    def is_in_steps(self) -> bool:
        """Whether all databases of both copies are in steps, none in the folder beside them."""
        return all(s.step is not None for copy in self._copies for s in copy.values())

    def know(self, known: KnownDatabase, copy: int) -> None:
        """Adds a database that was found, unless databases of the copy have one of its arrays.

        A step has each array once, so it could not take over two databases with one array.
        """
        if self._copies[copy].keys().isdisjoint(known.contents):
            self.replace([known], copy)

    def replace(self, stored: Iterable[KnownDatabase], copy: int | None = None) -> None:
        """Adds databases to a copy, in place of those that had their arrays.

        Args:
          stored: the databases.
          copy: 0 or 1; None stands for the copy whose turn it is.
        """
        arrays = self._copies[self.turn if copy is None else copy]
        for known in stored:
            arrays.update(dict.fromkeys(known.contents, known))

    def record(self, key: Key, copy: int) -> None:
        """Records which copy a step has."""
        self._copy_in[key] = copy

    def landed(self, key: Key, stored: Collection[KnownDatabase]) -> None:
        """Records that a new step has databases of the copy whose turn it is, and no others."""
        self._copies[self.turn].clear()
        self.replace(stored)
        if stored:
            self.record(key, self.turn)
        present = {s.key for s in self._steps()} | {key}
        self._copy_in = {key: n for key, n in self._copy_in.items() if key in present}

    def forget(self) -> None:
        """Forgets the databases of the copy whose turn it is."""
        self._copies[self.turn].clear()

    def forget_all(self) -> None:
        """Forgets the databases of both copies."""
        for copy in self._copies:
            copy.clear()
