"""Owns what is in an archive that ``torch.save`` has written. Nothing in it is unpickled.

Its description of the tensors is a pickle, which is read as records; their bytes are mapped.

Source: torch 2.12, ``torch.save``'s notes on serialization, ``torch/_utils.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torchax_ckpt.formats.pickle_records import (
    Persistent,
    Record,
    dtype_of,
    ints_of,
    read_records,
    text_of,
)
from torchax_ckpt.formats.tensor_files import FilePart

_LOCAL_HEADER = struct.Struct("<26xHH")
_REBUILDS = "torch._utils._rebuild_"
_TENSORS = frozenset(f"{_REBUILDS}tensor{version}" for version in ("", "_v2", "_v3"))
_PARAMETERS = frozenset(f"{_REBUILDS}parameter{more}" for more in ("", "_with_state"))
# A tensor with attributes of its own, or of a class of its own.
_OF_CLASS = "torch._tensor._rebuild_from_type_v2"
_USUAL = ("Tensor", "Parameter", "Buffer")
# What torch calls the storage of a dtype.
_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Described:
    """A tensor as an archive describes it.

    Attributes:
      dtype: numpy's or ml_dtypes' name of its dtype, or torch's where they have none.
      shape: its dims.
      storage: which of the archive's storages holds it.
      begin: where in the storage, in elements.
      strides: elements from one index to the next, along each dim.
    """

    dtype: str
    shape: tuple[int, ...]
    storage: str
    begin: int
    strides: tuple[int, ...]


def tensor_in(record: Any) -> Record | None:
    """The tensor, of whatever kind, that a record stands for or has as a parameter."""
    if isinstance(record, Record) and record.name in _PARAMETERS:
        record = record.args[0]
    if isinstance(record, Record) and record.name == _OF_CLASS:
        made, kind, args, _ = record.args
        is_usual = kind.name.rpartition(".")[2] in _USUAL
        record = Record(made.name if is_usual else f"{_REBUILDS}{kind.name}", args)
    is_one = isinstance(record, Record) and record.name.startswith(_REBUILDS)
    return record if is_one else None


def is_plain(tensor: Record) -> bool:
    """Whether it is strided elements of a storage: not sparse, quantized or on ``meta``."""
    return tensor.name in _TENSORS


def described(tensor: Any) -> Described:
    """A plain tensor, as its record says.

    Raises:
      ValueError: it is none.
    """
    if not isinstance(tensor, Record) or not is_plain(tensor):
        raise ValueError("expected a tensor")
    storage, begin, size, strides = tensor.args[:4]
    if not isinstance(storage, Persistent):
        raise ValueError("expected a tensor with a storage")
    _, kind, key, *_ = storage.reference
    if tensor.name.endswith("_v3"):
        dtype = dtype_of(tensor.args[6])
    else:
        dtype = _STORAGES.get(kind.name.rpartition(".")[2], kind.name)
    shape, steps = ints_of(size), ints_of(strides)
    if len(steps) != len(shape) or type(begin) is not int or begin < 0:
        raise ValueError("strides of another shape")
    return Described(dtype, shape, text_of(key), begin, steps)


class Archive:
    """An archive: a file, or a part of one. Made by ``open_archive``.

    Attributes:
      root: what was saved, as records.
    """

    def __init__(self, path: Path, section: _Section) -> None:
        self._path, self._section = path, section
        self._zip = zipfile.ZipFile(section)
        (name,) = (n for n in self._zip.namelist() if n.endswith("/data.pkl"))
        self._folder = name.removesuffix("data.pkl")
        order = f"{self._folder}byteorder"  # which older archives lack
        if order in self._zip.NameToInfo and self._member(order) != b"little":
            raise ValueError("expected little-endian tensors")
        self.root = read_records(self._member(name), str(path))

    def part(self, tensor: Described, start: tuple[int, ...]) -> FilePart:
        """Where a tensor lies.

        Args:
          tensor: one that ``root`` describes.
          start: where it begins in the tensor that it is a part of.

        Raises:
          ValueError, KeyError: the archive does not hold it.
        """
        info = self._zip.getinfo(f"{self._folder}data/{tensor.storage}")
        itemsize = np.dtype(tensor.dtype).itemsize
        reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        if 0 in tensor.shape:
            reach = 0
        if (
            info.compress_type != zipfile.ZIP_STORED
            or (tensor.begin + reach) * itemsize > info.file_size
        ):
            raise ValueError(f"{info.file_size} bytes that do not hold {list(tensor.shape)}")
        header = _LOCAL_HEADER.unpack(self._section.read_at(info.header_offset, _LOCAL_HEADER.size))
        data = self._section.offset + info.header_offset + _LOCAL_HEADER.size + sum(header)
        begin = data + tensor.begin * itemsize
        return FilePart(self._path, begin, start, tensor.shape, tensor.strides)

    def _member(self, name: str) -> bytes:
        """A small file of the archive."""
        info = self._zip.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self._section.max_bytes:
            raise ValueError(f"{name}: {info.file_size} bytes, or compressed: larger than any")
        return self._zip.read(info)


@contextlib.contextmanager
def open_archive(
    path: Path, offset: int, length: int, max_description_bytes: int
) -> Iterator[Archive]:
    """Opens an archive.

    Args:
      path: of its file.
      offset: where in the file it begins.
      length: its bytes.
      max_description_bytes: the most that its list of files, or its pickle, may have.

    Raises:
      ValueError, KeyError, zipfile.BadZipFile, ...: it is none; callers name the file.
    """
    with open(path, "rb") as file:
        yield Archive(path, _Section(file, offset, length, max_description_bytes))


class _Section(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, offset: int, length: int, max_bytes: int) -> None:
        self._file, self._length, self._position = file, length, 0
        self.offset, self.max_bytes = offset, max_bytes

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._position = max(0, offset + (0, self._position, self._length)[whence])
        return self._position

    def tell(self) -> int:
        """As of any file."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        if len(buffer) > self.max_bytes:
            raise ValueError(f"an archive that describes itself in {len(buffer)} bytes")
        count = max(0, min(len(buffer), self._length - self._position))
        data = self.read_at(self._position, count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def read_at(self, position: int, count: int) -> bytes:
        """Bytes, as many as there are, from a position of this part."""
        self._file.seek(self.offset + position)
        data: bytes = self._file.read(count)
        return data
