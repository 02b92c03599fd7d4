"""Opens a stored step, and reads its leaves onto the host, compared with their digests.

This needs neither torch, JAX nor Orbax: a program that inspects a checkpoint starts within a
second, and can run beside one that uses the accelerators.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from torchax_ckpt.devices.host_array import Placement
from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    StepNotFoundError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import SINGLE_PROCESS, Processes
from torchax_ckpt.runtime import host_memory, progress
from torchax_ckpt.state.per_process_state import ProcessStates
from torchax_ckpt.storage.arrays import array_checks, read_arrays
from torchax_ckpt.storage.arrays.assembly import Bounds, Index, Piece, Wanted, empty, overlap
from torchax_ckpt.storage.directory import commit_record, step_files
from torchax_ckpt.storage.directory.committed_step import MANIFEST, CommittedStep
from torchax_ckpt.storage.medium import containment, medium

logger = logging.getLogger(__name__)

Parts = Mapping[tuple[str, Bounds], list[tuple[Index, np.ndarray]]]
"""(leaf, region of it) -> the slices of the region that arrays on the host cover, and these."""


@contextlib.contextmanager
def about(committed: CommittedStep) -> Iterator[None]:
    """Adds step and path to a block's CorruptCheckpointError or MismatchError that lacks them."""
    try:
        yield
    except (CorruptCheckpointError, MismatchError) as error:
        if error.step is None:
            where = "" if error.path is not None else f" in {committed.path}"
            error.message = f"step {committed.step}{where}: {error.message}"
            error.step = committed.step
            error.path = error.path or str(committed.path)
        raise


@contextlib.contextmanager
def still_there(committed: CommittedStep) -> Iterator[None]:
    """Raises StepNotFoundError if the ``with`` block fails because the step was deleted.

    If it fails because Git LFS did not fetch files of the step, says that.
    """
    try:
        yield
    except StepNotFoundError:
        raise
    except (CorruptCheckpointError, FileNotFoundError) as error:
        if commit_record.is_there(committed):
            if (file := medium.of(committed.path).pointer_in(committed.path)) is not None:
                text = f"{file}: expected a file of the step, {containment.POINTER}"
                raise committed.error(CorruptCheckpointError, text, file=file) from error
            raise
        raise StepNotFoundError(
            f"{committed.path}: step {committed.step} was deleted meanwhile",
            step=committed.step,
            path=committed.path,
        ) from error


