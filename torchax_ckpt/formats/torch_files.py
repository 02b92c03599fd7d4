"""Reads files of ``torch.save`` with torch, after checks of what torch believes; runs no code.

A file is a zip archive of a pickle, which describes the tensors, and a file for each storage of
elements. ``torch.load(weights_only=True)`` runs no code of the pickle, but torch believes the sizes
that an archive states, and maps a compressed storage as if it were none.
"""

from __future__ import annotations

import functools
import io
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.formats.tensor_files import (
    FilePart,
    FileTensor,
    TensorFiles,
    by_name,
    reading,
    require_known,
    require_stored,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import STORABLE_DTYPES
from torchax_ckpt.plain_torch import array_of, native_torch

_LOCAL_HEADER = struct.Struct("<26xHH")  # the lengths of the name and of the extra field
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ZIP = b"PK\x03\x04"
# Keys under which training programs save the weights: those of torch's tutorials and of Lightning.
_MODELS = ("model", "state_dict")
# Enough for some 200,000 tensors.
_MAX_DESCRIPTION_BYTES = 32 << 20
_MAX_DEPTH = 64


class Section(io.RawIOBase):
    """A section of a file, as a file of its own; refuses a read of more bytes than ``max_bytes``.

    zipfile and torch read an archive's list of files at once, into as much memory as it states.
    """

    def __init__(self, file: Any, offset: int, length: int, max_bytes: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0
        self.max_bytes = max_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position within the section, and returns it."""
        self._position = max(0, offset + (0, self._position, self._length)[whence])
        return self._position

    def tell(self) -> int:
        """Returns the position within the section."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads bytes from the position into the buffer; returns their number."""
        if len(buffer) > self.max_bytes:
            raise ValueError(
                f"expected an archive that lists its files in at most {self.max_bytes} bytes, "
                f"found a list of files of {len(buffer)} bytes"
            )
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        data: bytes = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def begin_of(self, info: zipfile.ZipInfo) -> int:
        """Returns where in the section the content of a file of its archive begins."""
        self.seek(info.header_offset)
        header = _LOCAL_HEADER.unpack(self.read(_LOCAL_HEADER.size))
        return info.header_offset + _LOCAL_HEADER.size + sum(header)


def members(section: Section) -> dict[str, zipfile.ZipInfo]:
    """Returns the files inside an archive, by names such as ``data/0``; refuses compressed ones."""
    found = {}
    with zipfile.ZipFile(section) as archive:
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            is_large = info.file_size > section.max_bytes and not name.startswith("data/")
            if info.compress_type != zipfile.ZIP_STORED or is_large:
                raise ValueError(
                    f"{name:.80}: expected an uncompressed file of at most {section.max_bytes} "
                    f"bytes inside the archive, found a file of {info.file_size} bytes that is "
                    "compressed or too large"
                )
            found[name] = info
        if "byteorder" in found and archive.read(found["byteorder"]) != b"little":
            raise ValueError("expected little-endian tensors")
    section.seek(0)
    return found


def load(file: Any, path: Path | str, **how: Any) -> Any:
    """Returns what ``torch.save`` wrote, after ``members`` has checked it; refuses pickled code."""
    with native_torch():
        # Asked before, because torch searches its message about such a class in quadratic time.
        if classes := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            raise UnsupportedLeafError(
                f"{path}: expected plain tensors, numbers and texts, in lists and dicts, found "
                f"objects of {', '.join(sorted(classes)):.200}. torch makes them only by running "
                "code that the file names. If you trust the file, load it with "
                "torch.load(weights_only=False), and save its tensors alone"
            )
        if isinstance(file, Section):
            file.seek(0)
        return torch.load(file, weights_only=True, **how)


def is_torch_file(path: Path) -> bool:
    """Returns whether the path is a file with a suffix of ``torch.save``'s, or a zip archive."""
    if not path.is_file() or path.suffix in _SUFFIXES:
        return path.is_file()
    try:
        with open(path, "rb") as file:
            return file.read(len(_ZIP)) == _ZIP
    except OSError:  # open_files then raises an error that states the cause
        return False


def open_torch_file(path: Path, at: str | None = None) -> TensorFiles:
    """Opens a file of ``torch.save`` without reading a tensor; ties tensors that are one."""
    with reading(path, "a file of torch.save", may_be_link=True):
        root = _loaded(path)
        tensors: dict[str, FileTensor] = {}
        ties: dict[str, str] = {}
        named: dict[Any, str] = {}
        keys = map(_key, root if isinstance(root, dict) else ())
        found = by_name(path, _tensors(_place(root, at)), at, (key for key in keys if key))
        for name, tensor in found.items():
            with native_torch():
                array = _array(path, name, tensor)
                identity = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if array.size and (other := named.setdefault(identity, name)) != name:
                ties[name] = other
                continue
            part = FilePart(path, (0,) * array.ndim, array.shape, array=array)
            tensors[name] = FileTensor(array.dtype.name, array.shape, (part,))
        require_stored(path, tensors, path.stat().st_size)
    return TensorFiles(tensors, ties, (path,))


def _loaded(path: Path) -> Any:
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            begins = file.read(len(_ZIP))
        if begins == _ZIP:
            raise ValueError(
                "the zip archive is cut off: its list of files is missing. Copy the file again"
            )
        require_known(path)
        raise UnsupportedLeafError(
            f"{path}: expected a zip archive, as torch.save has written since torch 1.6. Load "
            "the file with torch.load and save it again with torch.save"
        )
    with open(path, "rb") as file:
        section = Section(file, 0, path.stat().st_size, _MAX_DESCRIPTION_BYTES)
        with zipfile.ZipFile(section) as archive:
            inside = archive.namelist()
        if inside and all(name.endswith(".npy") for name in inside):
            raise UnsupportedLeafError(
                f"{path}: expected a file of torch.save or safetensors, found an archive of NumPy "
                "(.npz). Convert it: safetensors.numpy.save_file(dict(numpy.load(path)), "
                '"model.safetensors")',
                path=path,
            )
        members(section)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of tensors that are refused below
            # Under this name torch finds a file whose own name is not UTF-8 for Python.
            with open(path, "rb") as file:
                place = f"/proc/self/fd/{file.fileno()}"
                return load(place, path, map_location="cpu", mmap=True)
    except (RuntimeError, AssertionError) as error:  # torch's words say nothing of the file
        raise ValueError(f"{error!s:.200}. Copy the file again, or save it again") from error


def _array(path: Path, name: str, tensor: torch.Tensor) -> Any:
    """Returns a tensor as an array, without a copy; raises if no step can store the tensor."""
    kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
    if kind is not torch.strided:
        raise UnsupportedLeafError(
            f"{path}: {name}: expected a plain tensor, found a tensor of the kind {kind}. "
            "Save it as a plain tensor"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in STORABLE_DTYPES:
        raise UnsupportedLeafError(f"{path}: {name}: dtype {dtype} cannot be stored")
    return array_of(tensor)


def _place(root: Any, at: str | None) -> Any:
    """Returns what the keys ``at`` lead to; for None, the dict of the weights or ``root``."""
    if at is None:
        dicts = (inner for key in _MODELS if isinstance(inner := _under(root, key), dict))
        return next(dicts, root)
    return functools.reduce(_under, names.split(at), root)


def _under(root: Any, key: str) -> Any:
    if not isinstance(root, dict):
        return None
    return next((value for k, value in root.items() if _key(k) == key), None)


def _tensors(root: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yields the keys and the tensor of each tensor in nested dicts, in the dicts' order."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        keys, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield keys, value
        elif isinstance(value, dict):
            # Nested dicts can share so many parts that a walk through all paths would never end.
            if id(value) in seen or len(keys) > _MAX_DEPTH:
                raise ValueError(
                    f"{'.'.join(keys):.80}: expected nested dicts that form a tree, found a dict "
                    f"that is in two places, or more than {_MAX_DEPTH} dicts deep"
                )
            seen.add(id(value))
            inner = ((_key(key), member) for key, member in value.items())
            waiting += [((*keys, k), member) for k, member in inner if k is not None][::-1]


def _key(key: Any) -> str | None:
    return str(key) if type(key) in (str, int) else None
