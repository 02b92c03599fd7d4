"""Threads that act as processes, with a coordination service in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from torchax_ckpt.processes.coordination import Processes


class Service:
    """A replacement of JAX's coordination service for threads of one process."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            if not allow_overwrite and key in self.known:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.known[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.known, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.known[key]

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        assert folder.endswith("/")
        with self._changed:
            return [(k, v) for k, v in self.known.items() if k.startswith(folder)]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for known in [k for k in self.known if k == key or k.startswith(f"{key}/")]:
                del self.known[known]


class Group:
    """Three processes, each simulated by a thread. They make their first calls together."""

    def __init__(self, timeout_secs: float = 30) -> None:
        self.service = Service()
        self.members = [
            Processes(f"test {id(self)} {i}", timeout_secs, index=i, count=3, client=self.service)
            for i in range(3)
        ]
        for member in self.members:
            member._place = "test"

    def __call__(self, act: Callable[[Processes], Any]) -> list[Any]:
        """Calls ``act`` in each process; returns each result or exception."""

        # A thread that begins late would look like a process that does not come.
        together = threading.Barrier(len(self.members))

        def run(member: Processes) -> Any:
            together.wait(60)
            try:
                return act(member)
            except Exception as error:
                return error

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(run, self.members))
