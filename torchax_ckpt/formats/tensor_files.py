"""Owns tensors as they lie in files of other programs: described at once, read part by part.

Nothing is read until it is asked for, and then no more than that: a model of any size goes to its
devices in the memory of their parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError
from torchax_ckpt.storage.arrays.placement import Index, empty


@dataclasses.dataclass(frozen=True)
class FilePart:
    """A part of a tensor, in one place of one file.

    Attributes:
      path: the file.
      offset: where its bytes begin.
      start: where in the tensor it begins, along each dim.
      shape: its dims.
      strides: elements from one index to the next, along each dim; None for C order.
    """

    path: Path
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    def mapped(self, dtype: np.dtype[Any]) -> np.ndarray:
        """The part, mapped into memory."""
        if self.strides is None:
            return np.memmap(self.path, dtype, "r", self.offset, self.shape).view(np.ndarray)
        reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        # As bytes, since numpy's as_strided does not know float8_e5m2.
        octets = np.dtype((np.void, dtype.itemsize))
        flat = np.memmap(self.path, octets, "r", self.offset, (reach,)).view(np.ndarray)
        steps = tuple(stride * dtype.itemsize for stride in self.strides)
        return as_strided(flat, self.shape, steps, writeable=False).view(dtype)


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor in files.

    Attributes:
      dtype: numpy's or ml_dtypes' name of its dtype.
      shape: its dims.
      parts: what it is made of; they do not overlap, and leave nothing out.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def read(self, index: Index) -> np.ndarray:
        """A region of it, in new memory.

        Raises:
          CorruptCheckpointError: a file is shorter than it was.
          DirectoryError: it cannot be read now.
        """
        bounds = [s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True)]
        result = empty(tuple(b - a for a, b in bounds), np.dtype(self.dtype))
        missing = result.size
        if not missing:
            return result
        for part in self.parts:
            low = [max(a, s) for (a, _), s in zip(bounds, part.start, strict=True)]
            ends = (s + n for s, n in zip(part.start, part.shape, strict=True))
            high = [min(b, e) for (_, b), e in zip(bounds, ends, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            there, here = (
                tuple(slice(a - s, b - s) for a, b, s in zip(low, high, origin, strict=True))
                for origin in (part.start, [a for a, _ in bounds])
            )
            result[here] = self._mapped(part)[there]
            missing -= result[here].size
        if missing:
            path = self.parts[0].path
            raise CorruptCheckpointError(f"{path}: its parts overlap, or leave gaps", path=path)
        return result

    def mapped(self) -> np.ndarray:
        """All of it; mapped where it is one part, and in new memory where it is several."""
        if [part.shape for part in self.parts] == [self.shape] and self.nbytes:
            return self._mapped(self.parts[0])
        return self.read(tuple(slice(0, n) for n in self.shape))

    def _mapped(self, part: FilePart) -> np.ndarray:
        try:
            return part.mapped(np.dtype(self.dtype))
        except CorruptCheckpointError:
            raise
        except ValueError as error:  # numpy's, where a file is too short
            raise CorruptCheckpointError(f"{part.path}: {error}", path=part.path) from error
        except OSError as error:
            raise DirectoryError(f"{part.path} cannot be read: {error}", path=part.path) from error


@dataclasses.dataclass(frozen=True)
class TensorFiles:
    """Weights in files.

    Attributes:
      tensors: torch's name -> where it lies.
      ties: another name of a tied weight -> its name, where the files say so.
      paths: the files.
    """

    tensors: Mapping[str, FileTensor]
    ties: Mapping[str, str]
    paths: tuple[Path, ...]
