"""Measures what the processes of a run send each other, for up to thousands of processes.

    python benchmarks/agreement.py [--counts 2,4,16,64,256,1024] [--repeats 5]
    python benchmarks/agreement.py --traffic [--counts 2,16,128,1024,4096]

The first form runs JAX's coordination service, with one client for each process, all in this
process and on the loopback address, and prints how long the library's own exchanges of one save
take. The clients share the cores of this machine with the service, so the times are upper bounds of
those of a service whose clients are on other hosts. The second form replaces the service by one in
memory, and prints the requests and bytes of saves, declined saves and restores. With 4,096
processes it takes some minutes, 4 GB and 8,192 threads. In both forms the code is the library's own
(see ``simulated_processes.py``), without devices, Orbax and storage.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import operator
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import simulated_processes
from jax._src.lib import _jax
from simulated_processes import Simulated

from torchax_ckpt.processes import decision_windows

# --- traffic -------------------------------------------------------------------------------------


# Long, so that no request is repeated unless a process has failed.
_MAX_WAIT_SECS = 60


class CountingService:
    """A coordination service in memory that counts its requests and their bytes.

    Attributes:
      requests: the number of requests of all clients.
      bytes: the bytes of keys and values, in both directions.
    """

    def __init__(self) -> None:
        self.requests = self.bytes = 0
        self._known: dict[str, dict[str, bytes]] = collections.defaultdict(dict)
        self._awaited: dict[str, list[threading.Event]] = collections.defaultdict(list)
        self._lock = threading.Lock()

    def _count(self, *sent: str | bytes) -> None:
        self.requests += 1
        self.bytes += sum(map(len, sent))

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        folder, _, name = key.rpartition("/")
        with self._lock:
            self._count(key, value)
            assert allow_overwrite or name not in self._known[folder], f"{key} was set before"
            self._known[folder][name] = value
            for event in self._awaited.pop(key, ()):
                event.set()

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        folder, _, name = key.rpartition("/")
        with self._lock:
            if name not in self._known[folder]:
                arrived = threading.Event()
                self._awaited[key].append(arrived)
                self._lock.release()
                try:
                    is_there = arrived.wait(_MAX_WAIT_SECS)
                finally:
                    self._lock.acquire()
                if not is_there:
                    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            found = self._known[folder][name]
            self._count(key, found)
            return found

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        with self._lock:
            found = [(f"{folder}{n}", m) for n, m in self._known[folder.rstrip("/")].items()]
            self._count(folder, *(part for pair in found for part in pair))
            return found

    def key_value_delete(self, key: str) -> None:
        folder, _, name = key.rpartition("/")
        with self._lock:
            self._count(key)
            self._known[folder].pop(name, None)
            for known in [k for k in self._known if k == key or k.startswith(f"{key}/")]:
                del self._known[known]


def traffic(count: int) -> dict[str, tuple[float, float]]:
    """Returns call -> requests and bytes of all processes together, for ``count`` processes."""
    found: dict[str, tuple[float, float]] = {}

    def counted(name: str, act: Callable[[Simulated], None], num_calls: int = 1) -> None:
        before = service.requests, service.bytes
        on_all(act)
        sent = service.requests - before[0], service.bytes - before[1]
        found[name] = sent[0] / num_calls, sent[1] / num_calls

    service = CountingService()
    with simulated_processes.processes([service] * count, has_local_tier=False) as on_all:
        on_all(lambda each: each.save(1))
        counted("durable tier: save", lambda each: each.save(2))
        with mock.patch.object(decision_windows, "_MAX_STEPS", 1):  # else fewer, by their time
            counted("durable tier: declined save, at most", lambda each: each.decline(20), 20)
        counted("durable tier: restore", Simulated.restore)
    service = CountingService()
    with simulated_processes.processes([service] * count, has_local_tier=True) as on_all:
        on_all(lambda each: each.save(1))
        counted("local tier: save", lambda each: each.save(2))
        on_all(lambda each: each.save(3, changes=False))
        counted("local tier: save, own states as before", lambda each: each.save(4, changes=False))
        counted("local tier: restore", lambda each: each.restore_locally(0))
        counted("local tier: restore, half lost", lambda each: each.restore_locally(count // 2))
    return found


def print_traffic(counts: list[int]) -> None:
    """Prints tables of requests and bytes: of all processes together, and for each process."""
    found = {count: traffic(count) for count in counts}
    for title, part in (("Requests", 0), ("Bytes", 1)):
        print(f"\n| {title} | " + " | ".join(f"{count:,}" for count in counts) + " |")
        print("|---" * (len(counts) + 1) + "|")
        for call in found[counts[0]]:
            row = (found[count][call][part] for count in counts)
            print(f"| {call} | " + " | ".join(_brief(number) for number in row) + " |")
    print("\n| Requests and bytes, each process | " + " | ".join(map("{:,}".format, counts)) + " |")
    print("|---" * (len(counts) + 1) + "|")
    for call in found[counts[0]]:
        shares = ([sent / count for sent in found[count][call]] for count in counts)
        cells = (f"{requests:.1f}, {_brief(sent)}" for requests, sent in shares)
        print(f"| {call} | " + " | ".join(cells) + " |")


def _brief(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 10 * size or (unit == "G" and number >= size):
            return f"{number / size:,.{int(number < 10 * size)}f} {unit}"
    return f"{number:,.0f}"


# --- time ----------------------------------------------------------------------------------------


class CountingClient:
    """A client of JAX's coordination service that counts the bytes of its requests."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.requests = self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._client, name)

        def send(*args: Any, **settings: Any) -> Any:
            answer = request(*args, **settings)
            self.requests += 1
            self.bytes += sum(len(part) for part in args if isinstance(part, str | bytes))
            parts = answer if isinstance(answer, list) else [(answer,)]
            self.bytes += sum(len(part) for pair in parts for part in pair if part is not None)
            return answer

        return send


