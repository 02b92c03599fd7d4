"""Owns what is in a directory that ``torch.distributed.checkpoint`` (DCP) has written.

Its metadata is a pickle, and each chunk of a tensor is one of ``torch.save``'s archives. Neither is
unpickled: the metadata is read as records, and the bytes of a chunk are mapped.

Source: torch 2.12, ``distributed/checkpoint/metadata.py`` and ``filesystem.py``; the archives as
``torch.save`` documents them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import struct
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    MismatchError,
    UnsupportedLeafError,
)
from torchax_ckpt.formats.foreign import MAX_METADATA_BYTES, in_folder, require_regular
from torchax_ckpt.formats.records import Name, Pairs, Persistent, Record, read_records
from torchax_ckpt.formats.tensor_files import FilePart, FileTensor, TensorFiles
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import STORABLE_DTYPES

METADATA = ".metadata"
_MODEL = "model"
_MAX_DESCRIPTION_BYTES = 1 << 20
_MAX_DIMS = 64  # numpy's
_LOCAL_HEADER = struct.Struct("<26xHH")
# What torch calls the storage of a dtype.
_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Chunk(FilePart):
    """A chunk of a tensor; ``offset`` is where its archive begins, of ``length`` bytes."""

    length: int = 0

    def mapped(self, dtype: np.dtype[Any]) -> np.ndarray:
        """The chunk, mapped, as its archive says that it lies."""
        with _read(self.path), open(self.path, "rb") as file:
            archive = zipfile.ZipFile(_Section(file, self.offset, self.length))
            (described,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            folder = described.removesuffix("data.pkl")
            record = read_records(_member(archive, described), str(self.path))
            key, begin, strides = self._laid_out(record, dtype)
            if _member(archive, f"{folder}byteorder") != b"little":
                raise ValueError("expected little-endian tensors")
            info = archive.getinfo(f"{folder}data/{key}")
            reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))
            if (
                info.compress_type != zipfile.ZIP_STORED
                or min(begin, *strides, 0) < 0
                or (begin + reach) * dtype.itemsize > info.file_size
            ):
                raise ValueError(f"{info.file_size} bytes that do not hold {list(self.shape)}")
            file.seek(self.offset + info.header_offset)
            header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        data = self.offset + info.header_offset + _LOCAL_HEADER.size + sum(header)
        return FilePart(
            self.path, data + begin * dtype.itemsize, self.start, self.shape, strides
        ).mapped(dtype)

    def _laid_out(self, record: Any, dtype: np.dtype[Any]) -> tuple[str, int, tuple[int, ...]]:
        """Which of the archive's storages holds the chunk, where in it, and its strides."""
        if not isinstance(record, Record) or not record.name.startswith("torch._utils._rebuild_te"):
            raise ValueError("expected a tensor")
        storage, begin, size, strides = record.args[:4]
        if not isinstance(storage, Persistent):
            raise ValueError("expected a tensor with a storage")
        _, kind, key, *_ = storage.reference
        if record.name.endswith("_v3"):
            found = _dtype(record.args[6])
        else:
            found = _STORAGES.get(kind.name.rpartition(".")[2], kind.name)
        if (found, _ints(size)) != (dtype.name, self.shape):
            raise ValueError(
                f"expected {dtype.name}{list(self.shape)}, found {found}{list(_ints(size))}"
            )
        if len(_ints(strides)) != len(self.shape) or type(begin) is not int:
            raise ValueError("strides of another shape")
        return _text(key), begin, _ints(strides)


