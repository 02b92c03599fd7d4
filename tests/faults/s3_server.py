"""S3 on loopback, with the faults of ``gcs_server``: an emulator in this process, or two servers.

The emulator is PyPI's ``moto``. The servers have environments of their own below ``build/``: PyPI's
``ministack``, whose releases of other packages are not those of s3fs, and npm's ``s3rver``, which
ignores every condition of a request.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import logging
import os
import re
import shutil
import socket
import subprocess
import threading
import urllib.parse
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gcs_server import BUCKET, ONE_REQUEST, Answer, FaultyServer
from moto import settings
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from support.waiting import wait_until
from werkzeug.test import Client

from torchax_ckpt.storage.medium.s3 import service

CODES = {
    400: "ExpiredToken",
    403: "AccessDenied",
    429: "SlowDown",
    500: "InternalError",
    501: "NotImplemented",
    503: "ServiceUnavailable",
}
# Of a request that no client has signed. Moto refuses to delete, and to show what an account has
# stored, for callers without a name.
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=S3RVER/20260101/us-east-1/s3/aws4_request"}
BUILD = Path(__file__).parents[2] / "build"
_KEY = re.compile(rf"/{BUCKET}(?:/(?P<key>[^?]*))?(?:\?(?P<query>.*))?")


class Moto:
    """Objects in the memory of this process, one request after the other."""

    def __init__(self) -> None:
        logging.getLogger("moto").setLevel(logging.CRITICAL)
        self.spoil: Callable[[str], None] | None = None
        self.rewrite_bytes = ONE_REQUEST
        self.ignored: set[str] = set()  # "METHOD header" of conditions that it does not heed
        self._lock = threading.RLock()
        settings.S3_IGNORE_SUBDOMAIN_BUCKETNAME = True
        self._app = DomainDispatcherApplication(create_backend_app)
        self._client = Client(self._app)
        self.answer("PUT", f"/{BUCKET}", {}, b"")

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        """Carries out a request."""
        with self._lock:
            given = {k: v for k, v in dict(headers).items() if f"{method} {k}" not in self.ignored}
            found = self._client.open(path, method=method, headers=given, data=body)
            content = found.get_data() if method != "HEAD" else b""
            if method == "PUT" and found.status_code == 200 and self.spoil is not None:
                self.spoil(urllib.parse.unquote(_KEY.fullmatch(path)["key"] or ""))  # type: ignore[index]
            return found.status_code, list(found.headers), content

    def put(self, name: str, content: bytes) -> None:
        """Stores an object, as a request of another program would."""
        assert self.answer("PUT", f"/{BUCKET}/{urllib.parse.quote(name)}", {}, content)[0] == 200

    def get(self, name: str) -> bytes:
        """The content of an object."""
        status, _, content = self.answer(
            "GET", f"/{BUCKET}/{urllib.parse.quote(name)}", SIGNED, b""
        )
        assert status == 200, name
        return content

    def delete(self, name: str) -> None:
        """Deletes an object."""
        path = f"/{BUCKET}/{urllib.parse.quote(name)}"
        assert self.answer("DELETE", path, SIGNED, b"")[0] == 204

    def names(self, prefix: str = "") -> list[str]:
        """The objects there are."""
        found: list[str] = []
        after = ""
        while True:
            query = {"list-type": "2", "prefix": prefix, "start-after": after}
            path = f"/{BUCKET}?{urllib.parse.urlencode(query)}"
            page = ElementTree.fromstring(self.answer("GET", path, {}, b"")[2])
            keys = [e.text or "" for e in page.iter() if e.tag.endswith("}Key") or e.tag == "Key"]
            found += keys
            if not keys:
                return sorted(found)
            after = keys[-1]


class Server(Moto):
    """A server in a process of its own, which the tests do not change."""

    def __init__(self, kind: str) -> None:
        self.spoil, self.rewrite_bytes = None, ONE_REQUEST
        self._port = _free_port()
        command, environment = COMMANDS[kind](self._port)
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def begin(self) -> None:
        """Waits until the server has a bucket."""

        def has_bucket() -> bool:
            assert self._process.poll() is None, "the server has ended"
            with contextlib.suppress(OSError):
                self.answer("PUT", f"/{BUCKET}", {}, b"")
                return self.answer("GET", f"/{BUCKET}", {}, b"")[0] == 200
            return False

        wait_until(has_bucket, 60)

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        """Has the server carry out a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()

    def stop(self) -> None:
        """Ends the server's process."""
        self._process.kill()
        self._process.wait()


