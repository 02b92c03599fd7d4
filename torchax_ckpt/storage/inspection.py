"""Owns what a step must be before anything in it is opened: plain files, and arrays as claimed.

A directory from elsewhere is data. Orbax and TensorStore follow links, join names from metadata to
paths, and take memory for whatever shape and chunks an array's metadata names, which ends the
process where there is not so much. So files are looked at before they are read, and the metadata
of arrays before the arrays are.
"""

from __future__ import annotations

import functools
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec
import numpy as np
import tensorstore as ts
from etils import epath

from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError, OutOfMemoryError
from torchax_ckpt.layout import names
from torchax_ckpt.storage import cutting, digests, location, medium

STATE = "state"
_PYTREE_METADATA = "_METADATA"
_MAX_ARRAY_METADATA_BYTES = 1 << 20
# Shards are one chunk, or several of some MiB; no run has so many devices, or so large arrays.
MAX_CHUNKS = 1 << 20
# What Zstandard makes at most of one byte: four say that a block of 128 KiB repeats another.
_MAX_UNPACKED = 1 << 15
# Folders of array data.
_DATA_FOLDER = "d"


@functools.cache
def host_memory_bytes() -> int:
    """The memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --- files ---------------------------------------------------------------------------------------


def require_contained(step_path: epath.Path, step: int) -> None:
    """Refuses a local step that holds anything but folders and files of a size to be expected.

    Raises:
      CorruptCheckpointError: a symbolic link, a device, a pipe, or a file that is too large.
      OutOfMemoryError: array data in one file that is larger than this host's memory.
    """
    if location.is_bucket(step_path):
        return  # a bucket has neither links nor special files
    try:
        found = list(_walk(os.fspath(step_path)))
    except OSError as error:  # deleted meanwhile
        if medium.is_unavailable(error):
            raise
        raise _corrupt(step, step_path, "a folder that can be read", str(error)) from error
    for path, status in found:
        if not stat.S_ISREG(status.st_mode):
            kind = "symbolic link" if stat.S_ISLNK(status.st_mode) else "special file"
            raise _corrupt(step, path, "folders and regular files", f"a {kind}")
        in_data = os.path.basename(os.path.dirname(path)) == _DATA_FOLDER
        if in_data and status.st_size > host_memory_bytes():
            on_storage = status.st_blocks * 512  # holes take no room
            raise _too_large(step, path, "a file", status.st_size, status.st_size, on_storage)
        if not in_data and status.st_size > digests.MAX_JSON_BYTES:
            expected = f"at most {digests.MAX_JSON_BYTES} bytes"
            raise _corrupt(step, path, expected, f"{status.st_size}")


def _walk(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """Everything at and below a path that is no folder; links are not followed."""
    folders = [top]
    while folders:
        folder = folders.pop()
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode):
            yield folder, status
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False)


def stored_bytes(step_path: epath.Path) -> int:
    """What the files of a step take on storage; what is removed meanwhile counts for nothing."""
    if location.is_bucket(step_path):
        return fsspec.filesystem("gcs", finalize_on_close=True).du(str(step_path))
    try:
        return sum(status.st_size for _, status in _walk(os.fspath(step_path)))
    except FileNotFoundError:
        return 0


def is_plain(folder: epath.Path, file: str) -> bool:
    """Whether a folder is no link, and the file in it a regular one (or not there)."""
    if location.is_bucket(folder):
        return True
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return False
    except FileNotFoundError:
        return True
    return is_plain_file(folder / file)


def is_plain_file(path: epath.Path) -> bool:
    """Whether a file is a regular one (or not there); its folder may be a link of the user's."""
    if location.is_bucket(path):
        return True
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_size <= digests.MAX_JSON_BYTES


# --- arrays of this package ----------------------------------------------------------------------


def require_stored(
    step_path: epath.Path, step: int, wanted: Mapping[str, tuple[tuple[int, ...], str]]
) -> int:
    """Refuses arrays whose own metadata is not what the manifest says; reads no array data.

    Args:
      step_path, step: the step.
      wanted: stored name -> shape and dtype.

    Returns:
      The fewest bytes in which they can lie on storage.

    Raises:
      CorruptCheckpointError: an array is not there, or of another shape, dtype or layout.
    """
    if not wanted:
        return 0
    folder = step_path / STATE
    try:
        spec = {"driver": "ocdbt", "base": location.kvstore(folder)}
        store = ts.KvStore.open(spec, context=location.reading_context()).result()
        found = {name: store.read(f"{stored_key(name)}/.zarray") for name in wanted}
        contents = {name: read.result() for name, read in found.items()}
    except (ValueError, OSError) as error:
        if medium.is_unavailable(error):
            raise
        raise _corrupt(step, folder, "an OCDBT database", f"{error!s:.300}") from error
    for name, (shape, dtype) in wanted.items():
        if contents[name].state != "value":
            raise _corrupt(step, folder, f"{dtype}{list(shape)}", "no such array", name)
        if problem := _problem(contents[name].value, shape, dtype):
            raise _corrupt(step, folder, *problem, name)
    return sum(
        math.prod(shape)
        * np.dtype(dtype).itemsize
        // (_MAX_UNPACKED if json.loads(contents[name].value)["compressor"] else 1)
        for name, (shape, dtype) in wanted.items()
    )


def beyond_memory(
    step_path: epath.Path, step: int, needed: int, least: int, name: str | None = None
) -> CheckpointError:
    """The error about leaves that this host cannot hold: that it is too small, or damage.

    Args:
      step_path, step: the step.
      needed: the bytes that would be taken of this host's memory at one time.
      least: the fewest bytes in which this can lie on storage. Where there is less, what the step
        says of itself is not so.
      name: of the largest leaf.
    """
    return _too_large(step, step_path, "leaves", needed, least, stored_bytes(step_path), name)


