"""Owns warm starts: a model's first weights, from another run's checkpoint or from files.

Whatever they come from becomes a ``StoredModule`` and a reader of its leaves; the rest is as in a
restore.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import MismatchError, SelectionError, StepNotFoundError
from torchax_ckpt.formats import opening
from torchax_ckpt.formats.tensor_files import FileTensor, TensorFiles
from torchax_ckpt.formats.weights import MODEL, weights_at
from torchax_ckpt.layout import names
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.restoring import step_reader
from torchax_ckpt.restoring.fallback import newest_readable, reading
from torchax_ckpt.restoring.restore import RestoreReport, apply, report_of
from torchax_ckpt.runtime.step_number import as_step
from torchax_ckpt.snapshot.move_shards import put
from torchax_ckpt.state.component import Findings, Read, Values
from torchax_ckpt.state.leaf import Spec
from torchax_ckpt.state.module import ModuleComponent
from torchax_ckpt.state.stored_entries import StoredModule
from torchax_ckpt.state.training_state import as_rule, require_init, require_module
from torchax_ckpt.storage.arrays import orbax_context
from torchax_ckpt.storage.arrays.placement import SingleLeaf, Wanted
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.stored.stored_step import StoredStep

logger = logging.getLogger(__name__)

_ON_ITS_WAY_BYTES = 1 << 30
# What .to("jax") makes of 64-bit integers.
_NARROWED = {"int64": "int32", "uint64": "uint32"}


def warm_start(
    model: Any,
    source: str | os.PathLike[str],
    *,
    step: int | None = None,
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
    """Gives a model its first weights, in place: another run's, or pretrained ones from files.

    Only weights: nothing is written, no lease is taken, and no run resumes. Optimizers, random
    state and a module's extra state stay as they are. The new run begins at its own step 0::

        with TorchaxCheckpointer("runs/finetune") as ckpt:
            if ckpt.latest_step() is None:
                warm_start(model, "runs/pretrain", exclude="head")
            start = ckpt.attach(model, optimizer)

    What is selected must fit, and what is not is left alone: neither taken from the source nor
    missed in it. Everything is compared first; nothing live is touched unless everything can be, so
    that a model that is not on ``"meta"`` takes its memory twice meanwhile (``restore_in_budget``).
    Files are read part by part, as devices hold them, and put there; digests of a checkpoint are
    compared as in every restore.

    A pattern names a tensor, or a module and so all that is in it; ``*`` stands for any characters,
    as few as possible. ``include`` and ``exclude`` go by the model's names: ``exclude="*.lora_A"``
    for tensors that the source lacks. ``rename`` goes from the source's names to the model's, and
    carries ``*`` over: ``{"transformer.h.*.attn": "layers.*.attention"}``; the first pattern that
    matches counts.

    Tied weights take the value of what one of their names stands for, if that is one tensor.

    Args:
      model: an ``nn.Module`` on ``"jax"`` or on ``"meta"``, or a ``JittableModule``.
      source: a run's directory, ``gs://`` too; a safetensors file; a directory or index as Hugging
        Face writes them; a file of ``torch.save``'s; or a directory that
        ``torch.distributed.checkpoint`` has written.
      step: of a run's directory: completed steps; None for the newest that can be read.
      at: where the weights are, if not in the one attached model: ``model/generator``,
        ``state/params`` of functional state; ``app/model`` in what torch has written.
      include: patterns; only tensors that one of them matches are taken. None for all.
      exclude: patterns; tensors that one of them matches are not.
      rename: pattern of the source's names -> the model's.
      shardings, init: as for ``TorchaxCheckpointer.attach``; ``init`` fills tensors on ``"meta"``
        that are not taken.
      strict: raise on any difference; if not, take what matches and report the rest.
      cast: convert floating tensors of another dtype to the model's. 64-bit integers in files
        become the 32-bit ones that devices have in their place if their values fit; nothing else
        is ever converted.
      options: memory bounds (``max_host_bytes``), ``verify``, ``restore_in_budget``.

    Returns:
      What was done; ``step`` is None for files.

    Raises:
      MismatchError: the weights do not fit; nothing was changed.
      SelectionError: a pattern matches nothing, two tensors would have one name, or ``step`` or
        ``at`` were given for files that have none.
      AttachError: no model, or one on the CPU.
      UninitializedLeafError: a meta tensor that nothing fills.
      StepNotFoundError: there is no such step, or nothing to read at all.
      CorruptCheckpointError: the source is damaged, or is none that can be trusted.
      DirectoryError: it cannot be read now.
      ForeignCheckpointError: a step of bare Orbax, whose names say nothing about torch.
      UnsupportedLeafError: a tensor has a dtype that JAX would narrow, or that cannot be held.
      ImportError: safetensors are given, and the library is not installed.
    """
    torchax_backend.check_internals()
    require_module(model, (MODEL,))
    require_init(init)
    options = options or CheckpointOptions()
    component = ModuleComponent(model, (MODEL,), as_rule(shardings), init)

    service = orbax_context.coordination_service()
    processes = Processes("warm starts", options.process_timeout_secs, service)

    def start(origin: _Origin) -> RestoreReport:
        selection = Selection(include, exclude, rename)
        return _start(component, origin, selection, strict, options, processes)

    path = Path(source)
    if opening.is_known(path):
        if step is not None:
            raise SelectionError(f"{path}: files have no steps, such as {step}")
        files = opening.open_files(path, at)
        with processes.round("taking weights from files"):
            return start(_of_files(files, str(path), cast, options))
    run = RunDirectory(source, read_only=True)
    history = RunHistory(run, processes)

    def start_from(committed: CommittedStep) -> RestoreReport:
        with reading(committed, run, processes), step_reader.about(committed):
            return start(_of_step(committed, at, cast, options, processes.meet))

    if step is not None:
        number = as_step(step)
        return start_from(*history.found(lambda: [run.find(number)]))
    if not (steps := history.found(run.steps)):
        raise StepNotFoundError(
            f"{run.path}: expected a run with checkpoints, safetensors, or what torch.save or "
            "torch's DCP has written; found none of them",
            path=run.path,
        )
    report, skipped = newest_readable(steps, start_from)
    return dataclasses.replace(report, skipped_steps=skipped)


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where weights come from.

    Attributes:
      module: what there is.
      step, path: of what, for messages.
      check: raises where what is to be read cannot be what it says it is.
      read: reads leaves onto their placements, as the dtypes wanted.
      is_whole: whether these reads see, and check, all that there is.
    """

    module: StoredModule
    step: int | None
    path: str
    check: Callable[[Mapping[str, Read]], None]
    read: Callable[[Mapping[str, Read]], Values]
    is_whole: Callable[[Mapping[str, Read]], bool]


