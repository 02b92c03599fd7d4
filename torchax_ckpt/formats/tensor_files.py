"""Describes where files of other programs contain tensors, reads regions, and writes such files.

A restore needs host memory for the regions that this host's devices hold, not for the whole model.
Files are checked before they are opened, because anybody may have written them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from etils import epath
from numpy.lib.stride_tricks import as_strided

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    MismatchError,
    UnsupportedLeafError,
)
from torchax_ckpt.storage.arrays import chunking
from torchax_ckpt.storage.arrays.assembly import Index, bounds_of, empty, overlap
from torchax_ckpt.storage.medium import containment, fsync, permissions, seals

MAX_METADATA_BYTES = seals.MAX_JSON_BYTES

# .to("jax") converts 64-bit integers to these dtypes, unless jax_enable_x64 is set.
NARROWED = {"int64": "int32", "uint64": "uint32"}
# Tensors that share elements may need as many bytes again as the files have, and this many more.
_MAX_SHARED_BYTES = 256 << 20
_MAX_NAME_BYTES = 255  # of a file system
# How files begin that people take for weights that can be read.
_SIGNATURES = {b"\x93NUMPY": "NumPy (.npy)", b"GGUF": "GGUF", b"\x89HDF\r\n\x1a\n": "HDF5"}
_MAX_SIGNATURE_BYTES = 8


def require_regular(path: Path, *, may_be_link: bool = False, max_bytes: int | None = None) -> None:
    """Raises ValueError for a folder, a large file, or a pipe, of which a read may never end."""
    status = path.stat(follow_symlinks=may_be_link)
    if not stat.S_ISREG(status.st_mode):
        kind = "symbolic link" if stat.S_ISLNK(status.st_mode) else "folder or special file"
        raise ValueError(f"{path.name!r:.80}: expected a regular file, found a {kind}")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(
            f"{path.name!r:.80}: expected at most {max_bytes} bytes, found a file of "
            f"{status.st_size} bytes"
        )


def require_known(path: Path) -> None:
    """Raises an error that says what a file is, if its first bytes show that it is no such file."""
    if containment.is_pointer(path):
        raise CorruptCheckpointError(
            f"{path}: expected the weights of a model, {containment.POINTER}", path=path, file=path
        )
    begins = containment.beginning(path, _MAX_SIGNATURE_BYTES)
    for signature, kind in _SIGNATURES.items():
        if begins.startswith(signature):
            raise UnsupportedLeafError(
                f"{path}: expected a file of safetensors, of torch.save or a folder of DCP, found "
                f"a file of {kind}. Read it with the library that wrote it, and save its arrays "
                "with safetensors",
                path=path,
            )


def in_folder(folder: Path, name: Any) -> Path:
    """Returns the path of a file in a folder; raises ValueError if the name leads elsewhere."""
    if type(name) is not str:
        raise ValueError(
            "expected a string as the name of each file that the checkpoint lists, found a "
            f"{type(name).__name__}"
        )
    if Path(name).name != name or name in ("", "..") or len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise ValueError(f"{name!r:.80} is not a file name")
    return folder / name


def require_new(path: Path) -> None:
    """Raises DirectoryError if a file or folder to write exists."""
    if path.exists():
        raise DirectoryError(f"{path}: exists already; nothing was written", path=path)


@contextlib.contextmanager
def writing(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yields temporary names of new files or folders; all get their own, in order, or none."""
    for path in paths:
        require_new(path)
    written: list[int] = []
    try:
        with contextlib.ExitStack() as swapped:
            for folder in {path.parent for path in paths}:
                permissions.make_folder(epath.Path(folder))
            last_first = [swapped.enter_context(fsync.swapped_in(p)) for p in reversed(paths)]
            yield last_first[::-1]
            written += [partial.stat().st_ino for partial in last_first[::-1]]
    except BaseException as error:
        for path, number in zip(paths, written, strict=False):
            # Another program may have given its own file or folder this name.
            with contextlib.suppress(OSError):
                if path.lstat().st_ino == number:
                    fsync.remove(path)
        # torch's zip writer reports a full disk as a RuntimeError.
        is_of_disk = isinstance(error, (OSError, RuntimeError))
        if is_of_disk and not isinstance(error, CheckpointError):
            out = paths[0]
            raise DirectoryError(f"cannot write {out}: {error!s:.300}", path=out) from error
        raise


