"""Owns how processes agree on when to save, without asking each other at every step.

Process 0 decides, one appointment ahead: at each it names the step of the next, and whether that
one is saved. What it says goes through JAX's coordination service, in the background; the others
look it up in the background too. Between appointments everybody knows that there is nothing to
know. Who reaches the end of what it knows waits, so nobody ever guesses.

Every process must ask at the same steps, in the same order, as training does.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from orbax import checkpoint as v0

from torchax_ckpt.errors import PolicyError

# How far ahead in time an appointment lies: enough to hear of it before it comes, and little
# beside the time that a save takes; and how far at most in steps, should they become slower.
_AHEAD_SECS = 0.05
_MAX_AHEAD = 100
_PATIENCE_SECS = 600
_POLL_SECS = 1

_counter = itertools.count()
_closing = threading.Event()
# Ends the look-ups before the interpreter joins their threads: the newest hook is called first, and
# that of concurrent.futures is registered by importing from it above.
threading._register_atexit(_closing.set)  # type: ignore[attr-defined]


class Appointments:
    """The appointments of one policy.

    Args:
      process_index: whose these are; process 0 decides.
      client: of JAX's coordination service.
    """

    def __init__(self, process_index: int | None = None, client: Any = None) -> None:
        self._decides = (jax.process_index() if process_index is None else process_index) == 0
        self._client = client or v0.multihost.get_jax_distributed_client()
        # Policies are asked in the same order everywhere.
        self._name = f"torchax_ckpt/appointments/{next(_counter)}"
        self._background = ThreadPoolExecutor(1, "appointments")
        self._asked = -1
        self._answer = False
        self._times_back = 0
        # The next appointment: its step, and whether that is saved.
        self._at, self._saves = -1, False
        self._count = 0  # of those named or looked up
        self._coming: Future[list[Any]] | None = None
        self._since = (0, 0.0)  # step and time of the appointment before
        self._keys: collections.deque[str] = collections.deque()
        self._awaited: tuple[int, str] | None = None

    def ask(self, step: int, decide: Callable[[], bool], newest: int | None) -> bool:
        """Whether to save this step; the same everywhere.

        Args:
          step: where this process is.
          decide: whether a save should begin now; called on process 0 alone.
          newest: the newest step that is durable here, or None.

        Raises:
          PolicyError: process 0 has not decided, long after this process came to this step.
        """
        if step == self._asked:
            return self._answer
        if step < self._asked:
            # What was agreed before the run went back is void.
            self._times_back += 1
            self._at = -1
        self._asked = step
        while self._at < step:  # the first time, after going back, and if steps were left out
            if self._decides:
                self._name_next(step, decide())
            else:
                self._look_up(step)
        self._answer = self._saves and step == self._at
        if step == self._at:
            if self._decides:
                self._forget(newest)
                if self._answer:
                    self._awaited = step, self._keys[-1]
                self._name_next(step + self._ahead(step), not self._answer and decide())
            elif self._coming is None:
                self._coming = self._background.submit(self._get, self._key(self._count))
        return self._answer

    def _ahead(self, step: int) -> int:
        """How many steps the next appointment lies ahead."""
        now = time.monotonic()
        last_step, last_time = self._since
        self._since = step, now
        secs_per_step = (now - last_time) / max(1, step - last_step)
        return max(1, min(_MAX_AHEAD, math.ceil(_AHEAD_SECS / max(secs_per_step, 1e-6))))

    def _name_next(self, at: int, saves: bool) -> None:
        if self._coming is not None and self._coming.done():
            self._coming.result()
        key = self._key(self._count)
        self._count += 1
        self._at, self._saves = at, saves
        self._keys.append(key)
        value = json.dumps([self._times_back, at, saves])
        self._coming = self._background.submit(self._set, key, value)

    def _look_up(self, step: int) -> None:
        coming = self._coming or self._background.submit(self._get, self._key(self._count))
        self._coming = None
        try:
            times_back, at, saves = coming.result(_PATIENCE_SECS)
        except TimeoutError:
            raise PolicyError(
                f"process 0 has not decided whether to save step {step}, {_PATIENCE_SECS} s after "
                "this process came to it; every process must call save at the same steps"
            ) from None
        self._count += 1
        if times_back == self._times_back:
            self._at, self._saves = at, saves

    def _forget(self, newest: int | None) -> None:
        """Deletes what every process has looked up: all up to an appointment whose step is durable.

        For then all processes have saved it, each after it had looked the appointment up.
        """
        if self._awaited is not None and self._awaited[0] == newest:
            key = ""
            while key != self._awaited[1]:
                key = self._keys.popleft()
                self._background.submit(self._client.key_value_delete, key)
            self._awaited = None

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"

    def _set(self, key: str, value: str) -> list[Any]:
        self._client.key_value_set(key, value)
        return []

    def _get(self, key: str) -> list[Any]:
        while not _closing.is_set():
            try:
                return json.loads(self._client.blocking_key_value_get(key, _POLL_SECS * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise PolicyError("the program is ending")
