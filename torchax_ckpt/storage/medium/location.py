"""Interprets the directory that a user gives: a local path, or a prefix in a bucket."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import os
import pathlib
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
# What is meant as a URL, also as pathlib or a slip leaves it: gs:/bucket, gs//bucket, " s3://bucket".
_URL = re.compile(r"\s*([a-z][a-z0-9+.-]*:/|(gs|gcs|s3)(:|//)|(file|https?)//)", re.IGNORECASE)
_SLIP = re.compile(r"\s*gc?s(:/?|/)/?(?=[^:/])", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def resolve(directory: Any) -> epath.Path:
    """Returns a directory's absolute path, or the URL of a bucket's prefix; else DirectoryError.

    Every path that a user gives passes here. It need not exist, but no link in it may be broken.
    """
    try:
        given = os.fspath(directory)
    except TypeError:
        given = None
    expected = "directory: expected a path or a gs:// URL"
    if not isinstance(given, str):
        raise DirectoryError(f"{expected}, found {directory!r:.100}")
    if not given:  # probably an unset shell variable, not the working directory
        raise DirectoryError(f"{expected}, found an empty string. Is a variable unset?")
    if "\0" in given:
        raise DirectoryError(f"{expected}, found {given!a:.300}: remove the character \\x00")
    try:
        return _in_bucket(_text(given)) if _URL.match(given) else _on_this_host(given)
    except UnicodeError:
        raise DirectoryError(
            f"{expected} in UTF-8, found {given!a:.300}, whose bytes are not UTF-8: rename the "
            "folder that has this name, or create one with another name"
        ) from None


def _in_bucket(url: str) -> epath.Path:
    scheme, separator, rest = url.partition("://")
    if separator and scheme.strip().lower() != "gs":
        raise _unsupported(url)
    if scheme != "gs" or not rest or rest.startswith("/"):
        meant = _SLIP.sub("gs://", url)
        raise DirectoryError(
            f"{url!r}: expected a local path, or gs://bucket/prefix as a string, found neither"
            + (f": give {meant!r}" if meant != url else "")
            + ". pathlib turns gs:// into gs:/. Begin a local path of this name with ./",
            path=url,
        )
    path = epath.Path(url)
    if _CONTROL.search(url) or ".." in path.parts:
        raise DirectoryError(
            f"{url!r}: expected the prefix of a bucket without .. and control characters, which "
            "names of objects cannot have everywhere: give another prefix",
            path=url,
        )
    if importlib.util.find_spec("gcsfs") is None:
        raise DirectoryError(
            f'{path}: a bucket needs the extra gcs: pip install "torchax-ckpt[gcs]"', path=path
        )
    return path


def _on_this_host(given: str) -> epath.Path:
    try:
        text = _text(os.fspath(pathlib.Path(os.path.expanduser(given)).absolute()))
    except FileNotFoundError:
        raise DirectoryError(
            f"{given}: expected an absolute path, because the working directory of this process "
            "does not exist any more, found a relative one"
        ) from None
    path = epath.Path(os.fsdecode(text.encode()))
    if ".." in path.parts or text.startswith("//"):  # TensorStore refuses both
        path = epath.Path("/" + os.path.realpath(path).lstrip("/"))
    for place in (path, *path.parents):
        if os.path.islink(place) and not os.path.exists(place):
            raise DirectoryError(
                f"{path}: expected a directory, or a path that does not exist yet, found the "
                f"symbolic link {place} to {os.readlink(place)}, which this process cannot find: "
                "create what the link leads to, or remove the link",
                path=path,
            )
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG):
            raise DirectoryError(
                f"{path}: expected a path that can exist, found one that cannot: {error.strerror}. "
                "Give another path",
                path=path,
            ) from None
    return path


def _text(path: str) -> str:
    """Returns the text whose UTF-8 are a path's bytes; UnicodeError if they are not UTF-8.

    Python has another text for the same bytes where the locale is not UTF-8, as with ``LC_ALL=C``.
    """
    try:
        return os.fsencode(path).decode()
    except UnicodeEncodeError:  # of a character that the locale lacks, and the kernel does not
        return path.encode("utf-8", "surrogateescape").decode()


def is_url(path: Any) -> bool:
    """Returns whether a path is a URL, so that it lies in a bucket and not on this host."""
    return "://" in str(path)


def exists(path: os.PathLike[str]) -> bool:
    """Returns whether a local path exists; a failed look-up is no "no", as in ``Path.exists``."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def is_within(inner: epath.Path, outer: epath.Path) -> bool:
    """Returns whether a path is another one, or lies in it, also if links lead there."""
    return real(inner).is_relative_to(real(outer))


def real(path: epath.Path) -> epath.Path:
    """Returns the path of the same place without links."""
    return path if is_url(path) else epath.Path(os.path.realpath(path))


def kvstore(folder: epath.Path) -> dict[str, str]:
    """Returns the spec with which TensorStore opens a folder as a key-value store."""
    if not is_url(folder):
        return {"driver": "file", "path": f"{_without_backslash(os.fspath(folder))}/"}
    name, _, prefix = str(folder).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": name, "path": f"{prefix}/"}


def _without_backslash(folder: str) -> str:
    """Returns a folder's path for TensorStore, which takes UTF-8, and a backslash for a slash."""
    head, backslash, tail = folder.rpartition("\\")
    if not backslash:
        return _text(folder)
    last, slash, rest = tail.partition("/")
    return f"/proc/self/fd/{_descriptor(head + backslash + last)}{slash}{_text(rest)}"


_descriptors: dict[str, int] = {}


def _descriptor(folder: str) -> int:
    """Returns a file descriptor of a folder, through which the kernel finds it by a plain name.

    It stays open until the program ends, because TensorStore does not say when it is done.
    """
    known = _descriptors.get(folder)
    with contextlib.suppress(OSError):  # somebody has closed it, or removed the folder
        if known is not None and os.path.samestat(os.fstat(known), os.stat(folder)):
            return known
    _descriptors[folder] = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return _descriptors[folder]


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
