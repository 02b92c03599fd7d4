"""Reads and writes checkpoints of ``torch.distributed.checkpoint`` (DCP).

DCP stores its metadata as a pickle, and each chunk of a tensor as an archive of ``torch.save``. The
reader unpickles neither the metadata nor the archives: it parses the metadata into records, and
maps a chunk's bytes into memory.

Source: torch 2.12, ``distributed/checkpoint/metadata.py`` and ``filesystem.py``; for the archives,
the documentation of ``torch.save``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from torchax_ckpt.errors import DirectoryError, MismatchError, UnsupportedLeafError
from torchax_ckpt.formats.archives import described, open_archive
from torchax_ckpt.formats.pickle_records import (
    Pairs,
    Record,
    dtype_of,
    ints_of,
    read_records,
    text_of,
)
from torchax_ckpt.formats.state_dict import native_torch
from torchax_ckpt.formats.tensor_files import FilePart, FileTensor, TensorFiles
from torchax_ckpt.formats.untrusted_files import MAX_METADATA_BYTES, in_folder, reading_file
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import STORABLE_DTYPES
from torchax_ckpt.storage.medium import fsync, permissions

METADATA = ".metadata"
_MODEL = "model"
_EXPECTED = "a file of torch.distributed.checkpoint"
_MAX_DESCRIPTION_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Chunk(FilePart):
    """A chunk of a tensor, stored as an archive of ``length`` bytes at ``offset`` of a file."""

    length: int = 0

    def mapped(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Maps the chunk into memory, with the offset and the strides that its archive states."""
        return self.plain(dtype).mapped(dtype)

    def plain(self, dtype: np.dtype[Any]) -> FilePart:
        """Returns the chunk's bytes in the archive; raises ValueError if it has other elements."""
        with (
            reading_file(self.path, _EXPECTED),
            open_archive(self.path, self.offset, self.length, _MAX_DESCRIPTION_BYTES) as archive,
        ):
            found = described(archive.root)
            if (found.dtype, found.shape) != (dtype.name, self.shape):
                raise ValueError(
                    f"expected {dtype.name}{list(self.shape)}, "
                    f"found {found.dtype}{list(found.shape)}"
                )
            return archive.part(found, self.start)


def is_dcp(path: Path) -> bool:
    """Returns whether the path is a directory with DCP's metadata, which ``open_dcp`` can read."""
    return (path / METADATA).is_file()


