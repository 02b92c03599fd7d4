"""Plain stores for tests of mirrors: objects in memory as ``az://``, and a server of SFTP."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import asyncssh
import fsspec
import pytest
from fsspec import asyn
from fsspec.registry import _registry

from torchax_ckpt.storage.medium import plain_store

_numbers = itertools.count(1)


class ClientError(Exception):
    """An error of a type that only this store's client knows."""


class Objects(fsspec.AbstractFileSystem):
    """A store of objects without folders, renames, copies and conditions.

    ``failure`` says whether a request fails, given its verb and the path.
    """

    protocol = "az"
    objects: ClassVar[dict[str, bytes]] = {}
    failure: ClassVar[Any] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("az://").strip("/")

    def _request(self, verb: str, path: str) -> None:
        if self.failure is not None and type(self).failure(verb, path):
            raise ClientError("no answer")

    def _below(self, path: str) -> set[str]:
        above = f"{path}/"
        names = (name.removeprefix(above) for name in self.objects if name.startswith(above))
        return {name.partition("/")[0] for name in names}

    def _found(self, path: str) -> dict[str, Any]:
        if path in self.objects:
            return {"name": path, "type": "file", "size": len(self.objects[path])}
        if self._below(path):
            return {"name": path, "type": "directory", "size": None}
        raise FileNotFoundError(path)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        self._request("info", path)
        return self._found(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        self._request("ls", path)
        found = [self._found(path)]
        if found[0]["type"] == "directory":
            found = [self._found(f"{path}/{name}") for name in sorted(self._below(path))]
        return found if detail else [info["name"] for info in found]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        self._request("read" if mode == "rb" else "write", path)
        if mode == "rb":
            self._found(path)
            return io.BytesIO(self.objects[path])
        return _Upload(self, path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        self._request("delete", path)
        self._found(path)
        for name in [
            n for n in self.objects if n == path or (recursive and n.startswith(f"{path}/"))
        ]:
            del self.objects[name]


class _Upload(io.BytesIO):
    """An object that is stored when it is closed: after an error, as by fsspec, a part of it."""

    def __init__(self, store: Objects, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def close(self) -> None:
        if not self.closed:
            self._store.objects[self._path] = self.getvalue()
        super().close()


@pytest.fixture
def az(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Objects]]:
    """An empty store, for URLs ``az://container/...``."""
    store = type("Store", (Objects,), {"objects": {}})
    monkeypatch.setitem(_registry, "az", store)
    monkeypatch.setitem(plain_store.SCHEMES, "az", ("fsspec", {}, "az://container"))
    plain_store._client.cache_clear()
    yield store
    plain_store._client.cache_clear()


class _Anybody(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return False


@pytest.fixture
def sftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server's root, whose key the user knows."""
    root, home = tmp_path / "server", tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    root.mkdir()
    key = asyncssh.generate_private_key("ssh-ed25519")

    async def listen() -> Any:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=_Anybody,
            server_host_keys=[key],
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=os.fsencode(root)),
        )

    async def stop() -> None:
        server.close()
        await server.wait_closed()

    loop = asyn.get_loop()
    server = asyncio.run_coroutine_threadsafe(listen(), loop).result(60)
    monkeypatch.setenv("HOME", str(home))
    known = f"[127.0.0.1]:{server.get_port()} {key.export_public_key().decode()}"
    (home / ".ssh/known_hosts").write_text(known)
    plain_store._client.cache_clear()
    yield f"sftp://127.0.0.1:{server.get_port()}"
    plain_store._client.cache_clear()
    asyncio.run_coroutine_threadsafe(stop(), loop).result(60)


@pytest.fixture(params=["az", pytest.param("sftp", marks=pytest.mark.slow)])
def plain_url(request: pytest.FixtureRequest) -> str:
    """The URL of a mirror in a plain store."""
    root = request.getfixturevalue(request.param)
    return f"{root if request.param == 'sftp' else 'az://container'}/runs/{next(_numbers)}"
