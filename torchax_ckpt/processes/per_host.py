"""The coordination of processes for a local tier, where each host writes its own directory."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator

from torchax_ckpt.processes.call_log import Call
from torchax_ckpt.processes.coordination import Processes


class PerHostProcesses(Processes):
    """A channel on which each process does the work of process 0, in its own directory.

    ``count`` is 1 and ``index`` is 0 on each process, so that every process does what process 0
    would do. The processes still exchange messages and enter the same rounds: if one process fails,
    the round fails on all processes.

    Args:
      processes: the channel between the processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        super().__init__("", 0, None, index=0, count=1)
        self._processes = processes
        self.log = processes.log

    @property
    def is_per_host(self) -> bool:
        """Whether the run has several processes, so that each process writes its own directory."""
        return self._processes.count > 1

    @contextlib.contextmanager
    def round(self, what: str, call: Call | None = None) -> Iterator[None]:
        """Runs a round of all processes; see ``Processes.round``."""
        with self._processes.round(what, call):
            yield

    def refuse(self, what: str, error: BaseException) -> None:
        """Makes the round ``what`` fail on the other processes; does not wait for them."""
        self._processes.refuse(what, error)

    def gather(self, value: bytes = b"", topic: str | None = None) -> list[bytes]:
        """Returns the values of all processes, on all processes."""
        sent = self._processes.gather(value, topic)
        lengths = json.dumps([len(message) for message in sent]).encode()
        packed = self._processes.share(b"\n".join([lengths, b"".join(sent)]), topic)
        header, _, body = packed.partition(b"\n")
        ends = list(itertools.accumulate(json.loads(header), initial=0))
        return [body[start:end] for start, end in itertools.pairwise(ends)]

    def meet(self, topic: str | None = None) -> None:
        """Waits until all processes have called ``meet``."""
        self._processes.meet(topic)

    def agreed_time(self) -> int:
        """Waits until all processes have called ``agreed_time``; returns the time of process 0."""
        return int.from_bytes(self.gather(time.time_ns().to_bytes(8))[0])
