"""One save of one captured state to one tier, on all processes of the run, as its stages in order.

Each process writes the shards of its devices. Process 0 writes what is equal on all, names the
folder, commits, and deletes a step that reads back damaged. In a local tier, each process does the
work of process 0 in its own directory. A save succeeds on all processes or fails on all.
CONTRIBUTING.md follows a parameter through these stages, with the files that they call.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchax_ckpt.devices.sharding import to_host_part
from torchax_ckpt.errors import CorruptCheckpointError, SaveError, SaveTimeoutError
from torchax_ckpt.layout.array_digests import Digests
from torchax_ckpt.layout.manifest import Manifest, Node, installed_versions
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.policies import preservation
from torchax_ckpt.processes.call_log import Call
from torchax_ckpt.processes.per_host import commit_part
from torchax_ckpt.runtime import durable_steps
from torchax_ckpt.runtime.background import Flag, Task
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.saving import host_parts
from torchax_ckpt.saving.capture import Capture
from torchax_ckpt.saving.reuse.reuse import Division, SaveReuse
from torchax_ckpt.saving.tier import Tier
from torchax_ckpt.snapshot.planner import with_host_leaves
from torchax_ckpt.snapshot.snapshotter import Stored
from torchax_ckpt.state.per_process_state import joined
from torchax_ckpt.storage.arrays import block_digests
from torchax_ckpt.storage.directory import committed_step, lineage
from torchax_ckpt.storage.directory.abandonment import SUMMARY_FIELD
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.directory.step_folder import StepFolder
from torchax_ckpt.storage.medium import medium, storage_errors
from torchax_ckpt.storage.writing import array_writer, step_writer
from torchax_ckpt.stored.stored_step import StoredStep
from torchax_ckpt.telemetry.events import SaveCost

logger = logging.getLogger(__name__)

# How long to wait for ``handed_over``, which an interrupt of ``Saver.begin`` may leave unset.
_HAND_OVER_SECS = 5.0


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A step that is being written.

    ``document`` and ``plan`` are complete on process 0. ``arrays`` are those that this process
    writes or reuses; ``reusable`` are the same but for those of per-process states, and later saves
    may reuse some of them.
    """

    folder: StepFolder
    document: Mapping[str, Node]
    plan: Plan
    arrays: Mapping[str, Stored]
    reusable: Mapping[str, Stored]
    division: Division


def round_of(step: int) -> str:
    """Returns the name of the round in which the processes save a step."""
    return f"saving step {step}"