class _Section(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

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
        if len(buffer) > _MAX_DESCRIPTION_BYTES:
            raise ValueError(f"an archive that describes itself in {len(buffer)} bytes")
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """A small file of an archive."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > _MAX_DESCRIPTION_BYTES:
        raise ValueError(f"{name}: {info.file_size} bytes, or compressed: larger than any")
    return archive.read(info)


def is_dcp(path: Path) -> bool:
    """Whether there is a directory that ``open_dcp`` takes."""
    return (path / METADATA).is_file()


def open_dcp(path: Path, at: str | None = None) -> TensorFiles:
    """Opens a checkpoint of torch's DCP; reads no tensor yet.

    Args:
      path: its directory.
      at: keys of the place where the weights are, joined with ``/``. None for ``model`` if there
        is such a key, or else everything.

    Raises:
      CorruptCheckpointError: its metadata is not as torch writes it, or leads out of the directory.
      DirectoryError: it cannot be read now.
      MismatchError: there are no tensors at this place.
      UnsupportedLeafError: a tensor has a dtype that cannot be stored, or is compressed.
    """
    with _read(path / METADATA, MAX_METADATA_BYTES):
        root = read_records((path / METADATA).read_bytes(), str(path / METADATA))
        metadata = _state(root, "Metadata")
        places = {_text(key): _place(keys) for key, keys in metadata.get("planner_data") or ()}
        chunks = dict(_chunks(metadata["storage_data"], path))
        every = {
            places.get(_text(key), (key,)): _tensor(
                key, _state(described, "TensorStorageMetadata"), chunks
            )
            for key, described in metadata["state_dict_metadata"]
            if described.name.endswith(".TensorStorageMetadata")
        }
    if at is not None:
        place = names.split(at)
    else:
        place = (_MODEL,) if any(keys[0] == _MODEL and keys[1:] for keys in every) else ()
    tensors: dict[str, FileTensor] = {}
    for keys, tensor in every.items():
        if keys[: len(place)] == place:
            name = ".".join(keys[len(place) :]) or keys[-1]
            if name in tensors:
                raise UnsupportedLeafError(f"{path}: two tensors would be called {name!r}")
            tensors[name] = tensor
    if not tensors:
        there = ", ".join(sorted({keys[0] for keys in every})[:10]) or "nowhere"
        raise MismatchError(f"{path}: expected tensors at {at!r}, found them at {there}", path=path)
    return TensorFiles(tensors, {}, (path / METADATA,))


@contextlib.contextmanager
def _read(path: Path, max_bytes: int | None = None) -> Iterator[None]:
    """What no torch has written is damage; links, which might lead out, are not followed."""
    try:
        require_regular(path, max_bytes=max_bytes)
        yield
    except OSError as error:
        raise DirectoryError(f"{path} cannot be read: {error}", path=path) from error
    except CheckpointError:
        raise
    except Exception as error:  # zipfile's own, and what comes of taking records for others
        raise CorruptCheckpointError(
            f"{path}: expected what torch.distributed.checkpoint writes: {error!s:.200}", path=path
        ) from error


def _state(record: Any, kind: str) -> dict[str, Any]:
    """The fields of a dataclass of DCP's."""
    if not isinstance(record, Record) or record.name.rpartition(".")[2] != kind:
        raise ValueError(f"expected {kind}, found {type(record).__name__}")
    if not isinstance(record.state, Pairs):
        raise ValueError(f"expected fields of {kind}")
    return {_text(field): value for field, value in record.state}


def _text(value: Any) -> str:
    # Whatever else a pickle holds may have parts in common, so many that to show, compare or hash
    # it never ends.
    if type(value) is not str:
        raise ValueError(f"expected a text, found a {type(value).__name__}")
    return value


def _place(keys: Any) -> tuple[str, ...]:
    if not isinstance(keys, tuple) or not keys:
        raise ValueError("expected the keys of a tensor")
    return tuple(str(key) if type(key) is int else _text(key) for key in keys)


def _ints(size: Any) -> tuple[int, ...]:
    """``torch.Size`` or a tuple."""
    values = size.args[0] if isinstance(size, Record) else size
    if (
        not isinstance(values, tuple)
        or len(values) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 63 for n in values)
    ):
        raise ValueError("expected a size")
    return values


def _dtype(name: Any) -> str:
    if not isinstance(name, Name):
        raise ValueError("expected a dtype")
    return name.name.removeprefix("torch.")


def _chunks(
    storage: Any, folder: Path
) -> Iterator[tuple[tuple[str, tuple[int, ...]], tuple[Path, int, int]]]:
    """Key and start of every chunk of a tensor -> file, offset and length of its archive."""
    for index, stored in storage:
        key, where = _state(index, "MetadataIndex"), _state(stored, "_StorageInfo")
        if key.get("offset") is None:
            continue  # no tensor, but some pickled object
        fqn, offset, length = _text(key["fqn"]), where["offset"], where["length"]
        file = in_folder(folder, where["relative_path"])
        if where.get("transform_descriptors"):
            raise UnsupportedLeafError(f"{folder}: {fqn}: is compressed or transformed")
        if not (type(offset) is type(length) is int and offset >= 0 < length):
            raise ValueError(f"{fqn}: expected a place in {file}")
        yield (fqn, _ints(key["offset"])), (file, offset, length)


def _tensor(key: str, described: dict[str, Any], chunks: dict[Any, Any]) -> FileTensor:
    shape = _ints(described["size"])
    dtype = _dtype(described["properties"].state[0])
    if dtype not in STORABLE_DTYPES:
        raise UnsupportedLeafError(f"{key}: dtype {dtype} cannot be stored")
    parts = []
    for chunk in described["chunks"]:
        fields = _state(chunk, "ChunkStorageMetadata")
        start, lengths = _ints(fields["offsets"]), _ints(fields["sizes"])
        ends = (s + n for s, n in zip(start, lengths, strict=True))
        if any(end > n for end, n in zip(ends, shape, strict=True)):
            raise ValueError(f"{key}: a chunk beyond {list(shape)}")
        if math.prod(lengths):
            file, offset, length = chunks[key, start]
            parts.append(_Chunk(file, offset, start, lengths, length=length))
    if sum(math.prod(part.shape) for part in parts) != math.prod(shape):
        raise ValueError(f"{key}: chunks that do not make up {list(shape)}")
    if not _are_apart(parts):
        raise ValueError(f"{key}: chunks that overlap, or cannot be cut apart along the dims")
    return FileTensor(dtype, shape, tuple(parts))


def _are_apart(parts: Sequence[FilePart]) -> bool:
    """Whether straight cuts, along one dim after the other, separate all parts.

    They do for whatever is sharded over a mesh; and it is told at once, where to compare each part
    with each takes long.
    """
    if len(parts) < 2:
        return True
    for dim in range(len(parts[0].shape)):
        groups: list[list[FilePart]] = []
        end = 0
        for part in sorted(parts, key=lambda part: part.start[dim]):
            if not groups or part.start[dim] >= end:
                groups.append([])
            groups[-1].append(part)
            end = max(end, part.start[dim] + part.shape[dim])
        if len(groups) > 1:
            return all(_are_apart(group) for group in groups)
    return False
