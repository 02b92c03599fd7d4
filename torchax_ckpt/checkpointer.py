"""``TorchaxCheckpointer``, the class that users call; other modules contain the algorithms."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchax_ckpt import policies, torchax_backend
from torchax_ckpt.errors import AttachError, CallError, CheckpointError, ClosedError
from torchax_ckpt.formats.huggingface.model_files import ModelFiles
from torchax_ckpt.options import CheckpointOptions, LocalTier, Mirror, TierName, require_kind
from torchax_ckpt.policies import preservation
from torchax_ckpt.processes.call_log import Kind
from torchax_ckpt.restoring.read_calls import ReadCalls
from torchax_ckpt.runtime.call_guard import NO_COPY, Calls, guarded
from torchax_ckpt.runtime.preemption import exit_if
from torchax_ckpt.runtime.step_numbers import as_step
from torchax_ckpt.runtime.user_messages import brief
from torchax_ckpt.saving import closing
from torchax_ckpt.saving.run import Run
from torchax_ckpt.saving.save_calls import SaveCalls
from torchax_ckpt.saving.training_loop import loop
from torchax_ckpt.saving.training_loop.deadline import Until
from torchax_ckpt.saving.training_loop.loop import Loop
from torchax_ckpt.state.findings import RestoreReport
from torchax_ckpt.state.stateful import explain_worker_error
from torchax_ckpt.state.training_state import TrainingState
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.recorder import Hook
from torchax_ckpt.telemetry.stats import Stats


class TorchaxCheckpointer:
    """Saves and restores the training of a PyTorch program that runs on JAX through torchax.

    This training loop survives interruptions::

        torchax.enable_globally()
        with TorchaxCheckpointer("runs/digits") as ckpt:
            ckpt.attach(model, optimizer, lr_scheduler=scheduler, dataloader=loader)
            for step in ckpt.steps(total):
                ...train...
                ckpt.record(loss=loss)
        ckpt.exit_if_preempted()

    The same with ``save`` in a loop of your own::

        with TorchaxCheckpointer("runs/digits") as ckpt:
            start = ckpt.attach(model, optimizer)
            for step in range(start + 1, total + 1):
                ...train...
                ckpt.save(step, metrics={"loss": loss})
                ckpt.exit_if_preempted(step)
            ckpt.save(total, force=True)

    Call the methods on the training thread, because torchax keeps its random key and its settings
    per thread. Methods that save or restore raise CallError in jit or in a forked process. From
    ``attach`` or the first ``save`` until ``close``, a SIGTERM does not end the process
    immediately: the next ``save`` saves its step and waits until it is durable, and
    ``reached_preemption`` returns True. Only one program at a time may write to a directory; any
    number may read it. In a run of several processes, each process must make the same calls at the
    same steps.

    Args:
      directory: a path, ``gs://bucket/prefix`` or ``s3://bucket/prefix``, which a save creates.
      save_every: save each multiple of this number of steps; ``steps`` also saves the last.
      keep: how many of the latest steps are kept, in place of three.
      save_decision_policy: when ``save`` saves, in place of ``save_every``; default: if no save is
        in flight, or at preemption.
      preservation_policy: which steps are kept, in place of ``keep``.
      local: a second tier for frequent saves, on a disk of each host, with policies of its own.
      mirror: a second place, a path, ``gs://bucket/prefix`` or ``s3://bucket/prefix``, to which a
        thread copies durable steps, and from which ``attach`` fetches them if this directory has
        none; see ``Mirror``.
      options: how steps are written and read. By default, if half of the state are frozen
        parameters (``requires_grad=False``), saves reuse the files that hold them, see ``reuse``.
      on_event: called with each ``Event``, in order, on a separate thread, which ``close`` waits
        for. Its exceptions are logged.

    Raises:
      DirectoryError: the directory is a file or a step, or no path of a supported scheme; or the
        bucket does not exist, or grants no permission to read or, unless ``read_only``, to write.
      PolicyError: a policy is none, or was given together with its short form.
      TierError: the local tier and the run's directory are one, or one lies in the other.
      MirrorError: the mirror and a directory of the run are one, or one lies in the other.
      BackendError: torchax, or JAX on several processes, lacks internals that this package needs;
        with ``read_only``, torchax needs them at ``attach`` only.
    """

    @brief
    @preservation.naming_ours
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every: int | None = None,
        keep: int | None = None,
        save_decision_policy: policies.SaveDecisionPolicy | None = None,
        preservation_policy: policies.PreservationPolicy | None = None,
        local: LocalTier | None = None,
        mirror: str | os.PathLike[str] | Mirror | None = None,
        options: CheckpointOptions | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._options = require_kind("options", options, CheckpointOptions) or CheckpointOptions()
        if not self._options.read_only:
            torchax_backend.check_internals()
        save_policy, self._keep_policy = preservation.in_full(
            save_every, keep, save_decision_policy, preservation_policy
        )
        # Threads get only hook.call, which keeps neither on_event nor this checkpointer alive.
        self._hook = Hook(on_event) if on_event is not None else None
        self._run = Run(
            directory,
            (save_policy, self._keep_policy),
            require_kind("local", local, LocalTier),
            mirror,
            self._options,
            self._hook.call if self._hook else None,
        )
        self._processes = self._run.processes
        self._saver = self._run.durable
        durable = self._saver.tier
        self._directory, self._telemetry = durable.directory, durable.telemetry
        self._preemption = self._run.preemption
        self._loop = Loop()
        self._saves = SaveCalls(
            self._run, self._loop, self._preemption, self._keep_policy, self._options
        )
        self._reads = ReadCalls(self._run, self._loop, self._options)
        self._calls = Calls()
        self._closing = self._run.closing(self._calls, self._preemption.close)
        self._call_log = self._run.call_log
        self._attached: TrainingState | None = None
        self._is_closed = self._has_ended = False

    @property
    def directory(self) -> str:
        """The path of the directory that contains the durable steps."""
        return str(self._directory.path)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "attached" if self._attached else "open"
        return f"<TorchaxCheckpointer {self.directory!r}: {state}, step {self._loop.position or 0}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CallError(NO_COPY)  # a copy would end the saves of this one when it is collected

    # --- attaching and restoring ---------------------------------------------------------------

    @guarded(trains=True, kind=Kind.CALL)
    def attach(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        redistribute: Callable[[list[Any], int], Sequence[Any]] | None = None,
        stateful: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        shardings: Any = None,
        init: Callable[..., Any] | None = None,
        resume: bool = True,
        rng: bool = True,
    ) -> int:
        """Registers the objects to save, and restores the newest checkpoint into them, in place.

        Restored arrays get the attached arrays' shardings, whatever mesh the step was saved on. A
        damaged step is skipped with a warning; a step that mismatches raises MismatchError.

        Args:
          model: an ``nn.Module`` on ``"jax"`` or ``"meta"``, a ``JittableModule``, or a dict of
            them.
          optimizer: a ``torch.optim.Optimizer``, or a dict of them. A fresh optimizer gets its
            state from the checkpoint, with the shardings of its parameters.
          lr_scheduler: a scheduler, or a list or dict of them.
          dataloader: a loader or a dict of them, such as torchdata's ``StatefulDataLoader`` or an
            iterator of Grain: with ``state_dict`` and ``load_state_dict``, or ``get_state`` and
            ``set_state``, or ``save_state_rank`` and ``restore_state_rank``.
          redistribute: ``(states, count) -> states``, called for each loader if another number of
            processes saved the step: makes a state for each process from the states of those.
          stateful: name -> any object with ``state_dict`` and ``load_state_dict``.
          tokenizer: a tokenizer or processor of transformers. Each step stores its text files, and
            the configs of models of transformers or PEFT, for ``torchax-ckpt export``.
          shardings: ``(name, jax.ShapeDtypeStruct) -> Sharding | PartitionSpec`` for the model's
            tensors, as ``shardings.fsdp(mesh)``, or a ``torchax.mesh_util.Mesh``; default: as they
            are. The name is ``encoder.0.weight``; with several models, ``<model>/`` precedes it.
          init: ``(name, jax.ShapeDtypeStruct) -> array``, called for each tensor on ``"meta"`` that
            no checkpoint supplies, except for non-persistent buffers that the modules can rebuild.
            The ShapeDtypeStruct has the sharding and ``is_buffer``. None declines a tensor.
          resume: whether to restore. If False, existing steps are renamed to ``abandoned-N`` once a
            new step is durable, and no run resumes from them.
          rng: whether to save and restore the random state of torchax, torch, numpy and Python.

        Returns:
          The number of completed steps of the newest readable checkpoint; 0 without one. Call
          ``load`` to get functional state (``save(state=)``).

        Raises:
          AttachError: ``attach`` was called before, or the objects cannot be attached: the model is
            still on the CPU, for example, or the optimizer's parameters are not the model's.
          MismatchError: the checkpoint does not match the objects; nothing was changed.
          UninitializedLeafError: neither a checkpoint nor ``init`` fills a meta tensor.
          UnsupportedLeafError: an attached value cannot be stored.
          ForeignCheckpointError: the newest step was not written by this package.
          CorruptCheckpointError, OutOfMemoryError: all steps are damaged; too little host memory.
          DirectoryError: a step or the mirror cannot be read now, or a bucket is mounted with FUSE.
          LeaseError, MirrorError: another program writes to the mirror; a conflict, see ``Mirror``.
        """
        self._require_open()
        make = functools.partial(
            TrainingState,
            {
                "model": model,
                "optimizer": optimizer,
                "lr_scheduler": lr_scheduler,
                "dataloader": dataloader,
                "stateful": stateful,
            },
            shardings=shardings,
            init=init,
            rng=rng,
            redistribute=redistribute,
        )
        is_attached = self._attached is not None
        attached, step = self._reads.attach(make, is_attached=is_attached, resume=resume)
        self._saves.assets = ModelFiles(model, tokenizer).encoded
        self._loop.restored(step)
        self._run.go_on_from(self._loop.position)
        self._attached = attached
        if not self._options.read_only:
            self._preemption.listen()
        return self._loop.position or 0

    @guarded(trains=True, kind=Kind.CALL)
    def restore(
        self,
        step: int | str | None = None,
        *,
        strict: bool = True,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        tier: TierName | None = None,
    ) -> RestoreReport:
        """Restores a step into the attached objects, in place.

        Compares names, dtypes and shapes first. Newer steps, which the log names, are renamed to
        ``abandoned-N`` once a new step is durable, and no run resumes from them. To continue a run
        whose model or optimizer has changed, call ``attach(..., resume=False)``, then ``restore``.
        To start a new run from another run's weights, see ``warm_start``.

        Args:
          step: completed steps of the checkpoint; None or ``"latest"`` for the newest readable
            step; ``"best:loss"`` for the best readable step by a metric, as ``BestN`` of the run
            ranks it, else the least; ``"best:loss:min"`` and ``"best:accuracy:max"`` say which.
          strict: whether any difference raises MismatchError. If False, restores the leaves that
            match and reports the rest.
          include, exclude, rename: patterns that select and rename the model's tensors, and so
            their optimizer state, as for ``warm_start``. Other tensors and their state stay.
          tier: "durable" or "local"; None for any tier that has the step, the local tier first.

        Returns:
          A report of what was restored.

        Raises:
          StepNotFoundError, TierError: there is no such step, or none at all; no such tier.
          MismatchError: with ``strict``, the step does not match the objects; nothing was changed.
          SelectionError: as for ``warm_start``.
          CorruptCheckpointError: the step is damaged; for None, all steps are damaged.
          AttachError, ForeignCheckpointError, UninitializedLeafError: as for ``attach``.
        """
        self._require_open()
        report = self._reads.restore(
            step,
            functools.partial(self._require_attached, "restore"),
            strict=strict,
            include=include,
            exclude=exclude,
            rename=rename,
            tier=tier,
        )
        self._loop.restored(report.step)
        self._run.go_on_from(report.step)
        return report

    def _reads_over_devices(self) -> bool:
        """Returns whether a read sends values between processes over the device network."""
        return self._processes.count > 1 and (
            self._options.single_replica_restore or self._run.local is not None
        )

    def _kind_of_read(self) -> Kind:
        return Kind.CALL if self._calls.is_training_thread else Kind.READ

    @guarded(trains=_reads_over_devices, kind=_kind_of_read)
    def load(
        self,
        step: int | str | None = None,
        abstract_state: Any = None,
        *,
        filter: str | None = None,
        tier: TierName | None = None,
    ) -> Any:
        """Reads a step and returns its content. Changes neither attached objects nor storage.

        Returns the state that ``save(state=)`` saved, or ``{"model": {name: tensor}, ...}`` for
        attached modules. Also reads steps that Orbax alone wrote. On several processes with
        ``single_replica_restore`` or a local tier, call it on the training thread only, because
        processes then send each other values over the device network.

        Args:
          step, tier: as for ``restore``.
          abstract_state: a pytree of ``jax.ShapeDtypeStruct``, torchax tensors, JAX arrays (also
            donated ones), torch CPU tensors, numpy arrays and Python values. The result has this
            structure, kinds of leaves and shardings. None returns everything as saved, with arrays
            on the default device; nodes that are not dicts, lists or tuples become dicts. Shardings
            over an abstract mesh, as ``jax.eval_shape`` returns them, need ``jax.set_mesh``.
          filter: reads only what has a name that matches this pattern of shells, such as
            ``"model/*.weight"``; ``torchax-ckpt show`` lists the names. Dicts then lack the rest,
            and lists have None in its place. Not together with ``abstract_state``.

        Raises:
          StepNotFoundError, TierError, CorruptCheckpointError: as for ``restore``.
          SelectionError: no name matches ``filter``, or ``best:`` names no metric.
          MismatchError: the step does not match ``abstract_state``.
        """
        return self._reads.load(step, abstract_state, filter, tier)

    @guarded(trains=False, kind=_kind_of_read)
    def verify(self, step: int | str | None = None, *, tier: TierName | None = None) -> int:
        """Compares every byte of a step with what was saved; returns the step's number.

        Marks an intact step as verified, also on storage, unless this checkpointer is
        ``read_only``. No preservation policy deletes the newest verified durable step.

        Args:
          step: completed steps of the checkpoint, or a name as for ``restore``; None and "latest"
            for the newest step, damaged or not.
          tier: "durable" or "local"; None for each tier that has the step.

        Raises:
          StepNotFoundError, TierError: as for ``restore``.
          CorruptCheckpointError: the step is damaged; the error names the leaf and any known file.
          ForeignCheckpointError: Orbax alone wrote the step, so it has no digests.
          DirectoryError: the step cannot be read now.
        """
        return self._reads.verify(step, tier)

    # --- saving --------------------------------------------------------------------------------

    @guarded(trains=True)
    def steps(
        self,
        total: int,
        *,
        until: Until | None = None,
        state: Callable[[], Any] | None = None,
    ) -> Iterator[int]:
        """Yields the remaining steps, from the first after the restored step to ``total``.

        After each loop body, saves the step with its recorded metrics if the policy says so; the
        last step is always saved. If a body calls ``restore``, the loop continues after the
        restored step, without saving that of the body. ``break`` and exceptions leave the loop
        without a save. At a preemption, and before the session ends, saves the step, waits for it
        and ends the loop; see ``reached_deadline``. ``until`` says when the session ends, in place
        of ``CheckpointOptions.deadline``; if it is too late for a step, warns and yields none.

        In functional training, ``state`` returns the pytree to save, as ``save(state=)`` takes it.
        It is called after the body of each step that is saved: ``state=lambda: state``.

        Raises:
          ArgumentError: ``until`` is none of the times that ``CheckpointOptions.deadline`` takes.
        """
        self._require_open()
        self._require_attached("steps")
        last = as_step(total)
        self._run.deadline.begin(until, self._loop.position or 0, last)
        save = loop.saving(self.save, state)
        return self._loop.steps(last, save, self.reached_preemption, self.reached_deadline)

    @brief
    def record(self, **metrics: Any) -> None:
        """Records metrics of the current step; metrics on devices are fetched if the step is saved.

        Raises:
          MetricsError: a metric is neither a number nor JSON.
        """
        self._loop.record(metrics)

    @brief
    def should_save(self, step: int) -> bool:
        """Returns whether ``save(step)`` would save the step: for a policy, at a preemption, or
        for a metric that ``BestN`` ranks and that is recorded already.
        """
        return self._saves.should_save(as_step(step))

    @guarded(trains=True, kind=Kind.SAVE)
    def save(
        self,
        step: int,
        *,
        state: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves the step if the policy says so, in the background.

        Changes that training makes after ``save`` do not alter the saved step. ``save`` waits
        neither for devices nor for storage, with three exceptions: the first save acquires the
        directory's lease; a save waits for an earlier save that is still in flight; a save with
        ``snapshot="transfer"`` waits until the arrays are on the host. After a preemption notice,
        ``save`` saves the step whatever the policy says and waits until the step is durable.

        Args:
          step: completed optimizer steps; also an integer array or tensor without dims.
          state: a pytree of torchax tensors, JAX arrays, torch CPU tensors, numpy arrays, Python
            numbers and strings, for functional training. It is saved in place of attached modules
            and optimizers; random state, loaders and stateful objects are saved too. May be a
            function, called if the step is saved. Warns if nothing has loaded the restored state.
          metrics: name -> number (also a device scalar) or JSON, added to those of ``record``.
          force: save to the durable tier whatever the policy says.

        Returns:
          Whether a save began; False if the step is already saved, or the system refuses threads,
          files or memory: then the save has failed. After a preemption notice, whether the step is
          durable, after a second attempt if the first one failed.

        Raises:
          StepError: a step below 0 or the last saved or restored step, or above 2**63 - 1;
            StepTypeError: not an int.
          AttachError: nothing is attached and no state is given.
          UnsupportedLeafError: a leaf cannot be stored; nothing was saved.
          MetricsError: a metric cannot be stored; or, unless the save is forced, not be ranked.
          OutOfMemoryError: the devices have no memory for copies (``snapshot="copy"``); nothing was
            saved.
          DirectoryError: the first save finds that the directory cannot be written.
          LeaseError: another program writes to the directory, took it over, or has saved this step
            or newer ones since ``attach``.
          SaveError: an earlier save failed, with ``CheckpointOptions(on_save_error="raise")``.
          ClosedError: this checkpointer is closed, or the program is ending.
        """
        self._require_open()
        return self._saves.save(step, self._attached, state, metrics or {}, force=force)

    @brief
    def reached_preemption(self, step: int | None = None) -> bool:
        """Returns whether this run got a preemption notice; call it after each completed step.

        A True answer is final. Under ``jax.distributed`` each process must call this method or
        ``save`` at every step. Without ``step``, returns the last answer, also after ``close``.
        """
        return self._preemption.reached(None if step is None else as_step(step))

    @brief
    def reached_deadline(self, step: int | None = None) -> bool:
        """Returns whether this run ends after ``step`` because the session ends soon.

        That is so if the time until the deadline is too short for the longest step so far, 1.5
        times the longest save until its step was durable, and ``deadline_margin_secs``. Then
        ``save`` does the same as after a preemption notice. Call it like ``reached_preemption``.
        """
        return self._run.deadline.reached(None if step is None else as_step(step))

    @brief
    def exit_if_preempted(self, step: int | None = None) -> None:
        """Ends the program with exit code 143, for a restart, at a preemption or a deadline.

        Call it after the loop, within ``with`` or after it; or after each ``save``, with its step.

        Raises:
          SystemExit: once ``close``, which may raise, has returned.
          CallError: called on another thread than the main thread.
        """
        is_over = self.reached_preemption(step) or self.reached_deadline(step)
        exit_if(is_over, self.close)

    # --- listing and deleting steps -----------------------------------------------------------

    @brief
    def all_steps(self, tier: TierName | None = None) -> list[int]:
        """Returns the existing steps, ascending, of one tier or (None) of all; opens no step."""
        return self._run.tiers.numbers(tier)

    @brief
    def latest_step(self, tier: TierName | None = None) -> int | None:
        """Returns the newest of ``all_steps``, or None if there are no steps."""
        return max(self.all_steps(tier), default=None)

    @brief
    def best_step(self) -> int | None:
        """Returns the durable, intact step that ranks first by the best-N rule, or None.

        Raises:
          PolicyError: the preservation policy has no best-N rule.
        """
        return self._reads.best_step()

    @brief
    def metrics(self, step: int) -> dict[str, Any]:
        """Returns a step's metrics, {} without or with damaged ones; raises StepNotFoundError."""
        committed = self._run.tiers.find(as_step(step))
        return self._run.tiers.holding(committed).directory.metrics(committed)

    @guarded(trains=True, kind=Kind.CALL)
    def delete(self, step: int, *, tier: TierName | None = None) -> None:
        """Deletes a step, whatever the preservation policy says.

        Args:
          step: completed steps of the checkpoint.
          tier: "durable" or "local"; None for each tier that has the step.

        Raises:
          StepNotFoundError, TierError, LeaseError: no such step or tier; another program writes.
        """
        self._require_open()
        with self._processes.round("beginning"):
            self._run.wait()
            self._run.tiers.named(tier)
            number = as_step(step)
        self._run.delete(number, tier)

    def stats(self) -> Stats:
        """Returns counts and times of saves and restores so far. May be called on any thread."""
        return self._telemetry.stats()

    # --- ending --------------------------------------------------------------------------------

    @guarded(trains=False)
    def wait_until_finished(self, timeout_secs: float | None = None) -> None:
        """Waits until no save is in flight, then calls ``check_for_errors``.

        Raises:
          SaveTimeoutError, SaveError: a save is still in flight, and continues; a save failed.
        """
        self._run.wait(timeout_secs)
        self.check_for_errors()

    @brief
    def check_for_errors(self) -> None:
        """Raises the oldest error of a background save that no call has raised yet.

        Raises:
          SaveError: a save failed; names step, path and cause.
          MetricsError: a best-N rule cannot rank a metric of a step that was saved nevertheless.
        """
        self._run.check_for_errors()

    @guarded(trains=False, kind=Kind.END)
    def close(self) -> None:
        """Waits for saves in flight, then releases the directory's lease. May be called twice.

        Raises:
          ProcessError, SaveError: the processes called differently; the newest durable save failed.
          SaveTimeoutError: a save took longer than ``save_timeout_secs``. The save continues; the
            checkpointer finishes closing when the save ends.
        """
        if self._has_ended:
            return
        self._is_closed = True  # no further saves, even if close() raises for a save in flight
        self._closing.close()
        self._has_ended = True
        if self._attached is not None or self.stats().num_saves:  # else it was used only to read
            self._telemetry.log_end()
        if (error := self._call_log.error or self._saver.tier.failures.newest) is not None:
            raise error

    # At the end of a program, Python sets the names of modules to None, and may then call this.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_closing"):  # otherwise __init__ raised
            self._closing.drop(self._hook)

    def __enter__(self) -> TorchaxCheckpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            explain_worker_error(error)
        try:
            self.close()
        except CheckpointError:
            # The error is already logged. It must not hide the exception that ended the loop.
            if error is None:
                raise

    # --- checks --------------------------------------------------------------------------------

    def _require_open(self) -> None:
        closing.require_program()
        if self._is_closed:
            raise ClosedError("this checkpointer is closed", path=self._directory.path)

    def _require_attached(self, action: str) -> TrainingState:
        if self._attached is None:
            raise AttachError(f"{action} was called before attach; call attach(model, ...) first")
        return self._attached
