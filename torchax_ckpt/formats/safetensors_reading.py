"""Owns what is in safetensors files: one, or several as Hugging Face writes them, with an index.

The safetensors library checks every file first: its header, offsets and sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, UnsupportedLeafError
from torchax_ckpt.formats.foreign import MAX_METADATA_BYTES, in_folder, require_regular
from torchax_ckpt.formats.safetensors_files import INDEX, METADATA, NAMES_OF_DTYPES, SINGLE
from torchax_ckpt.formats.tensor_files import FilePart, FileTensor, TensorFiles

_DTYPES = {theirs: ours for ours, theirs in NAMES_OF_DTYPES.items()}


def is_safetensors(path: Path) -> bool:
    """Whether there is a file, or a directory with them, that ``open_safetensors`` takes."""
    return path.is_file() or any((path / name).is_file() for name in (INDEX, SINGLE))


def open_safetensors(path: Path) -> TensorFiles:
    """Opens a file, or a directory or index as Hugging Face writes them; reads no tensor yet.

    Raises:
      DirectoryError: there is none, or it cannot be read now.
      CorruptCheckpointError: a file is damaged, or the index does not fit the files.
      UnsupportedLeafError: a tensor has a dtype that cannot be stored.
      ImportError: the safetensors library is not installed.
    """
    files, expected = _files(path)
    tensors: dict[str, FileTensor] = {}
    ties: dict[str, str] = {}
    for file in files:
        found, metadata = _open(file)
        if twice := found.keys() & tensors.keys():
            raise CorruptCheckpointError(f"{file}: {min(twice)} is in two files", path=file)
        if expected is not None and (missing := expected[file.name] - found.keys()):
            raise CorruptCheckpointError(
                f"{file}: {min(missing)} is in the index, but not in the file", path=file
            )
        tensors |= found
        ties |= metadata
    # As safetensors.torch.save_model notes them; other metadata is for people.
    known = {a: n for a, n in ties.items() if n in tensors and a not in tensors}
    return TensorFiles(tensors, known, tuple(files))


def _files(path: Path) -> tuple[list[Path], dict[str, set[str]] | None]:
    """The files of a model and, where there is an index, which names each of them has."""
    index = path / INDEX if path.is_dir() else path
    if path.is_dir() and not index.exists():
        path = path / SINGLE
    if index.name.endswith(".index.json") and index.exists():
        expected: dict[str, set[str]] = {}
        try:
            require_regular(index, may_be_link=True, max_bytes=MAX_METADATA_BYTES)
            for name, file in json.loads(index.read_text())["weight_map"].items():
                expected.setdefault(in_folder(index.parent, file).name, set()).add(name)
        except OSError as error:
            raise DirectoryError(f"{index} cannot be read: {error}", path=index) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{index}: no index: {error!r:.200}", path=index) from None
        return [index.parent / file for file in sorted(expected)], expected
    if not path.is_file():
        raise DirectoryError(f"{path}: no such file", path=path)
    return [path], None


def _open(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """The tensors of one file, and its metadata."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "reading safetensors needs the library of that name: pip install safetensors"
        ) from error
    try:
        require_regular(path, may_be_link=True)  # as in Hugging Face's cache
        with safetensors.safe_open(path, "np") as checked:  # offsets, sizes, the header's form
            metadata = checked.metadata() or {}
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path}: is in the index, and not there", path=path) from None
    except OSError as error:
        raise DirectoryError(f"{path} cannot be read: {error}", path=path) from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{path}: expected safetensors, found what cannot be read as such: {error!s:.200}",
            path=path,
        ) from error
    tensors = {
        name: _tensor(path, name, entry, 8 + length)
        for name, entry in header.items()
        if name != METADATA
    }
    return tensors, dict(metadata)


def _tensor(path: Path, name: str, entry: Mapping[str, Any], begin: int) -> FileTensor:
    if entry["dtype"] not in _DTYPES:
        raise UnsupportedLeafError(f"{path}: {name}: dtype {entry['dtype']} cannot be stored")
    shape = tuple(entry["shape"])
    part = FilePart(path, begin + entry["data_offsets"][0], (0,) * len(shape), shape)
    return FileTensor(_DTYPES[entry["dtype"]], shape, (part,))
