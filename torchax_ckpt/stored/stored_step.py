"""Opens a stored step for reading, and returns its leaves as arrays on the host.

This module uses neither torch nor devices. A program that inspects a checkpoint therefore starts
within a second, and can run beside a training program that uses the accelerators. A restore, which
must rebuild every leaf, uses ``restoring/step_reader.py``.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from torchax_ckpt.errors import CorruptCheckpointError, MismatchError, StepNotFoundError
from torchax_ckpt.layout.manifest import Digests, Manifest
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import SINGLE_PROCESS, Processes
from torchax_ckpt.runtime import host_memory, progress
from torchax_ckpt.storage.arrays import array_checks, read_arrays
from torchax_ckpt.storage.arrays.placement import Piece, Wanted, empty
from torchax_ckpt.storage.directory import commit_record, step_files
from torchax_ckpt.storage.directory.committed_step import MANIFEST, CommittedStep
from torchax_ckpt.storage.medium import containment

Index = tuple[slice, ...]


@contextlib.contextmanager
def about(committed: CommittedStep) -> Iterator[None]:
    """Adds step and path to a block's CorruptCheckpointError or MismatchError that lacks them."""
    try:
        yield
    except (CorruptCheckpointError, MismatchError) as error:
        if error.step is None:
            where = "" if str(committed.path) in error.message else f" in {committed.path}"
            error.message = f"step {committed.step}{where}: {error.message}"
            error.step = committed.step
            error.path = error.path or str(committed.path)
        raise


@contextlib.contextmanager
def still_there(committed: CommittedStep) -> Iterator[None]:
    """Raises StepNotFoundError if the ``with`` block fails because the step was deleted.

    If the block raises CorruptCheckpointError or FileNotFoundError, this function checks whether
    the step still exists. If it does, the block's error is raised unchanged.

    Raises:
      StepNotFoundError: the step was deleted.
    """
    try:
        yield
    except StepNotFoundError:
        raise
    except (CorruptCheckpointError, FileNotFoundError) as error:
        if commit_record.is_there(committed):
            raise
        raise StepNotFoundError(
            f"{committed.path}: step {committed.step} was deleted meanwhile",
            step=committed.step,
            path=committed.path,
        ) from error


def parse_manifest(committed: CommittedStep) -> Manifest:
    """Returns the manifest of a step; does not check that its leaves can be rebuilt.

    Raises:
      ForeignCheckpointError: the step has no manifest: bare Orbax wrote it.
      CorruptCheckpointError: the manifest is not one that this package wrote.
    """
    with about(committed):
        with step_files.as_corrupt(committed, "folders"):
            containment.require_contained(committed.path, committed.step)
        path = str(committed.path / MANIFEST)
        return Manifest.from_json(step_files.read_manifest(committed), path=path)


def require_whole(committed: CommittedStep, manifest: Manifest) -> None:
    """Refuses a step that holds only one host's part of the state.

    Raises:
      CorruptCheckpointError: the step is such a part; the message names a leaf that is not whole.
    """
    for name, node in manifest.leaves().items():
        if "whole" in node:
            raise CorruptCheckpointError(
                f"step {committed.step} in {committed.path}: {name}: expected the whole leaf, "
                f"{node['whole']!r:.80}, found {list(node['shape'])}: this step of a local tier "
                "holds one host's part. The hosts that saved it can restore it together, with "
                "LocalTier; elsewhere read a step of the run's durable directory.",
                step=committed.step,
                path=committed.path,
                key_path=name,
            )


def digests_of(manifest: Manifest, stored: str) -> Digests:
    """Returns the digests of a stored array.

    Raises:
      CorruptCheckpointError: the manifest has no digests of the array.
    """
    if stored not in manifest.digests:
        raise CorruptCheckpointError(f"{stored}: has no digests in the manifest", key_path=stored)
    return manifest.digests[stored]


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf, as the manifest of a step describes it.

    Attributes:
      name: for example ``model/encoder.0.weight``.
      kind: the kind of the saved leaf: ``torchax``, ``torch``, ``jax``, ``numpy``, ``numpy_scalar``
        or ``key``.
      dtype: the name of its dtype in numpy or ml_dtypes.
      shape: its shape, as stored: a random key has one more dim than the saved key had.
      stack: the name of the stack that has the leaf as a row; None if no stack does.
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


