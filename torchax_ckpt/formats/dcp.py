"""Owns what is in a directory that ``torch.distributed.checkpoint`` (DCP) has written.

Its metadata is a pickle, and each chunk of a tensor is one of ``torch.save``'s archives. Neither is
unpickled: the metadata is read as records, and the bytes of a chunk are mapped.

Source: torch 2.12, ``distributed/checkpoint/metadata.py`` and ``filesystem.py``; the archives as
``torch.save`` documents them.
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

METADATA = ".metadata"
_MODEL = "model"
_EXPECTED = "what torch.distributed.checkpoint writes"
_MAX_DESCRIPTION_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Chunk(FilePart):
    """A chunk of a tensor; ``offset`` is where its archive begins, of ``length`` bytes."""

    length: int = 0

    def mapped(self, dtype: np.dtype[Any]) -> np.ndarray:
        """The chunk, mapped, as its archive says that it lies."""
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
            part = archive.part(found, self.start)
        return part.mapped(dtype)


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
        there = ", ".join(sorted({keys[0] for keys in every})[:10]) or "nowhere"
        raise MismatchError(f"{path}: expected tensors at {at!r}, found them at {there}", path=path)
    return TensorFiles(tensors, {}, (path / METADATA,))


def _state(record: Any, kind: str) -> dict[str, Any]:
    """The fields of a dataclass of DCP's."""
    if not isinstance(record, Record) or record.name.rpartition(".")[2] != kind:
        raise ValueError(f"expected {kind}, found {type(record).__name__}")
    if not isinstance(record.state, Pairs):
        raise ValueError(f"expected fields of {kind}")
    return {text_of(field): value for field, value in record.state}


def _place(keys: Any) -> tuple[str, ...]:
    if not isinstance(keys, tuple) or not keys:
        raise ValueError("expected the keys of a tensor")
    return tuple(str(key) if type(key) is int else text_of(key) for key in keys)


def _chunks(
    storage: Any, folder: Path
) -> Iterator[tuple[tuple[str, tuple[int, ...]], tuple[Path, int, int]]]:
    """Key and start of every chunk of a tensor -> file, offset and length of its archive."""
    for index, stored in storage:
        key, where = _state(index, "MetadataIndex"), _state(stored, "_StorageInfo")
        if key.get("offset") is None:
            continue  # no tensor, but some pickled object
        fqn, offset, length = text_of(key["fqn"]), where["offset"], where["length"]
        file = in_folder(folder, where["relative_path"])
        if where.get("transform_descriptors"):
            raise UnsupportedLeafError(f"{folder}: {fqn}: is compressed or transformed")
        if not (type(offset) is type(length) is int and offset >= 0 < length):
            raise ValueError(f"{fqn}: expected a place in {file}")
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


def save_dcp(state: Mapping[str, Any], out: Path) -> None:
    """Writes a nested state dict of plain CPU tensors, from one process.

    Args:
      state: ``model`` and ``optimizer``, as torch's ``get_state_dict`` gives them.
      out: the directory; it has its name once it is complete.

    Raises:
      DirectoryError: it is there already, or cannot be written.
    """
    import torch.distributed.checkpoint as dcp

    if out.exists():
        raise DirectoryError(f"{out}: is there already; nothing was written", path=out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        # Nothing is copied ahead: that is for accelerators, and holds more than a tensor.
        writer = dcp.FileSystemWriter(partial, per_thread_copy_ahead=0)
        with warnings.catch_warnings(), native_torch():
            warnings.simplefilter("ignore")
            dcp.save(dict(state), storage_writer=writer, no_dist=True)
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (OSError, RuntimeError, dcp.CheckpointException)):
            raise DirectoryError(f"cannot write {out}: {error!s:.300}", path=out) from error
        raise