def open_dcp(path: Path, at: str | None = None) -> TensorFiles:
    """Opens a checkpoint of torch's DCP, without reading a tensor.

    Args:
      path: the checkpoint's directory.
      at: keys that lead to the weights, joined with ``/``. None selects the tensors under the key
        ``model``, or all tensors if there is no such key.

    Raises:
      CorruptCheckpointError: the metadata does not have the form that torch writes, or names a file
        outside the directory.
      DirectoryError: the directory cannot be read at the moment.
      MismatchError: there are no tensors under ``at``.
      UnsupportedLeafError: a tensor is compressed or has a dtype that cannot be stored, or two
        tensors would get the same name.
    """
    with reading_file(path / METADATA, _EXPECTED, max_bytes=MAX_METADATA_BYTES):
        root = read_records((path / METADATA).read_bytes(), str(path / METADATA))
        metadata = _state(root, "Metadata")
        places = {text_of(key): _place(keys) for key, keys in metadata.get("planner_data") or ()}
        chunks = dict(_chunks(metadata["storage_data"], path))
        every = {
            places.get(text_of(key), (key,)): _tensor(
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
        found = ", ".join(sorted({keys[0] for keys in every})[:10]) or "nowhere"
        raise MismatchError(
            f"{path}: expected tensors under the keys at={at!r}, found them at {found}. Pass at= "
            "with keys that lead to tensors",
            path=path,
        )
    return TensorFiles(tensors, {}, (path / METADATA,))


def _state(record: Any, kind: str) -> dict[str, Any]:
    """Returns the fields, by name, of the DCP object of class ``kind`` that a record describes."""
    if not isinstance(record, Record) or record.name.rpartition(".")[2] != kind:
        raise ValueError(f"expected {kind}, found {type(record).__name__}")
    if not isinstance(record.state, Pairs):
        raise ValueError(f"expected fields of {kind}")
    return {text_of(field): value for field, value in record.state}


def _place(keys: Any) -> tuple[str, ...]:
    """Returns, as strings, the keys that lead to a tensor in the nested state dict."""
    if not isinstance(keys, tuple) or not keys:
        raise ValueError("expected the keys of a tensor")
    return tuple(str(key) if type(key) is int else text_of(key) for key in keys)


def _chunks(
    storage: Any, folder: Path
) -> Iterator[tuple[tuple[str, tuple[int, ...]], tuple[Path, int, int]]]:
    """Yields, for each chunk, its start in its tensor and the section of a file that contains it.

    Yields:
      ``((key of the tensor, start of the chunk), (file, offset in bytes, length in bytes))``.
    """
    for index, stored in storage:
        key, where = _state(index, "MetadataIndex"), _state(stored, "_StorageInfo")
        if key.get("offset") is None:
            continue  # DCP gives offsets to tensors only: this is a pickled object
        fqn, offset, length = text_of(key["fqn"]), where["offset"], where["length"]
        file = in_folder(folder, where["relative_path"])
        if where.get("transform_descriptors"):
            raise UnsupportedLeafError(f"{folder}: {fqn}: is compressed or transformed")
        if not (type(offset) is type(length) is int and offset >= 0 < length):
            raise ValueError(
                f"{fqn}: expected a byte offset of at least 0 and a positive length for each chunk "
                f"of this tensor, found an invalid offset or length for a chunk in {file}"
            )
        yield (fqn, ints_of(key["offset"])), (file, offset, length)


def _tensor(key: str, described: dict[str, Any], chunks: dict[Any, Any]) -> FileTensor:
    shape = ints_of(described["size"])
    dtype = dtype_of(described["properties"].state[0])
    if dtype not in STORABLE_DTYPES:
        raise UnsupportedLeafError(f"{key}: dtype {dtype} cannot be stored")
    parts = []
    for chunk in described["chunks"]:
        fields = _state(chunk, "ChunkStorageMetadata")
        start, lengths = ints_of(fields["offsets"]), ints_of(fields["sizes"])
        ends = (s + n for s, n in zip(start, lengths, strict=True))
        if any(end > n for end, n in zip(ends, shape, strict=True)):
            raise ValueError(
                f"{key}: expected chunks within the shape {list(shape)}, found a chunk that "
                "reaches beyond this shape"
            )
        if math.prod(lengths):
            file, offset, length = chunks[key, start]
            parts.append(_Chunk(file, offset, start, lengths, length=length))
    if sum(math.prod(part.shape) for part in parts) != math.prod(shape):
        raise ValueError(
            f"{key}: expected chunks that fill the shape {list(shape)}, found chunks with more or "
            "fewer elements"
        )
    if not _are_separable(parts):
        raise ValueError(
            f"{key}: expected chunks that result from cutting the tensor, and then each piece, "
            "straight through along one dim, found chunks that overlap or were cut in another way"
        )
    return FileTensor(dtype, shape, tuple(parts))


def _are_separable(parts: Sequence[FilePart]) -> bool:
    """Returns whether repeated cuts can separate all parts from each other.

    A cut at an index of one dim divides a group of parts into the parts that end before the index
    and the parts that begin at the index or after it. Separable parts do not overlap, and the parts
    into which a mesh divides a tensor are always separable. A search for cuts is faster than
    comparing each of many parts with every other part.
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
            return all(_are_separable(group) for group in groups)
    return False


def save_dcp(state: Mapping[str, Any], out: Path) -> None:
    """Writes a nested state dict of plain CPU tensors as a DCP checkpoint, from one process.

    Args:
      state: the keys ``model`` and ``optimizer``, with the values that torch's ``get_state_dict``
        returns.
      out: the new directory. It has a temporary name until it is complete.

    Raises:
      DirectoryError: the directory exists already, or cannot be written.
    """
    import torch.distributed.checkpoint as dcp

    if out.exists():
        raise DirectoryError(f"{out}: exists already; nothing was written", path=out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        permissions.make_folder(epath.Path(out.parent))
        partial.mkdir()
        # Copying ahead speeds up reads from accelerators, but keeps several tensors in memory.
        writer = dcp.FileSystemWriter(partial, per_thread_copy_ahead=0)
        with warnings.catch_warnings(), native_torch():
            warnings.simplefilter("ignore")
            dcp.save(dict(state), storage_writer=writer, no_dist=True)
        fsync.swap_in(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (OSError, RuntimeError, dcp.CheckpointException)):
            raise DirectoryError(f"cannot write {out}: {error!s:.300}", path=out) from error
        raise
