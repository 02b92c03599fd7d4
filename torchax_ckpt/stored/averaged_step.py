"""Reads several steps of a run as one step, whose leaves are weighted averages.

Writers of files read such a step like any other step. The leaves are averaged in groups that fit
the memory bound, so the steps may have been saved on different meshes and in different stacks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from torchax_ckpt.errors import MismatchError
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.storage.arrays.placement import empty
from torchax_ckpt.storage.arrays.read_arrays import STREAMED_BYTES
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.stored.scratch import room_for
from torchax_ckpt.stored.stored_step import Index, StoredLeaf, StoredStep, about

# The dtype in which leaves are averaged, and which their average has. Leaves of all other dtypes
# have no average.
_DTYPES: Mapping[str, str] = {
    "bfloat16": "float32", "float16": "float32", "float32": "float32", "float64": "float64",
    "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip
_MAX_LISTED = 10


class AveragedStep(StoredStep):
    """Several steps, open for reading as one step.

    A leaf of a floating-point or complex dtype is the weighted average of this leaf in all steps,
    computed in float32, float64, complex64 or complex128: ``leaves`` has this dtype. An element
    begins as that of the oldest step. Each later step, with the weight w, changes it from ``a`` to
    ``a + (x - a) * (w / W)``, where W is the sum of the weights of the steps up to this one. If x
    equals a, the element stays as it is, so elements that are equal in all steps keep their bits.
    Where ``x - a`` overflows, the change is to ``a * (1 - w / W) + x * (w / W)``.

    Other leaves are those of the newest step: integers, bools and random keys. Leaves of 8 bits or
    less are mostly quantized weights; they must be equal in all steps. Everything else, such as the
    manifest's document and the assets, is that of the newest step too.

    Attributes:
      weights: each step, oldest first -> its weight. The weights sum up to 1.
      scratch: the folder for temporary files.
      taken: names of the leaves read so far that have no average and differ between the steps.

    Args:
      weights: each step -> its weight, a positive number. At least one.
      scratch: a folder for temporary files, which leaves larger than the memory bound need.

    Raises:
      CorruptCheckpointError, DirectoryError, ForeignCheckpointError, StepNotFoundError: as for
        ``StoredStep``.
    """

    def __init__(self, weights: Mapping[CommittedStep, float], scratch: Path) -> None:
        steps = sorted(weights, key=lambda committed: committed.step)
        super().__init__(steps[-1])
        total = math.fsum(weights.values())
        self.weights = {committed: weights[committed] / total for committed in steps}
        self.taken: set[str] = set()
        self._steps = [StoredStep(committed) for committed in steps]
        self.scratch = scratch
        self.leaves = {
            name: dataclasses.replace(leaf, dtype=_DTYPES.get(leaf.dtype, leaf.dtype))
            for name, leaf in self.leaves.items()
        }

    @property
    def newest(self) -> StoredStep:
        """The newest step, alone."""
        return self._steps[-1]

    def require_alike(self, names: Iterable[str]) -> None:
        """Checks that all steps have these leaves, with equal dtypes and shapes.

        Raises:
          MismatchError: they have not; the message lists the differences to the newest step.
        """
        names = list(names)
        differing = {}
        for older in self._steps[:-1]:
            for name in names:
                expected, found = _form(self.newest, name), _form(older, name)
                if expected != found:
                    where = f"{name} in step {older.committed.step}"
                    differing[where] = f"expected {expected}, found {found}"
        if not differing:
            return
        listed = "; ".join(f"{where}: {text}" for where, text in differing.items())
        if len(differing) > _MAX_LISTED:
            listed = "; ".join(listed.split("; ")[:_MAX_LISTED])
            listed += f"; and {len(differing) - _MAX_LISTED} more"
        raise MismatchError(
            f"steps with different weights have no average: {listed}. Leave these steps out",
            mismatched=differing,
            path=self.committed.path.parent,
        )

    def stream(
        self, names: Iterable[str], options: CheckpointOptions
    ) -> Iterator[tuple[str, Index, np.ndarray]]:
        """Reads leaves of all steps, and yields each leaf's average as one piece.

        Half of ``options.max_host_bytes`` bounds the averages in memory at one time, and the other
        half the pieces that are read. A leaf larger than that is averaged in a temporary file.

        Yields:
          The leaf's name, the index of the whole leaf, and its average.

        Raises:
          MismatchError: a step lacks one of the leaves or has it in another form, or leaves of 8
            bits or less differ.
          CorruptCheckpointError, DirectoryError: as in ``StoredStep.stream``.
        """
        names = list(names)
        self.require_alike(names)
        half_bytes = max(1, (options.max_host_bytes or STREAMED_BYTES) // 2)
        half = dataclasses.replace(options, max_host_bytes=half_bytes)
        for group in _groups([self.leaves[name] for name in names], half_bytes):
            with room_for(group, self.scratch, half) as allocate:
                averages = {
                    leaf.name: (allocate or empty)(leaf.shape, np.dtype(leaf.dtype))
                    for leaf in group
                }
                self._average(averages, half)
                for leaf in group:
                    whole = tuple(slice(0, n) for n in leaf.shape)
                    yield leaf.name, whole, averages.pop(leaf.name)

    def _average(self, averages: Mapping[str, np.ndarray], options: CheckpointOptions) -> None:
        """Reads leaves of all steps, oldest first, and puts their averages into arrays."""
        total = 0.0
        for stored, weight in zip(self._steps, self.weights.values(), strict=True):
            total += weight
            for name, index, content in stored.stream(averages, options):
                whole = averages[name]
                average = whole[index] if index else whole  # numpy gives a 0-d array as a scalar
                if stored is self._steps[0]:
                    average[...] = content
                elif self.leaves[name].dtype in _DTYPES:
                    _move(average, content, weight / total)
                else:
                    with about(stored.committed):
                        self._replace(name, average, content)

    def _replace(self, name: str, older: np.ndarray, newer: np.ndarray) -> None:
        """Replaces a part of a leaf that has no average by that of a newer step."""
        octets = np.dtype(f"u{older.dtype.itemsize}")
        if np.array_equal(older.view(octets), newer.view(octets)):
            return
        if older.dtype.itemsize == 1 and older.dtype.kind != "b":
            raise MismatchError(
                f"{name}: expected a leaf that is equal in all steps, because {older.dtype.name} "
                "mostly holds quantized weights, which have no average; found another in an older "
                "step. Average the weights before they are quantized",
                mismatched={name: "differs from an older step"},
            )
        self.taken.add(name)
        older[...] = newer


def _form(stored: StoredStep, name: str) -> str:
    leaf = stored.leaves.get(name)
    return "no such leaf" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _groups(leaves: Iterable[StoredLeaf], max_bytes: int) -> Iterator[list[StoredLeaf]]:
    """Yields lists of leaves to average together; a leaf larger than the bound is alone in one.

    The leaves of a stack follow each other, because a piece of the stack may have several of them.
    """
    group: list[StoredLeaf] = []
    size = 0
    for leaf in sorted(leaves, key=lambda leaf: leaf.stack or leaf.name):
        if group and size + leaf.nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(leaf)
        size += leaf.nbytes
    if group:
        yield group


def _move(average: np.ndarray, newer: np.ndarray, share: float) -> None:
    """Moves an average in place by a share of its distance to newer values.

    Args:
      average: float32, float64, complex64 or complex128.
      newer: values of the same shape, of a dtype of which no value changes in the average's dtype.
      share: the share, from 0 to 1.
    """
    if average.dtype.kind == "c":
        # A product of complex numbers would make NaN of an infinite part.
        _move(average.real, newer.real, share)
        _move(average.imag, newer.imag, share)
        return
    newer = np.asarray(newer, average.dtype)
    factor = average.dtype.type(share)
    with np.errstate(invalid="ignore", over="ignore"):
        moved = average + (newer - average) * factor
        overflowed = np.isfinite(average) & np.isfinite(newer) & ~np.isfinite(moved)
        if overflowed.any():  # the distance of two large numbers, not their average
            np.copyto(moved, average * (1 - factor) + newer * factor, where=overflowed)
    np.copyto(average, moved, where=newer != average)
