"""Lets the saves of one tier reuse the files of earlier steps that hold frozen leaves.

A save stores frozen leaves in databases of their own (``layout/unchanged.py``). A later save reuses
a database if all of its arrays are equal: process 0 names the step that has it, each process
compares what it stores of the arrays, and all reuse what all found equal.

On a disk there are up to two copies of each frozen array, so that damage to one file never affects
two steps that are kept one after the other. With ``LatestN(1)`` and ``EveryNSteps(100)``, step 399
uses another copy than step 300: step 398 is about to be deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from torchax_ckpt.errors import CheckpointError, ProcessError, SaveError
from torchax_ckpt.layout import batches, unchanged
from torchax_ckpt.layout.array_digests import Digests
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.layout.unchanged import Database
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.saving.reuse import known
from torchax_ckpt.saving.reuse.frozen_leaves import Frozen, FrozenLeaves
from torchax_ckpt.saving.reuse.known import Content, Entry, Known, SameObjects
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.storage.arrays import chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import medium, storage_errors
from torchax_ckpt.storage.medium.stored_file import StoredFile
from torchax_ckpt.storage.writing import reused_files
from torchax_ckpt.stored.stored_step import Compared, parse_manifest

logger = logging.getLogger(__name__)

# What one process writes to a database, at most. Smaller arrays share one, because each takes some
# milliseconds. If one of them changes, all are written again.
_DATABASE_BYTES = 64 << 20


@dataclasses.dataclass(eq=False)
class Reuse:
    """What the saves of one tier can reuse; ``frozen_leaves`` are those of the run."""

    directory: RunDirectory
    history: RunHistory
    preserving: Preserving
    processes: Processes
    frozen_leaves: FrozenLeaves
    has_two_copies: bool
    known: Known = dataclasses.field(default_factory=Known)

    def restored(self, committed: CommittedStep, compared: Compared | None) -> None:
        """Forgets all steps, on all processes; then does what ``loaded`` does."""
        self.known = Known(origin=committed.key)
        self.loaded(committed, compared)

    def loaded(self, committed: CommittedStep, compared: Compared | None) -> None:
        """Records the arrays that were read of the step that the run continues from."""
        before, databases = self.known, compared.manifest.unchanged if compared else {}
        copy = _copy_in(databases)
        if compared is None or copy is None or before.origin != committed.key:
            return
        contents = known.contents_of_step(compared.manifest, compared.leaves)
        if read_before := before.entries.get(copy):
            contents = {**read_before.contents, **contents}
        try:
            files = reused_files.present(committed.path / STATE) if self.processes.is_first else {}
        except OSError as error:
            logger.debug("nothing of step %d is reused: %s", committed.step, error)
            return
        if self.known is before:  # no save has ended meanwhile
            entry = Entry(committed.key, copy, databases, contents, files)
            self.known = dataclasses.replace(before, entries={copy: entry})

    @contextlib.contextmanager
    def saving(self, frozen: Frozen, same: SameObjects) -> Iterator[SaveReuse]:
        """Yields what one save reuses; the save has failed if an exception leaves the block."""
        save = SaveReuse(self, frozen.leaves, same)
        try:
            yield save
        except BaseException as error:
            # The files may be damaged. But a full disk has no room for them once more, and an error
            # of another process says nothing of them.
            reused = save.division.base if save.division.reused else None
            if not (isinstance(error, ProcessError) or storage_errors.is_full(error)):
                entries = {c: e for c, e in self.known.entries.items() if e is not reused}
                self.known = dataclasses.replace(self.known, entries=entries)
            if reused is not None:
                self._reuse_later()
            raise

    def _reuse_later(self) -> None:
        """Lets saves reuse nothing for a while: a bucket that refuses copies must not fail many."""
        num_refused = self.known.num_refused + 1
        num_in_full = min(2**num_refused, medium.of(self.directory.path).max_saves_in_full)
        self.known = dataclasses.replace(
            self.known, num_refused=num_refused, num_in_full=num_in_full
        )
        if num_in_full:
            logger.info("%s: the next %d saves write all arrays", self.directory.path, num_in_full)

    def copy_of(self, step: CommittedStep) -> int | None:
        """Returns which copy of the frozen arrays a step has; None if it has none."""
        known_copies = {e.key: e.copy for e in self.known.entries.values()}
        return known_copies[step.key] if step.key in known_copies else _copy_of(step)

    def is_sound(self, entry: Entry) -> bool:
        """Returns whether no read found damage in a step that may have the files of an entry."""
        return not any(
            entry.since <= step.step <= entry.key[0] and self.directory.verified.is_damaged(step)
            for step in self.history.branches.committed
        )

    def retain(self, doomed: Iterable[CommittedStep]) -> None:
        """Keeps the copy that the newest step lacks, if it is in a step to be deleted."""
        steps, entries = self.history.branches.committed, self.known.entries
        newest = next((e for e in entries.values() if steps and e.key == steps[-1].key), None)
        spare = entries.get(1 - newest.copy) if newest and self.has_two_copies else None
        last = next((step for step in doomed if spare and step.key == spare.key), None)
        if spare is not None and last is not None and self.is_sound(spare):
            databases = spare.databases.items()
            folders = [f for n, d in databases for f in unchanged.folders_of(n, d.processes)]
            is_retained = True
            try:
                reused_files.retain(self.directory.path, last, folders, self.directory.fence)
            except OSError as error:  # the next save writes these arrays
                is_retained = False  # also if the spare was retained before
                logger.debug("%s: no frozen arrays are kept aside: %s", spare.key, error)
            entries = {**entries, spare.copy: dataclasses.replace(spare, is_retained=is_retained)}
            self.known = dataclasses.replace(self.known, entries=entries)
        if not any(entry.is_retained for entry in entries.values()):
            reused_files.remove_retained(self.directory.path, self.directory.fence)


@dataclasses.dataclass(frozen=True)
class Division:
    """Which arrays of a save are in databases of frozen arrays, by stored names."""

    copy: int = 0  # which of the two copies of the frozen arrays the step has
    base: Entry | None = None  # the step whose files the save could reuse
    databases: Mapping[str, Database] = dataclasses.field(default_factory=dict)
    folders: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of what is written here
    reused: frozenset[str] = frozenset()  # the arrays whose files the save reuses
    digests: Mapping[str, Digests] = dataclasses.field(default_factory=dict)  # of these, if known
    # Which folders this process takes from the earlier step, and their names in the new one.
    links: Sequence[tuple[epath.Path, str]] = ()
    files: Mapping[str, StoredFile] = dataclasses.field(default_factory=dict)  # on process 0
    reused_bytes: int = 0  # of these files
    has_changed: bool = False  # whether an array differs from that of the base
    entry: Entry | None = None  # what later saves can reuse, without its key


@dataclasses.dataclass(eq=False)
class SaveReuse:
    """What one save reuses, and what it writes for later saves to reuse.

    The save calls the methods in their order. ``division`` is replaced as the save goes on.
    """

    reuse: Reuse
    frozen: frozenset[str]
    same: SameObjects
    division: Division = dataclasses.field(default_factory=Division)

    def candidate(self, step: int, metrics: Mapping[str, Any]) -> list[Any]:
        """Returns, on process 0, the step's copy, and key and folder of a step that has it.

        The key is None if there is none. The result fits into JSON.
        """
        reuse, entries = self.reuse, self.reuse.known.entries
        if not self.frozen:
            return [0, None, ""]
        copy, steps = next(iter(entries), 0), reuse.history.branches.committed
        if reuse.has_two_copies:
            before = reuse.preserving.kept_before(steps, step, metrics)
            other = None if before is None else reuse.copy_of(before)
            copy = copy if other is None else 1 - other
        entry, paths = entries.get(copy), {s.key: s.path for s in steps}
        if entry is not None and entry.is_retained:
            paths.setdefault(entry.key, reuse.directory.path / reused_files.RETAINED)
        if entry is None or reuse.known.num_in_full or (path := paths.get(entry.key)) is None:
            return [copy, None, ""]
        here = reused_files.present(path / STATE)
        problem = next(reused_files.differing(entry.files, here, path / STATE), None)
        if problem is None and reuse.is_sound(entry):
            return [copy, entry.key, path.name]
        problem = problem or f"{path} may be damaged, as another step is"
        logger.warning("%s: the frozen arrays are written again; verify the steps", problem)
        return [copy, None, ""]

    def divide(
        self,
        candidate: Sequence[Any],
        plan: Plan,
        arrays: Mapping[str, AnyArray],
        here: Mapping[str, AnyArray],
    ) -> Division:
        """Divides the arrays of the save, on all processes together, given the ``candidate``.

        Fetches arrays to compare them. This process stores those in ``here``, of all ``arrays``.
        """
        copy, key, folder = candidate
        found = Division(copy)
        if key is not None:
            entries = self.reuse.known.entries.values()
            base = next((e for e in entries if e.key == tuple(key)), None)
            equal = b""  # of a process that does not know the step, for which all reuse nothing
            if base is not None:
                equal = known.compare(base, plan, arrays, here, self.same.proofs)
            equal = self.reuse.processes.combine(
                equal, lambda every: bytes(map(min, zip(*every, strict=False)))
            )
            if base is not None:
                found = self._reusing(base, equal, copy, folder)
        written = {
            name: array
            for name, array in arrays.items()
            if name not in found.reused and self.frozen.issuperset(known.members_of(plan, name))
        }
        databases, folders = dict(found.databases), dict[str, str]()
        index = self.reuse.processes.index if self.reuse.processes.count > 1 else None
        free = (name for n in itertools.count() if (name := unchanged.name_of(n)) not in databases)
        for name, (names, writers) in zip(free, grouped(written, here), strict=False):
            by = None if index is None else tuple(sorted(writers))
            databases[name] = Database(copy, names, by)
            folders |= {n: unchanged.folder_of(name, index) for n in names if n in here}
        self.division = dataclasses.replace(found, databases=databases, folders=folders)
        return self.division

    def _reusing(self, base: Entry, equal: bytes, copy: int, folder: str) -> Division:
        """Returns the division with the equal databases of a step, which the processes share."""
        databases = {
            name: dataclasses.replace(database, copy=copy)
            for (name, database), is_equal in zip(base.databases.items(), equal, strict=False)
            if is_equal
        }
        folders = [f for n, d in databases.items() for f in unchanged.folders_of(n, d.processes)]
        state, processes = self.reuse.directory.path / folder / STATE, self.reuse.processes
        reused = frozenset(name for database in databases.values() for name in database.arrays)
        files = {p: file for p, file in base.files.items() if p.partition("/")[0] in folders}
        return Division(
            copy,
            base,
            databases,
            reused=reused,
            digests={n: base.contents[n].digests for n in reused & base.contents.keys()},
            links=[(state / name, name) for name in folders[processes.index :: processes.count]],
            files=files,
            reused_bytes=sum(file.num_bytes for file in files.values()),
            has_changed=not all(equal),
        )

    def complete(
        self,
        path: epath.Path,
        plan: Plan,
        here: Mapping[str, AnyArray],
        digests: Mapping[str, Digests],
    ) -> None:
        """Notes, on each process, what later saves can reuse of the step that is about to commit.

        Raises SaveError if files that the save reuses are gone or have changed.
        """
        found, files = self.division, dict[str, StoredFile]()
        if self.reuse.processes.is_first and found.databases:
            files = reused_files.present(path / STATE)
            for difference in reused_files.differing(found.files, files, path / STATE):
                raise SaveError(
                    f"{difference} before the step was committed, so the step is not kept. Another "
                    "program changes files of this run; keep it out of the directory"
                )
        digests, contents = {**digests, **found.digests}, {}
        for name in (n for database in found.databases.values() for n in database.arrays):
            if name in here and name in digests:
                array, members = here[name], known.members_of(plan, name)
                shape = tuple(array.shape)
                contents[name] = Content(members, shape, array.dtype.name, digests[name])
        entry = Entry((-1, 0), found.copy, found.databases, contents, files)
        self.division = dataclasses.replace(found, entry=entry)

    def committed(self, durable: CommittedStep) -> None:
        """Records that the save is committed on all processes."""
        reuse, found, before = self.reuse, self.division, self.reuse.known
        assert found.entry is not None, "complete"
        base = found.base if found.reused else None
        since = durable.step if base is None else base.since
        entry = dataclasses.replace(found.entry, key=durable.key, since=since)
        entries = dict(before.entries) if reuse.has_two_copies else {}
        proofs: Mapping[str, known.Proof] = {}
        if other := entries.get(1 - entry.copy) if reuse.has_two_copies else entry:
            is_per_host = reuse.processes.is_per_host
            proofs = known.proofs_of(entry, other, self.same.references, is_per_host=is_per_host)
        if entry.databases:
            entries[entry.copy] = entry
        if base is not None and not before.has_reused and reuse.processes.is_first:
            reuse.preserving.warn_of_sharing()
            path, state = reuse.directory.path, durable.path / STATE
            text = "step %d of %s has %d bytes of frozen arrays of an earlier step, %s"
            about = fields(step=durable.step, path=path, shared_bytes=found.reused_bytes)
            how = medium.of(state).how_taken_over(state)
            logger.info(text, durable.step, path, found.reused_bytes, how, extra=about)
        reuse.known = Known(
            entries,
            proofs,
            has_reused=before.has_reused or base is not None,
            num_refused=0 if base is not None else before.num_refused,
            num_in_full=max(0, before.num_in_full - 1),
        )
        if found.has_changed and not reuse.preserving.is_local:
            reuse.frozen_leaves.changed()


def grouped(
    arrays: Mapping[str, AnyArray], here: Mapping[str, AnyArray]
) -> Iterator[tuple[tuple[str, ...], frozenset[int]]]:
    """Yields the arrays that share a database, device arrays or host arrays; and their writers.

    No process writes more of one than the limit, except of a database of one array.
    """
    writers = {n: chunking.storing_processes(here.get(n, _ON_HOST)) for n in arrays}

    def share(name: str) -> int:
        return arrays[name].size * arrays[name].dtype.itemsize // len(writers[name])

    for on_host in (False, True):
        kind = [n for n in arrays if isinstance(here.get(n, _ON_HOST), np.ndarray) == on_host]
        for names in batches.batches(kind, share, _DATABASE_BYTES):
            yield tuple(names), frozenset[int]().union(*(writers[name] for name in names))


_ON_HOST = np.empty(0)  # stands for an array that process 0 alone stores


def _copy_in(databases: Mapping[str, Database]) -> int | None:
    """Returns which copy of the frozen arrays a step has; None if it has no databases."""
    return next((database.copy for database in databases.values()), None)


@functools.lru_cache(maxsize=64)
def _copy_of(committed: CommittedStep) -> int | None:
    """Returns ``_copy_in`` of a step; None if its manifest cannot be read."""
    try:
        return _copy_in(parse_manifest(committed).unchanged)
    except CheckpointError:  # no run can be restored from it
        return None
