"""Owns what one save writes: from a capture to a durable step, on all processes of the run.

Each process writes what its devices hold. Process 0 writes the rest, which is the same everywhere,
and does what is done once: it names the step, commits it, and deletes it if it cannot be read back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError
from torchax_ckpt.layout.manifest import Digests, Manifest, Node, installed_versions
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.restoring import host_shards
from torchax_ckpt.runtime.failure_log import FailureLog
from torchax_ckpt.snapshot.sharding import to_host_part
from torchax_ckpt.snapshot.snapshotter import Snapshot
from torchax_ckpt.snapshot.stacking import Array, beside
from torchax_ckpt.state.per_process_state import PerProcessState, joined
from torchax_ckpt.storage.arrays import block_digests, write_step
from torchax_ckpt.storage.arrays.compression import Compression
from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.abandonment import SUMMARY_FIELD
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.stored.stored_step import StoredStep

# What hosts say of their parts of a step.
_THERE, _NOT_THERE = b"there", b"not there"


@dataclasses.dataclass(frozen=True)
class Capture:
    """What one save writes, fixed at the moment of ``save``.

    Attributes:
      step: completed optimizer steps.
      snapshot: the leaves.
      document: component -> node, see ``layout/manifest.py``.
      own: what this process has for itself, of a run with several; not in the snapshot.
      fetch_metrics: gives the metrics as JSON; may wait for devices. Its second answer is a
        problem with them that does not keep the step from being saved, or None.
      began: ``time.perf_counter()`` when the training thread turned to this save.
    """

    step: int
    snapshot: Snapshot
    document: Mapping[str, Node]
    own: PerProcessState | None
    fetch_metrics: Callable[[], tuple[dict[str, Any], CheckpointError | None]]
    began: float


class Progress(Protocol):
    """Who is told what a save is at.

    Attributes:
      transferred: set once all arrays are on the host.
    """

    transferred: threading.Event

    def enter(self, phase: str) -> None:
        """The save turns to this."""


class Writer:
    """Writes captures to a directory.

    Args:
      directory: where steps go.
      history: the steps of this run.
      options: how they are written.
      processes: those that write them together, in a round for each.
      failures: where problems go that do not keep a step from being saved.
    """

    def __init__(
        self,
        directory: RunDirectory,
        history: RunHistory,
        options: CheckpointOptions,
        processes: Processes,
        failures: FailureLog,
    ) -> None:
        self._directory = directory
        self._history = history
        self._options = options
        self._processes = processes
        self._failures = failures
        self._versions = installed_versions()
        self._compression = Compression(options.compression)

    def write(
        self, capture: Capture, progress: Progress, recover: Callable[[], None]
    ) -> tuple[CommittedStep, dict[str, Any]]:
        """Writes a capture; returns the step, once it is durable, and its summary.

        Args:
          capture: what to write.
          progress: is told what this is at.
          recover: cleans up the directory, on process 0.
        """
        directory, processes = self._directory, self._processes
        progress.enter("cleaning up the directory")
        name, there = processes.first(lambda: self._prepare(capture.step, recover))
        self._history.refresh(committed_step.named(there, directory.path))
        progress.enter("fetching metrics from the devices")
        metrics, problem = capture.fetch_metrics()
        if problem is not None:
            self._failures.report(problem, "ranking")
        progress.enter("stacking the arrays")
        document, plan, stored = self._stored(capture)

        def on_host(number: int, count: int, nbytes: int) -> None:
            if count == 1:
                self._compression.begin(nbytes)
            if number == count:
                progress.transferred.set()
            progress.enter("digesting and writing the arrays")

        def manifest(taken: Mapping[str, Digests]) -> dict[str, Any]:
            known = block_digests.gathered(taken, stored, processes)
            progress.enter("writing and committing")
            if not processes.is_first:
                return {}
            return Manifest(document, plan, self._versions, known).to_json()

        summary = {
            "metrics": metrics,
            SUMMARY_FIELD: self._history.abandons(),
        }
        progress.enter("transferring the arrays from the devices")
        write_step.write_step(
            directory.path / name,
            stored,
            manifest,
            summary,
            self._options,
            self._compression.is_on,
            stacks=plan.stacks,
            on_host=on_host,
            before_commit=directory.fence,
            processes=processes,
        )
        self._compression.end(len(stored))
        commit = self._commit_part if processes.is_per_host else self._commit
        durable = commit(capture.step, name)
        if self._options.read_back:
            progress.enter("reading it back")
            self._read_back(durable)
        return durable, summary

    def _prepare(self, step: int, recover: Callable[[], None]) -> tuple[str, list[Any]]:
        """The name to write a step under, and the steps of this run that are there."""
        recover()
        known = committed_step.described(self._history.branches.in_place)
        return self._directory.path_for(step).name, known

    def _stored(self, capture: Capture) -> tuple[Mapping[str, Node], Plan, Mapping[str, Array]]:
        """The document, the plan, and what this process writes, alone or with others.

        Orbax takes no array of one process's devices where there are several. It goes as a host
        array, from process 0, as host arrays do. A process that writes a step of its own writes its
        part of what lies on several hosts.
        """
        plan, arrays = capture.snapshot.stored(self._any)
        if capture.own is None:
            return capture.document, plan, arrays
        is_per_host = self._processes.is_per_host
        document = (
            host_shards.described(capture.document, plan, arrays)
            if is_per_host
            else capture.document
        )
        stored: dict[str, Array] = {}
        for name, array in arrays.items():
            if isinstance(array, jax.Array) and not array.is_fully_addressable:
                stored[name] = to_host_part(array) if is_per_host else array
            elif self._processes.is_first:
                stored[name] = np.asarray(array)
        sent = self._processes.gather(capture.own.to_bytes())
        if not self._processes.is_first:
            return document, plan, stored
        own, leaves = joined(sent)
        plan, more = beside(plan, leaves, self._options.layout)
        return {**document, **own}, plan, {**stored, **more}

    def _any(self, is_so: bool) -> bool:
        """Whether it is so on any process; a process by itself answers for itself."""
        if self._processes.count == 1:
            return is_so
        sent = self._processes.gather(bytes([is_so]))
        return self._processes.first(lambda: any(map(any, sent)))

    def _commit(self, step: int, name: str) -> CommittedStep:
        def commit() -> list[Any]:
            return committed_step.described(
                [self._directory.commit(step, self._directory.path / name)]
            )

        (durable,) = committed_step.named(self._processes.first(commit), self._directory.path)
        self._history.landed(durable)
        return durable

    def _commit_part(self, step: int, name: str) -> CommittedStep:
        """Commits this host's part of a step, which all hosts have or none.

        It is deleted again only where another says that it has none. Who cannot be asked, as it
        has died, may have its part, and with this one the step is whole.
        """
        directory, processes = self._directory, self._processes
        at = processes.agreed_time()
        try:
            durable = directory.commit(step, directory.path / name, at)
        except Exception:
            with contextlib.suppress(Exception):  # of all that goes wrong this one is to be told
                processes.gather(_NOT_THERE)
            raise
        self._history.landed(durable)
        if _NOT_THERE in processes.gather(_THERE):
            directory.delete(durable)  # nobody would know of it, nor ever remove it
            processes.meet()  # raises what kept the other from it
        return durable

    def _read_back(self, durable: CommittedStep) -> None:
        """Reads the step on all processes, each its share; deletes it if any finds it damaged.

        Where it cannot be read now, or one of them has died, it may be whole.
        """
        try:
            StoredStep(durable, allow_part=True).verify(self._options, self._processes)
            self._processes.meet()
        except CorruptCheckpointError:  # it must not be the newest step
            if self._processes.is_first:
                self._directory.delete(durable)
            raise
        self._directory.verified.note(durable, is_sound=True)
