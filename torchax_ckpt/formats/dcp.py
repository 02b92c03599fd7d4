"""Reads checkpoints of ``torch.distributed.checkpoint`` (DCP).

DCP stores its metadata as a pickle, and each chunk of a tensor as an archive of ``torch.save``,
which says how the elements lie; the chunk's bytes are read when they are needed.

Source: torch 2.12, ``distributed/checkpoint/metadata.py`` and ``filesystem.py``; for the archives,
the documentation of ``torch.save``.
"""

from __future__ import annotations

import dataclasses
import io
import math

# For DCP's metadata alone, which torch itself reads with a plain pickle.load.
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from torchax_ckpt.errors import MismatchError, UnsupportedLeafError
from torchax_ckpt.formats.tensor_files import (
    MAX_METADATA_BYTES,
    FilePart,
    FileTensor,
    TensorFiles,
    by_name,
    in_folder,
    reading,
    require_stored,
)
from torchax_ckpt.formats.torch_files import Section, load, members
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import STORABLE_DTYPES

METADATA = ".metadata"
_MODEL = "model"
_EXPECTED = "a file of torch.distributed.checkpoint"
_MAX_DESCRIPTION_BYTES = 1 << 20
_MAX_DIMS = 64  # numpy's


@dataclasses.dataclass(frozen=True, eq=False)
class _Chunk(FilePart):
    """A chunk of a tensor, stored as an archive of ``length`` bytes at ``offset`` of a file."""

    length: int = 0

    def located(self, dtype: np.dtype[Any]) -> FilePart:
        """Returns the chunk's elements in the archive; raises ValueError if it has others."""
        with reading(self.path, _EXPECTED), open(self.path, "rb") as file:
            section = Section(file, self.offset, self.length, _MAX_DESCRIPTION_BYTES)
            info = members(section)["data/0"]
            # On "meta", torch takes no memory, whatever sizes the archive states.
            with torch.serialization.skip_data():
                found = load(section, self.path, map_location="meta")
            expected = f"torch.{dtype.name}{list(self.shape)}"
            if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
                raise ValueError(f"expected {expected}, found no plain tensor")
            if f"{found.dtype}{list(found.shape)}" != expected or found.is_conj() or found.is_neg():
                raise ValueError(f"expected {expected}, found {found.dtype}{list(found.shape)}")
            strides, begin = found.stride(), int(found.storage_offset())
            reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))
            # DCP stores every element.
            needed = max(begin + reach, math.prod(self.shape))
            if needed * dtype.itemsize > info.file_size:
                raise ValueError(
                    f"expected {expected} in a file inside the archive, found a file of "
                    f"{info.file_size} bytes, which is too small for the tensor"
                )
            offset = self.offset + section.begin_of(info) + begin * dtype.itemsize
        return FilePart(self.path, self.start, self.shape, offset, strides)


