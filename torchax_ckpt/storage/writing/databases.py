"""Reads databases of unchanged arrays; ``layout/unchanged.py`` tells what they are for."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.medium import bucket, containment, location

logger = logging.getLogger(__name__)

# The name of an OCDBT database's index.
_INDEX = "manifest.ocdbt"


class File(NamedTuple):
    """A file of a database: its bytes, and in a bucket what the service says of their content."""

    size: int
    crc32c: str = ""


def present(state: epath.Path) -> dict[str, dict[str, File]]:
    """Returns the files of the databases of unchanged arrays in a step.

    Args:
      state: the step's item of arrays.

    Returns:
      Name of the folder -> name of the file below the folder -> file; without the folders that
      lack the index of their database.

    Raises:
      OSError: storage does not answer.
    """
    contents = bucket.contents if location.is_bucket(state) else _sizes
    found: collections.defaultdict[str, dict[str, File]] = collections.defaultdict(dict)
    for name, content in contents(state, unchanged.FOLDER_PREFIX).items():
        folder, _, file = name.partition("/")
        found[folder][file] = File(*content)
    return {folder: files for folder, files in found.items() if _INDEX in files}


def _sizes(state: epath.Path, prefix: str) -> dict[str, tuple[int]]:
    """Returns the bytes of each file, like ``bucket.contents``; {} if there is no such path."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for folder in os.listdir(state):
            if folder.startswith(prefix):
                for path, status in containment.walk(state / folder):
                    found[os.path.relpath(path, state)] = (status.st_size,)
    return found


def has_only(folder: epath.Path, names: Iterable[str]) -> bool:
    """Returns whether a folder of a database has only the arrays with the given stored names."""
    known = {array_checks.stored_key(name) for name in names}
    try:
        found = _opened(folder).list().result()
    except (ValueError, OSError, RuntimeError) as error:  # TensorStore's errors
        logger.info("%s cannot be read: %s", folder, error)
        return False
    return {key.decode(errors="replace").rpartition("/")[0] for key in found} <= known


def read(
    folders: Sequence[epath.Path], name: str, shape: Sequence[int], dtype: str
) -> np.ndarray | None:
    """Reads an array of a database; returns None if it is damaged or another array.

    Args:
      folders: the folders of the database. Each has some of the array's chunks; the first one has
        the array's metadata.
      name: the stored name of the array.
      shape, dtype: of the array.
    """
    try:
        return _read(folders, f"{array_checks.stored_key(name)}/", tuple(shape), dtype)
    except (ValueError, LookupError, OSError, RuntimeError) as error:  # also TensorStore's
        logger.info("%s: %s cannot be read: %s", folders[0], name, error)
        return None


def _read(
    folders: Sequence[epath.Path], path: str, shape: tuple[int, ...], dtype: str
) -> np.ndarray | None:
    described = json.loads(_opened(folders[0]).read(f"{path}.zarray").result().value)
    chunk = tuple(described["chunks"])
    if tuple(described["shape"]) != shape or len(chunk) != len(shape) or 0 in chunk:
        return None
    separator = described.get("dimension_separator", ".")
    below = ts.KvStore.KeyRange(path, f"{path[:-1]}0")  # "0" follows "/"
    reads: dict[tuple[int, ...], tuple[tuple[slice, ...], Any]] = {}
    host: np.ndarray | None = None
    for folder in folders:
        array = ts.open(
            {
                "driver": "zarr",
                "kvstore": {"driver": "ocdbt", "base": location.kvstore(folder), "path": path},
                "metadata": described,
            },
            open=True,
            assume_metadata=True,
            context=location.reading_context(),
        ).result()
        if array.dtype.numpy_dtype.name != dtype:
            return None
        host = np.empty(shape, array.dtype.numpy_dtype) if host is None else host
        for key in _opened(folder).list(below).result():
            if (last := key.decode().removeprefix(path)) == ".zarray":
                continue
            index = tuple(map(int, last.split(separator))) if shape else ()
            if index in reads:
                return None  # two folders have the same chunk
            region = tuple(
                slice(i * c, min((i + 1) * c, n))
                for i, c, n in zip(index, chunk, shape, strict=True)
            )
            reads[index] = region, array[region].read()
    if len(reads) != math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True)):
        return None
    assert host is not None, "a database has a folder"
    for region, reading in reads.values():
        host[region] = reading.result()
    return host


def _opened(folder: epath.Path) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": location.kvstore(folder)}
    return ts.KvStore.open(spec, context=location.reading_context()).result()
