"""Groups of live processes, which run one distributed program after another.

To start processes and connect them takes seconds, and most programs of tests less than one. A group
is connected once through ``jax.distributed``. Its processes are ``programs/member.py``. All get a
program when all have ended the one before. A group in which a program fails, takes too long or
leaves something behind is ended, so that only the test of that program fails.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import PROGRAMS
from support.processes import Running

# The test's function: takes what ``run_processes`` takes, but neither environment nor devices.
Together = Callable[..., list[list[Any]]]
MAX_MESSAGE_BYTES = 1 << 17
START_SECS = 280.0
DONE = "done"
# Then the processes write where all their threads are, and end.
DEADLINE_SECS = 240


class Groups:
    """The live groups of a test process, by the number of their processes.

    ``is_new``: each program gets a new group, in which nothing ran before it.
    """

    def __init__(self, *, is_new: bool = False) -> None:
        self._groups: dict[int, Group] = {}
        self._is_new = is_new

    def run(self, program: str | Path, count: int, *args: Any) -> list[list[Any]]:
        """Runs a program in a live group; returns the reports of each process."""
        group = self._groups.pop(count, None) or Group(count)
        with contextlib.ExitStack() as ending:
            ending.enter_context(group)
            reports = group.run(program, *args)
            if not self._is_new:
                ending.pop_all()
                self._groups[count] = group
        return reports

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *exc: object) -> None:
        for group in self._groups.values():
            group.__exit__(*exc)


class Group:
    """One live group. ``with`` ends it."""

    def __init__(self, count: int) -> None:
        name = f"torchax_ckpt-tests-group-{uuid.uuid4()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")
            listener.listen(count)
            listener.settimeout(START_SECS)
            # Each program has a deadline, but the group has none.
            self._running = Running(PROGRAMS / "member.py", count, name, timeout_secs=0)
            self._members: list[socket.socket] = []
            with contextlib.ExitStack() as failed:
                failed.enter_context(self)
                try:
                    for _ in range(count):
                        self._members.append(listener.accept()[0])
                except TimeoutError:
                    self._fail(f"the group did not start within {START_SECS:.0f} s")
                failed.pop_all()

    def run(self, program: str | Path, *args: Any) -> list[list[Any]]:
        """Runs a program, a path or source, in each process; returns what each has reported."""
        indices = range(len(self._members))
        before = [len(self._running.reports(index)) for index in indices]
        is_file = isinstance(program, Path)
        source = program.read_text() if isinstance(program, Path) else textwrap.dedent(program)
        words = [json.dumps(arg) if isinstance(arg, dict) else str(arg) for arg in args]
        task = [source, str(program) if is_file else "-c", words, DEADLINE_SECS]
        try:
            for member in self._members:
                member.send(json.dumps(task).encode())
            left = set(self._members)
            while left:
                for member in select.select(left, [], [])[0]:
                    if (answer := member.recv(MAX_MESSAGE_BYTES).decode()) != DONE:
                        self._fail(answer or "a process has ended")
                    left.remove(member)
        except ConnectionError:
            self._fail("a process has ended")
        return [self._running.reports(index)[before[index] :] for index in indices]

    def _fail(self, problem: str) -> None:
        outputs = [
            f"--- process {index}\n{out[-2000:]}{err[-3000:]}"
            for index in range(len(self._running.processes))
            for out, err in [self._running.output(index)]
        ]
        raise AssertionError("\n".join([problem, *outputs]))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self._running.__exit__(*exc)
        for member in self._members:
            member.close()
