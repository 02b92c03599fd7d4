"""A proxy that misbehaves: refusals, resets, slow and truncated answers, outages, by seed."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import gcs_server

KINDS = ("429", "500", "503", "reset", "reset after", "slow", "truncated")
_TRICKLE_SECS = 0.1
_DROPPED = {"connection", "transfer-encoding", "content-length", "server", "date"}


class FaultProxy:
    """Stands between clients and the server; counts requests, and the bytes sent to be stored."""

    def __init__(self, server: gcs_server.GcsServer, seed: int = 0) -> None:
        self.server = server
        self.slow_secs = 1.0
        self.calm()
        self.counts: collections.Counter[str] = collections.Counter()
        self.uploaded_bytes = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._httpd = _Httpd(("127.0.0.1", 0), _Handler)
        self._httpd.proxy = self
        self.port: int = self._httpd.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._httpd.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the proxy and its threads."""
        self.is_out = ""
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()

    def calm(self) -> None:
        """No faults any more."""
        self.rate = 0.0  # the share of requests that meet a fault
        self.kinds: tuple[str, ...] = KINDS
        self.concerned = ""  # a pattern: the faults meet only the "METHOD path" that it is found in
        # "refuse" answers 503 to everything, "down" closes every connection.
        self.is_out = ""
        self.allows_reads = self.allows_writes = True
        self.needs_credentials = False  # whether a caller without a token is refused
        # Called with every "METHOD path" before it is handled.
        self.hook: Callable[[str], None] | None = None
        # The bytes per second of the answer to a "METHOD path", given its bytes; None: all at once.
        self.rate_of: Callable[[str, int], float | None] | None = None
        self.server.spoil = None
        self.server.storage.rewrite_bytes = gcs_server.ONE_REQUEST

    def names(self, url: str) -> list[str]:
        """The objects below a path of the bucket, by their names there."""
        prefix = url.removeprefix("gs://bucket/") + "/"
        return [name.removeprefix(prefix) for name in self.server.names(prefix)]

    def pause(self, concerned: str) -> tuple[threading.Event, threading.Event]:
        """Has a request with a text wait: an event that it has arrived, and one for it to go on."""
        arrived, go_on = threading.Event(), threading.Event()

        def wait(request: str) -> None:
            if concerned in request and not arrived.is_set():
                arrived.set()
                go_on.wait(60)

        self.hook = wait
        return arrived, go_on

    def environment(self) -> dict[str, str]:
        """What makes the clients in a process come here, and ask nobody else."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",
        }

    def draw(self, request: str) -> str:
        """The fault that a request meets, or nothing."""
        with self._lock:
            self.counts["requests"] += 1
            self.counts["copies"] += "/rewriteTo/" in request
            if not re.search(self.concerned, request):
                return ""
            kind = self.is_out
            if not kind and self._random.random() < self.rate:
                kind = self._random.choice(self.kinds)
            if kind:
                self.counts[kind] += 1
            return kind

    def refusal(self, method: str, path: str, is_authorized: bool) -> tuple[int, bytes] | None:
        """What a caller without the rights is answered, or who asks for them.

        A caller has roles/storage.objectUser at most, which does not reach the bucket's metadata.
        """
        if self.needs_credentials and not is_authorized:
            text = "Anonymous caller does not have storage.objects.list access"
            return 401, gcs_server.refusal(401, text)
        if (asked := gcs_server.permissions_asked(path)) is not None:
            if path.split("/b/")[1].split("/")[0] not in self.server.storage.buckets:
                return 404, gcs_server.refusal(404, "The specified bucket does not exist.")
            reading = ("storage.objects.get", "storage.objects.list")
            asked = [p for p in asked if p.startswith("storage.objects.")]
            may = [p for p in asked if (self.allows_reads if p in reading else self.allows_writes)]
            return 200, json.dumps({"permissions": may}).encode()
        if re.fullmatch(r"/storage/v1/b/[^/]+", path.partition("?")[0]):
            return 403, gcs_server.refusal(403, "The caller lacks storage.buckets.get.")
        if not (self.allows_reads if method == "GET" else self.allows_writes):
            return 403, gcs_server.refusal(403, "The caller does not have permission.")
        return None


@contextlib.contextmanager
def serving(server: str = "patched", seed: int = 0) -> Iterator[FaultProxy]:
    """A proxy before a new server: the "patched" one, or the "independent" one."""
    proxy = FaultProxy(gcs_server.GcsServer(), seed)
    if server == "independent":
        proxy.server.stop()
        proxy.server = gcs_server.IndependentServer(proxy.url)  # type: ignore[assignment]
    try:
        yield proxy
    finally:
        proxy.stop()
        proxy.server.stop()


class _Httpd(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that has gone away


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120
    server: _Httpd

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        proxy = self.server.proxy
        body = self._body()
        request = f"{self.command} {self.path}"
        if proxy.hook is not None:
            proxy.hook(request)
        kind = proxy.draw(request)
        if kind in ("reset", "down"):
            return self._reset()
        if kind in ("429", "500", "503", "refuse"):
            code = 503 if kind == "refuse" else int(kind)
            return self._answer(code, gcs_server.refusal(code, "a fault on purpose"))
        is_authorized = bool(self.headers.get("Authorization"))
        if (refused := proxy.refusal(self.command, self.path, is_authorized)) is not None:
            return self._answer(*refused)
        if self.path.startswith("/upload/"):
            proxy.uploaded_bytes += len(body)
        status, headers, content = self._forward(body)
        if kind == "slow":
            time.sleep(proxy.slow_secs)
        if kind == "reset after" or (kind == "truncated" and not content):
            return self._reset()
        return self._answer(status, content, headers, cut=kind == "truncated")

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_any  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        # One at a time, as the server behind handles them.
        connection = http.client.HTTPConnection("127.0.0.1", self.server.proxy.server.port)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _DROPPED}
        headers["Content-Length"] = str(len(body))
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()

    def _answer(
        self,
        status: int,
        content: bytes,
        headers: list[tuple[str, str]] | None = None,
        cut: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in headers or [("Content-Type", "application/json")]:
            if name.lower() not in _DROPPED:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        proxy, rate = self.server.proxy, None
        if proxy.rate_of is not None and not cut:
            rate = proxy.rate_of(f"{self.command} {self.path}", len(content))
        while rate is not None and proxy.rate_of is not None and content:
            num = max(1, int(rate * _TRICKLE_SECS))
            self.wfile.write(content[:num])
            content = content[num:]
            time.sleep(_TRICKLE_SECS)
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection |= cut

    def _reset(self) -> None:
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
