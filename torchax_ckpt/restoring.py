"""Owns the life of a restore: checked, read, written back, or nothing touched at all."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.errors import (
    CorruptCheckpointError,
    ForeignCheckpointError,
    UnusableStateError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.sharding import Local, put
from torchax_ckpt.state import functional, random_state
from torchax_ckpt.state.attached import STATE, Attached
from torchax_ckpt.state.component import Read, Restoration, Write
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.tree import decode, key_part
from torchax_ckpt.storage import arrays as storage
from torchax_ckpt.storage.directory import CommittedStep

logger = logging.getLogger(__name__)
T = TypeVar("T")

# How much is freed and read at a time under restore_in_budget: what a restore then needs beyond
# the state itself. Smaller parts would read stacks more often.
PART_BYTES = 256 << 20


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
    brings_rng = "rng" in attached.components and "rng" in manifest.document
    with random_state.left_alone(on_success=not brings_rng):
        restoration = attached.prepare(manifest.document, findings)
        if strict and findings:
            raise findings.error(committed.step, str(committed.path))
        restoration.require_filled()
        if options.restore_in_budget:
            _apply_in_budget(committed, manifest, restoration, options)
        else:
            restoration.apply(read_leaves(committed, manifest, restoration.reads, options))
    logger.info("restored step %d from %s", committed.step, committed.path)
    return RestoreReport(
        committed.step,
        missing=tuple(findings.missing),
        unexpected=tuple(findings.unexpected),
        mismatched=dict(findings.mismatched),
    )


def _apply_in_budget(
    committed: CommittedStep,
    manifest: Manifest,
    restoration: Restoration,
    options: CheckpointOptions,
) -> None:
    """Applies a restoration part by part, deleting what each part replaces before it is read.

    Raises:
      UnusableStateError: it failed on the way; then every buffer concerned is deleted.
    """
    reads = restoration.reads
    early = {name for call in restoration.calls for name in call.needs}
    restoration.apply_calls(
        read_leaves(committed, manifest, {name: reads[name] for name in early}, options)
    )
    try:
        for part in _parts(restoration.writes, reads):
            for write in part:
                if write.release is not None:
                    write.release()
            needed = {name: reads[name] for write in part for name in write.needs}
            values = read_leaves(committed, manifest, needed, options)
            restoration.apply_writes(part, values)
    except BaseException as error:
        for write in restoration.writes:
            if write.release is not None:
                write.release()
        raise UnusableStateError(
            f"restoring step {committed.step} from {committed.path} failed after buffers had been "
            f"freed for it (restore_in_budget=True): {error}. What is attached holds no state any "
            "more. Restore another step, or start the program again.",
            step=committed.step,
            path=committed.path,
        ) from error


def _parts(writes: Sequence[Write], reads: Mapping[str, Read]) -> Iterator[list[Write]]:
    """The writes in parts of at most so many bytes, or of one write."""
    part: list[Write] = []
    size = 0
    for write in writes:
        more = sum(reads[name].spec.nbytes for name in write.needs)
        if part and size + more > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(write)
        size += more
    if part:
        yield part


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
    _require_there(committed, abstract_state)
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


def _require_there(committed: CommittedStep, abstract_state: Any) -> None:
    """Raises MismatchError; Orbax would give what was asked for, cast, or as it was asked."""
    stored = storage.foreign_metadata(committed)
    findings = Findings()
    for path, abstract in jax.tree_util.tree_flatten_with_path(abstract_state)[0]:
        parts = [key_part(entry) for entry in path]
        name = names.join(parts)
        found: Any = stored
        for part in parts:
            children = (
                {str(k): v for k, v in found.items()}
                if isinstance(found, Mapping)
                else dict(zip(map(str, range(len(found))), found, strict=True))
                if isinstance(found, (list, tuple))
                else {}
            )
            found = children.get(part, _ABSENT)
        if found is _ABSENT:
            findings.missing.append(name)
        elif (read := functional.as_read(abstract)) is not None:
            if read.placement is not Local.HOST:
                functional.require_jax_dtype(read.spec.dtype, name)
            shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
            if (shape, dtype) != (read.spec.shape, np.dtype(read.spec.dtype)):
                text = f"{dtype}{list(shape)}" if shape is not None else repr(found)
                findings.mismatch(name, read.spec.content(), text)
    if findings:
        raise findings.error(committed.step, str(committed.path))


_ABSENT = object()


def read_manifest(committed: CommittedStep) -> Manifest:
    """The checked manifest of a step."""
    path = str(committed.path / storage.MANIFEST)
    try:
        manifest = Manifest.from_json(storage.read_manifest(committed), path=path)
        for node in manifest.document.values():
            decode(node, lambda leaf: leaf["array"])
    except CorruptCheckpointError as error:
        if error.step is not None:
            raise
        where = "" if str(committed.path) in str(error) else f"{path}: "
        raise CorruptCheckpointError(
            f"step {committed.step}: {where}{error}",
            step=committed.step,
            path=path,
            key_path=error.key_path,
        ) from error
    return manifest


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
            # Stacks pass through the host: their members go on to their devices as one batch,
            # which takes no compilation. Cutting them on the devices would.
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
            value: Any = arrays[stored][index, ...]
            if read.placement is Local.HOST:
                value = value.copy()  # not a view that would keep the whole stack alive
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