class _Stored:
    """A stand-in for an object in DCP's metadata: its state, and no code of its class."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        pass


def _ints(size: Any = ()) -> tuple[int, ...]:
    """Returns the size of a tensor; stands in for ``torch.Size``."""
    if (
        not isinstance(size, (tuple, list))
        or len(size) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 63 for n in size)
    ):
        raise ValueError("expected a size")
    return tuple(size)


def _no_items() -> dict[Any, Any]:
    """Takes no items, unlike ``dict``, because a pickle could multiply them."""
    return {}


_DCP = "torch.distributed.checkpoint"
_STAND_INS: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): _ints,
    ("torch.serialization", "_get_layout"): _Stored,
    ("builtins", "getattr"): _Stored,  # how some Pythons pickle a member of an enum
    ("collections", "OrderedDict"): _no_items,
    (f"{_DCP}.filesystem", "_StorageInfo"): type("_StorageInfo", (_Stored,), {}),
    **{
        (f"{_DCP}.metadata", name): type(name, (_Stored,), {})
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    },
    **{  # torch's before 2.3
        ("torch.distributed._shard.sharded_tensor.metadata", name): _Stored
        for name in ("TensorProperties", "MEM_FORMAT_ENCODING")
    },
    **{
        (module, name): _Stored
        for module in ("pathlib", "pathlib._local")  # the second in Python 3.13
        for name in ("PosixPath", "PurePosixPath", "WindowsPath")
    },
}  # fmt: skip
# The instructions of pickles that torch's metadata needs. None of them hashes a value.
_INSTRUCTIONS = (
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE "
    "BINUNICODE BINUNICODE8 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT MARK TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET APPEND APPENDS GLOBAL STACK_GLOBAL REDUCE NEWOBJ"
)


class _MetadataReader(pickle._Unpickler):
    """Reads DCP's metadata, a pickle, without calling anything that the pickle names.

    ``find_class`` answers the names that DCP writes with stand-ins. The base is Python's own
    unpickler, because C's takes memory for the greatest index that a pickle states. Tuples are no
    keys of dicts: to hash one that has the same parts many times may take forever.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: pickle._Unpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _INSTRUCTIONS.split())
    }

    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in for a class or function of DCP, or one of torch's dtypes."""
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) not in _STAND_INS:
            raise ValueError(
                f"expected only classes that DCP writes into its metadata, found {module:.40}."
                f"{name:.40}"
            )
        return _STAND_INS[module, name]

    def load_build(self) -> None:
        """Sets the state of the object on the stack."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], (_Stored, dict)):
            raise ValueError(f"expected an object of DCP, found a {type(self.stack[-1]).__name__}")
        if isinstance(self.stack[-1], _Stored):
            self.stack[-1].state = state

    def load_setitem(self) -> None:
        """Adds an item to the dict on the stack."""
        value, key = self.stack.pop(), self.stack.pop()
        self._add([key, value])

    def load_setitems(self) -> None:
        """Adds the items above the mark to the dict on the stack."""
        self._add(self.pop_mark())

    def _add(self, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(self.stack[-1]) is not dict or not isinstance(key, (str, int, _Stored)):
                raise ValueError(
                    f"expected dicts with strings or numbers as keys, found a {type(key).__name__}"
                )
            self.stack[-1][key] = value

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def is_dcp(path: Path) -> bool:
    """Returns whether the path is a directory with DCP's metadata, which ``open_dcp`` can read."""
    return (path / METADATA).is_file()


def open_dcp(path: Path, at: str | None = None) -> TensorFiles:
    """Opens a checkpoint of DCP without reading a tensor; for None, its ``model``, or else all."""
    every, _ = _read(path)
    if at is not None:
        place = names.split(at)
    else:
        place = (_MODEL,) if any(keys[0] == _MODEL and keys[1:] for keys in every) else ()
    depth = len(place)
    below = ((k[depth:] or k[-1:], t) for k, t in every.items() if k[:depth] == place)
    tensors = by_name(path, below, at, sorted({keys[0] for keys in every}))
    _require_stored(path, tensors)
    return TensorFiles(tensors, {}, (path / METADATA,))


