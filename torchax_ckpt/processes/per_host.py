"""Owns how processes agree where each does in a place of its own what else the first does."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator

from torchax_ckpt.processes.coordination import Processes


class PerHostProcesses(Processes):
    """Processes that do each for itself, in a place of its own, what else the first does for all.

    They enter the same rounds, so that what fails on one fails on all, and can hear each other.

    Args:
      processes: the same, as they are when they do something together.
    """

    def __init__(self, processes: Processes) -> None:
        super().__init__("", 0, None, index=0, count=1)
        self._processes = processes

    @property
    def is_per_host(self) -> bool:
        """Unless there is only one."""
        return self._processes.count > 1

    @contextlib.contextmanager
    def round(self, what: str) -> Iterator[None]:
        """As for those that do something together."""
        with self._processes.round(what):
            yield

    def refuse(self, what: str, error: BaseException) -> None:
        """As for those that do something together."""
        self._processes.refuse(what, error)

    def gather(self, value: bytes = b"", topic: str | None = None) -> list[bytes]:
        """The values of all processes, on all of them."""
        sent = self._processes.gather(value, topic)
        lengths = json.dumps([len(message) for message in sent]).encode()
        packed = self._processes.share(b"\n".join([lengths, b"".join(sent)]), topic)
        header, _, body = packed.partition(b"\n")
        ends = list(itertools.accumulate(json.loads(header), initial=0))
        return [body[start:end] for start, end in itertools.pairwise(ends)]

    def meet(self, topic: str | None = None) -> None:
        """Waits until all processes have come here."""
        self._processes.meet(topic)

    def agreed_time(self) -> int:
        """The time of process 0, once all have come here."""
        return int.from_bytes(self.gather(time.time_ns().to_bytes(8))[0])
