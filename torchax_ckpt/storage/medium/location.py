"""Interprets the directory that a user gives: a local path, or a prefix in a bucket."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from typing import Any

import tensorstore as ts
from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.runtime import host_memory

# Retries after 1, 2, 4, ... and at most 32 seconds: two minutes in all.
_RETRIES = 8
# The most memory for unpacking one chunk of Blosc: 2 GiB for the content, and less for its blocks.
_UNPACKING_BYTES = 4 << 30
_COLLAPSED = re.compile(r"g(?:c)?s:/([^/].*)")


def resolve(directory: Any) -> epath.Path:
    """Returns a directory's absolute path, or the URL of a bucket's prefix; else DirectoryError."""
    if directory == "":  # probably an unset shell variable, not the working directory
        raise DirectoryError(
            "directory: expected a path or a gs:// URL, found an empty string. Is a variable unset?"
        )
    try:
        path = epath.Path(directory)
    except KeyError:
        raise _unsupported(directory) from None
    except TypeError as error:
        raise DirectoryError(
            f"directory: expected a path or a gs:// URL, found {directory!r:.100}"
        ) from error
    if isinstance(directory, os.PathLike) and (match := _COLLAPSED.fullmatch(str(directory))):
        raise DirectoryError(
            f"{directory}: pathlib turns the URL of a bucket into a local path; give a string "
            f"instead: gs://{match[1]}",
            path=directory,
        )
    scheme, separator, _ = str(path).partition("://")
    if not separator:
        return path.expanduser().absolute()
    if scheme != "gs":
        raise _unsupported(directory)
    if importlib.util.find_spec("gcsfs") is None:
        raise DirectoryError(
            f'{path}: a bucket needs the extra gcs: pip install "torchax-ckpt[gcs]"', path=path
        )
    return path


def is_bucket(path: Any) -> bool:
    """Returns whether a path lies in a bucket."""
    return "://" in str(path)


def exists(path: os.PathLike[str]) -> bool:
    """Returns whether a local path exists; a failed look-up is no "no", as in ``Path.exists``."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a user gave a URL, even if pathlib has turned it into a local path."""
    text = os.fspath(path)
    return is_bucket(text) or text.partition("/")[0].endswith(":")


def kvstore(folder: epath.Path) -> dict[str, str]:
    """Returns the spec with which TensorStore opens a folder as a key-value store."""
    if not is_bucket(folder):
        return {"driver": "file", "path": f"{folder}/"}
    name, _, prefix = str(folder).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": name, "path": f"{prefix}/"}


def reading_context() -> ts.Context:
    """Returns TensorStore's settings for reading: parallel file access, and a cache of the index.

    A failed request to a bucket is repeated for two minutes, by default for 15. TensorStore unpacks
    a chunk of Blosc, up to 2 GiB, before it compares the sizes. A limit on chunks that are unpacked
    at the same time keeps hostile ones from exhausting this host's memory.
    """
    most = host_memory.host_memory_bytes() // _UNPACKING_BYTES
    threads = _threads(max(1, min(most, os.cpu_count() or 1)))
    # A cache of its own for each use, because the next use may find other bytes in the same files.
    settings = {
        "cache_pool#ocdbt": {"total_bytes_limit": 100 << 20},
        "gcs_request_retries": {"max_retries": _RETRIES},
    }
    return ts.Context(settings, threads)


@functools.cache
def _threads(num_unpacking: int) -> ts.Context:
    """Returns the settings that limit TensorStore's threads, which stay until the program ends.

    With limits of its own for each read, two of many programs crashed in a thread of TensorStore
    0.1.86; it is a guess that tasks of a failed read had outlived their limits.
    """
    return ts.Context(
        {
            "data_copy_concurrency": {"limit": num_unpacking},
            "file_io_concurrency": {"limit": 128},
        }
    )


def _unsupported(directory: Any) -> DirectoryError:
    scheme = str(directory).partition("://")[0]
    return DirectoryError(
        f"{directory}: {scheme}:// is not supported. Give a local path (also of a network file "
        "system) or a Google Cloud Storage URL, gs://bucket/prefix.",
        path=str(directory),
    )
