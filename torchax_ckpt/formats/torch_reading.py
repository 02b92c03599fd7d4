"""Owns what is in a file that ``torch.save`` has written: a state dict, or dicts of several.

Nothing is unpickled, as in everything that other programs wrote.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchax_ckpt.errors import MismatchError, UnsupportedLeafError
from torchax_ckpt.formats.archives import (
    Archive,
    Described,
    described,
    is_plain,
    open_archive,
    tensor_in,
)
from torchax_ckpt.formats.pickle_records import Pairs, Record
from torchax_ckpt.formats.tensor_files import FileTensor, TensorFiles
from torchax_ckpt.formats.untrusted_files import reading_file
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import STORABLE_DTYPES

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ZIP = b"PK\x03\x04"
# Where training programs put the weights of what else they save: torch's tutorials, and Lightning.
_MODELS = ("model", "state_dict")
# Of some 200,000 tensors.
_MAX_DESCRIPTION_BYTES = 32 << 20
_MAX_DEPTH = 64


def is_torch_file(path: Path) -> bool:
    """Whether there is a file that ``open_torch_file`` takes, by its name or how it begins."""
    if not path.is_file() or path.suffix in _SUFFIXES:
        return path.is_file()
    try:
        with open(path, "rb") as file:
            return file.read(len(_ZIP)) == _ZIP
    except OSError:  # whoever opens it as something else says why
        return False


def open_torch_file(path: Path, at: str | None = None) -> TensorFiles:
    """Opens a file of ``torch.save``'s; reads no tensor yet.

    Tensors of one storage, shape and place in it are one, and their names tied. What is neither a
    tensor nor a dict of them is left out: numbers, an optimizer's lists, objects.

    Args:
      path: the file.
      at: keys of the dict that holds the weights, joined with ``/``. None for ``model`` or
        ``state_dict``, if there is a dict under one of these keys, or else everything.

    Raises:
      CorruptCheckpointError: it is not as torch writes it.
      DirectoryError: it cannot be read now.
      MismatchError: there are no tensors at this place.
      UnsupportedLeafError: a tensor cannot be stored: sparse, quantized, of an unknown dtype; or
        the file is in the form that torch wrote before 1.6.
    """
    with reading_file(path, "what torch.save writes", may_be_link=True):
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                begins = file.read(len(_ZIP))
            if begins == _ZIP:
                raise ValueError("an archive without an end")
            raise UnsupportedLeafError(
                f"{path}: is no archive, as torch.save has written since torch 1.6: torch.load and "
                "torch.save it again"
            )
        length = path.stat().st_size
        with open_archive(path, 0, length, _MAX_DESCRIPTION_BYTES) as archive:
            return _opened(path, archive, at)


def _opened(path: Path, archive: Archive, at: str | None) -> TensorFiles:
    tensors: dict[str, FileTensor] = {}
    ties: dict[str, str] = {}
    named: dict[Described, str] = {}
    for keys, record in _tensors(_place(path, archive.root, at)):
        name = ".".join(keys)
        if name in tensors or name in ties:
            raise UnsupportedLeafError(f"{path}: two tensors would be called {name!r}")
        tensor = _described(path, name, record)
        if 0 not in tensor.shape and (other := named.setdefault(tensor, name)) != name:
            ties[name] = other
            continue
        part = archive.part(tensor, (0,) * len(tensor.shape))
        tensors[name] = FileTensor(tensor.dtype, tensor.shape, (part,))
    if not tensors:
        raise _no_tensors(path, archive.root, at)
    return TensorFiles(tensors, ties, (path,))


def _described(path: Path, name: str, record: Record) -> Described:
    if not is_plain(record):
        kind = record.name.rpartition("_rebuild_")[2]
        raise UnsupportedLeafError(
            f"{path}: {name}: a tensor of the kind {kind:.80}, not a plain one"
        )
    tensor = described(record)
    if tensor.dtype not in STORABLE_DTYPES:
        raise UnsupportedLeafError(f"{path}: {name}: dtype {tensor.dtype} cannot be stored")
    return tensor


def _place(path: Path, root: Any, at: str | None) -> Any:
    """The dict that the weights are looked for in."""
    if at is None:
        dicts = (inner for key in _MODELS if isinstance(inner := _under(root, key), Pairs))
        return next(dicts, root)
    found = root
    for key in names.split(at):
        found = _under(found, key)
    if found is None:
        raise _no_tensors(path, root, at)
    return found


def _under(root: Any, key: str) -> Any:
    """What a dict holds under a key; None where there is none."""
    if not isinstance(root, Pairs):
        return None
    return next((value for k, value in root if _key(k) == key), None)


def _tensors(root: Any) -> Iterator[tuple[tuple[str, ...], Record]]:
    """Keys and record of every tensor in nested dicts, in their order."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        keys, value = waiting.pop()
        if tensor := tensor_in(value):
            yield keys, tensor
        elif isinstance(value, Pairs):
            # Dicts within dicts may have parts in common, so many that a walk would never end.
            if id(value) in seen or len(keys) > _MAX_DEPTH:
                raise ValueError(f"{'.'.join(keys):.80}: a dict in two places, or too deep")
            seen.add(id(value))
            inner = ((_key(key), member) for key, member in value)
            waiting += [((*keys, k), member) for k, member in inner if k is not None][::-1]


def _key(key: Any) -> str | None:
    return str(key) if type(key) in (str, int) else None


def _no_tensors(path: Path, root: Any, at: str | None) -> MismatchError:
    keys = [_key(key) for key, _ in root] if isinstance(root, Pairs) else []
    there = ", ".join(repr(key)[:80] for key in keys[:10] if key) or "no dict"
    where = f"at {at!r}" if at else "in a dict of torch.save's"
    return MismatchError(f"{path}: expected tensors {where}, found {there}", path=path)
