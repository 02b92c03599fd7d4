"""Owns the life of a restore: checked, read, written back, or nothing touched at all."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.errors import (
    CorruptCheckpointError,
    ForeignCheckpointError,
    MismatchError,
    UnusableStateError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Digests, Manifest
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.sharding import Local, Placement, put
from torchax_ckpt.snapshot import free_device_bytes
from torchax_ckpt.state import checks, functional, random_state
from torchax_ckpt.state.attached import STATE, Attached
from torchax_ckpt.state.component import Read, Restoration, Write
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.leaf import require_jax_dtype
from torchax_ckpt.state.tree import key_part
from torchax_ckpt.storage import arrays as storage
from torchax_ckpt.storage import inspection, reading
from torchax_ckpt.storage.directory import CommittedStep
from torchax_ckpt.storage.placing import Wanted

logger = logging.getLogger(__name__)
T = TypeVar("T")

# What is freed and read at a time under restore_in_budget, per device, where no more is free or
# nobody knows. Smaller parts would read stacks more often.
_LEAST_PART_BYTES = 64 << 20


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
    with _about(committed), random_state.left_alone(on_success=not brings_rng):
        restoration = attached.prepare(manifest.document, findings)
        if strict and findings:
            raise findings.error(committed.step, str(committed.path))
        restoration.require_filled()
        _require_plausible(committed, manifest, restoration.reads)
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
    early = {name for call in (*restoration.checks, *restoration.calls) for name in call.needs}
    restoration.apply_calls(
        read_leaves(committed, manifest, {name: reads[name] for name in early}, options)
    )
    try:
        for part in _parts(restoration.writes, reads, _part_bytes(reads.values())):
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


def _part_bytes(reads: Iterable[Read]) -> int:
    """How much to free and read at a time, per device: half of what devices have left over.

    What is left over at their peak: a restore must not need more than the training it is for.
    """
    placements = {read.placement for read in reads}
    devices: set[Any] = {
        d for p in placements if isinstance(p, Sharding) for d in p.addressable_devices
    }
    if Local.DEFAULT_DEVICE in placements:
        devices.add(jax.local_devices()[0])
    free = [f for device in devices if (f := free_device_bytes(device)) is not None]
    shared = len(devices) if any(d.platform == "cpu" for d in devices) else 1
    return max(_LEAST_PART_BYTES, min(free, default=0) // shared // 2)


def _parts(
    writes: Sequence[Write], reads: Mapping[str, Read], part_bytes: int
) -> Iterator[list[Write]]:
    """The writes in parts of at most so many bytes per device, or of one write."""
    part: list[Write] = []
    size = 0
    for write in writes:
        more = sum(_device_bytes(reads[name]) for name in write.needs)
        if part and size + more > part_bytes:
            yield part
            part, size = [], 0
        part.append(write)
        size += more
    if part:
        yield part


def _device_bytes(read: Read) -> int:
    """What a leaf takes on each of its devices."""
    if isinstance(read.placement, Sharding):
        shard = read.placement.shard_shape(read.spec.shape)
        return math.prod(shard) * np.dtype(read.spec.dtype).itemsize
    return read.spec.nbytes if read.placement is Local.DEFAULT_DEVICE else 0


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
    with _about(committed):
        request = functional.Request(root, abstract_state, prefix, findings)
        if findings:
            raise findings.error(committed.step, str(committed.path))
        _require_plausible(committed, manifest, request.reads)
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
                require_jax_dtype(read.spec.dtype, name)
            shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
            if (shape, dtype) != (read.spec.shape, np.dtype(read.spec.dtype)):
                text = f"{dtype}{list(shape)}" if shape is not None else repr(found)
                findings.mismatch(name, read.spec.content(), text)
    if findings:
        raise findings.error(committed.step, str(committed.path))


_ABSENT = object()


def read_manifest(committed: CommittedStep) -> Manifest:
    """The manifest of a step; what it says was checked, and can be used.

    Raises:
      ForeignCheckpointError: the step has none: bare Orbax wrote it.
      CorruptCheckpointError: it is not one that this package has written.
    """
    with _about(committed):
        with storage.as_corrupt(committed, "folders"):
            inspection.require_contained(committed.path, committed.step)
        path = str(committed.path / storage.MANIFEST)
        manifest = Manifest.from_json(storage.read_manifest(committed), path=path)
        checks.check_document(manifest.document)
    return manifest


@contextlib.contextmanager
def _about(committed: CommittedStep) -> Iterator[None]:
    """Has errors that come out say which step they are about, and where it is."""
    try:
        yield
    except (CorruptCheckpointError, MismatchError) as error:
        if error.step is None:
            where = "" if str(committed.path) in error.message else f" in {committed.path}"
            error.message = f"step {committed.step}{where}: {error.message}"
            error.step = committed.step
            error.path = error.path or str(committed.path)
        raise


def _require_plausible(
    committed: CommittedStep, manifest: Manifest, reads: Mapping[str, Read]
) -> None:
    """Refuses arrays that are not stored as the manifest says, before memory is taken for them.

    Raises:
      CorruptCheckpointError: an array is not there, has another dtype or shape, or a layout this
        package does not write; or more would pass through this host than it has memory.
    """
    with storage.as_corrupt(committed, "array metadata"):
        inspection.require_stored(committed.path, committed.step, manifest.stored(reads))
    located = manifest.plan.locate()
    whole = {
        name: read.spec.nbytes
        for name, read in reads.items()
        if name in located
        or isinstance(read.placement, Local)
        or read.placement.is_fully_replicated
    }
    total, memory = sum(whole.values()), inspection.host_memory_bytes()
    if total > memory:
        largest = max(whole, key=lambda name: whole[name])
        raise CorruptCheckpointError(
            f"{largest}: expected leaves that this host can hold, {memory} bytes, found {total} "
            f"bytes, {whole[largest]} of them in this one",
            key_path=largest,
        )


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
    stacks: dict[str, dict[str, Placement]] = {}
    wanted: dict[str, Wanted] = {}
    empty: dict[str, Any] = {}
    for name, read in reads.items():
        shape, dtype = read.spec.shape, read.spec.dtype
        if name in manifest.plan.empty:
            empty[name] = np.zeros(shape, np.dtype(dtype))
        elif name not in located:
            known = _digests(manifest, name, options)
            wanted[name] = Wanted(shape, dtype, {name: read.placement}, known)
        else:
            stored, _ = located[name]
            if stored not in stacks:
                stacks[stored] = {}
                members = manifest.plan.stacks[stored]
                known = _digests(manifest, stored, options)
                wanted[stored] = Wanted(
                    (len(members), *shape), dtype, stacks[stored], known, members
                )
            stacks[stored][name] = read.placement
    leaves = reading.read_arrays(committed, wanted, options)
    return {**leaves, **put(empty, {name: reads[name].placement for name in empty})}


def _digests(manifest: Manifest, stored: str, options: CheckpointOptions) -> Digests | None:
    if options.verify == "never":
        return None
    if stored not in manifest.digests:
        raise CorruptCheckpointError(f"{stored}: has no digests in the manifest", key_path=stored)
    return manifest.digests[stored]


def _sharding(read: Read) -> Sharding | None:
    """What storage is asked for: a sharding, or None for a host array that is moved afterwards."""
    return None if isinstance(read.placement, Local) else read.placement
