"""Stores that are used for plain files only, such as Azure or a server with SFTP; for mirrors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import fsspec
from etils import epath

# The schemes of plain stores -> the package by which fsspec speaks to each, its settings, and the
# shortest URL.
SCHEMES: dict[str, tuple[str, dict[str, Any], str]] = {
    "az": ("adlfs", {}, "az://container"),
    "hf": ("huggingface_hub", {}, "hf://buckets/user/bucket"),
    # By default it trusts every host, and waits for a silent one without end.
    "sftp": ("sshfs", {"known_hosts": (), "keepalive_interval": 30}, "sftp://host/path"),
}


class PlainPath(epath.Path):
    """A path in a plain store, where fsspec can list, read, write and delete files, and no more.

    It has the methods of ``epath`` that this package calls. The paths of ``epath`` itself take a
    failed request for a missing file, and know no SFTP.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)  # pathlib has merged the slashes

    def _place(self) -> str:
        """Returns the client's name of this path. The client itself cuts a URL at a ? or #."""
        scheme, *parts = self.parts
        return "/".join(["", *parts[1:]] if scheme == "sftp:" else parts)

    def ask(self, verb: str, *values: Any, **named: Any) -> Any:
        """Calls a method of fsspec's client; its errors, of many types, become OSErrors."""
        scheme, _, rest = str(self).partition("://")
        try:
            store = _client(scheme, rest.partition("/")[0])
            store.invalidate_cache()  # other programs may have written meanwhile
            return getattr(store, verb)(self._place(), *values, **named)
        except FileNotFoundError:
            raise
        except Exception as error:
            # The next call connects anew, which some clients do not once a connection has ended.
            _client.cache_clear()
            if isinstance(error, OSError):
                raise
            raise OSError(f"{self}: {error!r}") from error

    def _kind(self) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return str(self.ask("info")["type"])
        return None

    def exists(self) -> bool:
        """Returns whether there is a file or folder; raises OSError if the store does not say."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Returns whether there is a folder; raises OSError if the store does not say."""
        return self._kind() == "directory"

    def _children(self) -> Iterator[tuple[PlainPath, dict[str, Any]]]:
        own = self._place().strip("/")
        for info in self.ask("ls", detail=True):
            if (place := info["name"].strip("/")) != own:  # as of a file, or of an empty folder
                yield self / place.rpartition("/")[2], info

    def iterdir(self) -> Iterator[PlainPath]:
        """Yields the paths in a folder."""
        return (child for child, _ in self._children())

    def files(self) -> Iterator[tuple[str, int]]:
        """Yields the path below this one, and the size in bytes, of each file below this folder.

        Raises OSError if a folder cannot be listed; fsspec's ``find`` would leave it out.
        """
        for child, info in self._children():
            if info["type"] != "directory":
                yield child.name, int(info["size"])
                continue
            for name, num_bytes in child.files():
                yield f"{child.name}/{name}", num_bytes

    def open(self, mode: str = "r", **_: Any) -> Any:
        """Opens a file; ``mode`` is ``rb`` or ``wb``."""
        return self.ask("open", mode=mode)

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        """Returns the first bytes of a file, or all."""
        # The ``cat_file`` of sshfs heeds no end.
        content: bytes = self.ask("cat_file") if max_bytes is None else self.ask("head", max_bytes)
        return content

    def read_text(self, encoding: str | None = None) -> str:
        """Returns the text of a file in UTF-8."""
        return self.read_bytes().decode()

    def write_bytes(self, data: bytes) -> int:
        """Writes a file; returns the number of its bytes."""
        self.ask("pipe_file", data)
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, errors: str | None = None) -> int:
        """Writes a file of text in UTF-8; returns the number of its bytes."""
        return self.write_bytes(data.encode())

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes a file."""
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            self.ask("rm")


@functools.cache
def _client(scheme: str, host: str) -> Any:
    """Returns the one client of a plain store, of which fsspec itself may make one per thread."""
    settings = {"skip_instance_cache": True, **SCHEMES[scheme][1]}
    return fsspec.url_to_fs(f"{scheme}://{host}/", **settings)[0]


def contains(path: Any) -> bool:
    """Returns whether a path or URL lies in a plain store, which can only be a mirror."""
    return str(path).partition("://")[0] in SCHEMES