@contextlib.contextmanager
def service(count: int) -> Iterator[list[CountingClient]]:
    """Runs JAX's coordination service on a loopback port; yields one connected client for each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    served = _jax.get_distributed_runtime_service(address, count)
    clients = [_jax.get_distributed_runtime_client(address, i) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        try:
            yield list(map(CountingClient, clients))
        finally:
            list(pool.map(lambda client: client.shutdown(), clients))
            served.shutdown()


def print_times(counts: list[int], repeats: int) -> None:
    """Prints a table of the time, requests and bytes of one save to the durable tier."""
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{os.cpu_count()} cores, load average {load}; median (least - greatest)\n")
    print("| processes | a save | a process | requests, a process | bytes, a process |")
    print("|---|---|---|---|---|")
    for count in counts:
        with (
            service(count) as clients,
            simulated_processes.processes(clients, has_local_tier=False) as on_all,
        ):
            on_all(lambda each: each.save(1))
            before = _sent(clients)
            secs = []
            for step in range(2, 2 + repeats):
                began = time.perf_counter()
                on_all(operator.methodcaller("save", step))
                secs.append(time.perf_counter() - began)
            after = _sent(clients)
        least, middle, most = min(secs), statistics.median(secs), max(secs)
        requests, sent = ((b - a) / repeats / count for a, b in zip(before, after, strict=True))
        print(
            f"| {count:,} | {middle * 1e3:,.1f} ms ({least * 1e3:,.1f} - {most * 1e3:,.1f}) "
            f"| {middle * 1e3 / count:.2f} ms | {requests:.1f} | {sent / 1e3:.1f} kB |",
            flush=True,
        )


def _sent(clients: list[CountingClient]) -> tuple[int, int]:
    return sum(each.requests for each in clients), sum(each.bytes for each in clients)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traffic", action="store_true")
    parser.add_argument("--counts")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    default = "2,16,128,1024,4096" if args.traffic else "2,4,16,64,256,1024"
    counts = [int(count) for count in (args.counts or default).split(",")]
    if args.traffic:
        print_traffic(counts)
    else:
        print_times(counts, args.repeats)


if __name__ == "__main__":
    main()
