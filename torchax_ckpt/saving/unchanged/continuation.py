"""What a run takes over from the step that it continues from, and from the steps before it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence

import jax

from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.unchanged import earlier_steps, known_databases, presence, restored
from torchax_ckpt.saving.unchanged.copies import Copies
from torchax_ckpt.saving.unchanged.identities import Identities
from torchax_ckpt.saving.unchanged.known_databases import KnownDatabase
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.writing import databases, retained
from torchax_ckpt.stored.stored_step import Compared, parse_manifest


class Continuation:
    """Finds the databases and the objects that the first saves after a restore can take over.

    Args:
      directory: the directory of the run.
      steps: returns the steps of the run, oldest first.
      processes: the processes of the run.
      copies: gets the databases.
      identities: gets the objects.
    """

    def __init__(
        self,
        directory: RunDirectory,
        steps: Callable[[], Sequence[CommittedStep]],
        processes: Processes,
        copies: Copies,
        identities: Identities,
    ) -> None:
        self._directory = directory
        self._steps = steps
        self._processes = processes
        self._copies = copies
        self._identities = identities
        # The step that the run continues from, until it saves; and the leaves read from this step.
        self._origin: Key | None = None
        self._read: dict[str, weakref.ref[jax.Array]] = {}
        # The step that was restored and compared, and the files of its databases.
        self._verified: Key | None = None
        self._files: Mapping[str, Mapping[str, databases.File]] = {}

    def begin(self, committed: CommittedStep, *, is_verified: bool) -> None:
        """Begins anew: the run continues from a step.

        Args:
          committed, is_verified: as for ``Reuse.adopt``.
        """
        self._copies.forget_all()
        self._identities.forget()
        self._origin, self._read = committed.key, {}
        self._verified = None
        # Parts of a local step may have been read from other hosts, in place of damaged ones here.
        if is_verified and not self._processes.is_per_host:
            with contextlib.suppress(OSError):  # the next save then reads the databases
                if self._processes.is_first:
                    self._files = databases.present(committed.path / STATE)
                self._verified = committed.key

    def read(self, committed: CommittedStep, compared: Compared) -> None:
        """Learns which objects a restore or a load has made of a step; see ``Reuse.read``."""
        copy = restored.copy_in(compared.manifest)
        if committed.key != self._origin or copy is None:
            return
        leaves = {name: reference() for name, reference in compared.references.items()}
        for name, reference in self._identities.proven(leaves).items():
            # A state that is only looked at must not take the place of the one that trains.
            if (known := self._read.get(name)) is None or known() is None:
                self._read[name] = reference
        found = [
            (database, identities)
            for _, database in known_databases.databases_of(compared.manifest)
            if len(identities := restored.identities(database, self._read)) == len(database)
        ]
        if not found:
            return
        with contextlib.suppress(OSError):  # the next save then compares the arrays
            steps = [s for s in self._directory.steps() if s.step < committed.step]
            other = restored.other_copy(copy, steps, self._directory.path)
            equal = [identities for database, identities in found if database in other]
            self._identities.restored(committed.key, copy, [i for _, i in found], equal)

    def copy_in(self, committed: CommittedStep) -> int | None:
        """Returns which copy of the unchanged arrays a step of the run has; None if it has none.

        Raises:
          OSError: storage does not answer.
        """
        with contextlib.suppress(KeyError):  # it is older than the steps that were searched
            return self._copies.copy_in(committed.key)
        copy = None
        with contextlib.suppress(CheckpointError):  # no run can be restored from it
            copy = restored.copy_in(parse_manifest(committed))
        self._copies.record(committed.key, copy)
        return copy

    def end(self) -> None:
        """Ends it: from here on, the run knows what its own saves have made."""
        self._origin, self._read = None, {}

    def search(self) -> frozenset[str]:
        """Finds databases in the newest steps of the run, and in the folder beside them.

        Returns the leaves that the newest step stores apart.
        """
        found: frozenset[str] = frozenset()
        for committed, manifest in earlier_steps.manifests(self._steps()):
            self._know(committed.key, manifest)
            found = found or known_databases.leaves_in(manifest)
        with contextlib.suppress(OSError, ValueError, RecursionError, CheckpointError):
            self._know(None, retained.read_manifest(self._directory.path))
        return found

    def _know(self, key: Key | None, manifest: Manifest) -> None:
        is_verified = key is not None and key == self._verified
        for name, contents in known_databases.databases_of(manifest):
            database = manifest.unchanged[name]
            files = presence.files_of(name, database.processes, self._files) if is_verified else ()
            known = KnownDatabase(key, name, contents, is_verified, database.processes, files)
            self._copies.know(known, database.copy)
            if key is not None:
                self._copies.record(key, database.copy)