def _start(
    component: ModuleComponent,
    origin: _Origin,
    selection: Selection,
    strict: bool,
    options: CheckpointOptions,
    processes: Processes,
) -> RestoreReport:
    findings = Findings()
    restoration = component.prepare_from(origin.module, findings, selection)
    selection.require_used()
    if strict and findings:
        raise findings.error(origin.step, origin.path)
    restoration.require_filled()
    origin.check(restoration.reads)
    apply(restoration, origin.read, options, processes, origin.step, origin.path)
    logger.info("took weights from %s", origin.path)
    is_verified = origin.is_whole(restoration.reads)
    return report_of(origin.step, findings, selection, is_verified=is_verified)


def _of_step(
    committed: CommittedStep,
    at: str | None,
    cast: bool,
    options: CheckpointOptions,
    agree: Callable[[], None],
) -> _Origin:
    stored = StoredStep(committed)
    step_reader.require_made(committed, stored.manifest)
    weights, nodes = weights_at(stored, at), stored.manifest.leaves()

    def read(reads: Mapping[str, Read]) -> Values:
        leaves = step_reader.read_leaves(committed, stored.manifest, reads, options, agree)
        for name, read in reads.items():
            if read.dtype is not None:
                changed = {name: leaves.pop(name).astype(read.dtype)}
                leaves |= put(changed, {name: read.placement})
        return leaves

    return _Origin(
        StoredModule(
            {name: nodes[leaf.name] for name, leaf in weights.leaves.items()},
            weights.ties,
            are_ties_known=False,
            converts=lambda a, b: a == b or (cast and _are_floating(a, b)),
        ),
        committed.step,
        str(committed.path),
        check=functools.partial(step_reader.require_plausible, committed, stored.manifest),
        read=read,
        is_whole=lambda reads: (
            options.verify != "never"
            and step_reader.is_whole(stored.manifest, reads, jax.process_count())
        ),
    )


def _of_files(files: TensorFiles, path: str, cast: bool, options: CheckpointOptions) -> _Origin:
    named = {names.join((MODEL, name)): tensor for name, tensor in files.tensors.items()}
    nodes = [Spec("torchax", t.dtype, t.shape).node(name) for name, t in named.items()]
    return _Origin(
        StoredModule(
            dict(zip(files.tensors, nodes, strict=True)),
            files.ties,
            are_ties_known=False,
            converts=lambda a, b: b in (a, _NARROWED.get(a)) or (cast and _are_floating(a, b)),
        ),
        None,
        path,
        check=lambda reads: None,  # every size was compared with the model's
        read=functools.partial(_read_files, named, options=options),
        is_whole=lambda reads: False,
    )


def _are_floating(*dtypes: str) -> bool:
    return all(jnp.issubdtype(np.dtype(dtype), jnp.floating) for dtype in dtypes)


def _read_files(
    tensors: Mapping[str, FileTensor], reads: Mapping[str, Read], options: CheckpointOptions
) -> dict[str, Any]:
    """Reads tensors part by part, as devices hold them, and puts each onto its placement.

    On its way at one time are ``max_host_bytes``, or what the largest part takes.
    """
    leaves: dict[str, Any] = {}
    empty: dict[str, Any] = {}
    moving: collections.deque[tuple[int, list[jax.Array]]] = collections.deque()
    max_bytes, on_its_way = options.max_host_bytes or _ON_ITS_WAY_BYTES, 0
    for name, read in reads.items():
        shape, dtype = read.spec.shape, read.dtype or read.spec.dtype
        if math.prod(shape) == 0:
            empty[name] = np.zeros(shape, np.dtype(dtype))
            continue
        part = read.placement.shard_shape(shape) if isinstance(read.placement, Sharding) else shape
        target = SingleLeaf(name, Wanted(shape, dtype, {name: read.placement}, None), leaves)
        for piece in target.pieces(part):
            while moving and on_its_way + piece.nbytes > max_bytes:
                nbytes, arrays = moving.popleft()
                jax.block_until_ready(arrays)
                on_its_way -= nbytes
            host = _as_dtype(tensors[name].read(piece.index), dtype, name)
            moving.append(target.arrived(piece, host))
            on_its_way += moving[-1][0]
    return {**leaves, **put(empty, {name: reads[name].placement for name in empty})}


def _as_dtype(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
    changed = array.astype(np.dtype(dtype), copy=False)
    if array.dtype.name in _NARROWED and not np.array_equal(changed, array):
        problem = f"expected {array.dtype.name} that fits into {dtype}, found values beyond"
        raise MismatchError(f"{name}: {problem}", mismatched={name: problem})
    return changed
