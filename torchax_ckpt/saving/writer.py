"""The writer of one save: writes a captured state as a durable step, on all processes of the run.

Each process writes the shards of its devices; process 0 writes what is equal on all, names the
folder, commits, and deletes a step that reads back damaged. In a local tier, each process does
the work of process 0 in its own directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError, DonatedBufferError
from torchax_ckpt.layout.manifest import Digests, Manifest, Node, installed_versions
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.per_host import Keepers
from torchax_ckpt.runtime.save_in_flight import FailureLog, SaveInFlight
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.saving import host_parts
from torchax_ckpt.saving.unchanged.division import Division
from torchax_ckpt.saving.unchanged.identities import Skipped
from torchax_ckpt.saving.unchanged.reuse import Pending, Reuse
from torchax_ckpt.snapshot.host_array import Memory
from torchax_ckpt.snapshot.planner import with_host_leaves
from torchax_ckpt.snapshot.sharding import to_host_part
from torchax_ckpt.snapshot.snapshotter import Snapshot, Stored
from torchax_ckpt.state.per_process_state import PerProcessState, joined
from torchax_ckpt.storage.arrays import block_digests
from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.abandonment import SUMMARY_FIELD
from torchax_ckpt.storage.directory.committed_step import (
    ASSETS,
    MANIFEST,
    STATE,
    SUMMARY,
    CommittedStep,
)
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.storage.medium import medium, seals, storage_errors
from torchax_ckpt.storage.medium.assets import Assets
from torchax_ckpt.storage.writing import array_writer, fetching, step_writer
from torchax_ckpt.stored.stored_step import StoredStep

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Capture:
    """The captured state that one save writes, as it was when ``save`` was called."""

    step: int
    snapshot: Snapshot
    document: Mapping[str, Node]
    per_process: PerProcessState | None  # None in a run of one process
    # may wait for devices; returns an error that does not prevent the save
    fetch_metrics: Callable[[], tuple[dict[str, Any], CheckpointError | None]]
    began: float  # ``time.perf_counter()`` on the training thread
    # taken over from an earlier step; not in ``snapshot``
    skipped: Skipped = dataclasses.field(default_factory=Skipped)
    assets: Assets | None = None
    attached: tuple[str, ...] | None = None  # see ``Manifest``
    reports_metrics: bool = True  # whether this save reports that error, of all tiers' saves

    def explained(self, error: BaseException) -> BaseException:
        """Returns the error, or a DonatedBufferError naming the leaf if a donation caused it."""
        if "has been deleted" in str(error):
            try:
                self.snapshot.require_alive()
                self.skipped.require_alive()
            except DonatedBufferError as donated:
                return donated.with_traceback(None)
        return error

    def state(self, document: Mapping[str, Node]) -> bytes:
        """Returns this process's per-process state with its nodes; b"" in a run of one process."""
        if self.per_process is None:
            return b""
        nodes = {name: document[name] for name in self.per_process.nodes}
        return dataclasses.replace(self.per_process, nodes=nodes).to_bytes()


class Agreed(NamedTuple):
    """What process 0 tells the others, as JSON, before they write."""

    folder: str
    known: list[Any]  # the steps beside it
    candidate: Any  # see ``Reuse.candidate``


@dataclasses.dataclass(frozen=True)
class Draft:
    """A step that is about to be written.

    ``document`` and ``plan`` are complete on process 0. ``arrays`` are those that this process
    writes or takes over; a later save may take over those in ``reusable``.
    """

    path: epath.Path
    document: Mapping[str, Node]
    plan: Plan
    arrays: Mapping[str, Stored]
    reusable: Mapping[str, Stored]
    division: Division

    @property
    def written(self) -> dict[str, Stored]:
        """The arrays that are not taken over."""
        return {n: array for n, array in self.arrays.items() if n not in self.division.linked}

    @property
    def places(self) -> dict[str, Any]:
        """Stored name -> the leaves of a stack, and the database of unchanged arrays, in JSON."""
        database_of = {n: name for name, d in self.division.databases.items() for n in d.arrays}
        return {n: [self.plan.stacks.get(n), database_of.get(n)] for n in self.arrays}