def _too_large(
    step: int,
    path: str | os.PathLike[str],
    what: str,
    needed: int,
    least: int,
    on_storage: int,
    name: str | None = None,
) -> CheckpointError:
    expected = f"{what} that this host can hold, {host_memory_bytes()} bytes"
    found = f"{needed} bytes"
    if on_storage < least:
        found += f", which cannot be: {on_storage} bytes lie on storage"
        return _corrupt(step, path, expected, found, name)
    leaf = "" if name is None else f"{name}: "
    return OutOfMemoryError(
        f"step {step} in {os.fspath(path)}: {leaf}expected {expected}, found {found}. The step may "
        "be sound: read it on a host with more memory, or ask for less of it at a time, as arrays "
        "sharded over devices.",
        step=step,
        path=path,
        key_path=name,
    )


def stored_key(name: str) -> str:
    """Under which key Orbax stores the array of this name."""
    return ".".join(names.component_and_rest(name))


def _problem(raw: bytes, shape: tuple[int, ...], dtype: str) -> tuple[str, str] | None:
    """What is expected of an array's metadata, and what was found instead; None if it fits."""
    if len(raw) > _MAX_ARRAY_METADATA_BYTES:
        return f"at most {_MAX_ARRAY_METADATA_BYTES} bytes of metadata", f"{len(raw)}"
    try:
        metadata = json.loads(raw)
        found = metadata["dtype"], metadata["shape"]
        chunk, compressor = metadata["chunks"], metadata["compressor"]
        codec = compressor and compressor["id"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return "metadata of a Zarr array", f"{error!r:.200}"
    if found != (_zarr_dtype(dtype), list(shape)):
        return f"{dtype}{list(shape)}", f"{found[0]!r:.40}{found[1]!r:.80}"
    whole = [max(1, dim) for dim in shape]
    if not (
        isinstance(chunk, list)
        and len(chunk) == len(whole)
        and all(type(n) is int and 0 < n <= limit for n, limit in zip(chunk, whole, strict=True))
    ):
        return f"chunks within {whole}", f"{chunk!r:.80}"
    count = cutting.num_pieces(whole, chunk)
    if count > MAX_CHUNKS:
        return f"at most {MAX_CHUNKS} chunks", f"{count}"
    if codec not in (None, "zstd") or metadata.get("filters") is not None:
        return "plain bytes, or Zstandard", f"{codec!r:.40}, {metadata.get('filters')!r:.40}"
    return None


def _zarr_dtype(name: str) -> str:
    """How Zarr version 2 writes a dtype; TensorStore, those that numpy lacks by name."""
    dtype = np.dtype(name)
    return dtype.str if dtype.isbuiltin == 1 else name


# --- steps that bare Orbax wrote -----------------------------------------------------------------


def require_names_within(step_path: epath.Path, step: int) -> None:
    """Refuses a step whose pytree metadata names arrays that would lie outside of it.

    Raises:
      CorruptCheckpointError: names the metadata and the array.
    """
    for folder in (step_path, *(p for p in step_path.iterdir() if p.is_dir())):
        path = folder / _PYTREE_METADATA
        if not path.exists():
            continue
        tree = _pytree_metadata(step, path).get("tree_metadata")
        for entry in (tree if isinstance(tree, dict) else {}).values():
            keys = entry.get("key_metadata") if isinstance(entry, dict) else None
            parts = [
                str(key.get("key")) if isinstance(key, dict) else ""
                for key in (keys if isinstance(keys, list) else [])
            ]
            name = ".".join(parts)
            if name.startswith("/") or ".." in name.split("/"):
                raise _corrupt(step, path, "arrays within the step", f"{name!r:.80}")


def require_modest(step_path: epath.Path, step: int, leaves: Mapping[str, Any]) -> None:
    """Refuses arrays that this host cannot hold, and chunks larger than their arrays.

    Args:
      step_path, step: the step.
      leaves: name -> Orbax's metadata of an array.

    Raises:
      OutOfMemoryError: the host is too small; CorruptCheckpointError: what is on storage cannot be
        so much. Names the array.
    """
    memory, total = host_memory_bytes(), 0
    for name, leaf in leaves.items():
        stored = getattr(leaf, "storage_metadata", None)
        chunk = getattr(stored, "chunk_shape", None) or ()
        itemsize = getattr(leaf.dtype, "itemsize", 1)
        total += (nbytes := math.prod(leaf.shape) * itemsize)
        if nbytes < math.prod(chunk) * itemsize > memory:
            expected = f"chunks within {list(leaf.shape)!r:.80}"
            raise _corrupt(step, step_path, expected, f"{list(chunk)!r:.80}", name)
        if total > memory:  # bare Orbax compresses, if not told otherwise
            raise beyond_memory(step_path, step, total, total // _MAX_UNPACKED, name)


def _pytree_metadata(step: int, path: epath.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        if medium.is_unavailable(error):
            raise
        raise _corrupt(step, path, "Orbax's metadata", f"{error!r:.200}") from error
    if not isinstance(found, dict):
        raise _corrupt(step, path, "Orbax's metadata", f"a {type(found).__name__}")
    return found


def _corrupt(
    step: int,
    path: str | os.PathLike[str],
    expected: str,
    found: str,
    name: str | None = None,
) -> CorruptCheckpointError:
    leaf = "" if name is None else f"{name}: "
    return CorruptCheckpointError(
        f"step {step} in {os.fspath(path)}: {leaf}expected {expected}, found {found}",
        step=step,
        path=path,
        key_path=name,
    )
