"""One save of one captured state to one tier, on all processes of the run, as its stages in order.

Each process writes the shards of its devices. Process 0 writes what is equal on all, names the
folder, commits, and deletes a step that reads back damaged. In a local tier, each process does the
work of process 0 in its own directory. A save succeeds on all processes or fails on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchax_ckpt.compilation.packed_programs import on_durable
from torchax_ckpt.devices.sharding import to_host_part
from torchax_ckpt.errors import CorruptCheckpointError, DonatedBufferError, LeaseError, SaveError
from torchax_ckpt.layout.manifest import Digests, Manifest, Node, installed_versions
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.processes.call_log import Call
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.saving import host_parts
from torchax_ckpt.saving.capture import Capture
from torchax_ckpt.saving.save_in_flight import SaveInFlight
from torchax_ckpt.saving.tier import Tier
from torchax_ckpt.saving.unchanged.division import Division
from torchax_ckpt.snapshot.planner import with_host_leaves
from torchax_ckpt.snapshot.snapshotter import Stored
from torchax_ckpt.state.per_process_state import joined
from torchax_ckpt.storage.arrays import block_digests
from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.abandonment import SUMMARY_FIELD
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.directory.step_folder import StepFolder
from torchax_ckpt.storage.medium import medium, storage_errors
from torchax_ckpt.storage.writing import array_writer, step_writer
from torchax_ckpt.stored.stored_step import StoredStep
from torchax_ckpt.telemetry.events import SaveCost

logger = logging.getLogger(__name__)

# An interrupt may end ``Saver.begin`` before it sets ``handed_over``.
_HAND_OVER_SECS = 5.0


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A step that is being written.

    ``document`` and ``plan`` are complete on process 0. ``arrays`` are those that this process
    writes or takes over; a later save may take over those in ``reusable``.
    """

    folder: StepFolder
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