class Save(Task):
    """A save, which its thread carries out; holds nothing of the state once that has ended."""

    def __init__(self, tier: Tier, call: Call | None, capture: Capture) -> None:
        # By ``partial``, which has no frame: a frame of Python's that holds the state would stay
        # alive with the traceback of a stored error.
        super().__init__(f"save-{capture.step}", functools.partial(self.run, capture))
        self.step = capture.step
        self._tier, self._call = tier, call
        self._committed: CommittedStep | None = None  # although the save may still fail
        self._began = capture.began  # a ``time.perf_counter()``
        self.enter("starting its thread")
        self.is_known_overdue = False  # whether a SaveTimeoutError for this save was raised
        self.handed_over = Flag()  # set once the training thread continues
        self.blocking_secs = 0.0  # from ``began`` until then
        self.transferred = Flag()  # set once all arrays are on the host

    # --- as the training thread sees it ---

    @property
    def age_secs(self) -> float:
        """Seconds since the training thread began the save."""
        return time.perf_counter() - self._began

    def enter(self, phase: str) -> None:
        """Records that the save begins the stage ``phase``."""
        self._phase = phase, time.perf_counter()

    def where(self) -> str:
        """Returns a text that names the current stage of the save and the stage's age."""
        phase, since = self._phase
        return f"{phase}, for {time.perf_counter() - since:.1f} s"

    def timeout_error(self) -> SaveTimeoutError:
        """Returns the error of a caller that has waited too long for this save."""
        path = self._tier.directory.path
        return SaveTimeoutError(
            f"the save of step {self.step} to {path} is still in flight after "
            f"{self.age_secs:.2f} s. Current stage: {self.where()}. The save continues; earlier "
            "steps are intact.",
            step=self.step,
            path=path,
        )

    def watch(self, limit_secs: float) -> None:
        """Has a thread log stage and call stack after 1, 2, 4, 8, ... times ``limit_secs``."""

        def run() -> None:
            secs = limit_secs
            while not self.ended.wait(secs - self.age_secs):
                if self.age_secs >= secs:
                    text = "%s Stack of its thread:\n%s"
                    logger.error(text, self.timeout_error(), self.stack())
                    secs *= 2

        try:
            Task(f"watch-save-{self.step}", run).start()
        except RuntimeError as error:
            text = "the save of step %d is not reported if it takes longer than %g s: %s"
            logger.warning(text, self.step, limit_secs, error)

    # --- on its own thread ---

    def run(self, capture: Capture) -> None:
        """Carries out the save, which fails by any error until ``_learn`` has returned."""
        if capture.snapshot.way != "transfer":  # with it, the training thread waits for this one
            # If this thread took the interpreter lock now, save() would block longer.
            self.handed_over.wait(_HAND_OVER_SECS)
        self._tier.telemetry.saving(capture.step, capture.began)
        self._tier.saves_channel.log.resume(self._call)
        try:
            durable, reused_bytes = self._make_durable(capture)
        except BaseException as error:  # the training thread must learn of any failure
            error = capture.explained(error)
            self._tier.fail(self.step, error, self._committed, age_secs=self.age_secs)
        else:
            self._report(durable, reused_bytes)
            self._tidy(durable)
        finally:
            self.transferred.set()
            del capture  # the traceback of a stored error refers to this frame

    def _make_durable(self, capture: Capture) -> tuple[CommittedStep, int]:
        """Returns the step once it counts on all processes, and the bytes that it reuses."""
        tier = self._tier
        with tier.reuse.saving(capture.frozen, capture.same) as reuse:
            with tier.saves_channel.round(round_of(self.step), is_met=False) as outcome:
                outcome.value = self._write(capture, reuse)
            described, summary = outcome.value
            [durable] = committed_step.from_json(described, tier.directory.path)
            self._committed = durable
            self._read_back(durable)
            self._learn(durable, summary, reuse)
        return durable, reuse.division.reused_bytes

    def _write(self, capture: Capture, reuse: SaveReuse) -> list[Any] | None:
        """Writes and commits the step; returns, on process 0, what all processes then learn.

        All processes have written before process 0 commits, and write nothing more afterwards.
        """
        began_nsecs = time.time_ns()
        metrics = self._fetch_metrics(capture)
        stored = self._stack(capture)
        folder, candidate, states = self._begin_folder(capture, metrics, reuse)
        draft = self._divide(capture, stored, folder, candidate, states, reuse)
        del stored, states  # only what is written is held
        self._link(draft)
        digests = self._write_arrays(capture, draft)
        at_nsecs, metrics = self._agree_on_end(metrics)
        is_first, summary = self._tier.saves_channel.is_first, dict[str, Any]()
        if is_first:
            summary = self._complete(capture, draft, digests, metrics, (began_nsecs, at_nsecs))
        reuse.complete(draft.folder.path, draft.plan, draft.reusable, digests)
        if not is_first:
            return None
        durable = self._commit(draft.folder)
        return [committed_step.to_json([durable]), summary]

    # --- the stages ---

    def _fetch_metrics(self, capture: Capture) -> dict[str, Any]:
        """Returns this process's metrics, and reports what prevents a ranking by them."""
        self.enter("fetching metrics from the devices")
        metrics, problem = capture.fetch_metrics()
        if problem is not None and capture.reports_metrics:
            self._tier.failures.report(problem, "ranking")
        return metrics

    def _stack(self, capture: Capture) -> tuple[Plan, Mapping[str, Stored]]:
        """Returns the storage plan and what is stored, in the same order on all processes."""
        self.enter("stacking the arrays")
        (plan, arrays), same = capture.snapshot.to_store(), capture.same
        arrays = {**arrays, **{name: proof.form for name, proof in same.proofs.items()}}
        if self._tier.saves_channel.count > 1:  # some may leave out what others do not
            arrays = dict(sorted(arrays.items()))
        return Plan({**plan.stacks, **same.stacks}, plan.empty), arrays

    def _begin_folder(
        self, capture: Capture, metrics: Mapping[str, Any], reuse: SaveReuse
    ) -> tuple[StepFolder, list[Any], Sequence[bytes]]:
        """Has process 0 clean up, make the step's folder, and choose a step whose files to reuse.

        Returns the folder, the candidate, and on process 0 the states of all processes.
        """
        tier = self._tier
        # One message, because each one of all processes takes as long as the slowest of them.
        mine = b"" if tier.saves_channel.is_per_host else capture.state(capture.document)
        states = tier.saves_channel.gather(mine)
        self.enter("cleaning up the directory")

        def begin() -> list[Any]:
            tier.claim.clean_up()
            known = committed_step.to_json(tier.history.branches.in_place)
            candidate = reuse.candidate(self.step, metrics)
            return [StepFolder.begin(tier.directory, self.step).path.name, known, candidate]

        name, known, candidate = tier.saves_channel.first(begin)
        tier.history.refresh(committed_step.from_json(known, tier.directory.path))
        folder = StepFolder(tier.directory, self.step, tier.directory.path / name)
        return folder, candidate, states

    def _divide(
        self,
        capture: Capture,
        stored: tuple[Plan, Mapping[str, Stored]],
        folder: StepFolder,
        candidate: Sequence[Any],
        states: Sequence[bytes],
        reuse: SaveReuse,
    ) -> _Draft:
        """Finds what the save reuses, and what this process writes."""
        (plan, arrays), same, document = stored, capture.same, capture.document
        if self._tier.saves_channel.is_per_host:
            document = host_parts.described(document, plan, arrays)
        here = self._arrays_here(arrays)
        if candidate[1] is not None:
            self.enter("comparing the arrays with earlier steps")
        division = reuse.divide(candidate, plan, arrays, here)
        # Known arrays that must be written after all: their values in place of forms without any.
        here |= self._arrays_here(same.stored(same.proofs.keys() - division.reused))
        nodes, leaves = self._per_process_states(capture, document, states)
        plan, more = with_host_leaves(plan, leaves, self._tier.options.layout)
        return _Draft(folder, {**document, **nodes}, plan, {**here, **more}, here, division)

    def _arrays_here(self, arrays: Mapping[str, Stored]) -> dict[str, Stored]:
        """Returns what this process writes of the arrays, which may span the devices of all."""
        processes = self._tier.saves_channel
        if processes.count == 1 and not processes.is_per_host:
            return dict(arrays)
        stored: dict[str, Stored] = {}
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) and not array.is_fully_addressable:
                stored[name] = to_host_part(array) if processes.is_per_host else array
            elif processes.is_first:
                stored[name] = np.asarray(array)  # its sharding means nothing to other processes
        return stored

    def _per_process_states(
        self, capture: Capture, document: Mapping[str, Node], states: Sequence[bytes]
    ) -> tuple[Mapping[str, Node], Mapping[str, np.ndarray]]:
        """Returns the nodes and leaves of the per-process states that this process stores."""
        if (hosts := self._tier.saves_channel.hosts) is not None:
            state, digest = capture.state(document), host_parts.digest_of_parts(document)
            kept = self._tier.keepers.exchange(hosts, state, digest)
            return joined(state, kept, (hosts.count, hosts.index))
        if capture.per_process is None or not self._tier.saves_channel.is_first:
            return {}, {}
        return joined(states[0], dict(enumerate(states[1:], start=1)))

    def _link(self, draft: _Draft) -> None:
        """Puts the files of earlier steps that the save reuses into its folder."""
        for folder, name in draft.division.links:
            medium.of(folder).take_over(folder, draft.folder.path / STATE / name)

    def _write_arrays(self, capture: Capture, draft: _Draft) -> Mapping[str, Digests]:
        """Writes the other arrays; returns the digests of what all processes have written."""
        options, processes, division = self._tier.options, self._tier.saves_channel, draft.division
        self.enter("transferring the arrays from the devices")
        # A training that waits for a transfer waits until all arrays are on the host. So that they
        # are soon, a batch does not wait for the memory of an earlier one, which is being written.
        memories = [] if capture.snapshot.way == "transfer" else self._tier.memories

        def on_host(is_last: bool) -> None:
            if is_last:
                self.transferred.set()
            self.enter("digesting and writing the arrays")

        written = {n: array for n, array in draft.arrays.items() if n not in division.reused}
        taken = array_writer.write_arrays(
            draft.folder.path / STATE,
            written,
            division.folders,
            process=processes.index,
            stacks=draft.plan.stacks,
            codec=array_writer.codec_of(options.compression),
            max_bytes=options.max_host_bytes,
            memories=memories,
            on_host=on_host,
        )
        database_of = {n: name for name, d in division.databases.items() for n in d.arrays}
        # Stored name -> the leaves of a stack, and the database of frozen arrays.
        places = {n: [draft.plan.stacks.get(n), database_of.get(n)] for n in draft.arrays}
        return block_digests.gathered(taken, written, places, processes)

    def _agree_on_end(self, metrics: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns the time and process 0's metrics, for the summary.

        In a local tier, waits until all hosts have written; elsewhere the digests were waited for.
        """
        self.enter("committing")
        if (hosts := self._tier.saves_channel.hosts) is None:
            return time.time_ns(), metrics
        mine = json.dumps(metrics).encode() if hosts.is_first else b""
        agreed = hosts.combine(mine, lambda sent: b"%d %s" % (time.time_ns(), sent[0]))
        at, _, first_metrics = agreed.partition(b" ")
        return int(at), json.loads(first_metrics)

    def _complete(
        self,
        capture: Capture,
        draft: _Draft,
        digests: Mapping[str, Digests],
        metrics: Mapping[str, Any],
        times: tuple[int, int],
    ) -> dict[str, Any]:
        """Writes all but the arrays, which all processes have written; returns the summary."""
        summary: dict[str, Any] = {
            "metrics": metrics,
            SUMMARY_FIELD: self._tier.history.abandons(),
            **self._tier.directory.run_name.for_summary(),
            **lineage.for_summary(self._tier.history.start.lineage),
        }
        if rules := [*preservation.best_rules(self._tier.preserving.policy)]:
            summary[committed_step.RANKS] = {rule.metric: rule.mode for rule in rules}
        manifest = Manifest(
            draft.document,
            draft.plan,
            installed_versions(),
            {**digests, **draft.division.digests},
            draft.division.databases,
            capture.assets.seal if capture.assets else None,
            capture.attached,
        )
        began_nsecs, at_nsecs = times
        step_writer.complete(
            draft.folder.path,
            draft.arrays,
            manifest,
            summary,
            began_nsecs=began_nsecs,
            at_nsecs=at_nsecs,
            num_processes=self._tier.saves_channel.count,
            assets=capture.assets,
            texts=self._tier.texts,
        )
        return summary

    @stage("commit")
    def _commit(self, folder: StepFolder) -> CommittedStep:
        """Makes a complete step durable and visible."""

        def commit() -> CommittedStep:
            self._committed = folder.commit()
            return self._committed

        if (hosts := self._tier.saves_channel.hosts) is None:
            return commit()
        return commit_part(hosts, commit, self._tier.directory.delete)

    def _read_back(self, durable: CommittedStep) -> None:
        """Reads the new step back, if the options say so, on all processes together."""
        if self._tier.options.read_back:
            self.enter("reading it back")
            with self._tier.saves_channel.round(f"reading back step {durable.step}"):
                self._read_share(durable)

    @stage("read back")
    def _read_share(self, durable: CommittedStep) -> None:
        """Reads this process's share of the step; deletes the step if it is damaged."""
        directory = self._tier.directory
        try:
            channel = self._tier.saves_channel
            StoredStep(durable, self._tier.options, allow_part=True).verify(channel)
            channel.meet()
        except CorruptCheckpointError:  # after other errors, the step may be intact
            if self._tier.saves_channel.is_first:
                try:
                    directory.delete(durable)
                except Exception as error:  # the damage is the error to raise
                    text = "%s: this damaged step cannot be deleted: %s"
                    logger.warning(text, durable.path, storage_errors.said(error))
            raise
        directory.verified.note(durable, is_sound=True)

    @stage("end a durable save")
    def _learn(self, durable: CommittedStep, summary: Mapping[str, Any], reuse: SaveReuse) -> None:
        """Records what later saves use, once the save has succeeded on all processes."""
        reuse.committed(durable)
        self._tier.history.succeed(durable, summary)

    def _report(self, durable: CommittedStep, reused_bytes: int) -> None:
        """Says that the step is durable, once it is known how long ``save`` has blocked."""
        tier, durable_secs = self._tier, self.age_secs
        tier.failures.mended()
        self.handed_over.wait(_HAND_OVER_SECS)
        cost = SaveCost(durable.step, self.blocking_secs, durable_secs)
        tier.costs.add(cost, tier.directory.path)
        metrics = tier.directory.metrics(durable)  # known, since _learn
        tier.telemetry.durable(cost, reused_bytes, metrics, tier.history.branches.committed)
        tier.mirroring.wake()
        for notify in durable_steps.listeners:
            notify()

    def _tidy(self, durable: CommittedStep) -> None:
        """Renames abandoned steps (deletes them in a local tier); deletes what no policy keeps.

        A failure is reported, and leaves the work to the next save.
        """
        self.enter("deleting what no rule keeps")
        tier, path = self._tier, self._tier.directory.path
        try:
            what, channel = f"tidying up after step {durable.step}", tier.saves_channel
            with channel.round(what, is_met=channel.is_per_host) as outcome:
                outcome.value = self._tidied(durable) if channel.is_first else None
            tier.history.refresh(committed_step.from_json(outcome.value, path))
        except Exception as error:
            failure = SaveError(
                f"step {durable.step} is durable in {path}, but tidying up after it failed: "
                f"{storage_errors.explained(error, path)}",
                step=durable.step,
                path=path,
            )
            failure.__cause__ = error
            # The next save does the rest of this work first.
            tier.claim.clean_up_later(has_failed=False)
            tier.failures.report(failure, "tidying", storage_errors.kind(error))
        else:
            tier.failures.over("tidying")

    def _tidied(self, durable: CommittedStep) -> list[Any]:
        """Tidies up on process 0; returns the steps that are left, as JSON."""
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
        directory.warn_of_staying([*staying, *undeleted])
        return committed_step.to_json([*left, *staying])
