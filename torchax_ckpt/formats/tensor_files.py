"""Describes where files of other programs contain tensors, and reads regions of the tensors.

Opening a file reads no tensor; a later request reads the bytes of one region of a tensor. A restore
therefore needs host memory for the regions that this host's devices hold, not for the whole model.
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
    """A rectangular part of a tensor, stored at one offset in one file.

    Attributes:
      path: the file.
      offset: offset of the part's first byte in the file.
      start: index of the part's first element in the tensor, for each dim.
      shape: dims of the part.
      strides: distance between two neighboring indices along each dim, in elements; None for C
        order.
    """

    path: Path
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    def mapped(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Returns the part as an array that maps the file into memory, read-only."""
        if self.strides is None:
            return np.memmap(self.path, dtype, "r", self.offset, self.shape).view(np.ndarray)
        reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        # The elements are opaque bytes for as_strided, because it does not know float8_e5m2.
        octets = np.dtype((np.void, dtype.itemsize))
        flat = np.memmap(self.path, octets, "r", self.offset, (reach,)).view(np.ndarray)
        steps = tuple(stride * dtype.itemsize for stride in self.strides)
        return as_strided(flat, self.shape, steps, writeable=False).view(dtype)


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor that is stored in one or more parts of files.

    Attributes:
      dtype: name of its dtype in numpy or ml_dtypes.
      shape: its dims.
      parts: the stored parts, which do not overlap and together cover the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def read(self, index: Index) -> np.ndarray:
        """Reads a region of the tensor into new memory.

        Args:
          index: one slice for each dim, with step 1.

        Returns:
          An array of the region's shape and the tensor's dtype.

        Raises:
          CorruptCheckpointError: a file is too short, or the parts overlap or leave gaps.
          DirectoryError: a file cannot be read at the moment.
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
            in_part, in_result = (
                tuple(slice(a - s, b - s) for a, b, s in zip(low, high, origin, strict=True))
                for origin in (part.start, [a for a, _ in bounds])
            )
            result[in_result] = self._mapped(part)[in_part]
            missing -= result[in_result].size
        if missing:
            path = self.parts[0].path
            raise CorruptCheckpointError(f"{path}: its parts overlap, or leave gaps", path=path)
        return result

    def mapped(self) -> np.ndarray:
        """Returns the whole tensor: mapped if it is one part of a file, else copied into memory."""
        if [part.shape for part in self.parts] == [self.shape] and self.nbytes:
            return self._mapped(self.parts[0])
        return self.read(tuple(slice(0, n) for n in self.shape))

    def _mapped(self, part: FilePart) -> np.ndarray:
        try:
            return part.mapped(np.dtype(self.dtype))
        except CorruptCheckpointError:
            raise
        except ValueError as error:  # numpy raises it if a file is too short
            raise CorruptCheckpointError(f"{part.path}: {error}", path=part.path) from error
        except OSError as error:
            raise DirectoryError(f"{part.path} cannot be read: {error}", path=part.path) from error


@dataclasses.dataclass(frozen=True)
class TensorFiles:
    """The weights that files of another program contain.

    Attributes:
      tensors: torch's name -> the tensor and its place in the files.
      ties: alias of a tied weight -> its name in ``tensors``; empty unless the files state ties.
      paths: the files.
    """

    tensors: Mapping[str, FileTensor]
    ties: Mapping[str, str]
    paths: tuple[Path, ...]
