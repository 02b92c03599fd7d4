"""Reads and writes safetensors files.

The writer writes the header first, then the tensors piece by piece, in any order; the safetensors
library would need memory for all tensors. The reader has the library check header, offsets, sizes.

Source: the format in https://huggingface.co/docs/safetensors, and the library's ``save_model`` for
the names of tied weights in the metadata.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchax_ckpt.errors import (
    CorruptCheckpointError,
    DirectoryError,
    UnsupportedLeafError,
)
from torchax_ckpt.formats.tensor_files import (
    MAX_METADATA_BYTES,
    FilePart,
    FileTensor,
    TensorFiles,
    in_folder,
    reading,
    writing,
)
from torchax_ckpt.formats.weights import Weights, as_dtype
from torchax_ckpt.layout.batches import batches
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep

NAMES_OF_DTYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip

METADATA = "__metadata__"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ALIGNMENT = 8


def export_safetensors(
    stored: StoredStep,
    weights: Weights,
    out: Path,
    *,
    max_shard_bytes: int | None,
    texts: Mapping[Path, str],
    on_bytes: Callable[[int], None],
) -> list[Path]:
    """Writes weights with Hugging Face's file names, index and metadata; returns all paths."""
    files = _divide(stored, weights, out, max_shard_bytes)
    text_files = dict(texts)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(leaf.nbytes for leaf in weights.leaves.values())},
            "weight_map": {n: path.name for path, leaves in files.items() for n in sorted(leaves)},
        }
        text_files[out / INDEX] = json.dumps(index, indent=2) + "\n"
    paths = [*files, *text_files]  # in this order they get their names
    headers = [_header(leaves, weights.ties) for leaves in files.values()]
    places = collections.defaultdict(list)
    with writing(paths) as partials:
        for partial, leaves, (header, offsets) in zip(
            partials, files.values(), headers, strict=False
        ):
            _allocate(partial, header, sum(leaf.nbytes for leaf in leaves.values()))
            for name, leaf in leaves.items():
                places[leaf.name].append((partial, offsets[name], np.dtype(leaf.dtype)))
        for name, region, content in stored.stream(places):
            shape = stored.leaves[name].shape
            for path, offset, dtype in places[name]:
                part = as_dtype(content, dtype, name)
                if part.shape == shape:  # mapping a part of the file would take longer
                    octets: Any = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                    with open(path, "r+b") as file:
                        file.seek(offset)
                        file.write(octets)
                else:
                    mapped = np.memmap(path, dtype, "r+", offset, shape)
                    mapped[region] = part
                    del mapped  # so that written pages no longer count as memory of this process
                on_bytes(part.nbytes)
        for partial, text in zip(partials[len(files) :], text_files.values(), strict=True):
            partial.write_bytes(text.encode())
    return paths


def _divide(
    stored: StoredStep, weights: Weights, out: Path, max_shard_bytes: int | None
) -> dict[Path, dict[str, StoredLeaf]]:
    """Returns file -> its tensors; of shards, those of frozen weights come first."""
    if METADATA in weights.leaves:
        raise UnsupportedLeafError(
            f"no tensor can have the name {METADATA} in safetensors; export to another format"
        )
    leaves, limit = weights.leaves, max_shard_bytes or sys.maxsize
    databases = stored.manifest.unchanged.values() if max_shard_bytes else ()
    unchanged = {array for database in databases for array in database.arrays}
    parts: list[list[str]] = [[], []]
    for name, leaf in leaves.items():
        parts[(leaf.stack or leaf.name) not in unchanged].append(name)
    found = (b for part in parts for b in batches(part, lambda n: leaves[n].nbytes, limit))
    shards = [{name: leaves[name] for name in shard} for shard in found] or [{}]
    if len(shards) == 1:
        return {out if out.suffix == ".safetensors" else out / SINGLE: shards[0]}
    return {
        out / f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard
        for i, shard in enumerate(shards, 1)
    }


