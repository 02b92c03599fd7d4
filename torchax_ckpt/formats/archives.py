"""Reads the zip archives that ``torch.save`` writes, without unpickling anything.

An archive contains a pickle, which describes the tensors, and a file for each storage of elements.
The reader parses the pickle into objects of ``pickle_records``, and maps the elements into memory.

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
# torch pickles a tensor with extra attributes, or of a subclass, as a call of this function.
_FROM_CLASS = "torch._tensor._rebuild_from_type_v2"
_TORCH_CLASSES = ("Tensor", "Parameter", "Buffer")
# Name of torch's class of a storage -> dtype of the storage's elements.
_STORAGE_DTYPES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Described:
    """The description of one tensor in an archive: its dtype, and where its elements are.

    Attributes:
      dtype: name of its dtype in numpy or ml_dtypes; torch's name if neither has that dtype.
      shape: its dims.
      storage: key of the archive's storage that contains its elements.
      begin: offset of its first element in the storage, in elements.
      strides: distance between two neighboring indices along each dim, in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    storage: str
    begin: int
    strides: tuple[int, ...]


def tensor_in(record: Any) -> Record | None:
    """Returns the record if it describes a tensor; for a parameter, the record of its tensor.

    The tensor may be of any kind, such as plain, sparse or quantized. The function returns None if
    the given record describes neither a tensor nor a parameter.
    """
    if isinstance(record, Record) and record.name in _PARAMETERS:
        record = record.args[0]
    if isinstance(record, Record) and record.name == _FROM_CLASS:
        rebuild, kind, args, _ = record.args
        is_torch_class = kind.name.rpartition(".")[2] in _TORCH_CLASSES
        record = Record(rebuild.name if is_torch_class else f"{_REBUILDS}{kind.name}", args)
    is_tensor = isinstance(record, Record) and record.name.startswith(_REBUILDS)
    return record if is_tensor else None


def is_plain(tensor: Record) -> bool:
    """Returns True for a plain, strided tensor; False for a sparse, quantized or meta tensor."""
    return tensor.name in _TENSORS


def described(tensor: Any) -> Described:
    """Returns dtype, shape, storage and strides of a plain tensor, from its record.

    Raises:
      ValueError: the record does not describe a plain tensor.
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
        dtype = _STORAGE_DTYPES.get(kind.name.rpartition(".")[2], kind.name)
    shape, steps = ints_of(size), ints_of(strides)
    if len(steps) != len(shape) or type(begin) is not int or begin < 0:
        raise ValueError(
            "expected a tensor for which the archive states an offset of at least 0 and one stride "
            "per dim, found a tensor with an invalid offset or another number of strides"
        )
    return Described(dtype, shape, text_of(key), begin, steps)


class Archive:
    """An open archive of ``torch.save``, which is a whole file or a section of a file.

    ``open_archive`` makes an Archive.

    Attributes:
      root: the object that ``torch.save`` saved, as records.
    """

    def __init__(self, path: Path, section: _Section) -> None:
        self._path, self._section = path, section
        self._zip = zipfile.ZipFile(section)
        (name,) = (n for n in self._zip.namelist() if n.endswith("/data.pkl"))
        self._folder = name.removesuffix("data.pkl")
        order = f"{self._folder}byteorder"  # older archives have no such file
        if order in self._zip.NameToInfo and self._member(order) != b"little":
            raise ValueError("expected little-endian tensors")
        self.root = read_records(self._member(name), str(path))

    def part(self, tensor: Described, start: tuple[int, ...]) -> FilePart:
        """Returns where the bytes of a tensor lie in the file.

        Args:
          tensor: a tensor that ``root`` describes.
          start: if the tensor is a chunk of a larger tensor, the index of the chunk's first element
            in the larger tensor; otherwise zeros.

        Raises:
          ValueError, KeyError: the archive does not contain the tensor's bytes.
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
            raise ValueError(
                f"expected a tensor of shape {list(tensor.shape)} in an uncompressed file inside "
                f"the archive, found a file of {info.file_size} bytes that is compressed or too "
                "small for the tensor"
            )
        header = _LOCAL_HEADER.unpack(self._section.read_at(info.header_offset, _LOCAL_HEADER.size))
        data = self._section.offset + info.header_offset + _LOCAL_HEADER.size + sum(header)
        begin = data + tensor.begin * itemsize
        return FilePart(self._path, begin, start, tensor.shape, tensor.strides)

    def _member(self, name: str) -> bytes:
        """Returns the content of a small file inside the archive.

        Raises:
          ValueError: the file is compressed or too large.
        """
        info = self._zip.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self._section.max_bytes:
            raise ValueError(
                f"{name}: expected an uncompressed file of at most {self._section.max_bytes} bytes "
                f"inside the archive, found a file of {info.file_size} bytes that is compressed or "
                "too large"
            )
        return self._zip.read(info)


@contextlib.contextmanager
def open_archive(
    path: Path, offset: int, length: int, max_description_bytes: int
) -> Iterator[Archive]:
    """Opens an archive.

    Args:
      path: the file that contains the archive.
      offset: first byte of the archive in the file.
      length: size of the archive in bytes.
      max_description_bytes: largest permitted size of the archive's list of files, and of its
        pickle.

    Raises:
      ValueError, KeyError, zipfile.BadZipFile, ...: the bytes are not an archive of ``torch.save``.
        The message does not name the file; the caller adds its name.
    """
    with open(path, "rb") as file:
        yield Archive(path, _Section(file, offset, length, max_description_bytes))


class _Section(io.RawIOBase):
    """A file object that reads one section of another file."""

    def __init__(self, file: Any, offset: int, length: int, max_bytes: int) -> None:
        self._file, self._length, self._position = file, length, 0
        self.offset, self.max_bytes = offset, max_bytes

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the read position within the section, and returns the new position."""
        self._position = max(0, offset + (0, self._position, self._length)[whence])
        return self._position

    def tell(self) -> int:
        """Returns the read position within the section."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads bytes from the read position into the buffer; returns the number of bytes read.

        Raises:
          ValueError: the buffer is larger than ``max_bytes``. ``zipfile`` reads an archive's list
            of files with one call, into a buffer of the size that the archive states.
        """
        if len(buffer) > self.max_bytes:
            raise ValueError(
                f"expected an archive that lists its files in at most {self.max_bytes} bytes, "
                f"found a list of files of {len(buffer)} bytes"
            )
        count = max(0, min(len(buffer), self._length - self._position))
        data = self.read_at(self._position, count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def read_at(self, position: int, count: int) -> bytes:
        """Returns ``count`` bytes from a position in the section; fewer if the file ends before."""
        self._file.seek(self.offset + position)
        data: bytes = self._file.read(count)
        return data