def parse_manifest(committed: CommittedStep) -> Manifest:
    """Returns the manifest of a step; does not check that its leaves can be rebuilt.

    Raises ForeignCheckpointError if bare Orbax wrote the step.
    """
    with about(committed):
        with step_files.as_corrupt(committed, "folders"):
            medium.of(committed.path).require_contained(committed.path, committed.step)
        path = str(committed.path / MANIFEST)
        return Manifest.from_json(step_files.read_manifest(committed), path=path)


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf, as the manifest describes it; a random key has one more dim than the saved key.

    ``kind`` is ``torchax``, ``torch``, ``jax``, ``numpy``, ``numpy_scalar`` or ``key``; ``stack``
    is the stack that has the leaf as a row.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stack: str | None

    @property
    def nbytes(self) -> int:
        """The size of the leaf in bytes, uncompressed."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Compared:
    """The names of the leaves that were read from a step and compared with its digests."""

    manifest: Manifest
    leaves: set[str] = dataclasses.field(default_factory=set)


class StoredStep:
    """One step, open for reading; reading changes no files.

    ``options.max_host_bytes`` bounds the bytes of arrays in memory; a single piece may exceed it.

    Raises ForeignCheckpointError for a step of bare Orbax; CorruptCheckpointError, also for one
    host's part of the state unless ``allow_part``; DirectoryError if the step cannot be read now.
    The methods too raise StepNotFoundError if it was deleted meanwhile.
    """

    has_digests = True

    def __init__(
        self,
        committed: CommittedStep,
        options: CheckpointOptions | None = None,
        *,
        allow_part: bool = False,
    ) -> None:
        self.committed = committed
        self.options = options or CheckpointOptions()
        self.stores: Mapping[str, ts.TensorStore] = {}  # by stored name, if they are open already
        with still_there(committed):
            self.manifest = self._read_manifest()
        if not allow_part:
            self._require_whole()
        located = self.manifest.plan.locate()
        self.leaves = {
            name: StoredLeaf(
                name,
                node["kind"],
                node["dtype"],
                tuple(node["shape"]),
                located[name][0] if name in located else None,
            )
            for name, node in self.manifest.leaves.items()
        }

    def _read_manifest(self) -> Manifest:
        return parse_manifest(self.committed)

    def _require_whole(self) -> None:
        for name, node in self.manifest.leaves.items():
            if "whole" in node:
                raise self.committed.error(
                    CorruptCheckpointError,
                    f"{name}: expected the whole leaf, {node['whole']!r:.80}, found "
                    f"{list(node['shape'])}: this step of a local tier holds one host's part. The "
                    "hosts that saved it can restore it together, with LocalTier; elsewhere read a "
                    "step of the run's durable directory.",
                    name,
                )

    @property
    def stored_bytes(self) -> int:
        """The total size of the step's leaves in bytes, uncompressed."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @functools.cached_property
    def shardings(self) -> Mapping[str, str]:
        """The sharding that each leaf had when saved, in words; {} if Orbax recorded none."""
        by_key = _read_shardings(self.committed)
        found = {}
        for name, leaf in self.leaves.items():
            text = by_key.get(array_checks.stored_key(leaf.stack or name))
            if text is not None:
                found[name] = _in_words(text, is_stacked=leaf.stack is not None)
        return found

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Index, np.ndarray]]:
        """Yields (leaf's name, piece's index in the leaf, content), in the order of storage.

        Only the pieces of a stack that have rows of these leaves are read. Raises
        CorruptCheckpointError, which names the leaf and, if known, the file; or DirectoryError.
        """
        for _, contents in self._pieces(names, lambda name, index: True):
            yield from contents

    def _pieces(
        self, names: Iterable[str], is_needed: Callable[[str, Index], bool]
    ) -> Iterator[tuple[int, list[tuple[str, Index, np.ndarray]]]]:
        """Yields the size in bytes of each piece that ``is_needed``, and what ``stream`` yields."""
        selected = set(names)
        with still_there(self.committed), about(self.committed):
            wanted = self.wanted(dict.fromkeys(selected))
            self.require_stored(selected)

            def is_wanted(stored: str, piece: Piece) -> bool:
                members = wanted[stored].members
                if not members:
                    return is_needed(stored, piece.index)
                rows = selected.intersection(members[piece.index[0]])
                return any(is_needed(name, piece.index[1:]) for name in rows)

            for stored, piece, host in read_arrays.stream_arrays(
                self.committed, wanted, self.options, is_wanted
            ):
                contents = [(stored, piece.index, host)]
                if members := wanted[stored].members:
                    contents = [
                        # numpy gives a 0-d row as a scalar, so it is made an array again.
                        (members[row], piece.index[1:], np.asarray(content, host.dtype))
                        for row, content in enumerate(host, start=piece.start[0])
                        if members[row] in selected
                    ]
                yield piece.nbytes, contents

    def read(
        self,
        names: Iterable[str],
        allocate: Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns whole leaves, by name, in arrays that ``allocate`` (shape, dtype) returns.

        Raises as ``stream`` does, and OutOfMemoryError if the host's memory cannot hold the leaves.
        """
        leaves = [self.leaves[name] for name in names]
        total = sum(leaf.nbytes for leaf in leaves)
        if allocate is None and total > host_memory.host_memory_bytes():
            with still_there(self.committed):
                least = self.require_stored(leaf.name for leaf in leaves)
                raise step_files.beyond_memory(self.committed, total, least)
        found = {
            leaf.name: (allocate or empty)(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves
        }
        with progress.bar(f"reading step {self.committed.step}", lambda: total) as on_bytes:
            for name, index, content in self.stream(found):
                found[name][index] = content
                on_bytes(content.nbytes)
        return found

    def read_parts(self, wanted: Mapping[str, Collection[Bounds]]) -> Parts:
        """Returns regions of leaves, in parts that hold at most twice their bytes, compared.

        Copying all of them together would take longer than reading them. Raises as ``stream`` does.
        """
        found: Parts = {(name, bounds): [] for name, every in wanted.items() for bounds in every}

        def is_needed(name: str, index: Index) -> bool:
            return any(overlap(bounds, index) is not None for bounds in wanted[name])

        for nbytes, contents in self._pieces(wanted, is_needed):
            parts = [
                ((name, bounds), both[0], np.asarray(content[both[1]], content.dtype))
                for name, index, content in contents
                for bounds in wanted[name]
                if (both := overlap(bounds, index)) is not None
            ]
            # A view keeps the memory of the whole piece.
            is_most = 2 * sum(part.nbytes for *_, part in parts) >= nbytes
            for key, within, part in parts:
                found[key].append((within, part if is_most else part.copy()))
        return found

    def read_assets(self) -> dict[str, str]:
        """Returns the step's assets, name -> text; no name leads out of a folder."""
        with still_there(self.committed):
            return step_files.read_assets(self.committed, self.manifest.assets)

    def verify(
        self,
        processes: Processes = SINGLE_PROCESS,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Compares all leaves and assets with their digests; raises as ``stream`` does.

        If there are several processes, each process reads only its share of the stored arrays.
        """
        with still_there(self.committed), about(self.committed):
            if processes.is_first:
                self.read_assets()
            wanted = self.wanted(dict.fromkeys(self.leaves))
            share = itertools.islice(wanted, processes.index, None, processes.count)
            wanted = {name: wanted[name] for name in share}
            self.require_stored(self.leaves)
            for _, piece, _ in read_arrays.stream_arrays(self.committed, wanted, self.options):
                on_bytes(piece.nbytes)

    def is_whole(self, leaves: Collection[str], num_processes: int) -> bool:
        """Returns whether reading these leaves compares every stored byte of the step.

        The other processes are taken to read corresponding leaves. Reads the assets, which no
        restore uses.
        """
        needed = set(self.leaves)
        # If as many processes read as saved, each process reads its own per-process state.
        if ProcessStates.of_document(self.manifest.document).count == num_processes:
            needed = {name for name in needed if names.without_process(name) == name}
            leaves = {names.without_process(name) for name in leaves}
        stored = self.manifest.stored
        if self.options.verify == "never" or not (
            needed.issubset(leaves) or stored(needed).keys() <= stored(leaves).keys()
        ):
            return False
        try:
            step_files.read_assets(self.committed, self.manifest.assets)
        except CheckpointError as error:  # the restored state is intact all the same
            logger.warning("%s", error)
            return False
        return True

    # --- stored arrays ---

    def wanted(
        self, placements: Mapping[str, Placement | None], *, compares: bool = True
    ) -> dict[str, Wanted]:
        """Returns the stored arrays with these leaves, by name; None places a leaf nowhere."""
        wanted = {}
        for stored, (shape, dtype) in self.manifest.stored(placements).items():
            members = self.manifest.plan.stacks.get(stored, ())
            if compares and stored not in self.manifest.digests:
                raise CorruptCheckpointError(
                    f"{stored}: has no digests in the manifest", key_path=stored
                )
            digests = self.manifest.digests[stored] if compares else None
            placed = {n: p for n in members or (stored,) if (p := placements.get(n)) is not None}
            wanted[stored] = Wanted(shape, dtype, placed, digests, members)
        return wanted

    def require_stored(self, leaves: Iterable[str]) -> int:
        """Compares array metadata with the manifest; returns the fewest bytes that arrays take."""
        stored = self.manifest.stored(leaves)
        with step_files.as_corrupt(self.committed, "array metadata"):
            return array_checks.require_stored(self.committed.path, self.committed.step, stored)


def _read_shardings(committed: CommittedStep) -> dict[str, Any]:
    """Returns the shardings that Orbax recorded, by the arrays' Orbax keys; {} without a record."""
    with step_files.as_corrupt(committed, "shardings"):
        try:
            content = commit_record.read_sealed(committed.path, commit_record.SHARDINGS)
        except FileNotFoundError:
            return {}
    try:
        raw = json.loads(content)
        return {base64.b64decode(key).decode(): json.loads(text) for key, text in raw.items()}
    # Another program or an older release wrote it.
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _in_words(sharding: Any, *, is_stacked: bool) -> str:
    """Returns a sharding, which Orbax recorded as JSON, as text: ``(fsdp, -) on fsdp=8``."""
    if not isinstance(sharding, dict):
        return "?"
    if sharding.get("sharding_type") != "NamedSharding":
        return str(sharding.get("device_str") or sharding.get("sharding_type") or "?")
    keys = ("partition_spec", "shape", "axis_names")
    spec, sizes, axes = ([] if sharding.get(key) is None else sharding[key] for key in keys)
    if not all(isinstance(part, list) for part in (spec, sizes, axes)):
        return "?"
    dims = [
        "+".join(map(str, dim)) if isinstance(dim, list) else str(dim or "-")
        for dim in spec[1 if is_stacked else 0 :]
    ]
    mesh = ", ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=False))
    return f"({', '.join(dims)}) on {mesh}" if dims else f"replicated on {mesh}"
