"""Exchanges of values between the processes of a run, through process 0, within a round."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torchax_ckpt.processes.messages import Messages

T = TypeVar("T")

# Messages to process 0 that together may be longer have keys of their own, so that a listing does
# not repeat them.
_MAX_LISTED_BYTES = 4 << 20
_LONG = b"\1"
_SHORT = b"\0"
# How many messages a process waits for one by one, after the first listing of what has arrived.
_FIRST_WAITS = 8


class Exchanges(Messages):
    """The exchanges of one channel; ``Processes`` adds the rounds that they belong to."""

    timeout_secs: float

    def gather(self, value: bytes = b"", topic: str | None = None) -> list[bytes]:
        """Sends a value to process 0; returns all values there, and [] on other processes.

        A ``topic`` distinguishes the message from those of other threads in the same round.
        Messages without a topic are numbered in their order.
        """
        if self.count == 1:
            return [value]
        place = self._place_of(topic)
        if not self.is_first:
            if is_long := len(value) > _MAX_LISTED_BYTES // self.count:
                self._set(f"{place} long/{self.index}", value)
            self._set(f"{place}/{self.index}", _LONG if is_long else _SHORT + value)
            return []
        values = self._received(place)
        self._forget()
        return [value, *(values[index] for index in range(1, self.count))]

    def _received(self, place: str) -> dict[int, bytes]:
        """Returns the message of each other process at ``place``, when all have arrived.

        One listing costs much less than one read for each message. Between two listings, waits for
        some of the missing messages one by one, four times as many as before.
        """
        deadline = time.monotonic() + self.timeout_secs
        found: dict[int, bytes] = {}
        num_waits = _FIRST_WAITS
        while missing := [index for index in range(1, self.count) if index not in found]:
            keys = {f"{place}/{index}": index for index in missing}
            listed = self._listed(f"{place}/")
            found |= {keys[key]: message for key, message in listed if key in keys}
            for index in [index for index in missing if index not in found][:num_waits]:
                found[index] = self._get(f"{place}/{index}", deadline, place)
            num_waits *= 4
        return {
            index: message[1:]
            if message != _LONG
            else self._get(f"{place} long/{index}", deadline, place)
            for index, message in found.items()
        }

    def scatter(self, values: Sequence[bytes] = (), topic: str | None = None) -> bytes:
        """Returns ``values[i]`` of process 0 on process i; ``topic`` is as for ``gather``."""
        if self.count == 1:
            return values[0]
        place = self._place_of(topic)
        if not self.is_first:
            return self._get(f"{place} to/{self.index}", self._deadline_of_first(), place)
        for index in range(1, self.count):
            self._set(f"{place} to/{index}", values[index])
        return values[0]

    def post(self, topic: str, value: bytes) -> None:
        """Sends a value to the processes that call ``posted`` in the same round."""
        self._set(f"{self._here}/{topic}/from {self.index}", value)

    def posted(self, topic: str, index: int) -> bytes:
        """Returns the value that process ``index`` posts in this round."""
        place = f"{self._here}/{topic}"
        return self._get(f"{place}/from {index}", self._deadline_of_first(), place, [index])

    def share(self, value: bytes = b"", topic: str | None = None) -> bytes:
        """Returns process 0's ``value`` on all processes; ``topic`` is as for ``gather``."""
        if self.count == 1:
            return value
        place = self._place_of(topic)
        if self.is_first:
            self._set(f"{place}/shared", value)
            return value
        return self._get(f"{place}/shared", self._deadline_of_first(), place)

    def meet(self, topic: str | None = None) -> None:
        """Waits until all processes have called ``meet``; ``topic`` is as for ``gather``."""
        if self.count == 1:
            return
        if topic is None:
            topic = f"meeting {self._messages}"
            self._messages += 1
        self.gather(topic=topic)
        self.share(topic=topic)

    def common_name(self) -> str:
        """Returns a new name, the same on all processes, if they call this in the same order."""
        return self._place_of(None).replace("/", "-")

    def first(self, action: Callable[[], T]) -> T:
        """Returns on all processes, as JSON, the result of an action that process 0 runs."""
        if self.count == 1:
            return action()
        if not self.is_first:
            return json.loads(self.share())
        value = action()
        self.share(json.dumps(value).encode())
        return value

    # --- what the rounds say ---

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which commits, moves and deletes steps for all processes."""
        return self.index == 0

    _messages: int  # messages without a topic, in this round

    @property
    def _here(self) -> str:
        """The prefix of the keys of this round."""
        raise NotImplementedError

    def _place_of(self, topic: str | None) -> str:
        if topic is None:
            topic = str(self._messages)
            self._messages += 1
        return f"{self._here}/{topic}"

    def _deadline_of_first(self) -> float:
        """Returns the deadline for process 0, which may arrive late and itself wait for another."""
        return time.monotonic() + 2 * self.timeout_secs

    def _get(
        self, key: str, deadline: float, place: str, senders: Sequence[int] | None = None
    ) -> bytes:
        """Returns the message ``key`` when it arrives; raises if a process fails or time runs out.

        ``deadline`` is a ``time.monotonic()``; ``senders`` are waited for, by default those that
        are missing in the folder of keys ``place``.
        """
        raise NotImplementedError

    def _forget(self) -> None:
        """Deletes messages of earlier rounds."""
        raise NotImplementedError
