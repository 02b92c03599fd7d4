"""Finds the arrays that did not change since earlier saves, so that a save need not write them.

Leaves whose digests stay equal from save to save count as still. The storage plan keeps them out of
the stacks of other leaves, and a save stores them in databases of their own
(``layout/unchanged.py``), which a later save takes over from an earlier step if the arrays are
equal. That is decided by 128-bit digests of the arrays that it saves, not by their being still
(``ledger.py``). Process 0 names the step. Each process compares what it stores of the arrays, and
all take over what all found equal.

A step shares no files with the step that is kept before it. With ``LatestN(1)`` and
``EveryNSteps(100)``, step 399 follows step 300, because step 398 is about to be deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax
from etils import epath

from torchax_ckpt import options
from torchax_ckpt.devices.host_array import HostArray
from torchax_ckpt.errors import CheckpointError, DonatedBufferError, ProcessError, SaveError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.layout.unchanged import Database, Digests
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.saving.unchanged import identities, ledger
from torchax_ckpt.saving.unchanged.division import Division
from torchax_ckpt.saving.unchanged.identities import Skipped
from torchax_ckpt.saving.unchanged.ledger import Content, Entry, Reference
from torchax_ckpt.snapshot.stacking import Array
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import medium, storage_errors
from torchax_ckpt.storage.medium.stored_file import StoredFile
from torchax_ckpt.storage.writing import unchanged_files
from torchax_ckpt.stored.stored_step import Compared, parse_manifest

logger = logging.getLogger(__name__)

# After so many failures in a row, the number of saves that take nothing over stays the same.
_MAX_DOUBLINGS = 6
_UNKNOWN: Key = (-1, 0)


@dataclasses.dataclass(frozen=True)
class Pending:
    """What becomes known once the step of a save is committed."""

    entry: Entry  # without its key
    still: Sequence[str] | None  # on process 0, the leaves that are still; None: as before
    reused_bytes: int  # on process 0, of the files that the save took over


class Reuse:
    """The ledger of one tier, which divides the arrays of each save.

    With ``mode`` "auto", the state decides whether saves take anything over. For a local tier,
    ``leader`` is the ``Reuse`` of the durable tier, which says which leaves are still, because a
    snapshot for both tiers has one storage plan. The methods are called while no save is in flight,
    or by the thread of the save; ``loaded`` at any time.

    Attributes:
      apart: the leaves that storage plans keep apart from the others.
    """

    def __init__(
        self,
        directory: RunDirectory,
        history: RunHistory,
        preserving: Preserving,
        processes: Processes,
        mode: options.Reuse,
        *,
        has_two_copies: bool = True,
        leader: Reuse | None = None,
    ) -> None:
        self._directory = directory
        self._history, self._preserving = history, preserving
        self._processes = processes
        self._has_two_copies = has_two_copies
        self._leader = leader or self
        self._mode = mode
        self._is_on, self._is_decided = mode is True, mode != "auto"
        self.apart: frozenset[str] = frozenset()
        self._still: frozenset[str] | None = None  # None: the run does not know yet
        self._last: Mapping[str, Content] = {}  # what the newest save has stored
        # For each copy, the newest step that has it; the newest of all; those of its databases that
        # are equal in both copies; and the step whose databases the folder ``unchanged`` has.
        self._entries: dict[int, Entry] = {}
        self._newest: Entry | None = None
        self._repeated: list[dict[str, HostArray]] = []
        self._retained: Key | None = None
        # Which copy each step has, None for none; and whose turn it is.
        self._copies: dict[Key, int | None] = {}
        self._turn = 0
        self._origin: Key | None = None  # the step that the run continues from, until it saves
        self._damaged: set[Key] = set()  # steps that are known to be damaged
        # Still leaves none of which is on a TPU, so that later saves need not ask each of them.
        self._without_proof: frozenset[str] | None = None
        # Of the save in flight: the entry that it could take over, and whether it does.
        self._base: Entry | None = None
        self._takes_over = self._has_logged = False
        # Saves in a row that failed while a bucket copied, and how many take nothing over now.
        self._num_refused = self._num_in_full = 0

    # --- which leaves are still ---

    def plan_save(
        self, names: Sequence[str], arrays: Sequence[Array], frozen: Callable[[], frozenset[str]]
    ) -> None:
        """Decides which leaves of a state the next save to this tier keeps apart.

        Before the run knows, those that ``frozen`` expects not to change: a wrong guess costs time.
        """
        if not self._is_decided:
            self._decide(names, arrays, frozen())
        self._keep_apart(frozen() if self._is_on and self._still is None else self.still)

    def _decide(
        self, names: Sequence[str], arrays: Sequence[Array], frozen: frozenset[str]
    ) -> None:
        sizes = {n: a.size * a.dtype.itemsize for n, a in zip(names, arrays, strict=True)}
        frozen_bytes, all_bytes = sum(sizes[n] for n in frozen & sizes.keys()), sum(sizes.values())
        self._is_on, self._is_decided = 2 * frozen_bytes >= all_bytes > 0, True
        if self._is_on:
            text = "%s: %d of %d bytes of the state are frozen parameters, so saves reuse them"
            logger.debug(text, self._directory.path, frozen_bytes, all_bytes)
            self._preserving.warn_of_sharing()

    @property
    def still(self) -> frozenset[str]:
        """The leaves that did not change, as far as is known; else those that are kept apart."""
        if not self._is_on:
            return frozenset()
        return self.apart if self._still is None else self._still

    def _keep_apart(self, leaves: frozenset[str]) -> None:
        if leaves != self.apart:
            logger.debug("%d leaves do not change and are stored apart", len(leaves))
            self.apart = leaves

    # --- what earlier steps have ---

    def restored(self, committed: CommittedStep, compared: Compared | None) -> None:
        """Begins anew from a step, on all processes; else as ``loaded``."""
        if not self._mode:
            return
        self._entries, self._newest, self._origin = {}, None, committed.key
        leader, still = self._leader, frozenset[str]()
        if compared is not None:
            plan, databases = compared.manifest.plan, compared.manifest.unchanged.values()
            stored = (name for database in databases for name in database.arrays)
            still = frozenset(leaf for name in stored for leaf in ledger.members_of(plan, name))
        if self._processes.is_per_host:  # what the hosts have of the step may differ
            with leader._processes.round("looking for unchanged arrays"):
                still = frozenset(leader._processes.first(lambda: sorted(still)))
        elif compared is not None:
            leader._last = ledger.contents_of_step(compared.manifest)
        if leader._mode == "auto":
            leader._is_on, leader._is_decided = bool(still), False  # on until the next save decides
        if still:
            leader._still = still
            leader._keep_apart(still)
        self.loaded(committed, compared)

    def loaded(self, committed: CommittedStep, compared: Compared | None) -> None:
        """Records the arrays that were read of the step that the run continues from."""
        if committed.key != self._origin or compared is None:
            return
        manifest = compared.manifest
        self._copies[committed.key] = copy = _copy_in(manifest.unchanged)
        if copy is None:
            return
        stored = ledger.contents_of_step(manifest).items()
        contents = {name: c for name, c in stored if compared.leaves.issuperset(c.members)}
        if (before := self._entries.get(copy)) is not None:
            contents |= before.contents
        files: Mapping[str, StoredFile] = {}
        try:
            if self._processes.is_first:
                state = committed.path / STATE
                files = unchanged_files.present(state) if before is None else before.files
        except OSError as error:
            logger.debug("nothing is taken over from step %d: %s", committed.step, error)
            return
        self._record(Entry(committed.key, copy, manifest.unchanged, contents, files=files))

    def skipped(self, names: Sequence[str], arrays: Sequence[Array]) -> Skipped:
        """Returns those of the leaves of a state that the next save need not look at."""
        self._origin = None
        still = self._leader.still
        if not still or still is self._without_proof:
            return Skipped()
        leaves = dict(zip(names, arrays, strict=True))
        steps, entry = self._history.branches.committed, self._newest
        forms: dict[str, HostArray] = {}
        contents: dict[str, Content] = {}
        references: dict[str, Reference] = {}
        if entry is not None and steps and steps[-1].key == entry.key:
            for database in self._repeated:
                found = {name: entry.contents[name] for name in database}
                members = [leaf for content in found.values() for leaf in content.members]
                known = {leaf: entry.references[leaf] for leaf in members}
                if all(n in leaves and leaves[n] is reference() for n, reference in known.items()):
                    forms, contents = forms | database, contents | found
                    references |= known
        held = {leaf: leaves[leaf] for leaf in references}
        others = still.intersection(leaves).difference(held)
        references |= self._proven({leaf: leaves[leaf] for leaf in others})
        if not references:
            self._without_proof = still
        return Skipped(forms, contents, held, references)

    def _proven(self, leaves: Mapping[str, Any]) -> dict[str, Reference]:
        """Returns references to those of the leaves whose identity proves their values."""
        # Processes may have different arrays on their own devices; process 0 stores its own.
        is_alone = self._processes.count == 1 and not self._processes.is_per_host
        return {
            name: weakref.ref(array)
            for name, array in leaves.items()
            if isinstance(array, jax.Array)
            and identities.is_proof(array)
            and (is_alone or not array.is_fully_addressable)
        }

    def _record(self, entry: Entry) -> None:
        self._newest, self._repeated = entry, []
        if not entry.databases:
            return
        if not self._has_two_copies:
            self._entries.clear()
        self._entries[entry.copy] = entry
        other = self._entries.get(1 - entry.copy) if self._has_two_copies else entry
        if entry.references:
            self._without_proof = None
            if other is not None:
                per_host = self._processes.is_per_host
                self._repeated = identities.in_both_copies(entry, other, is_per_host=per_host)

    # --- a save ---

    def candidate(self, step: int, metrics: Mapping[str, Any]) -> list[Any]:
        """Returns the new step's copy, and the key (or None) and folder of a whole step with it."""
        if not self._leader._is_on:
            return [self._turn, None, ""]
        steps = self._history.branches.committed
        self._drop_damaged(steps)
        if not self._has_two_copies:
            self._turn = next(iter(self._entries), 0)
        else:
            before = self._preserving.kept_before(steps, step, metrics)
            if before is not None and (copy := self._copy_of(before)) is not None:
                self._turn = 1 - copy
        nothing, entry = [self._turn, None, ""], self._entries.get(self._turn)
        if self._num_in_full:
            self._num_in_full -= 1
            return nothing
        if entry is None:
            return nothing
        path = next((s.path for s in steps if s.key == entry.key), None)
        if entry.key == self._retained:
            path = path or self._directory.path / unchanged_files.RETAINED
        if path is None:
            return nothing
        here = unchanged_files.present(path / STATE)
        if lacking := [*unchanged_files.differing(entry.files, here)]:
            others = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            where = f"{path / STATE / lacking[0]}{others}"
            logger.warning("%s: the unchanged arrays are written again; verify the steps", where)
            return nothing
        return [self._turn, entry.key, path.name]

    def _drop_damaged(self, steps: Sequence[CommittedStep]) -> None:
        """Forgets entries of steps found to be damaged; in a bucket, also their copies."""
        damaged = {s.key for s in steps if self._directory.verified.is_damaged(s)}
        new, self._damaged = damaged - self._damaged, damaged
        for copy, entry in [*self._entries.items()]:
            if entry.key in new or (new and not self._has_two_copies):
                text = "%s: a step is damaged, so the unchanged arrays are written again"
                logger.info(text, self._directory.path)
                del self._entries[copy]

    def _copy_of(self, committed: CommittedStep) -> int | None:
        """Returns which copy of the unchanged arrays a step has; None if it has none."""
        if committed.key not in self._copies:
            self._copies[committed.key] = None
            with contextlib.suppress(CheckpointError):  # no run can be restored from it
                self._copies[committed.key] = _copy_in(parse_manifest(committed).unchanged)
        return self._copies[committed.key]

    def divide(
        self,
        candidate: Sequence[Any],
        plan: Plan,
        arrays: Mapping[str, AnyArray],
        here: Mapping[str, AnyArray],
        skipped: Skipped,
    ) -> Division:
        """Divides the arrays of a save, on all processes together, given the ``candidate``.

        Fetches what the save could take over, but does not skip. Of ``arrays``, this process stores
        those in ``here``.
        """
        copy, key, folder = candidate
        processes, base, equal = self._processes, None, 0
        if key is not None:
            base = next((e for e in self._entries.values() if e.key == tuple(key)), None)
            if base is not None:
                long, is_first = skipped.long_digests, processes.is_first
                equal = ledger.compare(base, plan, arrays, here, long, is_first=is_first)
            answers = processes.gather(equal.to_bytes((equal.bit_length() + 7) // 8))
            equal = processes.first(lambda: reduce(operator.and_, map(int.from_bytes, answers)))
        self._base, self._takes_over = base, equal > 0
        divided = Division(copy)
        if base is not None:
            source = self._directory.path / folder / STATE
            divided.take_over(base, equal, source, arrays, here, processes)
        divided.write(plan, arrays, here, self._leader.still, processes)
        return divided

    def pending(
        self,
        path: epath.Path,
        divided: Division,
        plan: Plan,
        here: Mapping[str, AnyArray],
        digests: Mapping[str, Digests],
        references: Mapping[str, Reference],
    ) -> Pending:
        """Returns, on each process, what is to be known once the new step is committed.

        Raises SaveError if files that the save took over are gone.
        """
        contents: Mapping[str, Content] = {}
        if self._leader._is_on:
            contents = ledger.contents_of_save(plan, here, {**digests, **divided.digests})
        files: dict[str, StoredFile] = {}
        still: Sequence[str] | None = None
        if self._processes.is_first and divided.databases:
            present = unchanged_files.present(path / STATE)
            for difference in unchanged_files.differing(divided.files, present):
                raise SaveError(
                    f"{path / STATE / difference} before the step was committed, so the step is "
                    "not kept. Another program changes files of this run; keep it out of the "
                    "directory"
                )
            linked = {name.partition("/")[0] for name in divided.files}  # may have files of others
            files = {n: f for n, f in present.items() if n.partition("/")[0] not in linked}
            files |= divided.files
        if self._processes.is_first and self._leader is self and self._is_on:
            found = ledger.still_leaves(contents, self._last, self.still, here)
            still = None if found == self._still else sorted(found)
        reused_bytes = sum(file.num_bytes for file in divided.files.values())
        entry = Entry(_UNKNOWN, divided.copy, divided.databases, contents, references, files)
        return Pending(entry, still, reused_bytes)

    def succeeded(
        self, committed: CommittedStep, still: Iterable[str] | None, pending: Pending
    ) -> None:
        """Records that a save is committed on all processes; ``still`` is as on process 0."""
        if still is not None:
            self._still = frozenset(still)
        self._last = pending.entry.contents
        if self._takes_over:
            self._num_refused = 0
            self._log_first(committed, pending.reused_bytes)
        self._takes_over, self._base = False, None
        present = {s.key for s in self._history.branches.committed}
        self._copies = {key: copy for key, copy in self._copies.items() if key in present}
        self._copies[committed.key] = _copy_in(pending.entry.databases)
        self._record(dataclasses.replace(pending.entry, key=committed.key))

    def _log_first(self, committed: CommittedStep, reused_bytes: int) -> None:
        if self._has_logged or not self._processes.is_first:
            return
        self._has_logged = True
        how = medium.of(committed.path).how_taken_over(committed.path / STATE)
        text = "step %d of %s has %d bytes of unchanged arrays of an earlier step, %s"
        about = fields(step=committed.step, path=self._directory.path, shared_bytes=reused_bytes)
        logger.info(text, committed.step, self._directory.path, reused_bytes, how, extra=about)

    def failed(self, error: BaseException) -> None:
        """Records that a save failed: a database may be damaged, or processes may not agree.

        A full disk says nothing of the databases, and has no room to write them once more.
        """
        says_nothing = isinstance(error, (DonatedBufferError, ProcessError))
        if not (says_nothing or storage_errors.is_full(error)):
            self._entries = {c: e for c, e in self._entries.items() if e is not self._base}
        self._newest = None
        is_donated = isinstance(error, DonatedBufferError)
        copies = not medium.of(self._directory.path).has_links
        if self._takes_over and not is_donated and copies:
            # A service that refuses every copy must not fail every other save.
            self._num_refused = min(self._num_refused + 1, _MAX_DOUBLINGS)
            self._num_in_full = 2**self._num_refused
            text = "%s: the next %d saves write all arrays"
            logger.info(text, self._directory.path, self._num_in_full)
        self._takes_over, self._base = False, None  # the next may fail before it knows
        if self._processes.count > 1:
            self._still = None

    def retain(self, doomed: Iterable[CommittedStep]) -> None:
        """Keeps the copy that the newest step lacks, if it is in a step to be deleted."""
        directory, steps = self._directory, self._history.branches.committed
        self._drop_damaged(steps)
        copy = self._copies.get(steps[-1].key) if steps and self._has_two_copies else None
        spare = None if copy is None else self._entries.get(1 - copy)
        by_key = {committed.key: committed for committed in doomed}
        if spare is not None and spare.key in by_key:
            databases = spare.databases.items()
            folders = [f for n, d in databases for f in unchanged.folders_of(n, d.processes)]
            try:
                unchanged_files.retain(directory.path, by_key[spare.key], folders, directory.fence)
            except OSError as error:  # the next save writes these arrays
                logger.debug("%s: no unchanged arrays are kept aside: %s", spare.key, error)
                return
            self._retained = spare.key
        elif all(entry.key != self._retained for entry in self._entries.values()):
            unchanged_files.remove_retained(directory.path, directory.fence)
            self._retained = None


def _copy_in(found: Mapping[str, Database]) -> int | None:
    """Returns which copy of the unchanged arrays a step has; None if it has no databases."""
    return next((database.copy for database in found.values()), None)