class Writer:
    """Writes captures to a directory; ``failures`` gets problems that do not prevent a save."""

    def __init__(
        self,
        directory: RunDirectory,
        history: RunHistory,
        options: CheckpointOptions,
        processes: Processes,
        failures: FailureLog,
        reuse: Reuse,
    ) -> None:
        self._directory = directory
        self._history = history
        self._options = options
        self._processes = processes
        self._hosts = processes.hosts
        self._keepers = Keepers()
        self._failures = failures
        self._versions = installed_versions()
        self._codec = array_writer.codec_of(options.compression)
        num_memories = 1 if options.max_host_bytes else 2  # with a bound, batches wait
        self._memories = [Memory(fetching.STACK_BYTES) for _ in range(num_memories)]
        self._reuse = reuse
        # Each host describes its parts anew at each save, so that no text is used twice.
        self._texts = None if self._hosts else seals.Texts("document", "stacks")
        self._is_recovered = self._has_failed = False
        # Of the newest save: what process 0 knows, and which leaves are still.
        self._pending: Pending | None = None
        self._still: Sequence[str] | None = None
        self._summary: dict[str, Any] = {}

    def write(self, capture: Capture, progress: SaveInFlight) -> list[Any] | None:
        """Writes a captured state as a durable step; on process 0, returns it for ``learn``.

        All processes have written before process 0 commits, and write nothing more afterwards.
        """
        began_nsecs, self._pending = time.time_ns(), None
        metrics = self._metrics(capture, progress)
        progress.enter("stacking the arrays")
        stored = capture.snapshot.stored()
        agreed, states = self._agree(capture, metrics, progress)
        draft = self._draft(capture, agreed, *stored, states, progress)
        del stored, states  # only what is written is held
        digests = self._write_arrays(capture, draft, progress)
        progress.enter("writing and committing")
        self._complete(capture, metrics, draft, digests, began_nsecs)
        self._pending = self._reuse.pending(
            draft.path,
            draft.division,
            draft.plan,
            draft.reusable,
            digests,
            capture.skipped.references,
        )
        return self._commit(capture.step, draft.path) if self._processes.is_first else None

    def _metrics(self, capture: Capture, progress: SaveInFlight) -> dict[str, Any]:
        """Returns the save's metrics, and reports what prevents a ranking by them."""
        progress.enter("fetching metrics from the devices")
        metrics, problem = capture.fetch_metrics()
        if problem is not None and capture.reports_metrics:
            self._failures.report(problem, "ranking")
        return metrics

    def _complete(
        self,
        capture: Capture,
        metrics: Mapping[str, Any],
        draft: Draft,
        digests: Mapping[str, Digests],
        began_nsecs: int,
    ) -> None:
        """Writes, on process 0, all of a step but its arrays, which all processes have written."""
        at_nsecs = time.time_ns()
        if (hosts := self._hosts) is not None:  # equal on all, when all have written
            told = json.dumps(metrics).encode() if hosts.is_first else b""
            agreed = hosts.combine(told, lambda all_: b"%d %s" % (time.time_ns(), all_[0]))
            at, _, first_metrics = agreed.partition(b" ")
            at_nsecs, metrics = int(at), json.loads(first_metrics)
        self._summary = {
            "metrics": metrics,
            SUMMARY_FIELD: self._history.abandons(),
            **self._directory.run_name.for_summary(),
        }
        if not self._processes.is_first:
            return
        assets, division = capture.assets, draft.division
        manifest = Manifest(
            draft.document,
            draft.plan,
            self._versions,
            {**digests, **division.digests},
            division.databases,
            assets.seal if assets else None,
            capture.attached,
        )
        items = {
            MANIFEST: seals.encoded(manifest.to_json(), self._texts),
            SUMMARY: seals.encoded(self._summary),
        }
        if assets is not None:
            items[ASSETS] = assets.content
        step_writer.complete(
            draft.path,
            draft.arrays,
            division.databases,
            self._processes.count,
            items,
            began_nsecs=began_nsecs,
            at_nsecs=at_nsecs,
        )

    def learn(self, committed: Any) -> tuple[CommittedStep, dict[str, Any]]:
        """Returns the newest save's step and summary, given process 0's result of ``write``."""
        steps, self._still, metrics = committed
        (durable,) = committed_step.named(steps, self._directory.path)
        self._history.committed(durable)
        return durable, {**self._summary, "metrics": metrics}

    @property
    def reused_bytes(self) -> int:
        """The bytes that the newest save took over from earlier steps; known on process 0."""
        return self._pending.reused_bytes if self._pending else 0

    @stage("end a durable save")
    def succeeded(self, durable: CommittedStep) -> None:
        """Records that the newest save succeeded on all processes."""
        self._has_failed = False
        if self._pending:
            self._reuse.succeeded(durable, self._still, self._pending)

    def failed(self, error: BaseException) -> None:
        """Records that a save failed on all processes, at any time since it was announced."""
        self._is_recovered, self._has_failed = False, True
        self._reuse.failed(error)

    def free(self) -> None:
        """Gives the memory of stacks back to the system, once no save is in flight."""
        for memory in self._memories:
            memory.free()

    def retain(self, doomed: Sequence[CommittedStep]) -> None:
        """Keeps what later saves take over from steps that are about to be deleted."""
        self._reuse.retain(doomed)

    def recover(self) -> None:
        """Removes what failed or killed saves left, if any did; call it on process 0 only."""
        if self._is_recovered:
            return
        if self._has_failed:
            self._directory.claim()
        self._directory.recover()
        self._history.refresh(self._directory.branches().in_place)
        self._is_recovered = True

    def recover_later(self) -> None:
        """Makes the next save or delete begin with ``recover``."""
        self._is_recovered = False

    def _agree(
        self, capture: Capture, metrics: Mapping[str, Any], progress: SaveInFlight
    ) -> tuple[Agreed, Sequence[bytes]]:
        """Makes the step's folder; returns also the states of all processes, on process 0."""
        # One message, because each one of all processes takes as long as the slowest of them.
        state = capture.state(capture.document) if self._hosts is None else b""
        states = self._processes.gather(state)
        progress.enter("cleaning up the directory")

        def make_folder() -> Agreed:
            self.recover()
            known = committed_step.described(self._history.branches.in_place)
            candidate = self._reuse.candidate(capture.step, metrics)
            path = self._directory.path_for(capture.step)
            step_writer.make_folder(path)
            return Agreed(path.name, known, candidate)

        return Agreed(*self._processes.first(make_folder)), states

    def _draft(
        self,
        capture: Capture,
        agreed: Agreed,
        plan: Plan,
        arrays: Mapping[str, Stored],
        states: Sequence[bytes],
        progress: SaveInFlight,
    ) -> Draft:
        """Finds what of the arrays is taken over, and what this process writes."""
        directory, processes, skipped = self._directory, self._processes, capture.skipped
        self._history.refresh(committed_step.named(agreed.known, directory.path))
        plan = Plan({**plan.stacks, **skipped.stacks}, plan.empty)
        arrays = {**arrays, **skipped.forms}
        if processes.count > 1:  # some may skip what others do not
            arrays = dict(sorted(arrays.items()))
        document = capture.document
        if processes.is_per_host:
            document = host_parts.described(document, plan, arrays)
        here = self._here(arrays)
        if agreed.candidate[1] is not None:
            progress.enter("comparing the arrays with earlier steps")
        division = self._reuse.divide(agreed.candidate, plan, arrays, here, skipped)
        here |= self._here(skipped.stored(skipped.forms.keys() - division.linked))
        nodes, leaves = self._states(capture, document, states)
        plan, more = with_host_leaves(plan, leaves, self._options.layout)
        document, stored = {**document, **nodes}, {**here, **more}
        return Draft(directory.path / agreed.folder, document, plan, stored, here, division)

    def _write_arrays(
        self, capture: Capture, draft: Draft, progress: SaveInFlight
    ) -> Mapping[str, Digests]:
        """Takes over and writes arrays; returns the digests of what all processes have written."""
        progress.enter("transferring the arrays from the devices")
        # The training waits for a transfer: if it may, that ends before anything is written.
        memories = [] if capture.snapshot.way == "transfer" else self._memories

        def on_host(is_last: bool) -> None:
            if is_last:
                progress.transferred.set()
            progress.enter("digesting and writing the arrays")

        for folder, name in draft.division.links:
            medium.of(folder).take_over(folder, draft.path / STATE / name)
        taken = array_writer.write_arrays(
            draft.path / STATE,
            draft.written,
            draft.division.folders,
            process=self._processes.index,
            stacks=draft.plan.stacks,
            codec=self._codec,
            max_bytes=self._options.max_host_bytes,
            memories=memories,
            on_host=on_host,
        )
        return block_digests.gathered(taken, draft.written, draft.places, self._processes)

    def _states(
        self, capture: Capture, document: Mapping[str, Node], states: Sequence[bytes]
    ) -> tuple[Mapping[str, Node], Mapping[str, np.ndarray]]:
        """Returns the nodes and leaves of the per-process states that this process stores."""
        if self._hosts is not None:
            state = capture.state(document)
            kept = self._keepers.exchange(self._hosts, state, host_parts.parts(document))
            return joined(state, kept, (self._hosts.count, self._hosts.index))
        if capture.per_process is None or not self._processes.is_first:
            return {}, {}
        return joined(states[0], dict(enumerate(states[1:], start=1)))

    def _here(self, arrays: Mapping[str, Stored]) -> dict[str, Stored]:
        """Returns the arrays that this process writes, given those over the devices of all."""
        if self._processes.count == 1 and self._hosts is None:
            return dict(arrays)
        stored: dict[str, Stored] = {}
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) and not array.is_fully_addressable:
                stored[name] = array if self._hosts is None else to_host_part(array)
            elif self._processes.is_first:
                stored[name] = np.asarray(array)  # its sharding means nothing to other processes
        return stored

    @stage("commit")
    def _commit(self, step: int, path: epath.Path) -> list[Any]:
        """Makes a complete step durable and visible; returns what all processes learn, as JSON."""
        self._directory.fence()
        step_writer.mark(path)
        if self._hosts is None:
            durable = self._directory.commit(step, path)
            self._history.committed(durable)
        else:
            durable = self._commit_part(self._hosts, step, path)
        still = self._pending.still if self._pending else None
        return [committed_step.described([durable]), still, self._summary["metrics"]]

    @stage("commit a part")
    def _commit_part(self, hosts: Processes, step: int, path: epath.Path) -> CommittedStep:
        """Commits this host's part of a step; deletes it if another host reports a failure."""
        try:
            durable = self._directory.commit(step, path)
        except Exception:
            with contextlib.suppress(Exception):  # the failed commit is the error to report
                hosts.any(flag=True)
            raise
        self._history.committed(durable)
        # Raises if a host died before it reported: that one may have committed, so the part stays.
        if hosts.any(flag=False):  # another host has failed
            self._directory.delete(durable)  # later cleanups would not find this part
            hosts.meet()  # raises the other host's error
        return durable

    @stage("read back")
    def read_back(self, durable: CommittedStep) -> None:
        """Reads the new step back, each process a share; deletes the step if it is damaged."""
        try:
            stored = StoredStep(durable, self._options, allow_part=True)
            stored.verify(self._processes)
            self._processes.meet()
        except CorruptCheckpointError:  # after other errors, the step may be intact
            if self._processes.is_first:
                try:
                    self._directory.delete(durable)
                except Exception as error:  # the damage is the error to raise
                    text = "%s: this damaged step cannot be deleted: %s"
                    logger.warning(text, durable.path, storage_errors.said(error))
            raise
        self._directory.verified.note(durable, is_sound=True)
