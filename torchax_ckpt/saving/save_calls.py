"""Implements ``TorchaxCheckpointer.save``: selects tiers, captures state, starts the writes."""

from __future__ import annotations

import contextlib
import logging
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torchax_ckpt import policies
from torchax_ckpt.errors import AttachError, ClosedError, DirectoryError, ProcessError, SaveError
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.policies import preservation
from torchax_ckpt.processes.call_log import Kind
from torchax_ckpt.runtime import background
from torchax_ckpt.runtime.preemption import Preemption
from torchax_ckpt.runtime.step_numbers import as_step
from torchax_ckpt.saving.capture import Capture
from torchax_ckpt.saving.reuse import known
from torchax_ckpt.saving.run import Run
from torchax_ckpt.saving.saver import Saver
from torchax_ckpt.saving.training_loop import step_metrics
from torchax_ckpt.saving.training_loop.loop import Loop
from torchax_ckpt.state import training_state
from torchax_ckpt.state.training_state import TrainingState
from torchax_ckpt.storage.directory.assets import Assets
from torchax_ckpt.storage.medium import storage_errors

logger = logging.getLogger(__name__)


class SaveCalls:
    """Implements ``save`` and ``should_save`` of one checkpointer."""

    def __init__(
        self,
        run: Run,
        loop: Loop,
        preemption: Preemption,
        keep_policy: policies.PreservationPolicy,
        options: CheckpointOptions,
    ) -> None:
        self._run = run
        self._durable = run.durable
        self._is_alone = run.processes.count == 1
        self._log = run.call_log
        self._loop = loop
        self._preemption, self._deadline = preemption, run.deadline
        self._is_first = run.processes.is_first
        self._ranked = [rule.metric for rule in preservation.best_rules(keep_policy)]
        self._has_told_preemption = self._has_warned = False
        self._raises = options.on_save_error == "raise"
        self._unattached = TrainingState()  # random state only, for functional training
        self.assets: Callable[[], Assets | None] = lambda: None  # of the attached model

    def should_save(self, step: int) -> bool:
        """Returns whether a call of ``save`` for this step would begin a save."""
        try:
            with self._log.calling("save", Kind.SAVE), self._failing_at_limits(step):
                self._log.at(step)
                self._log.decline()
                # Decided at each step, so that all processes agree which one is the last: a later
                # notice ends the run at a later step.
                if self._is_last(step):
                    return bool(self._required(step))
                is_due = self._loop.is_due(step, self._loop.metrics(step), self._ranked)
                return bool(self._wanted(step, is_due=is_due))
        except ProcessError:
            if self._log.error is None:
                raise
        return False  # also after calls have differed: no save begins any more

    def save(
        self,
        step: Any,
        attached: TrainingState | None,
        state: Any,
        metrics: Mapping[str, Any],
        *,
        force: bool,
    ) -> bool:
        """Saves a step to each tier whose policy wants it; see ``TorchaxCheckpointer.save``.

        A process that cannot save the step takes part in all that the others do before they begin
        the save, and then makes their saves fail.
        """
        number = as_step(step)
        self._loop.require_next(number, self._durable.path)
        with self._failing_at_limits(number):
            self._preemption.listen()
            is_last = self._is_last(number)
            must_save = force or is_last
            # Several processes could notice a failure at different steps here, so they check it
            # after prepare().
            if self._raises and self._is_alone:
                self._run.check_for_errors(SaveError)
            refusal = _Refusal(is_alone=self._is_alone)
            pending: Mapping[str, Any] = {}
            if must_save:
                self._log.publish()
            with refusal:
                _require_state(attached, state, number)
                pending = self._loop.take_metrics(number, metrics)
                self._loop.keep_metrics(number, pending)  # the save may be declined, or fail
                if must_save:
                    self._durable.wait()  # a save of this step may be in flight, and may fail
            is_due = self._loop.is_due(number, pending, self._ranked)
            due = self._required(number) if must_save else self._wanted(number, is_due=is_due)
            if not due:
                self._log.decline()
                refusal.raise_error()
                if not must_save:  # otherwise the step is not skipped but saved already
                    self._durable.tier.telemetry.skipped(number)
                return False
            if state is not None and self._is_first:
                self._loop.warn_of_unloaded()
            self._log.publish()
            if self._preemption.reached() and not self._has_told_preemption:
                self._has_told_preemption = True
                self._durable.tell_preemption(number)
            began = time.perf_counter()
            fetch_metrics: Callable[[], Any] | None = None
            with refusal:
                fetch_metrics = step_metrics.fetching(
                    pending, self._ranked, number, must_save=must_save
                )
            try:
                self._run.prepare(number)
            except DirectoryError as error:
                if self._is_alone or background.ending.is_set or not storage_errors.is_limit(error):
                    raise
                refusal.raise_error()
                self._durable.tier.failures.of_save(number, error)  # on all processes
                self._loop.position = number
                return False
            self._run.announce_new()
            if self._raises:  # the oldest failure, on all processes at the same step
                with self._run.processes.round(f"raising failures before step {number}"):
                    for saver in due:
                        saver.wait()
                    self._run.check_for_errors(SaveError)
            try:
                refusal.raise_error()
                for saver in due:
                    saver.wait()
                assert fetch_metrics is not None, "refused above"
                parts = attached or self._unattached
                captures = self._captures(number, due, parts, state, fetch_metrics, began)
            except BaseException as error:
                if not self._is_alone:
                    self._loop.position = number  # the processes that begin the save do the same
                    is_durable = self._durable in due
                    # At the last step, those processes repeat a failed save: see ``_finish``.
                    again = [self._durable] if is_last else []
                    _abstain(number, [*due, *again], error)
                    self._run.frozen_leaves.refuse(error, is_durable=is_durable)
                    if storage_errors.is_limit(error):
                        return False
                raise
            self._loop.position = number  # set first, because the rest may raise or be interrupted
            has_begun = self._begin(captures, due)
            # At the last step only the durable tier saves.
            return self._finish(captures[0]) if is_last else has_begun
        return False  # the system has refused something

    @contextlib.contextmanager
    def _failing_at_limits(self, step: int) -> Iterator[None]:
        """Has the save fail like one in the background if the system refuses threads or memory.

        Several processes raise the error, because they have made the save fail already. At the end
        of the program, ClosedError is raised, because the next save would not be better off.
        """
        try:
            yield
        except Exception as error:
            is_ending = background.ending.is_set
            if not storage_errors.is_limit(error) or not (self._is_alone or is_ending):
                self._loop.keep_metrics(step, {})  # to hold them may be what lacked memory
                raise
            failure = self._durable.tier.failures.of_save(step, error)
            if is_ending:
                raise ClosedError(
                    f"the program is ending, so no later save can mend this: {failure}",
                    step=step,
                    path=failure.path,
                ) from error
            self._loop.position = step

    def _is_last(self, step: int) -> bool:
        """Returns whether the run ends after this step, preempted or before its deadline."""
        is_preempted = self._preemption.decide(step)  # all processes ask this at each step
        return self._deadline.reached(step) or is_preempted

    def _required(self, step: int) -> list[Saver]:
        """Returns the savers of a step whatever the policies say: the durable tier's, or none."""
        self._run.open()
        return [] if self._durable.tier.history.has(step) else [self._durable]

    def _wanted(self, step: int, *, is_due: bool) -> list[Saver]:
        """Returns the savers of the tiers whose policies want a step, or for which it is due."""
        self._run.open()
        looks_ahead = not self._ranked or self._loop.measures_every_step
        wanted = []
        for saver in self._run:
            if saver.tier.history.has(step):
                continue
            is_local = saver.tier.is_local
            if saver.windows.ask(
                step, is_due=is_due and not is_local, looks_ahead=looks_ahead or is_local
            ):
                wanted.append(saver)
            elif is_due and self._is_first and not (is_local or self._has_warned):
                self._has_warned = True
                logger.warning(
                    "step %d is not saved, although a best-N rule ranks a metric of it: the "
                    "processes had decided before process 0 recorded the metric. Record it before "
                    "should_save, and at every step or never at two steps in a row. This may go "
                    "on for up to 100 steps",
                    step,
                )
        return wanted

    def _captures(
        self,
        step: int,
        due: Sequence[Saver],
        attached: TrainingState,
        state: Any,
        fetch_metrics: Callable[[], Any],
        began: float,
    ) -> list[Capture]:
        """Captures the state for each tier; each reuses files of its own earlier steps."""
        if isinstance(state, types.FunctionType | types.MethodType):
            state = state()
            _require_state(None, state, step)
        captured = attached.capture(state)
        names = list(chain.from_iterable(part.form.names for part in captured.values()))
        arrays = list(chain.from_iterable(part.arrays for part in captured.values()))
        per_process = None
        if not self._is_alone:
            names, arrays, per_process = training_state.split(captured)
        document = {name: part.form.node for name, part in captured.items()}
        frozen = self._run.frozen_leaves.of_state(
            names, arrays, attached.frozen, is_durable=self._durable in due
        )
        same = [known.SameObjects()] * len(due)
        if frozen.has_proofs:
            leaves = {n: a for n, a in zip(names, arrays, strict=True) if n in frozen.leaves}
            proofs = [saver.tier.reuse.known.proofs for saver in due]
            same = known.same_objects(proofs, leaves, is_alone=self._is_alone)
        others = same[0].others(names, arrays)  # the same for all tiers
        snapshot = self._run.snapshotter.take(*others, same[0].stacks, frozen.leaves)
        assets = self.assets()
        return [
            Capture(
                step=step,
                snapshot=snapshot,
                document=document,
                per_process=per_process,
                fetch_metrics=fetch_metrics,
                began=began,
                frozen=frozen,
                same=each,
                assets=assets,
                attached=None if state is None else attached.names(),
                reports_metrics=number == 0,  # a problem with them is that of all tiers
            )
            for number, each in enumerate(same)
        ]

    def _begin(self, captures: Sequence[Capture], savers: Sequence[Saver]) -> bool:
        has_begun = False
        for number, (saver, capture) in enumerate(zip(savers, captures, strict=True)):
            saver.windows.begun(capture.step)
            try:
                has_begun |= saver.begin(capture)
            except BaseException as error:
                if not self._is_alone:
                    _abstain(capture.step, savers[number + 1 :], error)
                raise
        return has_begun

    def _finish(self, capture: Capture) -> bool:
        """Waits for the durable save, repeats it once if it failed; returns if it is durable."""
        self._durable.wait()
        if not self._durable.tier.history.has(capture.step):
            self._durable.begin(capture)  # now, because no later save will try again
            self._durable.wait()
        return self._durable.tier.history.has(capture.step)


class _Refusal:
    """Keeps the first error of ``with`` blocks until this process may raise it; alone, at once."""

    def __init__(self, *, is_alone: bool) -> None:
        self._is_alone = is_alone
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or self._is_alone:
            return False
        self._error = self._error or error
        return True

    def raise_error(self) -> None:
        """Raises the error that was kept; does nothing if there is none."""
        if self._error is not None:
            raise self._error


def _require_state(attached: TrainingState | None, state: Any, step: int) -> None:
    if state is None and (attached is None or attached.components.keys() <= {"rng"}):
        raise AttachError(
            "save was called before anything was attached; call attach(model, optimizer) or "
            "give the state: save(step, state=state), or steps(total, state=lambda: state)",
            step=step,
        )


def _abstain(step: int, savers: Sequence[Saver], error: BaseException) -> None:
    """Makes the save of a step, which the other processes begin, fail on all of them."""
    for saver in savers:
        saver.windows.begun(step)
        saver.abstain(step, error)
