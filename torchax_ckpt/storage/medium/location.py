"""Interprets the directory that a user gives: a local path, or a prefix in a bucket."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import pathlib
import re
from collections.abc import Collection
from typing import Any

from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.medium import plain_store

# What is meant as a URL, also as pathlib or a slip leaves it: gs:/bucket, gs//bucket, " s3://bucket".
_URL = re.compile(
    r"\s*(\w+::)*([a-z][a-z0-9+.-]*:/|(gs|gcs|s3)(:|//)|(file|https?)//)", re.IGNORECASE
)
# What may hold a password: user information, which a port is not, a chain, and a query, which is a
# part of the name in a bucket.
_SECRET = re.compile(
    r"[^:/]+[:/]+[^/]*(@|:(?!\d*(/|\Z)))|.*::[a-z][a-z0-9+.-]*:/|(?!\s*(gs|gcs|s3)[:/]).*\?",
    re.IGNORECASE | re.DOTALL,
)
_SLIP = re.compile(r"\s*(gc?s|s3)(:/?|/)/?(?=[^:/])", re.IGNORECASE)
# The schemes of buckets -> the client of each, which the extra of the second name installs.
_CLIENTS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
# Of the 1,024 that a name of an object may have; names within a step take up to some 200.
_MAX_PREFIX_BYTES = 800
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def resolve(directory: Any, *, as_mirror: bool = False) -> epath.Path:
    """Returns a directory's absolute path, or the URL of a bucket's prefix; else DirectoryError.

    Every path that a user gives passes here. It need not exist, but no link in it may be broken.
    A mirror may also lie in a plain store, as the directory of a run cannot.
    """
    path = _interpreted(directory, plain_store.SCHEMES if as_mirror else ())
    if is_url(path):
        _require_client(path)
    return path


def _interpreted(directory: Any, plain: Collection[str] = ()) -> epath.Path:
    """Returns what :func:`resolve` does, also if the client of a bucket is not installed."""
    if isinstance(directory, plain_store.PlainPath):  # resolved already
        return directory
    try:
        given = os.fspath(directory)
    except TypeError:
        given = None
    expected = "directory: expected a path or the URL of a bucket, gs:// or s3://,"
    if not isinstance(given, str):
        raise DirectoryError(f"{expected} found {directory!r:.100}")
    if not given:  # probably an unset shell variable, not the working directory
        raise DirectoryError(f"{expected} found an empty string. Is a variable unset?")
    if _URL.match(given) and _SECRET.match(given):
        raise DirectoryError(
            f"{expected} without user information, query (?) and chain (::), found a URL with one "
            "of these, which may be a password. Give credentials in the environment of the program"
        )
    if "\0" in given:
        raise DirectoryError(f"{expected} found {given!a:.300}: remove the character \\x00")
    try:
        if not _URL.match(given):
            return _on_this_host(given)
        return _in_bucket(_text(given), plain)
    except UnicodeError:
        raise DirectoryError(
            f"{expected} in UTF-8, found {given!a:.300}, whose bytes are not UTF-8: rename the "
            "folder that has this name, or create one with another name"
        ) from None


def _in_bucket(url: str, plain: Collection[str]) -> epath.Path:
    """Returns a path in a bucket, or in a store of one of the schemes ``plain``."""
    scheme, separator, rest = url.partition("://")
    known = {*_CLIENTS, *plain}
    if separator and scheme.strip().lower() not in known:
        why = "can only be a mirror" if plain_store.contains(url) else "is not supported"
        raise DirectoryError(
            f"{url}: {scheme}:// {why}. Give a local path (also of a network file system), "
            "gs://bucket/prefix of Google Cloud Storage, or s3://bucket/prefix.",
            path=url,
        )
    if scheme not in known or not rest or rest.startswith("/"):
        meant = _SLIP.sub(lambda slip: "s3://" if slip[1].lower() == "s3" else "gs://", url)
        raise DirectoryError(
            f"{url!r}: expected a local path, or gs://bucket/prefix or s3://bucket/prefix as a "
            "string, found neither"
            + (f": give {meant!r}" if meant != url else "")
            + ". pathlib turns gs:// into gs:/. Begin a local path of this name with ./",
            path=url,
        )
    path = plain_store.PlainPath(url) if scheme in plain else epath.Path(url)
    special = "# * [ ] " if scheme in plain else ""  # for some clients
    if _CONTROL.search(url) or ".." in path.parts or any(c in url for c in special.split()):
        raise DirectoryError(
            f"{url!r}: expected the prefix of a bucket without .. {special}and control characters, "
            "which names of objects cannot have everywhere: give another prefix",
            path=url,
        )
    if scheme in _CLIENTS and len(os.fsencode(rest)) > _MAX_PREFIX_BYTES:
        raise DirectoryError(
            f"{url:.80}...: expected at most {_MAX_PREFIX_BYTES} bytes after {scheme}://, found "
            f"{len(os.fsencode(rest))}: names of objects have at most 1,024, and a step needs "
            "the rest. Give a shorter prefix",
            path=url,
        )
    if scheme in plain:
        _, _, shortest = plain_store.SCHEMES[scheme]
        is_repository = scheme == "hf" and path.parts[1] != "buckets"  # each write is a commit
        if len(path.parts) < shortest.count("/") or is_repository:
            raise DirectoryError(f"{url}: expected {shortest}, or a folder in it", path=url)
    return path


def _require_client(path: epath.Path) -> None:
    """Raises DirectoryError if the package that reaches a bucket or a store is not installed."""
    scheme = str(path).partition("://")[0]
    package, extra = _CLIENTS.get(scheme) or (plain_store.SCHEMES[scheme][0], "")
    if importlib.util.find_spec(package) is not None:
        return
    if extra:
        raise DirectoryError(
            f'{path}: a bucket needs the extra {extra}: pip install "torchax-ckpt[{extra}]"',
            path=path,
        )
    raise DirectoryError(
        f"{path}: a mirror there needs the package {package}: pip install {package}", path=path
    )


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


def on_this_host(
    argument: str, path: str | os.PathLike[str], reason: str | None = None
) -> pathlib.Path:
    """Returns a path on this host as the user gave it; raises DirectoryError for a URL."""
    if is_url(_interpreted(path)):
        because = f", because {reason}" if reason else ""
        raise DirectoryError(
            f"{argument}: expected a path on this host{because}; found {os.fspath(path)!r:.300}",
            path=path,
        )
    return pathlib.Path(path).expanduser()


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


def overlap(one: epath.Path, other: epath.Path) -> bool:
    """Returns whether two paths are one, or one lies in the other, also if links lead there."""
    return is_within(one, other) or is_within(other, one)


def real(path: epath.Path) -> epath.Path:
    """Returns the path of the same place without links."""
    return path if is_url(path) else epath.Path(os.path.realpath(path))


def without_backslash(folder: str) -> str:
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
