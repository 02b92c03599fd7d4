"""Warm starts: a model's initial weights come from another run's checkpoint or from files.

The weights are matched and written by the code of restores.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import ArgumentError, SelectionError, StepNotFoundError
from torchax_ckpt.formats import importing
from torchax_ckpt.formats.weights import MODEL, weights_at
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.options import CheckpointOptions, require_kind
from torchax_ckpt.processes.coordination import open_for_call
from torchax_ckpt.restoring.fallback import newest_readable, reading
from torchax_ckpt.restoring.file_weights import FileWeights
from torchax_ckpt.restoring.restorable_step import RestorableStep
from torchax_ckpt.restoring.restore import carry_out
from torchax_ckpt.runtime.step_numbers import as_given
from torchax_ckpt.runtime.user_messages import brief
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.state.findings import RestoreReport
from torchax_ckpt.state.modules.module import ModuleComponent
from torchax_ckpt.state.plans.restoration import Restoration
from torchax_ckpt.state.stored_entries import StoredModule
from torchax_ckpt.state.training_state import as_rule, require_callable, require_module
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location
from torchax_ckpt.stored import named_steps
from torchax_ckpt.stored.stored_step import StoredStep, about

logger = logging.getLogger(__name__)


@brief
def warm_start(
    model: Any,
    source: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    at: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    shardings: Any = None,
    init: Callable[..., Any] | None = None,
    strict: bool = True,
    cast: bool = False,
    options: CheckpointOptions | None = None,
) -> RestoreReport:
    """Sets a model's initial weights, in place: from another run or from pretrained files.

    ``warm_start`` reads only weights: it writes no files, acquires no lease and resumes no run.
    Optimizers, random state and a module's extra state stay unchanged. The new run begins at its
    own step 0::

        with TorchaxCheckpointer("runs/finetune") as ckpt:
            if ckpt.latest_step() is None:
                warm_start(model, "runs/pretrain", exclude="head")
            start = ckpt.attach(model, optimizer)

    The source must have each selected tensor, with its shape and dtype, under its name; ``rename``,
    ``cast`` and ``strict`` relax this. Tensors of the model that are not selected are not read, and
    the source need not have them. All names, shapes and dtypes are compared before any tensor of
    the model is changed. Unless ``restore_in_budget`` is set, all weights are also read before any
    tensor is changed, so a model that is not on ``"meta"`` temporarily takes twice its memory.
    Files are read in the parts that the devices need, and each part goes directly to its device. If
    the source is a checkpoint, the data that is read is compared with the checkpoint's digests, as
    in every restore.

    A pattern names a tensor, or a module and everything in it; ``*`` matches any characters, as few
    as possible. ``include`` and ``exclude`` are patterns for the model's names. For example,
    use ``exclude="*.lora_A"`` if the model has tensors of this name and the source has none.
    ``rename`` maps the source's names to the model's, and copies the text that each ``*`` matches:
    ``{"transformer.h.*.attn": "layers.*.attention"}``. If several patterns of ``rename`` match a
    name, the first of them applies.

    The source may store a weight that is tied in the model under any of the weight's names. If the
    source has several names of a tied weight, all of them must refer to the same tensor. Weights
    that the model declares as tied, as the models of ``transformers`` do, and that are separate
    tensors, as after ``.to("jax")``, are tied again if the source has only one value for them.
    Build optimizers and a JittableModule after that: the model then has one parameter less. If an
    optimizer, a JittableModule or a dict or list of parameters exists already, or after
    ``gc.freeze``, the weights stay separate, and the source must have both. A start that resumes
    the run makes no warm start, so ``tie_weights()`` after
    ``.to("jax")`` remains the rule for a program that resumes.

    Args:
      model: an ``nn.Module`` on ``"jax"`` or on ``"meta"``, or a ``JittableModule``.
      source: a run's directory or a step's, also in a bucket; a safetensors file; a directory or
        index in Hugging Face's format; a file written by ``torch.save``; or a directory written by
        ``torch.distributed.checkpoint``.
      step: the step to read from a run's directory: its number, or a name, as for ``load``; None
        for the newest readable.
      at: the place of the weights in the source, unless they are those of a single attached model.
        Examples are ``model/generator`` for one of several models, ``state/params`` for functional
        state, and ``app/model`` for files written by torch.
      include: patterns; only tensors that match one of them are taken. None for all.
      exclude: patterns; tensors that match one of them are not taken.
      rename: pattern for the source's names -> the model's names.
      shardings, init: as for ``TorchaxCheckpointer.attach``; ``init`` fills tensors on ``"meta"``
        that are not taken.
      strict: raise on any difference; otherwise take the matching tensors and report the rest.
      cast: convert floating-point tensors to the dtypes that the model has. 64-bit integers in
        files always become the model's 32-bit integers (``.to("jax")`` narrows them too), if the
        values fit. No other dtype is ever converted.
      options: memory bounds (``max_host_bytes``), ``verify``, ``restore_in_budget``.

    Returns:
      The report of the restore; its ``step`` is None for files.

    Raises:
      MismatchError: the weights do not fit; nothing was changed.
      SelectionError: a pattern matches nothing; two tensors would get one name; or ``step`` was
        given for files, which have no steps, or ``at`` for files that have no places.
      AttachError: the model is not a module, or is on the CPU.
      UninitializedLeafError: nothing fills a tensor on ``"meta"``.
      StepNotFoundError: the directory lacks the step, or ``source`` has nothing to read.
      CorruptCheckpointError: the source is damaged, or is not safe to read.
      DirectoryError: the source cannot be read at present.
      ForeignCheckpointError: Orbax alone wrote the step, so its names say nothing about torch.
      UnsupportedLeafError: a tensor has a dtype that JAX would narrow, or that cannot be read.
      ImportError: the source is in safetensors format, and that library is not installed.
    """
    options = require_kind("options", options, CheckpointOptions) or CheckpointOptions()
    with open_for_call("warm_start", step, options.process_timeout_secs) as processes:
        # What one process alone cannot do, fails on all; and all are connected before any reads.
        with processes.round("beginning"):
            torchax_backend.check_internals()
            require_module(model, (MODEL,))
            require_callable("init", init)
            if not isinstance(source, (str, os.PathLike)):
                raise ArgumentError(f"source: expected a path or a URL, found {source!r:.80}")
            component = ModuleComponent(model, (MODEL,), as_rule(shardings), init)
            given = as_given(step)
            path = Path(location.resolve(source))
            is_file = importing.is_known(path)
            if is_file and step is not None:
                raise SelectionError(
                    f"{path}: expected step=None, because files of weights have no steps, found "
                    f"step={step}. Leave out the argument step"
                )

        def start(
            source: RestorableStep | FileWeights, module: StoredModule, path: str, step: int | None
        ) -> RestoreReport:
            plan = Restoration(Selection(include, exclude, rename))
            component.prepare_from(module, plan, ties_again=True)
            plan.selection.require_used()
            report = carry_out(
                plan, source, options, processes, step, path, strict=strict, call="warm_start"
            )
            logger.info("took weights from %s", path)
            if again := [f"{a} (to {n})" for a, n in plan.tied_again.items()]:
                logger.info(
                    "tied again, because the model declares them as tied and the source has one "
                    "value for them: %s. Call model.tie_weights() after model.to('jax') in a "
                    "program that resumes: a start without warm_start needs the ties too",
                    ", ".join(again),
                )
            return report

        def converts(stored: str, live: str) -> bool:
            return stored == live or (cast and _are_floating(stored, live))

        if is_file:
            with processes.round("taking weights from files"):
                files = importing.open_files(path, at)
                weights = FileWeights(files, options)
                return start(weights, weights.module(converts), str(path), None)
        run = RunDirectory(source, read_only=True, reads_step=True)
        history = RunHistory(run, processes)

        def start_from(committed: CommittedStep) -> RestoreReport:
            with reading(committed, run, processes), about(committed):
                stored = StoredStep(committed, options)
                restorable = RestorableStep(stored, processes.meet)
                weights, nodes = weights_at(stored, at), stored.manifest.leaves
                tensors = {name: nodes[leaf.name] for name, leaf in weights.leaves.items()}
                module = StoredModule(
                    tensors, weights.ties, are_ties_known=False, converts=converts
                )
                return start(restorable, module, str(committed.path), committed.step)

        def find() -> list[CommittedStep]:
            return history.found(lambda: named_steps.candidates(run, given))

        if isinstance(given, int) or run.is_of_one_step:
            return start_from(find()[-1])
        if not history.found(run.steps):
            raise StepNotFoundError(
                f"{run.path}: expected a run's directory with checkpoints, safetensors files, or "
                "files written by torch.save or torch.distributed.checkpoint; found none of them",
                path=run.path,
            )
        report, skipped = newest_readable(find, start_from)
        return dataclasses.replace(report, skipped_steps=skipped)


def _are_floating(*dtypes: str) -> bool:
    return all(jnp.issubdtype(np.dtype(dtype), jnp.floating) for dtype in dtypes)