class FaultyS3(FaultyServer):
    """Serves S3's protocol, with faults."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, Moto())

    @contextlib.contextmanager
    def independent(self) -> Iterator[None]:
        """Has the second server store the objects."""
        with self.of("ministack"):
            yield

    @contextlib.contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Has another server store the objects: "ministack" or "s3rver"."""
        before, self.store = self.store, Server(kind)
        try:
            self.store.begin()
            yield
        finally:
            self.store.stop()
            self.store = before

    def calm(self) -> None:
        super().calm()
        # The actions that the account may not do: "s3:ListBucket", "s3:GetObject", ...
        self.lacking: set[str] = set()
        self.store.ignored = set()
        self.hosts: set[str] = set()  # the names by which clients have called this one

    def path_of(self, path: str, host: str) -> str:
        name = host.partition(":")[0]
        self.hosts.add(name)
        return f"/{BUCKET}{path}" if name.startswith(f"{BUCKET}.") else path

    def is_upload(self, method: str, path: str) -> bool:
        return method == "PUT"

    def environment(self) -> dict[str, str]:
        """What makes the clients in a process come here, and ask nobody else."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": "S3RVER",  # s3rver knows no other
            "AWS_SECRET_ACCESS_KEY": "the-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        }

    def error(self, code: int, message: str) -> Answer:
        content = f"<Error><Code>{CODES[code]}</Code><Message>{message}</Message></Error>"
        return code, [("Content-Type", "application/xml")], content.encode()

    def refusal(self, method: str, path: str, is_authorized: bool) -> Answer | None:
        """What a caller without the rights is answered."""
        match = _KEY.fullmatch(path)
        if match is None:
            return None
        is_listing = not match["key"] and method in ("GET", "HEAD")
        kind = {"GET": "GetObject", "HEAD": "GetObject", "DELETE": "DeleteObject"}
        action = "s3:ListBucket" if is_listing else f"s3:{kind.get(method, 'PutObject')}"
        may = self.allows_reads if method in ("GET", "HEAD") else self.allows_writes
        if action in self.lacking or not may or (self.needs_credentials and not is_authorized):
            return self.error(403, "Access Denied")
        return None


@contextlib.contextmanager
def connected(settings: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Has s3fs connect anew with settings for a block, and once more without them."""
    try:
        with settings:
            service.filesystem().connect(refresh=True)
            yield
    finally:
        service.filesystem().connect(refresh=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Has one process at a time install a server into its folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ministack(port: int) -> tuple[list[str], dict[str, str] | None]:
    folder = BUILD / "ministack"
    python = folder / "bin" / "python"
    with _alone(folder):
        if not (folder / "bin" / "ministack").exists():
            venv.create(folder, with_pip=True, clear=True)
            install = [str(python), "-m", "pip", "install", "-q", "ministack>=1.5"]
            subprocess.run(install, check=True)
    return [str(folder / "bin" / "ministack")], {**os.environ, "GATEWAY_PORT": str(port)}


def _s3rver(port: int) -> tuple[list[str], dict[str, str] | None]:
    folder = BUILD / "s3rver"
    with _alone(folder):
        if not (folder / "node_modules" / ".bin" / "s3rver").exists():
            folder.mkdir(parents=True, exist_ok=True)
            npm = shutil.which("npm")
            assert npm, "npm is not installed, which this test needs"
            install = [npm, "install", "--silent", "--prefix", str(folder), "s3rver@3.7"]
            subprocess.run(install, check=True)
    command = folder / "node_modules" / ".bin" / "s3rver"
    data = folder / f"data-{port}"
    data.mkdir()
    return [
        str(command),
        *("-d", str(data), "-a", "127.0.0.1", "-p", str(port), "-s"),
        "--allow-mismatched-signatures",
        "--configure-bucket",
        BUCKET,
    ], None


COMMANDS = {"ministack": _ministack, "s3rver": _s3rver}
