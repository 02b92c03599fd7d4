"""Owns what a user may give as a directory, local paths and buckets, and how each is reached."""

from __future__ import annotations

import os
import re
from typing import Any

import tensorstore as ts
from etils import epath

from torchax_ckpt.errors import DirectoryError

# After 1, 2, 4, ... and at most 32 seconds: two minutes in all.
_RETRIES = 8
_COLLAPSED = re.compile(r"g(?:c)?s:/([^/].*)")


def resolve(directory: Any) -> epath.Path:
    """The absolute path of a directory, or the URL of a prefix in a bucket.

    Raises:
      DirectoryError: it is no path, or of a scheme that is not supported.
    """
    if directory == "":  # a variable that is not set: hardly the working directory
        raise DirectoryError("directory: expected a path or a gs:// URL, found an empty text")
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
            f"{directory}: pathlib takes a bucket for a local path; give a string instead: "
            f"gs://{match[1]}",
            path=directory,
        )
    scheme, separator, _ = str(path).partition("://")
    if not separator:
        return path.expanduser().absolute()
    if scheme != "gs":
        raise _unsupported(directory)
    return path


def is_bucket(path: Any) -> bool:
    """Whether a path lies in a bucket."""
    return "://" in str(path)


def kvstore(folder: epath.Path) -> dict[str, str]:
    """TensorStore's spec of a folder as keys and values."""
    if not is_bucket(folder):
        return {"driver": "file", "path": f"{folder}/"}
    name, _, prefix = str(folder).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": name, "path": f"{prefix}/"}


def reading_context() -> ts.Context:
    """TensorStore's settings for reading: files in parallel, and a database's index once.

    Left alone, it repeats a request to a bucket for a quarter of an hour. Writing is left alone:
    there the settings are Orbax's own constants, which no option reaches.
    """
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 128},
            "cache_pool#ocdbt": {"total_bytes_limit": 100 << 20},
            "gcs_request_retries": {"max_retries": _RETRIES},
        }
    )


def _unsupported(directory: Any) -> DirectoryError:
    scheme = str(directory).partition("://")[0]
    return DirectoryError(
        f"{directory}: {scheme}:// is not supported. Supported are local paths, network file "
        "systems and mounted buckets among them, and Google Cloud Storage as gs://bucket/prefix.",
        path=str(directory),
    )
