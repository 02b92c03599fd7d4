"""``TorchaxCheckpointer``: the class that users call. Composes the rooms; holds no algorithm."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchax_ckpt import policies, torchax_backend
from torchax_ckpt.errors import AttachError, CheckpointError, ClosedError
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.options import CheckpointOptions, LocalTier, TierName
from torchax_ckpt.policies import preservation
from torchax_ckpt.restoring.fallback import newest_readable, reading
from torchax_ckpt.restoring.load import load_state
from torchax_ckpt.restoring.restore import RestoreReport, restore_attached
from torchax_ckpt.restoring.verify import verify_step
from torchax_ckpt.runtime.call_guard import Calls, guarded
from torchax_ckpt.runtime.preemption import Preemption
from torchax_ckpt.runtime.step_number import as_step
from torchax_ckpt.saving.loop import Loop
from torchax_ckpt.saving.save_calls import SaveCalls
from torchax_ckpt.saving.tiers import Tiers
from torchax_ckpt.snapshot.snapshotter import Snapshotter
from torchax_ckpt.state.training_state import TrainingState
from torchax_ckpt.storage.arrays import orbax_internals
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.hook import Hook
from torchax_ckpt.telemetry.stats import Stats

logger = logging.getLogger(__name__)


class TorchaxCheckpointer:
    """Saves and restores the training of a PyTorch program that runs on JAX through torchax.

    Two lines make a training loop survive::

        torchax.enable_globally()
        with TorchaxCheckpointer("runs/digits") as ckpt:
            ckpt.attach(model, optimizer, lr_scheduler=scheduler, dataloader=loader)
            for step in ckpt.steps(total):
                ...train...
                ckpt.record(loss=loss)

    Or, with the loop in your own hands::

        with TorchaxCheckpointer("runs/digits") as ckpt:
            start = ckpt.attach(model, optimizer)
            for step in range(start + 1, total + 1):
                ...train...
                ckpt.save(step, metrics={"loss": loss})
            ckpt.save(total, force=True)

    Call it from the training thread, whose random key and torch modes torchax keeps; what cannot
    work from where it is called raises CallError. From ``attach`` or the first ``save`` on, until
    ``close``, a SIGTERM no longer ends the process but is a notice: the next ``save`` saves and
    waits, ``reached_preemption`` is True (``CheckpointOptions(preemption_grace_secs=)``). One
    program writes to a directory at a time; any number may read it. Of a program on several
    processes, every process makes the same calls at the same steps.

    Args:
      directory: a local path or ``gs://bucket/prefix``, one per run. Created by the first save.
      save_decision_policy: when ``save`` saves; default: continuously, and at a preemption.
      preservation_policy: which steps are kept; default: the latest three.
      local: a second tier for frequent saves, on a ramdisk or a disk of each host. It has policies
        of its own; those above are the directory's.
      options: how steps are written and read.
      on_event: called with each ``Event``, for loggers: in order, on one thread of its own, which
        ``close`` waits for. What it raises is logged; training and saving go on.

    Raises:
      DirectoryError: the directory is a file, or of an unsupported scheme; a bucket that is not
        there, or lacks a permission (to write, unless ``CheckpointOptions(read_only=True)``).
      BackendError: the installed torchax or Orbax does not look as expected.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_decision_policy: policies.SaveDecisionPolicy | None = None,
        preservation_policy: policies.PreservationPolicy | None = None,
        local: LocalTier | None = None,
        options: CheckpointOptions | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        torchax_backend.check_internals()
        orbax_internals.check_internals()
        self._options = options or CheckpointOptions()
        self._keep_policy = preservation_policy or preservation.default_preservation_policy()
        snapshotter = Snapshotter(self._options.snapshot, self._options.layout)
        # Threads know the hook through this alone: it may refer to this checkpointer.
        self._hook = Hook(on_event) if on_event is not None else None
        self._tiers = Tiers(
            directory,
            save_decision_policy,
            self._keep_policy,
            local,
            self._options,
            self._hook.call if self._hook else None,
            on_donated=snapshotter.donated,
        )
        self._processes = self._tiers.processes
        durable = self._tiers.durable
        self._directory, self._saver = durable.directory, durable.saver
        self._telemetry = durable.telemetry
        self._preemption = Preemption(self._options.preemption_grace_secs)
        self._loop = Loop()
        self._saves = SaveCalls(
            self._tiers, self._loop, self._preemption, snapshotter, self._keep_policy, self._options
        )
        self._closing = self._tiers.closing(self._preemption.close)
        self._calls = Calls()
        self._attached: TrainingState | None = None
        self._is_closed = self._has_ended = False

    @property
    def directory(self) -> str:
        """Where the durable steps are."""
        return str(self._directory.path)

    # --- attaching and restoring ---------------------------------------------------------------

    @guarded(trains=True)
    def attach(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        stateful: Mapping[str, Any] | None = None,
        shardings: Any = None,
        init: Callable[..., Any] | None = None,
        resume: bool = True,
        rng: bool = True,
    ) -> int:
        """Says what to save, and restores the newest checkpoint into it, in place.

        The live shardings decide where restored arrays go, whatever layout they were saved from.
        A damaged newest step is skipped with a warning; one that does not fit raises.

        Args:
          model: an ``nn.Module`` on ``"jax"`` or on ``"meta"``, a ``JittableModule``, or a dict
            of them.
          optimizer: a ``torch.optim.Optimizer``, or a dict of them. A fresh one gets its state
            from the checkpoint, sharded as its parameters are.
          lr_scheduler: a scheduler, or a list or dict of them.
          dataloader: an object with ``state_dict`` and ``load_state_dict``, such as torchdata's
            ``StatefulDataLoader``, or a dict of them.
          stateful: name -> any object with ``state_dict`` and ``load_state_dict``.
          shardings: ``(name, jax.ShapeDtypeStruct) -> Sharding | PartitionSpec`` for the model's
            tensors, or a ``torchax.mesh_util.Mesh``; default: as they are. The name is torch's
            (``encoder.0.weight``), after the model's own and ``/`` where there are several.
          init: ``(name, jax.ShapeDtypeStruct) -> array`` for tensors on ``"meta"`` that no
            checkpoint supplies: at a first start, and non-persistent buffers. The abstract leaf
            carries the sharding; None declines.
          resume: whether to restore. If not, and there are steps, they are abandoned once a new
            one is durable.
          rng: whether to save and restore random state: torchax's key, torch, numpy, Python.

        Returns:
          Completed steps, those of the restored checkpoint; or 0. After functional state was
          saved, its step; call ``load`` for the state itself.

        Raises:
          AttachError: called twice, or objects that do not belong together: a model still on the
            CPU, an optimizer whose parameters are not the model's.
          MismatchError: the checkpoint does not fit; nothing was changed.
          UninitializedLeafError: a meta tensor that nothing fills.
          UnsupportedLeafError: something attached cannot be stored.
          ForeignCheckpointError: the newest step was not written by this package.
          CorruptCheckpointError: there are steps, but all are damaged.
          OutOfMemoryError: this host is too small for the newest step.
          DirectoryError: a step cannot be read now, which is no reason to go back to an older one.
        """
        self._require_open()
        if self._attached is not None:
            raise AttachError(
                "attach was called before on this checkpointer; attach everything in one call, or "
                "use a second checkpointer with another directory"
            )
        self._tiers.wait()
        self._tiers.take_over()
        attached = TrainingState(
            model, optimizer, lr_scheduler, dataloader, stateful, shardings, init, rng
        )
        if candidates := self._tiers.steps() if resume else []:
            report, _ = newest_readable(candidates, lambda s: self._restore(s, attached, True))
            self._loop.position = report.step
        else:
            fresh = attached.prepare_fresh()
            fresh.require_filled()
            fresh.apply({})
            self._loop.position = None
        self._tiers.go_on_from(self._loop.position)
        self._attached = attached
        if not self._options.read_only:
            self._preemption.listen()
        return self._loop.position or 0

    @guarded(trains=True)
    def restore(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        tier: TierName | None = None,
    ) -> RestoreReport:
        """Restores a step into what is attached, in place.

        Everything is compared first; nothing live is touched unless everything can be. Newer
        steps become an abandoned branch: they stay until a new step is durable, are then set
        aside as ``abandoned-N``, and nothing resumes from them.

        The run goes on from the step, with another head or other names, after
        ``attach(..., resume=False)``; for a new run from another's weights see ``warm_start``.

        Args:
          step: completed steps of the checkpoint; None for the newest that can be read.
          strict: raise on any difference; if not, restore what matches and report the rest.
          include, exclude, rename: which of the model's tensors, and under which names: patterns
            as for ``warm_start``. Their optimizer state goes with them; others keep theirs.
          tier: "durable" or "local"; None for whichever has it, the local one first.

        Returns:
          What was done.

        Raises:
          StepNotFoundError: there is no such step, or none at all.
          TierError: there is no such tier.
          MismatchError: the checkpoint does not fit, and ``strict``; nothing was changed.
          SelectionError: as for ``warm_start``.
          CorruptCheckpointError: it cannot be read; of None, none can.
          AttachError, ForeignCheckpointError, UninitializedLeafError: as for ``attach``.
        """
        self._require_open()
        attached = self._require_attached("restore")
        self._tiers.wait()
        selection = functools.partial(Selection, include, exclude, rename)
        candidates = self._tiers.candidates(None if step is None else as_step(step), tier)
        report, skipped = newest_readable(
            candidates, lambda s: self._restore(s, attached, strict, selection())
        )
        self._loop.restored(report.step)
        self._tiers.go_on_from(report.step)
        return dataclasses.replace(report, skipped_steps=skipped)

    def _restore(
        self,
        committed: CommittedStep,
        attached: TrainingState,
        strict: bool,
        selection: Selection | None = None,
    ) -> RestoreReport:
        began = time.perf_counter()
        tier = self._tiers.holding(committed)
        with reading(committed, tier.directory, tier.processes):
            source = self._tiers.opened(committed)
            report = restore_attached(
                source, attached, strict, self._options, self._processes, selection
            )
        secs = time.perf_counter() - began
        where = tier.directory.path  # in which this host may lack the step that others gave it
        logger.info("restored step %s from the %s tier, %s", report.step, tier.name, where)
        values = {"secs": secs, "is_verified": report.is_verified, "tier": tier.name}
        self._telemetry.emit("restored", report.step, **values)
        if report.is_verified:
            tier.directory.verified.note(committed, is_sound=True)
        return dataclasses.replace(report, tier=tier.name)

    def _reads_over_devices(self) -> bool:
        """Whether processes send each other over their devices what they read."""
        return self._processes.count > 1 and (
            self._options.single_replica_restore or self._tiers.local is not None
        )

    @guarded(trains=_reads_over_devices)
    def load(
        self,
        step: int | None = None,
        abstract_state: Any = None,
        *,
        tier: TierName | None = None,
    ) -> Any:
        """Reads a step and returns its functional state. Changes nothing, here or on disk.

        Also reads steps of attached modules, as ``{"model": {name: tensor}, ...}``, and steps
        that bare Orbax wrote. On several processes, with ``single_replica_restore`` or a local
        tier, from the training thread alone: processes then send each other what they read.

        Args:
          step: completed steps of the checkpoint; None for the newest that can be read.
          abstract_state: a pytree of ``jax.ShapeDtypeStruct``, torchax tensors, JAX arrays,
            torch CPU tensors, numpy arrays and Python values. The result has its structure and
            its kinds, on its shardings; donated arrays do too. None for everything as it was
            saved, with device arrays on the default device and other nodes than dicts, lists and
            tuples as dicts.
          tier: "durable" or "local"; None for whichever has it, the local one first.

        Raises:
          StepNotFoundError: there is no such step, or none at all.
          TierError: there is no such tier.
          MismatchError: the step does not have what is asked for.
          CorruptCheckpointError: it cannot be read.
        """
        candidates = self._tiers.candidates(None if step is None else as_step(step), tier)
        state, _ = newest_readable(candidates, lambda s: self._load(s, abstract_state))
        return state

    def _load(self, committed: CommittedStep, abstract_state: Any) -> Any:
        tier = self._tiers.holding(committed)
        with reading(committed, tier.directory, tier.processes):
            opened = self._tiers.opened
            return load_state(committed, opened, abstract_state, self._options, self._processes)

    @guarded(trains=False)
    def verify(self, step: int | None = None, *, tier: TierName | None = None) -> int:
        """Reads a step back whole and compares every byte with what was saved.

        The step then counts as verified, also for later programs unless this one only reads
        (``read_only``); no keep rule deletes the newest verified durable step. Live state is not
        touched.

        Args:
          step: completed steps of the checkpoint; None for the newest, damaged or not.
          tier: "durable" or "local"; None for both, as far as they have it.

        Returns:
          The step.

        Raises:
          StepNotFoundError: there is no such step, or none at all.
          TierError: there is no such tier.
          CorruptCheckpointError: it is damaged; names the leaf and, where it can be known, the
            file.
          ForeignCheckpointError: bare Orbax wrote it, without digests.
          DirectoryError: it cannot be read now.
        """
        found = self._tiers.candidates(None if step is None else as_step(step), tier)
        newest = found[-1].step
        for committed in [s for s in found if s.step == newest]:
            place = self._tiers.holding(committed)
            verify_step(committed, place.directory, place.processes, self._options)
        return newest

    # --- saving --------------------------------------------------------------------------------

    @guarded(trains=True)
    def steps(self, total: int) -> Iterator[int]:
        """The steps still to do, from the first after the restored one to ``total``.

        After each body the step is saved if the policy says so, with what was recorded in it;
        the last one is saved in any case. A body that restores another step is not saved; the loop
        goes on from there. ``break`` and exceptions leave the loop without saving
        the body they leave. At a preemption the step is saved, waited for, and the loop ends.
        """
        self._require_open()
        self._require_attached("steps")
        return self._loop.steps(as_step(total), self.save, self.reached_preemption)

    def record(self, **metrics: Any) -> None:
        """Notes metrics of the present step; they are fetched and stored only if it is saved.

        Raises:
          MetricsError: neither a number nor JSON.
        """
        self._loop.record(metrics)

    def should_save(self, step: int) -> bool:
        """Whether ``save(step)`` would begin a save: at a preemption, or as a policy says."""
        return self._saves.should_save(as_step(step))

    @guarded(trains=True)
    def save(
        self,
        step: int,
        *,
        state: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves the step if the policy says so, in the background.

        What is saved is fixed when this returns. It waits for no device and no storage, except:
        the first save, which takes the directory; an earlier save still in flight, where the
        policy wants both; snapshots by "transfer", which wait until the arrays are on the host.
        Once the run was told to end, the step is saved whatever the policy says, and this waits
        for it.

        Args:
          step: completed optimizer steps.
          state: a pytree of torchax tensors, JAX arrays, torch CPU tensors, numpy arrays, Python
            numbers and strings, for functional training. It is saved in place of attached
            modules and optimizers; random state, loaders and stateful objects are saved too.
          metrics: numbers (device scalars too) and JSON by name; joins what ``record`` noted.
          force: save whatever the policy says, to the durable tier.

        Returns:
          Whether a save began; False for a step that is there already. Once the run was told to
          end: whether the step is durable, after a second attempt if the first one failed.

        Raises:
          StepError: negative, or below the last step saved or restored; StepTypeError: no int.
          AttachError: nothing is attached and no state is given.
          UnsupportedLeafError: a leaf cannot be stored; nothing was saved.
          MetricsError: metrics that cannot be stored, or ranked under a best-N rule.
          OutOfMemoryError: the devices have no memory for the copies of snapshot="copy"; nothing
            was saved or changed.
          DirectoryError: the first save finds that the directory cannot be written.
          LeaseError: another program writes to the directory, or has taken over from this one; or
            the first save finds that another has saved this step, or newer ones, since ``attach``.
          SaveError: an earlier save failed, under ``CheckpointOptions(on_save_error="raise")``.
        """
        self._require_open()
        return self._saves.save(as_step(step), self._attached, state, metrics or {}, force=force)

    def reached_preemption(self, step: int | None = None) -> bool:
        """Whether this run was told to end; True from then on. Ask after completing each step.

        Under ``jax.distributed`` every process must ask at every step, as ``save`` does. Without
        a step this gives the latest answer, also after ``close``: exit with 143, or anything but
        0, to have the scheduler start the program again.
        """
        return self._preemption.reached(None if step is None else as_step(step))

    # --- the steps there are -------------------------------------------------------------------

    def all_steps(self, tier: TierName | None = None) -> list[int]:
        """The steps there are, in order; reads the directories anew, but not what the steps hold.

        Args:
          tier: only those in this one, "durable" or "local"; raises TierError if there is none.
        """
        return self._tiers.numbers(tier)

    def latest_step(self, tier: TierName | None = None) -> int | None:
        """The newest of ``all_steps``, or None."""
        return max(self.all_steps(tier), default=None)

    def best_step(self) -> int | None:
        """The best durable step by the preservation policy's best-N rule, or None.

        None that is known to be damaged.

        Raises:
          PolicyError: there is no best-N rule.
        """
        rule = preservation.best_rule(self._keep_policy)
        sound = [s for s in self._directory.steps() if not self._directory.verified.is_damaged(s)]
        infos = [self._directory.info(s) for s in sound]
        return next((info.step for info in rule.ranked(infos)), None)

    def metrics(self, step: int) -> dict[str, Any]:
        """The metrics saved with a step; {} if there are none, or they are damaged (``verify``).

        Raises:
          StepNotFoundError: there is no such step.
        """
        committed = self._tiers.find(as_step(step))
        return self._tiers.holding(committed).directory.metrics(committed)

    @guarded(trains=True)
    def delete(self, step: int, *, tier: TierName | None = None) -> None:
        """Deletes a step, whatever the preservation policy says.

        Args:
          step: completed steps of the checkpoint.
          tier: where, "durable" or "local"; None for wherever it is.

        Raises:
          StepNotFoundError: there is no such step.
          TierError: there is no such tier.
          LeaseError: another program writes to the directory.
        """
        self._require_open()
        self._tiers.wait()
        self._tiers.delete(as_step(step), tier)

    def stats(self) -> Stats:
        """What this checkpointer did so far, and what that cost; see ``Stats``. From any thread."""
        return self._telemetry.stats()

    # --- ending --------------------------------------------------------------------------------

    @guarded(trains=False)
    def wait_until_finished(self, timeout_secs: float | None = None) -> None:
        """Waits until no save is in flight, then raises what ``check_for_errors`` would.

        Raises:
          SaveTimeoutError: still in flight after ``timeout_secs``; the save goes on.
          SaveError: a save failed.
        """
        self._tiers.wait(timeout_secs)
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raises the oldest failure of a background save that was not raised yet; once.

        Raises:
          SaveError: names step and path, with the cause.
          MetricsError: a device metric turned out to be one that a best-N rule cannot rank.
        """
        self._tiers.check_for_errors()

    @guarded(trains=False)
    def close(self) -> None:
        """Finishes the saves in flight, and lets other programs write. May be called twice.

        Raises:
          SaveError: the newest save to the durable tier failed.
          SaveTimeoutError: a save is late (``save_timeout_secs``). The rest follows when it ends.
        """
        if self._has_ended:
            return
        self._is_closed = True  # nothing more is saved, also if a save is still in flight
        self._closing.close()
        self._has_ended = True
        if self._saver.newest_failure is not None:
            raise self._saver.newest_failure

    def __del__(self) -> None:
        if hasattr(self, "_closing"):  # else __init__ raised
            self._closing.drop(self._hook)

    def __enter__(self) -> TorchaxCheckpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except CheckpointError:
            # Logged when it happened; it must not take the place of what ended the loop.
            if error is None:
                raise

    # --- small things --------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this checkpointer is closed", path=self._directory.path)

    def _require_attached(self, action: str) -> TrainingState:
        if self._attached is None:
            raise AttachError(f"{action} was called before attach; call attach(model, ...) first")
        return self._attached