class Save:
    """A save, from the start of its thread to the end of what it does with other steps."""

    def __init__(self, tier: Tier, call: Call | None, in_flight: SaveInFlight) -> None:
        self._tier, self._call, self._in_flight = tier, call, in_flight
        self._processes, self._hosts = tier.saves, tier.saves.hosts
        self._began_nsecs = time.time_ns()
        self._committed: CommittedStep | None = None  # although the save may still fail

    def run(self, capture: Capture) -> None:
        """Carries out the save. An error before the step is durable is the failure of the save."""
        tier, in_flight = self._tier, self._in_flight
        if capture.snapshot.way != "transfer":
            # Otherwise this thread would take the interpreter lock, and save() would block longer.
            in_flight.handed_over.wait(_HAND_OVER_SECS)
        tier.telemetry.saving(capture.step, capture.began)
        try:
            durable, reused_bytes = self._make_durable(capture)
        except BaseException as error:  # the training thread must learn of any failure
            error = capture.explained(error)
            failed(tier, capture.step, error, in_flight.age_secs, self._committed)
        else:
            self._report(durable, reused_bytes)
            self._tidy(durable)
        finally:
            in_flight.transferred.set()

    def _make_durable(self, capture: Capture) -> tuple[CommittedStep, int]:
        """Returns the step once it counts on all processes, and the bytes that it took over.

        All processes have written before process 0 commits, and write nothing more afterwards.
        """
        step, call = capture.step, self._call
        with self._processes.round(round_of(step), call, is_met=False) as outcome:
            metrics = self._fetch_metrics(capture)
            draft = self._begin(capture, metrics)
            digests = self._write_arrays(capture, draft)
            summary = self._complete(capture, draft, digests, metrics)
            pending = self._tier.reuse.pending(
                draft.folder.path,
                draft.division,
                draft.plan,
                draft.reusable,
                digests,
                capture.skipped.references,
            )
            if self._processes.is_first:
                durable = self._commit(draft.folder)
                described = committed_step.described([durable])
                outcome.value = [described, pending.still, summary["metrics"]]
        steps, still, metrics = outcome.value
        [durable] = committed_step.named(steps, self._tier.directory.path)
        self._committed = durable
        if self._tier.options.read_back:
            self._in_flight.enter("reading it back")
            with self._processes.round(f"reading back step {step}", call):
                self._read_back(durable)
        self._succeed(durable, still, pending)
        self._tier.history.succeed(durable, {**summary, "metrics": metrics})
        return durable, pending.reused_bytes

    # --- the stages ---

    def _fetch_metrics(self, capture: Capture) -> dict[str, Any]:
        """Returns the save's metrics, and reports what prevents a ranking by them."""
        self._in_flight.enter("fetching metrics from the devices")
        metrics, problem = capture.fetch_metrics()
        if problem is not None and capture.reports_metrics:
            self._tier.failures.report(problem, "ranking")
        return metrics

    def _begin(self, capture: Capture, metrics: Mapping[str, Any]) -> _Draft:
        """Makes the step's folder; finds what is taken over, and what this process writes."""
        tier, processes = self._tier, self._processes
        self._in_flight.enter("stacking the arrays")
        plan, arrays = capture.snapshot.stored()
        # One message, because each one of all processes takes as long as the slowest of them.
        states = processes.gather(b"" if self._hosts else capture.state(capture.document))
        self._in_flight.enter("cleaning up the directory")

        def make_folder() -> list[Any]:
            tier.claim.clean_up()
            known = committed_step.described(tier.history.branches.in_place)
            candidate = tier.reuse.candidate(capture.step, metrics)
            folder = StepFolder.begin(tier.directory, capture.step)
            return [folder.path.name, known, candidate]

        name, known, candidate = processes.first(make_folder)
        tier.history.refresh(committed_step.named(known, tier.directory.path))
        skipped, document = capture.skipped, capture.document
        plan = Plan({**plan.stacks, **skipped.stacks}, plan.empty)
        arrays = {**arrays, **skipped.forms}
        if processes.count > 1:  # some may skip what others do not
            arrays = dict(sorted(arrays.items()))
        if processes.is_per_host:
            document = host_parts.described(document, plan, arrays)
        here = self._here(arrays)
        if candidate[1] is not None:
            self._in_flight.enter("comparing the arrays with earlier steps")
        division = tier.reuse.divide(candidate, plan, arrays, here, skipped)
        here |= self._here(skipped.stored(skipped.forms.keys() - division.linked))
        nodes, leaves = self._states(capture, document, states)
        plan, more = with_host_leaves(plan, leaves, tier.options.layout)
        document, stored = {**document, **nodes}, {**here, **more}
        folder = StepFolder(tier.directory, capture.step, tier.directory.path / name)
        return _Draft(folder, document, plan, stored, here, division)

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

    def _states(
        self, capture: Capture, document: Mapping[str, Node], states: Sequence[bytes]
    ) -> tuple[Mapping[str, Node], Mapping[str, np.ndarray]]:
        """Returns the nodes and leaves of the per-process states that this process stores."""
        if (hosts := self._hosts) is not None:
            state, parts = capture.state(document), host_parts.parts(document)
            kept = self._tier.keepers.exchange(hosts, state, parts)
            return joined(state, kept, (hosts.count, hosts.index))
        if capture.per_process is None or not self._processes.is_first:
            return {}, {}
        return joined(states[0], dict(enumerate(states[1:], start=1)))

    def _write_arrays(self, capture: Capture, draft: _Draft) -> Mapping[str, Digests]:
        """Takes over and writes arrays; returns the digests of what all processes have written."""
        options = self._tier.options
        self._in_flight.enter("transferring the arrays from the devices")
        # The training waits for a transfer: if it may, that ends before anything is written.
        memories = [] if capture.snapshot.way == "transfer" else self._tier.memories

        def on_host(is_last: bool) -> None:
            if is_last:
                self._in_flight.transferred.set()
            self._in_flight.enter("digesting and writing the arrays")

        state = draft.folder.path / STATE
        for folder, name in draft.division.links:
            medium.of(folder).take_over(folder, state / name)
        taken = array_writer.write_arrays(
            state,
            draft.written,
            draft.division.folders,
            process=self._processes.index,
            stacks=draft.plan.stacks,
            codec=array_writer.codec_of(options.compression),
            max_bytes=options.max_host_bytes,
            memories=memories,
            on_host=on_host,
        )
        return block_digests.gathered(taken, draft.written, draft.places, self._processes)

    def _complete(
        self,
        capture: Capture,
        draft: _Draft,
        digests: Mapping[str, Digests],
        metrics: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Writes, on process 0, all but the arrays, which all have written; returns the summary."""
        self._in_flight.enter("writing and committing")
        at_nsecs, division = time.time_ns(), draft.division
        if (hosts := self._hosts) is not None:  # equal on all, when all have written
            told = json.dumps(metrics).encode() if hosts.is_first else b""
            agreed = hosts.combine(told, lambda all_: b"%d %s" % (time.time_ns(), all_[0]))
            at, _, first_metrics = agreed.partition(b" ")
            at_nsecs, metrics = int(at), json.loads(first_metrics)
        summary = {
            "metrics": metrics,
            SUMMARY_FIELD: self._tier.history.abandons(),
            **self._tier.directory.run_name.for_summary(),
        }
        if not self._processes.is_first:
            return summary
        manifest = Manifest(
            draft.document,
            draft.plan,
            installed_versions(),
            {**digests, **division.digests},
            division.databases,
            capture.assets.seal if capture.assets else None,
            capture.attached,
        )
        step_writer.complete(
            draft.folder.path,
            draft.arrays,
            manifest,
            summary,
            began_nsecs=self._began_nsecs,
            at_nsecs=at_nsecs,
            num_processes=self._processes.count,
            assets=capture.assets,
            texts=self._tier.texts,
        )
        return summary

    @stage("commit")
    def _commit(self, folder: StepFolder) -> CommittedStep:
        """Makes a complete step durable and visible."""
        if self._hosts is not None:
            return self._commit_part(self._hosts, folder)
        self._committed = folder.commit()
        return self._committed

    @stage("commit a part")
    def _commit_part(self, hosts: Processes, folder: StepFolder) -> CommittedStep:
        """Commits this host's part of a step; deletes it if another host reports a failure."""
        try:
            self._committed = durable = folder.commit()
        except Exception:
            with contextlib.suppress(Exception):  # the failed commit is the error to report
                hosts.any(flag=True)
            raise
        # Raises if a host died before it reported: that one may have committed, so the part stays.
        if hosts.any(flag=False):  # another host has failed
            self._tier.directory.delete(durable)  # later cleanups would not find this part
            hosts.meet()  # raises the other host's error
        return durable

    @stage("read back")
    def _read_back(self, durable: CommittedStep) -> None:
        """Reads the new step back, each process a share; deletes the step if it is damaged."""
        directory = self._tier.directory
        try:
            stored = StoredStep(durable, self._tier.options, allow_part=True)
            stored.verify(self._processes)
            self._processes.meet()
        except CorruptCheckpointError:  # after other errors, the step may be intact
            if self._processes.is_first:
                try:
                    directory.delete(durable)
                except Exception as error:  # the damage is the error to raise
                    text = "%s: this damaged step cannot be deleted: %s"
                    logger.warning(text, durable.path, storage_errors.said(error))
            raise
        directory.verified.note(durable, is_sound=True)

    @stage("end a durable save")
    def _succeed(self, durable: CommittedStep, still: Any, pending: Any) -> None:
        """Records that the save has succeeded on all processes."""
        self._tier.reuse.succeeded(durable, still, pending)

    def _report(self, durable: CommittedStep, reused_bytes: int) -> None:
        """Says that the step is durable, once it is known how long ``save`` has blocked."""
        tier, in_flight = self._tier, self._in_flight
        durable_secs = in_flight.age_secs
        tier.failures.mended()
        in_flight.enter("deleting what no rule keeps")
        in_flight.handed_over.wait(_HAND_OVER_SECS)
        cost = SaveCost(durable.step, in_flight.blocking_secs, durable_secs)
        tier.costs.add(cost, tier.directory.path)
        tier.telemetry.durable(cost, reused_bytes, tier.history.branches.committed)
        for notify in on_durable:
            notify()

    def _tidy(self, durable: CommittedStep) -> None:
        """Renames abandoned steps (deletes them in a local tier); deletes what no policy keeps.

        A failure is reported, and leaves the work to the next save.
        """
        tier, path = self._tier, self._tier.directory.path
        try:
            what, is_met = f"tidying up after step {durable.step}", self._processes.is_per_host
            with self._processes.round(what, self._call, is_met=is_met) as outcome:
                outcome.value = self._tidied(durable) if self._processes.is_first else None
            tier.history.refresh(committed_step.named(outcome.value, path))
        except Exception as error:
            failure = SaveError(
                f"step {durable.step} is durable in {path}, but tidying up after it failed: "
                f"{storage_errors.explained(error, path)}",
                step=durable.step,
                path=path,
            )
            failure.__cause__ = error
            tier.claim.clean_up_later()  # the next save does the rest of this work first
            tier.failures.report(failure, "tidying", storage_errors.kind(error))
        else:
            tier.failures.over("tidying")

    def _tidied(self, durable: CommittedStep) -> list[Any]:
        """Does on process 0 what ``tidy`` says; returns, as JSON, the steps that are left."""
        tier, directory = self._tier, self._tier.directory
        steps, unwanted = [*tier.history.branches.committed], tier.history.branches.unwanted
        staying = directory.set_aside(unwanted)
        if durable.is_incoming:
            steps[-1] = directory.settle(durable)
        tier.history.refresh([*steps, *staying])
        aside = [s for s in unwanted if s not in staying and s.key not in directory.failed]
        tier.telemetry.steps_gone("set_aside", [s.step for s in aside], steps)
        keep = tier.preserving.kept(steps)
        directory.verified.mark(steps)
        doomed = [s for s, is_kept in zip(steps, keep, strict=True) if not is_kept]
        tier.reuse.retain([s for s in doomed if s.key not in directory.staying])
        undeleted = directory.prune(doomed)
        gone = [s for s in doomed if s not in undeleted]
        left = [s for s in steps if s not in gone]
        tier.telemetry.steps_gone("deleted", [s.step for s in gone], left)
        directory.tell_staying([*staying, *undeleted])
        return committed_step.described([*left, *staying])


def failed(
    tier: Tier,
    step: int,
    error: BaseException,
    age_secs: float = 0.0,
    committed: CommittedStep | None = None,
) -> None:
    """Reports that a save has failed on all processes; else as ``undo``."""
    undo(tier, step, error, committed)
    if isinstance(error, DonatedBufferError):
        tier.on_donated()
    tier.failures.of_save(step, error, age_secs)
    if isinstance(error, LeaseError):
        tier.claim.lose()
        return
    try:
        if tier.saves.is_first:
            tier.directory.recover()  # now, because a full disk needs the space
    except Exception as problem:
        logger.debug("leftovers of the failed save stay until the next save: %s", problem)


def undo(
    tier: Tier, step: int, error: BaseException, committed: CommittedStep | None = None
) -> None:
    """Ends a save that has failed, although it may have ``committed`` its step."""
    tier.claim.clean_up_later()
    tier.reuse.failed(error)
    tier.history.fail(step, committed)


def round_of(step: int) -> str:
    """Returns the work of the round in which the processes save a step."""
    return f"saving step {step}"
