"""Owns the life of a restore: checked, read, written back, or nothing touched at all."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.errors import CorruptCheckpointError, ForeignCheckpointError
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.sharding import Local, put
from torchax_ckpt.state import functional
from torchax_ckpt.state.attached import STATE, Attached
from torchax_ckpt.state.component import Read
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.storage import arrays as storage
from torchax_ckpt.storage.directory import CommittedStep

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    Attributes:
      step: the step restored.
      missing: names attached but not in the checkpoint; they keep what they held.
      unexpected: names in the checkpoint that nothing attached takes.
      mismatched: names that differ -> "expected ..., found ..."; they keep what they held.
      skipped_steps: newer steps that could not be read.
    """

    step: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skipped_steps: tuple[int, ...] = ()


def newest_readable(
    candidates: Sequence[CommittedStep], attempt: Callable[[CommittedStep], T]
) -> tuple[T, tuple[int, ...]]:
    """What ``attempt`` gives for the newest step that can be read, and the steps skipped.

    Raises:
      CorruptCheckpointError: none of them can be read; the error of the newest.
    """
    first_error: CorruptCheckpointError | None = None
    skipped: list[int] = []
    for committed in reversed(candidates):
        try:
            return attempt(committed), tuple(skipped)
        except CorruptCheckpointError as error:
            first_error = first_error or error
            skipped.append(committed.step)
            warnings.warn(f"skipping an unreadable checkpoint: {error}", stacklevel=4)
    assert first_error is not None, "called with no candidates"
    raise first_error


def restore_attached(
    committed: CommittedStep, attached: Attached, strict: bool, options: CheckpointOptions
) -> RestoreReport:
    """Restores one step into what is attached: everything, or nothing and an error.

    Raises:
      MismatchError: something differs and ``strict``.
      CorruptCheckpointError, ForeignCheckpointError, UninitializedLeafError
    """
    manifest = read_manifest(committed)
    findings = Findings()
    restoration = attached.prepare(manifest.document, findings)
    if strict and findings:
        raise findings.error(committed.step, str(committed.path))
    restoration.require_filled()
    values = read_leaves(committed, manifest, restoration.reads, options)
    restoration.apply(values)
    logger.info("restored step %d from %s", committed.step, committed.path)
    return RestoreReport(
        committed.step,
        missing=tuple(findings.missing),
        unexpected=tuple(findings.unexpected),
        mismatched=dict(findings.mismatched),
    )


def load_state(committed: CommittedStep, abstract_state: Any, options: CheckpointOptions) -> Any:
    """Reads the functional state of one step, or all components of one that was attached.

    Raises:
      MismatchError: the step does not have what the abstract state asks for.
      CorruptCheckpointError: it cannot be read.
    """
    try:
        manifest = read_manifest(committed)
    except ForeignCheckpointError:
        return _load_foreign(committed, abstract_state, options)
    findings = Findings()
    prefix: tuple[str, ...] = ()
    if STATE in manifest.document:
        root, prefix = manifest.document[STATE], (STATE,)
    else:
        asked = abstract_state.keys() if isinstance(abstract_state, Mapping) else None
        root = {
            "dict": [[n, d] for n, d in manifest.document.items() if asked is None or n in asked]
        }
    request = functional.Request(root, abstract_state, prefix, findings)
    if findings:
        raise findings.error(committed.step, str(committed.path))
    values = read_leaves(committed, manifest, request.reads, options)
    return request.build(values)


def _load_foreign(committed: CommittedStep, abstract_state: Any, options: CheckpointOptions) -> Any:
    """Reads a step of bare Orbax; its pytree must have the abstract state's structure."""
    if abstract_state is None:
        return storage.load_foreign(committed, None, options)
    leaves, treedef = jax.tree_util.tree_flatten(abstract_state)
    reads = {str(i): read for i, leaf in enumerate(leaves) if (read := functional.as_read(leaf))}
    asked = [
        storage.abstract_array(read.spec.shape, read.spec.dtype, _sharding(read))
        if (read := reads.get(str(i)))
        else leaf
        for i, leaf in enumerate(leaves)
    ]
    loaded = storage.load_foreign(committed, jax.tree_util.tree_unflatten(treedef, asked), options)
    found = {str(i): leaf for i, leaf in enumerate(jax.tree_util.tree_leaves(loaded))}
    arrays = put({n: found[n] for n in reads}, {n: read.placement for n, read in reads.items()})
    revived = {n: functional.revive(reads[n].spec.node(n), arrays[n]) for n in reads}
    return jax.tree_util.tree_unflatten(treedef, {**found, **revived}.values())


def read_manifest(committed: CommittedStep) -> Manifest:
    """The checked manifest of a step."""
    raw = storage.read_manifest(committed)
    return Manifest.from_json(raw, path=str(committed.path / storage.MANIFEST))


def read_leaves(
    committed: CommittedStep,
    manifest: Manifest,
    reads: Mapping[str, Read],
    options: CheckpointOptions,
) -> dict[str, Any]:
    """Reads leaves and puts each on its placement.

    Raises:
      CorruptCheckpointError: one is not stored as the manifest says.
    """
    located = manifest.plan.locate()
    wanted: dict[str, tuple[tuple[int, ...], str, Sharding | None]] = {}
    for name, read in reads.items():
        if name in located:
            stored, _ = located[name]
            shape = (len(manifest.plan.stacks[stored]), *read.spec.shape)
            wanted[stored] = (shape, read.spec.dtype, None)
        elif name not in manifest.plan.empty:
            wanted[name] = (read.spec.shape, read.spec.dtype, _sharding(read))
    arrays = storage.read_arrays(committed, wanted, options)
    values: dict[str, Any] = {}
    to_move: dict[str, Any] = {}
    for name, read in reads.items():
        if name in located:
            stored, index = located[name]
            value: Any = np.asarray(arrays[stored][index])
        elif name in manifest.plan.empty:
            value = np.zeros(read.spec.shape, np.dtype(read.spec.dtype))
        else:
            value = arrays[name]
        (values if isinstance(value, jax.Array) else to_move)[name] = value
    moved = put(to_move, {name: reads[name].placement for name in to_move})
    return {**values, **moved}


def _sharding(read: Read) -> Sharding | None:
    """What storage is asked for: a sharding, or None for a host array that is moved afterwards."""
    return None if isinstance(read.placement, Local) else read.placement
