"""Checks, before stored arrays are opened, that their metadata matches the manifest.

A directory from an unknown source is untrusted: Orbax and TensorStore build paths from the names in
a step's metadata, and allocate whatever shapes and chunks it states, which could kill the process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np
import tensorstore as ts
from etils import epath

from torchax_ckpt.layout import names
from torchax_ckpt.storage.arrays import chunking, tensorstore_context
from torchax_ckpt.storage.directory.committed_step import STATE
from torchax_ckpt.storage.medium import medium, storage_errors
from torchax_ckpt.storage.medium.containment import corrupt

_MAX_ARRAY_METADATA_BYTES = 1 << 20
# A shard is one chunk, or several chunks of some MiB. No run has so many devices, or so large an
# array, that an array needs more chunks than this.
MAX_CHUNKS = 1 << 20
# The most bytes to which Zstandard expands one byte: four bytes can encode a block of 128 KiB. The
# other codecs in Blosc expand less.
MAX_UNPACKED = 1 << 15


def require_stored(
    step_path: epath.Path, step: int, wanted: Mapping[str, tuple[tuple[int, ...], str]]
) -> int:
    """Raises CorruptCheckpointError if metadata is wrong; returns the least bytes on storage.

    With fewer bytes on storage, the arrays cannot be there, however well they were compressed.
    """
    if not wanted:
        return 0
    folder = step_path / STATE
    try:
        spec = {"driver": "ocdbt", "base": medium.of(folder).kvstore(folder)}
        store = ts.KvStore.open(spec, context=tensorstore_context.reading_context()).result()
        reads = {name: store.read(f"{stored_key(name)}/.zarray") for name in wanted}
        contents = {name: read.result() for name, read in reads.items()}
    except (ValueError, OSError) as error:
        if storage_errors.is_unavailable(error):
            raise
        file = storage_errors.file_of(error)
        raise corrupt(step, folder, "an OCDBT database", f"{error!s:.300}", file=file) from error
    for name, (shape, dtype) in wanted.items():
        if contents[name].state != "value":
            raise corrupt(step, folder, f"{dtype}{list(shape)}", "no such array", name)
        if problem := _problem(contents[name].value, shape, dtype):
            raise corrupt(step, folder, *problem, name)
    return sum(
        math.prod(shape)
        * np.dtype(dtype).itemsize
        // (MAX_UNPACKED if json.loads(contents[name].value)["compressor"] else 1)
        for name, (shape, dtype) in wanted.items()
    )


def stored_key(name: str) -> str:
    """Returns the key of an array, by its stored name, in the OCDBT database that Orbax writes."""
    return ".".join(names.component_and_rest(name))


def stored_dtype(name: str) -> str:
    """Returns the name in Zarr's metadata of a dtype; TensorStore names those that numpy lacks."""
    return np.dtype(name).str if np.dtype(name).isbuiltin == 1 else name


def _problem(raw: bytes, shape: tuple[int, ...], dtype: str) -> tuple[str, str] | None:
    """Returns the expected and the found metadata as text if they differ; None if they match."""
    if len(raw) > _MAX_ARRAY_METADATA_BYTES:
        return f"at most {_MAX_ARRAY_METADATA_BYTES} bytes of metadata", f"{len(raw)}"
    try:
        metadata = json.loads(raw)
        found = metadata["dtype"], metadata["shape"]
        chunk, compressor = metadata["chunks"], metadata["compressor"]
        codec = compressor and compressor["id"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return "metadata of a Zarr array", f"{error!r:.200}"
    if found != (stored_dtype(dtype), list(shape)):
        return f"{dtype}{list(shape)}", f"{found[0]!r:.40}{found[1]!r:.80}"
    whole = [max(1, dim) for dim in shape]
    if not (
        isinstance(chunk, list)
        and len(chunk) == len(whole)
        and all(type(n) is int and 0 < n <= limit for n, limit in zip(chunk, whole, strict=True))
    ):
        return f"chunks within {whole}", f"{chunk!r:.80}"
    count = chunking.num_pieces(whole, chunk)
    if count > MAX_CHUNKS:
        return f"at most {MAX_CHUNKS} chunks", f"{count}"
    if codec not in (None, "zstd", "blosc") or metadata.get("filters") is not None:
        return (
            "Zstandard, Blosc or no compressor, and no filters",
            f"{codec!r:.40}, {metadata.get('filters')!r:.40}",
        )
    return None
