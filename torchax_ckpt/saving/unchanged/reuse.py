"""Finds the arrays that did not change since earlier saves, so that a save need not write them.

Which leaves do not change is known from the digests of consecutive saves. Such leaves count as
still. The storage plan keeps still leaves out of the stacks of other leaves, and a save stores them
in databases of their own (``layout/unchanged.py``). A later save that finds equal arrays takes such
a database over from an earlier step instead of writing it.

That a leaf is still decides only where it is stored. Before a save takes a database over, it
compares the 128-bit digests of the arrays that it saves with those of the stored arrays. The save
computes these digests itself, from the bytes that it would write; or an earlier save or the restore
has, for arrays on TPUs that are the same objects as then (``identities.py``, ``restored.py``).

There are two copies of each database, and a new step has another one than the step that is kept
before it (``copies.py``). This run takes over only what it wrote, or what it read and compared.

In a run of several processes, process 0 knows the databases and decides. All processes know which
leaves are still, because all must make the same storage plan. So this changes only when a step is
restored or a save has ended on all processes. The planner is told at a restore and before a save.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.processes.coordination import SINGLE_PROCESS, Processes
from torchax_ckpt.saving.unchanged import (
    comparison,
    earlier_steps,
    known_databases,
    presence,
    still_leaves,
)
from torchax_ckpt.saving.unchanged.comparison import Answer, Offer, Taken
from torchax_ckpt.saving.unchanged.continuation import Continuation
from torchax_ckpt.saving.unchanged.copies import Copies
from torchax_ckpt.saving.unchanged.division import Decision, Division, Written
from torchax_ckpt.saving.unchanged.identities import Identities, Kept
from torchax_ckpt.saving.unchanged.known_databases import Content, KnownDatabase
from torchax_ckpt.saving.unchanged.refusals import Refusals
from torchax_ckpt.snapshot.host_array import HostArray
from torchax_ckpt.snapshot.stacking import Array
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location
from torchax_ckpt.storage.writing import retained
from torchax_ckpt.stored.stored_step import Compared

logger = logging.getLogger(__name__)


class Reuse:
    """Knows the databases of unchanged arrays of a run, and divides the arrays of each save.

    The thread of a save calls all methods but ``plan_save``, ``adopt``, ``read`` and ``kept``,
    which the training thread calls: all but ``read`` while no save is in flight.

    Args:
      directory: the directory of the run.
      alternates: whether there are two copies of the unchanged arrays; if not, all steps share one.
      searches: whether to take over what earlier programs stored, after reading it.
      steps: returns the steps of the run, oldest first.
      kept_before: see ``Preserving.kept_before``; called on process 0.
      on_still: called with the names of the still leaves after a restore and before each save.
      processes: the processes of the run.
      leader: for a local tier, the ``Reuse`` of the durable tier, which says which leaves are
        still, because a snapshot for both tiers has one storage plan. ``plan_save`` is not called
        for a local tier.
    """

    def __init__(
        self,
        directory: RunDirectory,
        alternates: bool,
        searches: bool,
        steps: Callable[[], Sequence[CommittedStep]],
        kept_before: Callable[
            [Sequence[CommittedStep], int, Mapping[str, Any]], CommittedStep | None
        ],
        on_still: Callable[[frozenset[str]], None],
        processes: Processes = SINGLE_PROCESS,
        leader: Reuse | None = None,
    ) -> None:
        self._leader = leader
        self._directory = directory
        self._copies = Copies(alternates, steps)
        self._kept_before = kept_before
        self._searches = searches
        self._steps = steps
        self._on_still = on_still
        self._processes = processes
        # What the storage plan of the next save keeps apart, and what process 0 keeps apart.
        self._still: frozenset[str] = frozenset()
        self._apart: frozenset[str] = frozenset()
        self._has_learned = False
        # The databases of the newest offers, and their steps.
        self._offered: list[tuple[KnownDatabase, epath.Path]] = []
        self._compared: frozenset[str] = frozenset()  # the arrays that the newest answer was about
        self._sent: dict[str, Taken] = {}  # and what it said of those that are offered
        self._last: Mapping[str, Content] = {}
        self._identities = Identities(
            alternates, processes.count == 1 and not processes.is_per_host
        )
        self._may_search = searches
        self._takes_over = False
        self._refusals = Refusals()
        self._continuation = Continuation(
            directory, steps, processes, self._copies, self._identities
        )

    def plan_save(self, expected: Callable[[], frozenset[str]]) -> None:
        """Tells the planner which leaves are still; called before each save to this tier.

        Args:
          expected: returns the leaves that will probably not change, for the saves before the run
            knows. If the guess is right, the first two saves write the leaves as later saves need
            them; if it is wrong, these saves take longer.
        """
        if not self._has_learned:
            self._be_still(expected())
        self._on_still(self._still)

    def adopt(self, committed: CommittedStep, *, is_verified: bool) -> None:
        """Makes the next save look for what it can take over: all processes continue from a step.

        Args:
          committed: the step.
          is_verified: whether the run has read all of the step and compared it with its digests.
        """
        if not self._searches:
            return
        self._may_search = True
        self._continuation.begin(committed, is_verified=is_verified)
        (self._leader or self)._learn(committed)

    def read(self, committed: CommittedStep, compared: Compared) -> None:
        """Learns which objects a restore or a load has made of a step's unchanged arrays.

        Does nothing unless the run continues from the step and has not saved yet. Reads only the
        manifests of earlier steps, and only if some identity proves anything.

        Args:
          committed: the step.
          compared: what was read of it, and compared with its digests.
        """
        self._continuation.read(committed, compared)

    def kept(self, names: Sequence[str], arrays: Sequence[Array]) -> Kept:
        """Returns the arrays that the next save need not look at, to take them over.

        Args:
          names, arrays: the leaves of the state.
        """
        self._continuation.end()
        steps = self._steps()
        newest = steps[-1].key if steps else None
        return self._identities.kept(newest, names, arrays, (self._leader or self)._still)

    def offers(self, step: int, metrics: Mapping[str, Any]) -> list[Offer]:
        """Returns the databases that the next save could take over; called on process 0 only.

        Args:
          step, metrics: of the next save.
        """
        if self._may_search:
            self._may_search = False
            found = self._continuation.search()
            self._apart = self._apart or found
        self._takes_over, self._offered = False, []
        before = self._kept_before(self._steps(), step, metrics)
        copy = None if before is None else self._continuation.copy_in(before)
        stored = self._copies.take_turn(copy)
        if not self._refusals.may_take_over():
            return []
        paths: dict[Key | None, epath.Path] = {s.key: s.path for s in self._steps()}
        paths[None] = retained.path_of(self._directory.path)
        self._offered = presence.whole([(s, paths[s.step]) for s in stored if s.step in paths])
        return [Offer.of(known, path.name) for known, path in self._offered]

    def answer(
        self, offers: Sequence[Offer], plan: Plan, arrays: Mapping[str, AnyArray], kept: Kept
    ) -> bytes:
        """Compares the arrays of a save with the offers; returns a message for process 0.

        Fetches the arrays of the databases that the save could take over, and computes their
        digests, except of the arrays that are kept.

        Args:
          offers: the result of ``offers`` on process 0.
          plan: the storage plan.
          arrays: stored name -> array, for the arrays that the save may take over.
          kept: what the method ``kept`` returned for the save.
        """
        here, self._compared = self._processes, frozenset(arrays)
        known = [stored.contents for stored, _ in self._offered] if here.is_first else None
        found = comparison.answer(
            offers, plan, arrays, kept.taken, self._directory.path, here, known
        )
        self._sent = found.taken(offers)
        return found.to_bytes()

    def decide(
        self, plan: Plan, arrays: Mapping[str, AnyArray], answers: Sequence[bytes]
    ) -> Decision:
        """Decides which databases the new step has; called on process 0 only.

        Args:
          plan, arrays: as for ``answer``, but ``arrays`` are all arrays of the save.
          answers: the answers of all processes.

        Raises:
          ProcessError: the processes have different storage plans.
        """
        found = [*map(Answer.of_bytes, answers)]
        comparison.require_same_stacks(found)
        decision = Decision(self._copies.turn)
        for number, (stored, path) in enumerate(self._offered):
            live, read = ([getattr(a, f)[number] for a in found] for f in ("live", "stored"))
            is_same = {
                name
                for name, content in stored.contents.items()
                if content.members == known_databases.members_of(plan, name)
            }
            if is_same != stored.contents.keys() or not comparison.are_equal(stored.contents, live):
                continue
            if not stored.is_verified and not comparison.are_equal(stored.contents, read):
                text = "%s is damaged: the unchanged arrays are written again"
                folder = comparison.folders_of(path.name, stored.name, stored.processes)[0]
                logger.warning(text, self._directory.path / folder)
                continue
            decision.take_over(stored, path.name, arrays)
            self._takes_over = True
        apart = self._apart if self._leader is None else self._leader._still
        still = {
            name: array
            for name, array in arrays.items()
            if name in self._compared
            and name not in decision.digests
            and apart.issuperset(known_databases.members_of(plan, name))
        }
        for names in known_databases.packed(still):
            decision.write(names, still, self._processes.count)
        return decision

    def digested(
        self,
        division: Division,
        plan: Plan,
        arrays: Mapping[str, HostArray],
        digests: Mapping[str, Digests],
        kept: Kept,
    ) -> None:
        """Learns which objects the unchanged arrays are; called on each process.

        Args:
          division, plan: as for ``written``.
          arrays: stored name -> array over the devices of all processes; values do not count.
          digests: stored name -> digests of the blocks that this process has written.
          kept: what the method ``kept`` returned for the save.
        """
        taken = {name: sent for name, sent in self._sent.items() if name in division.linked}
        for name, found in digests.items():
            if name in division.folders and found.long is not None:
                taken[name] = Taken(found.block, comparison.encoded(found.long))
        self._identities.saving(division.databases, plan, arrays, taken, kept.references)

    def written(
        self,
        path: epath.Path,
        division: Division,
        plan: Plan,
        arrays: Mapping[str, Any],
        digests: Mapping[str, Digests],
    ) -> Written:
        """Returns what is to be known once the new step is durable; called on process 0 only.

        Args:
          path: the folder of the step, which all processes have written, before its commit mark.
          division: the arrays that the save took over or stored apart.
          plan: the storage plan of the save.
          arrays: stored name -> array.
          digests: stored name -> digests, of all arrays.

        Raises:
          SaveError, OSError: files that the save took over are gone, or storage does not answer.
        """
        linked = [s for s, _ in self._offered if s.contents.keys() <= division.linked]
        files = presence.files_in(path, division.databases, linked)
        contents = known_databases.contents_of_arrays(plan, arrays, digests, self._compared)
        told = None
        if self._leader is None:
            still = still_leaves.found(plan, arrays, contents, self._last, self._apart)
            told = None if still == self._still else sorted(still)
        reused_bytes = sum(s.num_bytes for s in linked)
        return Written(division.databases, contents, files, told, reused_bytes)

    def landed(
        self, committed: CommittedStep, still: Iterable[str] | None, written: Written | None
    ) -> None:
        """Records that a save is durable on all processes.

        Args:
          committed: the step.
          still: the attribute of ``written`` on process 0.
          written: what the method ``written`` returned; None on other processes.
        """
        self._has_learned = True
        self._identities.landed(committed.key)
        self._be_still(self._still if still is None else frozenset(still))
        if self._takes_over:
            self._takes_over = False
            self._refusals.succeeded()
        if written is None:
            return
        known = []
        for name, database in written.databases.items():
            held = {stored: written.contents[stored] for stored in database.arrays}
            found = committed.key, name, held, True, database.processes, written.files[name]
            known.append(KnownDatabase(*found))
        self._copies.landed(committed.key, known)
        self._last = written.contents

    def failed(self) -> None:
        """Records that a save failed: the next save takes nothing over that this save tried to.

        The reason may be that a database of an earlier step is damaged, or that several processes
        did not agree on which leaves are still.
        """
        self._copies.forget()
        self._identities.forget()
        if self._takes_over and location.is_bucket(self._directory.path):
            self._refusals.failed()
            said = (self._directory.path, self._refusals.num_in_full)
            logger.warning("%s: the next %d saves write all arrays", *said)
        self._takes_over = False  # the next failure may come before the save knows
        if self._processes.count > 1:
            self._has_learned = False
            self._be_still(frozenset())

    def retain(self, doomed: Iterable[CommittedStep]) -> None:
        """Keeps the copy that the newest step lacks, if it is in steps to be deleted."""
        steps = {committed.key: committed for committed in doomed}
        directory = self._directory
        spare = self._copies.spare
        stored = [] if spare is None else self._copies.databases(spare)
        if needed := {s.step for s in stored if s.step is not None and s.step in steps}:
            newest = max(needed)  # the folder takes databases of one step only
            held = [s for s in stored if s.step == newest]
            try:
                folders = [f for s in held for f in unchanged.folders_of(s.name, s.processes)]
                retained.keep(directory.path, steps[newest], folders, directory.fence)
            except OSError as error:  # the next save writes these arrays
                logger.info("%s: no unchanged arrays are kept aside: %s", newest, error)
                return
            self._copies.replace([dataclasses.replace(s, step=None) for s in held], spare)
        elif self._copies.is_in_steps:
            retained.remove(directory.path, directory.fence)

    def _learn(self, committed: CommittedStep) -> None:
        """Learns which leaves are still from the step that the run continues from, or before it.

        Process 0 reads this for all processes, which must make the same storage plan. A local step
        teaches nothing to a run that knows the still leaves already.
        """

        def found() -> list[str] | None:
            if self._has_learned and committed.path.parent != self._directory.path:
                return None
            if (manifest := earlier_steps.manifest_for(committed, self._directory)) is None:
                return None
            self._last = dict(known_databases.contents_of(manifest))
            return sorted(known_databases.leaves_in(manifest))

        with self._processes.round("looking for unchanged arrays"):
            still = self._processes.first(found)
        if still is not None:
            self._has_learned = True
            self._be_still(frozenset(still))
            self._on_still(self._still)

    def _be_still(self, leaves: frozenset[str]) -> None:
        self._apart = leaves
        if leaves != self._still:
            logger.info("%d leaves do not change and are stored apart from the others", len(leaves))
            self._still = leaves