def _header(
    leaves: Mapping[str, StoredLeaf], ties: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Returns a file's header, which precedes the tensors, and where in the file each begins."""
    described: dict[str, object] = {
        # Hugging Face's loaders require "format". safetensors.torch.save_model writes the ties in
        # this form.
        METADATA: {
            **{alias: name for alias, name in ties.items() if name in leaves},
            "format": "pt",
        }
    }
    end, begins = 0, {}
    # Tensors with the widest elements come first, so that every tensor is aligned.
    for name in sorted(leaves, key=lambda n: (-np.dtype(leaves[n].dtype).itemsize, n)):
        leaf = leaves[name]
        if leaf.dtype not in NAMES_OF_DTYPES:
            raise UnsupportedLeafError(
                f"{leaf.name}: safetensors has no dtype {leaf.dtype}", key_path=leaf.name
            )
        begins[name], end = end, end + leaf.nbytes
        described[name] = {
            "dtype": NAMES_OF_DTYPES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    offsets = {name: 8 + len(text) + begin for name, begin in begins.items()}
    return len(text).to_bytes(8, "little") + text, offsets


def _allocate(path: Path, header: bytes, nbytes: int) -> None:
    with open(path, "xb") as opened:
        opened.write(header)
        opened.flush()
        if nbytes:  # a write to the mapped file on a full disk would kill the process
            os.posix_fallocate(opened.fileno(), len(header), nbytes)


_DTYPES = {theirs: ours for ours, theirs in NAMES_OF_DTYPES.items()}


def is_safetensors(path: Path) -> bool:
    """Returns whether the path is any file, or a directory with Hugging Face's safetensors."""
    return path.is_file() or any((path / name).is_file() for name in (INDEX, SINGLE))


def open_safetensors(path: Path) -> TensorFiles:
    """Opens a safetensors file, or a directory or index of Hugging Face's; see ``open_files``."""
    files, expected = _files(path)
    tensors: dict[str, FileTensor] = {}
    ties: dict[str, str] = {}
    for file in files:
        if expected is not None and not file.exists():
            raise CorruptCheckpointError(
                f"{file}: expected this file, which the index names, found none. Copy or download "
                "it",
                path=file,
            )
        found, metadata = _open(file)
        if twice := found.keys() & tensors.keys():
            raise CorruptCheckpointError(f"{file}: {min(twice)} is in two files", path=file)
        if expected is not None and (missing := expected[file.name] - found.keys()):
            raise CorruptCheckpointError(
                f"{file}: expected the tensor {min(missing)}, which the index lists for this file, "
                "found no such tensor. Copy or download the files again",
                path=file,
            )
        tensors |= found
        ties |= metadata
    # safetensors.torch.save_model records a tie as alias -> name of a tensor. Other metadata is for
    # people.
    known = {a: n for a, n in ties.items() if n in tensors and a not in tensors}
    return TensorFiles(tensors, known, tuple(files))


def _files(path: Path) -> tuple[list[Path], dict[str, set[str]] | None]:
    """Returns a model's files, and the tensors that its index, if any, lists for each file."""
    index = path / INDEX if path.is_dir() else path
    if path.is_dir() and not index.exists():
        path = path / SINGLE
    if index.name.endswith(".index.json") and index.exists():
        expected: dict[str, set[str]] = {}
        expects = "an index of safetensors"
        with reading(index, expects, may_be_link=True, max_bytes=MAX_METADATA_BYTES):
            for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
                expected.setdefault(in_folder(index.parent, file).name, set()).add(name)
        return [index.parent / file for file in sorted(expected)], expected
    if not path.is_file():
        raise DirectoryError(f"{path}: no such file", path=path)
    return [path], None


def _open(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "reading safetensors needs the safetensors library: pip install safetensors"
        ) from error
    # Hugging Face's cache contains links.
    with reading(path, "a file of safetensors", may_be_link=True):
        with safetensors.safe_open(path, "np") as checked:  # checks header, offsets and sizes
            metadata = checked.metadata() or {}
        return tensors_in(path)[0], dict(metadata)


def tensors_in(path: Path) -> tuple[dict[str, FileTensor], int]:
    """Returns the tensors of a file that is known to be sound, and the length of its header."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    tensors = {
        name: _tensor(path, name, entry, 8 + length)
        for name, entry in header.items()
        if name != METADATA
    }
    return tensors, 8 + length


def _tensor(path: Path, name: str, entry: Mapping[str, Any], begin: int) -> FileTensor:
    if entry["dtype"] not in _DTYPES:
        raise UnsupportedLeafError(f"{path}: {name}: dtype {entry['dtype']} cannot be stored")
    shape = tuple(entry["shape"])
    part = FilePart(path, (0,) * len(shape), shape, begin + entry["data_offsets"][0])
    return FileTensor(_DTYPES[entry["dtype"]], shape, (part,))