@contextlib.contextmanager
def reading(
    path: Path, expected: str, *, may_be_link: bool = False, max_bytes: int | None = None
) -> Iterator[None]:
    """Turns an OSError of the block into a DirectoryError (not now), others into corruption."""
    try:
        require_regular(path, may_be_link=may_be_link, max_bytes=max_bytes)
        yield
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise DirectoryError(f"{path} cannot be read: {error}", path=path) from error
    except Exception as error:  # zipfile's errors, and type errors from unexpected records
        require_known(path)
        raise CorruptCheckpointError(
            f"{path}: expected {expected}: {error!s:.200}", path=path
        ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class FilePart:
    """A rectangular part of a tensor, stored in one file from byte ``offset``.

    ``start`` is its place in the tensor; ``strides`` are in elements, None for C order. ``array``
    is the part if it is mapped into memory already; ``offset`` then says nothing.
    """

    path: Path
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None
    array: np.ndarray | None = None

    def located(self, dtype: np.dtype[Any]) -> FilePart:
        """Returns the part with its place in the file; raises ValueError if it is not there."""
        return self

    def mapped(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Returns the part as an array that maps the file into memory, read-only."""
        if self.array is not None:
            return self.array
        if self.strides is None:
            return self._map(dtype, math.prod(self.shape)).reshape(self.shape)
        reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        # The elements are opaque bytes for as_strided, because it does not know float8_e5m2.
        flat = self._map(np.dtype((np.void, dtype.itemsize)), reach)
        steps = tuple(stride * dtype.itemsize for stride in self.strides)
        return as_strided(flat, self.shape, steps, writeable=False).view(dtype)

    def _map(self, dtype: np.dtype[Any], num_elements: int) -> np.ndarray:
        """Maps elements of the file from ``offset`` on; numpy's memmap takes ten times as long."""
        skipped = self.offset % mmap.ALLOCATIONGRANULARITY
        nbytes = skipped + num_elements * dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            pages = mmap.mmap(
                file.fileno(), nbytes, access=mmap.ACCESS_READ, offset=self.offset - skipped
            )
        return np.frombuffer(pages, dtype, num_elements, skipped)

    def read_into(self, result: np.ndarray, index: Index) -> bool:
        """Reads a region if it is one run of bytes in file and array; returns whether it did."""
        is_run = self.strides is None and self.array is None
        if not is_run or not result.flags.c_contiguous:
            return False
        long = [d for d, n in enumerate(result.shape) if n > 1]
        if long and result.shape[long[0] + 1 :] != self.shape[long[0] + 1 :]:
            return False
        start = 0
        for part, length in zip(index, self.shape, strict=True):
            start = start * length + part.start
        octets: Any = result.reshape(-1).view(np.uint8)
        target = memoryview(octets)
        offset = self.offset + start * result.dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            while target:
                num_read = os.preadv(file.fileno(), [target], offset)
                if not num_read:
                    raise EOFError(f"expected {len(target)} more bytes at {offset}, found the end")
                target, offset = target[num_read:], offset + num_read
        return True


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor that is stored in parts, which do not overlap and together cover it."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def is_one_part(self) -> bool:
        """Whether one part of a file holds the whole tensor, so that ``mapped`` copies nothing."""
        return bool(self.nbytes) and [part.shape for part in self.parts] == [self.shape]

    def read(self, index: Index) -> np.ndarray:
        """Reads a region of the tensor, slices with step 1, into new memory."""
        bounds = bounds_of(index, self.shape)
        result = empty(tuple(b - a for a, b in bounds), np.dtype(self.dtype))
        missing = result.size
        if not missing:
            return result
        for part in self.parts:
            both = overlap(bounds, chunking.region(part.start, part.shape))
            if both is None:
                continue
            in_result, in_part = both
            where: Any = (*in_result, ...)  # with it, a tensor without dims gives a view too
            region = result[where]
            missing -= region.size
            with reading(part.path, "all bytes of its tensors", may_be_link=True):
                located = part.located(result.dtype)
                if not located.read_into(region, in_part):
                    region[...] = located.mapped(result.dtype)[in_part]
        if missing:
            path = self.parts[0].path
            raise CorruptCheckpointError(f"{path}: its parts overlap, or leave gaps", path=path)
        return result

    def mapped(self) -> np.ndarray:
        """Returns the whole tensor: mapped if it is one part of a file, else copied into memory."""
        if self.is_one_part:
            with reading(self.parts[0].path, "all bytes of its tensors", may_be_link=True):
                dtype = np.dtype(self.dtype)
                return self.parts[0].located(dtype).mapped(dtype)
        return self.read(tuple(slice(0, n) for n in self.shape))


@dataclasses.dataclass(frozen=True)
class TensorFiles:
    """The weights that files of another program contain, and ties: alias -> name in ``tensors``."""

    tensors: Mapping[str, FileTensor]
    ties: Mapping[str, str]
    paths: tuple[Path, ...]


_Tensor = TypeVar("_Tensor")


def by_name(
    path: Path,
    tensors: Iterable[tuple[Sequence[str], _Tensor]],
    at: str | None,
    keys: Iterable[str],
) -> dict[str, _Tensor]:
    """Returns tensors by their joined keys; ``keys`` are those of the file, for the error."""
    found: dict[str, _Tensor] = {}
    for parts, tensor in tensors:
        name = ".".join(parts)
        if name in found:
            raise UnsupportedLeafError(f"{path}: two tensors would be called {name!r}")
        found[name] = tensor
    if not found:
        listed = ", ".join(f"{key!r:.80}" for key in itertools.islice(keys, 10)) or "no keys"
        where = f"at {at!r}" if at else "in a dict"
        raise MismatchError(
            f"{path}: expected tensors {where}, found {listed}. Pass at= with keys that lead to "
            "tensors",
            path=path,
        )
    return found


def require_stored(path: Path, tensors: Mapping[str, FileTensor], stored_bytes: int) -> None:
    """Raises UnsupportedLeafError if a small file, of overlapping tensors, asks for all memory."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if nbytes > 2 * stored_bytes + _MAX_SHARED_BYTES:
        raise UnsupportedLeafError(
            f"{path}: expected tensors that the files store whole, found tensors of {nbytes} bytes "
            f"in files that store {stored_bytes} bytes of them, so they share elements. Save each "
            "as tensor.contiguous()"
        )