class StoredStep:
    """One step, open for reading. Reading a step changes no files in the step's directory.

    Attributes:
      committed: the step.
      manifest: its manifest.
      leaves: every leaf by name, in the manifest's order.

    Args:
      committed: the step.
      allow_part: whether to accept one host's part of a step, whose leaves are not whole.

    Raises:
      ForeignCheckpointError: bare Orbax wrote the step.
      CorruptCheckpointError: its manifest is damaged, or the step is one host's part.
      StepNotFoundError: the step was deleted meanwhile. The methods raise this too.
      DirectoryError: the step cannot be read now.
    """

    def __init__(self, committed: CommittedStep, *, allow_part: bool = False) -> None:
        self.committed = committed
        with still_there(committed):
            self.manifest = parse_manifest(committed)
        if not allow_part:
            require_whole(committed, self.manifest)
        located = self.manifest.plan.locate()
        self.leaves = {
            name: StoredLeaf(
                name,
                node["kind"],
                node["dtype"],
                tuple(node["shape"]),
                located[name][0] if name in located else None,
            )
            for name, node in self.manifest.leaves().items()
        }

    @property
    def stored_bytes(self) -> int:
        """The total size of the step's leaves in bytes, uncompressed."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @functools.cached_property
    def shardings(self) -> Mapping[str, str]:
        """The sharding that each leaf had when saved, in words; {} if Orbax recorded no shardings.

        Raises:
          CorruptCheckpointError: the record of the shardings is damaged.
          DirectoryError: the record cannot be read now.
        """
        by_key = _read_shardings(self.committed)
        found = {}
        for name, leaf in self.leaves.items():
            text = by_key.get(array_checks.stored_key(leaf.stack or name))
            if text is not None:
                found[name] = _in_words(text, is_stacked=leaf.stack is not None)
        return found

    def stream(
        self, names: Iterable[str], options: CheckpointOptions
    ) -> Iterator[tuple[str, Index, np.ndarray]]:
        """Reads leaves piece by piece, and compares the pieces with their digests.

        Yields the leaves in the order in which they are stored, each leaf in one or several pieces.
        Of a stack, only the pieces that have rows of these leaves are read.
        ``options.max_host_bytes`` bounds the bytes in memory at one time, but a single piece may
        exceed this bound.

        Yields:
          The leaf's name, the index of the piece in the leaf, and the piece's content.

        Raises:
          CorruptCheckpointError: a leaf is damaged; the message names it and, if known, the file.
          DirectoryError: the step cannot be read now.
        """
        asked = set(names)
        with still_there(self.committed), about(self.committed):
            wanted = self._wanted(asked)

            def has_asked(stored: str, piece: Piece) -> bool:
                members = wanted[stored].members
                return not members or not asked.isdisjoint(members[piece.index[0]])

            for stored, piece, host in read_arrays.stream_arrays(
                self.committed, wanted, options, has_asked
            ):
                members = wanted[stored].members
                if not members:
                    yield stored, piece.index, host
                    continue
                for row, content in enumerate(host, start=piece.start[0]):
                    if members[row] in asked:
                        # numpy gives a 0-d row as a scalar, so it is made an array again.
                        yield members[row], piece.index[1:], np.asarray(content, host.dtype)

    def read(
        self,
        names: Iterable[str],
        options: CheckpointOptions,
        allocate: Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns whole leaves, by name.

        Args:
          names: the leaves.
          options: memory bounds of reading.
          allocate: returns an array to read into, given its shape and dtype; default: an array in
            this host's memory.

        Raises:
          CorruptCheckpointError, DirectoryError: as in ``stream``.
          OutOfMemoryError: this host's memory cannot hold the leaves.
        """
        names = list(names)
        total = sum(self.leaves[name].nbytes for name in names)
        if allocate is None and total > host_memory.host_memory_bytes():
            with still_there(self.committed):
                least = self._require_stored(self.manifest.stored(names))
                path, step = self.committed.path, self.committed.step
                raise containment.beyond_memory(path, step, total, least)
        found = {
            name: (allocate or empty)(self.leaves[name].shape, np.dtype(self.leaves[name].dtype))
            for name in names
        }
        with progress.bar(f"reading step {self.committed.step}", lambda: total) as on_bytes:
            for name, index, content in self.stream(found, options):
                found[name][index] = content
                on_bytes(content.nbytes)
        return found

    def read_assets(self) -> dict[str, str]:
        """Returns the step's assets, as a dict from name to text; {} for a step without assets.

        The names are relative paths that lead out of no folder (``storage/medium/assets.py``).

        Raises:
          CorruptCheckpointError: the assets are damaged.
          DirectoryError: the assets cannot be read now.
        """
        with still_there(self.committed):
            return step_files.read_assets(self.committed, self.manifest.assets)

    def verify(
        self,
        options: CheckpointOptions,
        processes: Processes = SINGLE_PROCESS,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Reads all leaves and assets, and compares them with their digests.

        If there are several processes, each process reads only its share of the stored arrays.

        Raises:
          CorruptCheckpointError, DirectoryError: as in ``stream``.
        """
        with still_there(self.committed), about(self.committed):
            if processes.is_first:
                self.read_assets()
            wanted = self._wanted(self.leaves)
            share = itertools.islice(wanted, processes.index, None, processes.count)
            wanted = {name: wanted[name] for name in share}
            for _, piece, _ in read_arrays.stream_arrays(self.committed, wanted, options):
                on_bytes(piece.nbytes)

    def _wanted(self, names: Iterable[str]) -> dict[str, Wanted]:
        stored = self.manifest.stored(names)
        self._require_stored(stored)
        stacks = self.manifest.plan.stacks
        return {
            name: Wanted(shape, dtype, {}, digests_of(self.manifest, name), stacks.get(name, ()))
            for name, (shape, dtype) in stored.items()
        }

    def _require_stored(self, stored: Mapping[str, tuple[tuple[int, ...], str]]) -> int:
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
    """Returns a sharding as text, for example ``(fsdp, -) on fsdp=8``.

    Args:
      sharding: the JSON that Orbax recorded.
      is_stacked: whether the array is a stack, whose first dim is not a dim of the leaf.
    """
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