def open_optimizer(path: Path, at: str) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Returns parameter -> key -> FileTensor or plain value of an optimizer in DCP, and its groups.

    ``at`` is the key of what ``get_state_dict`` returned.
    """
    every, values = _read(path)
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    others = []
    for keys, found in (every | values).items():
        if keys[0] == at and (len(keys) != 4 or keys[1] not in parts):
            others.append(names.join(keys))
        elif keys[0] == at:
            if not isinstance(found, FileTensor):
                file, offset, length = found
                with reading(file, _EXPECTED), open(file, "rb") as opened:
                    section = Section(opened, offset, length, _MAX_DESCRIPTION_BYTES)
                    members(section)
                    found = load(section, f"{file}: {names.join(keys)}", map_location="cpu")
            parts[keys[1]].setdefault(keys[2], {})[keys[3]] = found
    by_index = parts["param_groups"]
    groups = [by_index[key] for key in sorted(by_index, key=lambda key: (len(key), key))]
    if not groups:
        raise MismatchError(
            f"{path}: expected the state dict of an optimizer under the key {at}, with "
            "parameters by name, as get_state_dict returns it; found none",
            path=path,
        )
    if others:
        raise UnsupportedLeafError(
            f"{path}: expected an optimizer without nested state or nested hyperparameters, found "
            f"{', '.join(sorted(others)[:10])}. Import the weights without the optimizer"
        )
    for group in groups:  # those of one class have the same keys, or some have more
        less, more = groups[0].keys() - group.keys(), group.keys() - groups[0].keys()
        if less and more:
            raise MismatchError(
                f"{path}: expected groups of one optimizer, found one with {min(less)} and one "
                f"with {min(more)}, as of several. Import the weights without the optimizers",
                path=path,
            )
    _require_stored(path, {names.join(k): t for k, t in every.items() if k[0] == at})
    return parts["state"], groups


def _read(path: Path) -> tuple[dict[tuple[str, ...], FileTensor], dict[tuple[str, ...], Any]]:
    """Returns the place of each tensor -> the tensor, and of each other value -> its archive."""
    with reading(path / METADATA, _EXPECTED, max_bytes=MAX_METADATA_BYTES):
        root = _MetadataReader(io.BytesIO((path / METADATA).read_bytes())).load()
        metadata = _state(root, "Metadata")
        planner_data = metadata.get("planner_data") or {}
        places = {_text(key): _place(keys) for key, keys in planner_data.items()}
        chunks = dict(_chunks(metadata["storage_data"], path))
        tensors, values = {}, {}
        for key, described in metadata["state_dict_metadata"].items():
            place = places.get(_text(key), (key,))
            if type(described).__name__ != "BytesStorageMetadata":
                described = _state(described, "TensorStorageMetadata")
                tensors[place] = _tensor(key, described, chunks)
            elif (key, None) in chunks:
                values[place] = chunks[key, None]
        return tensors, values


def _require_stored(path: Path, tensors: Mapping[str, FileTensor]) -> None:
    parts = [part for tensor in tensors.values() for part in tensor.parts]
    lengths = {(part.path, part.offset): part.length for part in parts if isinstance(part, _Chunk)}
    require_stored(path, tensors, sum(lengths.values()))


def _state(stored: Any, kind: str) -> dict[str, Any]:
    """Returns the fields of a DCP object, which must be of class ``kind``."""
    if type(stored).__name__ != kind or not isinstance(stored, _Stored):
        raise ValueError(f"expected {kind}, found {type(stored).__name__}")
    if not isinstance(stored.state, dict):
        raise ValueError(f"expected fields of {kind}")
    return stored.state


def _text(value: Any) -> str:
    """Returns the value, which must be a string; an error does not show it, as it may be huge."""
    if type(value) is not str:
        raise ValueError(f"expected a string, found a {type(value).__name__}")
    return value


def _place(keys: Any) -> tuple[str, ...]:
    if not isinstance(keys, tuple) or not keys:
        raise ValueError("expected the keys of a tensor")
    return tuple(str(key) if type(key) is int else _text(key) for key in keys)


def _chunks(
    storage: Any, folder: Path
) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], tuple[Path, int, int]]]:
    """Yields ((key, start), (file, offset and length in bytes)); a pickled value has no start."""
    for index, stored in storage.items():
        key, where = _state(index, "MetadataIndex"), _state(stored, "_StorageInfo")
        fqn, offset, length = _text(key["fqn"]), where["offset"], where["length"]
        file = in_folder(folder, where["relative_path"])
        if where.get("transform_descriptors"):
            raise UnsupportedLeafError(f"{folder}: {fqn}: is compressed or transformed")
        if not (type(offset) is type(length) is int and offset >= 0 < length):
            raise ValueError(
                f"{fqn}: expected a byte offset of at least 0 and a positive length for each chunk "
                f"of this tensor, found an invalid offset or length for a chunk in {file}"
            )
        start = key.get("offset")
        yield (fqn, None if start is None else _ints(start)), (file, offset, length)


def _tensor(key: str, described: dict[str, Any], chunks: dict[Any, Any]) -> FileTensor:
    shape = _ints(described["size"])
    (found, *_) = described["properties"].state
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{key}: expected a dtype, found a {type(found).__name__}")
    dtype = str(found).removeprefix("torch.")
    if dtype not in STORABLE_DTYPES:
        raise UnsupportedLeafError(f"{key}: dtype {dtype} cannot be stored")
    parts = []
    for chunk in described["chunks"]:
        fields = _state(chunk, "ChunkStorageMetadata")
        start, lengths = _ints(fields["offsets"]), _ints(fields["sizes"])
        ends = (s + n for s, n in zip(start, lengths, strict=True))
        if any(end > n for end, n in zip(ends, shape, strict=True)):
            raise ValueError(
                f"{key}: expected chunks within the shape {list(shape)}, found a chunk that "
                "reaches beyond this shape"
            )
        if math.prod(lengths):
            file, offset, length = chunks[key, start]
            parts.append(_Chunk(file, start, lengths, offset, length=length))
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
    """Returns whether repeated cuts, each at an index of one dim, can separate all parts.

    Then they do not overlap; parts made by a mesh always are. Faster than comparing all pairs.
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
