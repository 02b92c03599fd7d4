"""Measures what a mirror adds to the steps of a training loop that always has a save in flight.

    python benchmarks/mirrored.py [--state deep] [--rounds 5] [--secs 60] [--mbytes-per-sec 20]

The mirror is a sink: a server of S3 on loopback, in a process of its own, that takes so many bytes
a second and forgets all large objects. The loop runs with and without the mirror in turns, each
time in a new process. Prints the medians of both, and the processor time of the sink, which takes
cores from the loop as no real service does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
# Larger objects are forgotten: those of arrays, which no copy reads back.
_KEPT_BYTES = 1 << 20


class Sink(ThreadingHTTPServer):
    """As much of S3 as a mirror uses: objects, listings, conditions, uploads in parts."""

    daemon_threads = True

    def __init__(self, bytes_per_sec: float) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.objects: dict[str, tuple[str, int, bytes]] = {}  # key -> ETag, size, content
        self.uploads: dict[str, int] = {}  # id -> bytes so far
        self.lock = threading.Lock()
        self.received_bytes = 0
        self._count, self._rate, self._free_at = 0, bytes_per_sec, 0.0

    def put(self, key: str, size: int, content: bytes) -> str:
        """Stores an object; returns its ETag."""
        self._count += 1
        etag = f'"{self._count:032x}"'
        self.objects[key] = etag, size, content if size <= _KEPT_BYTES else b""
        return etag

    def receive(self, num_bytes: int) -> None:
        """Waits as long as the link takes for so many bytes, of all requests."""
        with self.lock:
            self.received_bytes += num_bytes
            began = max(time.monotonic(), self._free_at)
            self._free_at = until = began + num_bytes / self._rate
        time.sleep(max(0.0, until - time.monotonic()))


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Sink

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": f"{len(content)}", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _xml(self, text: str, status: int = 200) -> None:
        content = f"<?xml version='1.0'?>{text}".encode()
        self._answer(status, content, **{"Content-Type": "text/xml"})

    def _refuse(self, status: int, code: str) -> None:
        self._xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>", status)

    def _asked(self) -> tuple[str, dict[str, str]]:
        path, _, query = self.path.partition("?")
        key = urllib.parse.unquote(path).lstrip("/").partition("/")[2]
        return key, dict(urllib.parse.parse_qsl(query, keep_blank_values=True))

    def _body(self) -> tuple[int, bytes]:
        """Receives the body; returns its length, and the content unless it is large."""
        left = total = int(self.headers.get("Content-Length", 0))
        kept, block = bytearray(), bytearray(1 << 18)
        while left:
            count = self.rfile.readinto(memoryview(block)[: min(left, len(block))])
            left -= count
            self.server.receive(count)
            if total <= _KEPT_BYTES:
                kept += block[:count]
        return total, bytes(kept)

    def _holds(self, key: str) -> bool:
        """Whether the conditions of the request hold; else refuses it."""
        known = self.server.objects.get(key)
        match, none = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if match and known is None:
            self._refuse(404, "NoSuchKey")
        elif (match and known and match.strip('"') != known[0].strip('"')) or (none and known):
            self._refuse(412, "PreconditionFailed")
        else:
            return True
        return False

    def do_PUT(self) -> None:
        size, content = self._body()
        key, query = self._asked()
        sink = self.server
        if "uploadId" in query:
            with sink.lock:
                sink.uploads[query["uploadId"]] += size
            self._answer(200, ETag='"part"')
            return
        with sink.lock:
            if not key:
                self._answer(200)
            elif origin := self.headers.get("x-amz-copy-source"):
                known = sink.objects.get(urllib.parse.unquote(origin).lstrip("/").partition("/")[2])
                if known is None:
                    self._refuse(404, "NoSuchKey")
                    return
                etag = sink.put(key, *known[1:])
                self._xml(f"<CopyObjectResult><ETag>{escape(etag)}</ETag></CopyObjectResult>")
            elif self._holds(key):
                self._answer(200, ETag=sink.put(key, size, content))

    def do_POST(self) -> None:
        _, content = self._body()
        key, query = self._asked()
        sink = self.server
        with sink.lock:
            if "uploads" in query:
                upload = f"{len(sink.uploads)}"
                sink.uploads[upload] = 0
                text = f"<UploadId>{upload}</UploadId>"
                self._xml(f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>")
            elif "uploadId" in query:
                etag = sink.put(key, sink.uploads[query["uploadId"]], b"")
                text = f"<ETag>{escape(etag)}</ETag>"
                self._xml(f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>")
            else:  # deletes several
                from xml.etree import ElementTree

                for element in ElementTree.fromstring(content).iter():
                    if element.tag.rpartition("}")[2] == "Key":
                        sink.objects.pop(element.text or "", None)
                self._xml("<DeleteResult></DeleteResult>")

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        with self.server.lock:
            if self._holds(key):
                self.server.objects.pop(key, None)
                self._answer(204)

    def do_GET(self) -> None:
        key, query = self._asked()
        if self.path == "/used":
            used = {"secs": time.process_time(), "bytes": self.server.received_bytes}
            self._answer(200, json.dumps(used).encode())
            return
        with self.server.lock:
            known = self.server.objects.get(key)
            if not key:
                self._list(query)
            elif known is None:
                self._refuse(404, "NoSuchKey")
            else:
                etag, size, content = known
                headers = {"ETag": etag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
                if self.command == "HEAD":
                    headers["Content-Length"] = f"{size}"
                self._answer(200, content, **headers)

    do_HEAD = do_GET  # noqa: N815

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        limit = int(query.get("max-keys", 1000))
        found: dict[str, str] = {}  # key or common prefix -> its element
        for key in sorted(self.server.objects):
            if not key.startswith(prefix):
                continue
            rest, found_one, _ = key[len(prefix) :].partition(delimiter or "\0")
            if found_one:
                shown = f"{prefix}{rest}{delimiter}"
                text = f"<CommonPrefixes><Prefix>{escape(shown)}</Prefix></CommonPrefixes>"
            else:
                shown, (etag, size, _) = key, self.server.objects[key]
                text = (
                    f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>{escape(etag)}"
                    "</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
            if shown > after:
                found[shown] = text
        names = [*found][:limit]
        is_cut, last = len(found) > limit, escape(names[-1]) if names else ""
        more = f"<NextContinuationToken>{last}</NextContinuationToken>"
        self._xml(
            f"<ListBucketResult><Name>sink</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(names)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
            f"{more * is_cut}{''.join(found[name] for name in names)}</ListBucketResult>"
        )


def loop(state: str, secs: float, mirror: str | None, port: int) -> dict[str, Any]:
    """Runs the loop of ``measure.py`` in a new process; returns its figures."""
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "sink",
        "AWS_SECRET_ACCESS_KEY": "sink",
        "AWS_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        **({"MIRROR": mirror} if mirror else {}),
    }
    directory = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp")))
    options = ["--max-secs", f"{secs}", "--device-secs", "0.05"]
    arguments = ["loop", state, "torchax_ckpt", directory / "run", "100000", *options]
    command = [sys.executable, str(HERE / "measure.py"), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", default="deep", help="a state of states.py")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of loops")
    parser.add_argument("--secs", type=float, default=60, help="of each loop")
    parser.add_argument("--mbytes-per-sec", type=float, default=20)
    parser.add_argument("--sink", action="store_true", help="serves, and prints the port")
    args = parser.parse_args()
    if args.sink:
        sink = Sink(args.mbytes_per_sec * 1e6)
        print(sink.server_port, flush=True)
        sink.serve_forever()
    rate = f"{args.mbytes_per_sec}"
    serve = [sys.executable, __file__, "--sink", "--mbytes-per-sec", rate]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        added: list[float] = []
        print("| round | median step, ms | with a mirror | added | copied MB | sink's processor |")
        print("|---|---|---|---|---|---|")
        try:
            for number in range(args.rounds):
                found = {}
                order = (None, f"s3://sink/run-{number}")
                used = {"secs": 0.0, "bytes": 0.0}
                for mirror in order if number % 2 == 0 else reversed(order):
                    before, began = _used(port), time.monotonic()
                    found[bool(mirror)] = loop(args.state, args.secs, mirror, port)
                    if mirror:
                        used = {name: value - before[name] for name, value in _used(port).items()}
                        used["secs"] /= time.monotonic() - began
                alone, both = (1e3 * statistics.median(found[k]["step"]) for k in (False, True))
                added.append(both / alone - 1)
                print(
                    f"| {number + 1} | {alone:.2f} | {both:.2f} | {added[-1]:+.1%} | "
                    f"{used['bytes'] / 1e6:,.0f} | {used['secs']:.1%} of a core |",
                    flush=True,
                )
        finally:
            server.terminate()
    middle, least, greatest = statistics.median(added), min(added), max(added)
    print(
        f"\nadded by the mirror to the median step: {middle:+.1%} ({least:+.1%} to {greatest:+.1%})"
    )


def _used(port: int) -> dict[str, float]:
    """Returns the processor time of the sink so far, and the bytes that it has received."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/used") as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    main()
