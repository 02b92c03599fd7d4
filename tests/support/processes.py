"""Starts programs in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import PROGRAMS, ROOT, TESTS, forked
from support.jax_releases import xla_flags

# Environment of programs that share compiled code: see compiled.py.
COMPILED_ONCE = {
    "JAX_COMPILATION_CACHE_DIR": os.environ.get("TORCHAX_CKPT_TESTS_COMPILED", ""),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


class Started:
    """A program in a process of its own, with its output.

    ``arguments`` are those of ``python``. If ``devices`` is None, the program sets their number.
    ``fresh`` starts a new interpreter instead of forking one that has imported ``modules``, see
    ``forked.py``. It shares compiled code only if ``env`` says so, since it may measure compiling.
    """

    def __init__(
        self,
        *arguments: str | Path,
        devices: int | None = 8,
        env: Mapping[str, str] = {},
        fresh: bool = False,
        modules: Sequence[str] = forked.MODULES,
    ) -> None:
        self._arguments = tuple(map(str, arguments))
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        out, err = self._outputs
        variables = environment(devices, env if fresh else {**COMPILED_ONCE, **env})
        self.process: forked.Process
        if fresh:
            command = [sys.executable, *self._arguments]
            self.process = subprocess.Popen(command, env=variables, stdout=out, stderr=err)
        else:
            self.process = forked.start(
                self._arguments, env=variables, stdout=out, stderr=err, modules=modules
            )

    def output(self) -> tuple[str, str]:
        """Returns the text written to stdout and stderr so far."""
        # pread does not move the file position, which the process shares.
        out, err = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in self._outputs)
        return out, err

    def result(self, timeout_secs: float) -> subprocess.CompletedProcess[str]:
        """Waits for the program and returns its result; kills it after the timeout."""
        with self:
            code = self.process.wait(timeout_secs)
            return subprocess.CompletedProcess(self._arguments, code, *self.output())

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for file in self._outputs:
            file.close()


class Talking:
    """A program whose output is read line by line as it runs; ``env`` is its whole environment."""

    def __init__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str],
        fresh: bool = False,
        modules: Sequence[str] = forked.MODULES,
    ) -> None:
        words = list(map(str, arguments))
        reading, writing = os.pipe()
        self.lines = open(reading)  # noqa: SIM115
        self.process: forked.Process
        with open(writing, "w") as both:
            if fresh:
                command = [sys.executable, *words]
                self.process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=both, stderr=both
                )
            else:
                self.process = forked.start(
                    words, env=env, stdout=both, stderr=both, modules=modules
                )

    def __enter__(self) -> Talking:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self.lines.close()


class Running:
    """The processes of one distributed program, each with its own devices.

    The first arguments of the program, a path or source, are the index of the process, the number
    of processes, and the port of JAX's coordination service; dicts among ``args`` are given as
    JSON. An alarm ends each process after ``timeout_secs``, even if the test has ended.
    """

    def __init__(
        self,
        program: str | Path,
        count: int,
        *args: Any,
        devices: int = 2,
        env: Mapping[str, str] = {},
        timeout_secs: int = 280,
        fresh: bool = False,
    ) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        self._timeout_secs = timeout_secs
        lines = f"import signal; signal.alarm({timeout_secs})\n"
        if isinstance(program, Path):
            lines += f"exec(compile(open({str(program)!r}).read(), {str(program)!r}, 'exec'))"
        else:
            lines += textwrap.dedent(program)
        # Otherwise JAX's coordination service listens on every address of this machine.
        bound = {"JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}"}
        variables = {**COMPILED_ONCE, **bound, **env}
        words = [json.dumps(arg) if isinstance(arg, dict) else str(arg) for arg in args]
        self._started = [
            Started(
                *("-c", lines, str(index), str(count), port, *words),
                devices=devices,
                env=variables,
                fresh=fresh,
            )
            for index in range(count)
        ]
        self.processes = [started.process for started in self._started]

    def kill(self, index: int) -> None:
        """Sends SIGKILL to a process."""
        self.processes[index].kill()

    def output(self, index: int) -> tuple[str, str]:
        """Returns the text that a process has written to stdout and stderr so far."""
        return self._started[index].output()

    def reports(self, index: int) -> list[Any]:
        """Returns the JSON objects that a process has printed so far, one on each line."""
        lines = self.output(index)[0].splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait(self) -> list[int]:
        """Waits for all processes and returns their exit codes."""
        return [process.wait(self._timeout_secs) for process in self.processes]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()  # All are killed before any is waited for.
        for started in self._started:
            started.__exit__(*exc)


def run_processes(program: str | Path, count: int, *args: Any, **kwargs: Any) -> list[list[Any]]:
    """Runs a distributed program as :class:`Running` does; returns the reports of each process."""
    with Running(program, count, *args, **kwargs) as running:
        codes = running.wait()
        if any(codes):
            told = [
                f"--- process {index}: exit {code}\n{out}{err[-3000:]}"
                for index, code in enumerate(codes)
                for out, err in [running.output(index)]
            ]
            raise AssertionError("\n".join(told))
        return [running.reports(index) for index in range(count)]


def environment(devices: int | None, env: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment, changed for a program with that many devices."""
    path = [*map(str, (TESTS, PROGRAMS, ROOT)), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variables = {
        **os.environ,
        "XLA_FLAGS": xla_flags(devices),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path))),
        **env,
    }
    if devices is None and "XLA_FLAGS" not in env:
        del variables["XLA_FLAGS"]
    return variables


def run_python(
    program: str | Path,
    *args: str,
    devices: int = 8,
    check: bool = True,
    env: Mapping[str, str] = {},
    timeout_secs: float = 240,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a program, a path or source, as :class:`Started` does; asserts that it succeeds."""
    command = [program] if isinstance(program, Path) else ["-c", textwrap.dedent(program)]
    result = Started(*command, *args, devices=devices, env=env, fresh=fresh).result(timeout_secs)
    if check and result.returncode != 0:
        raise AssertionError(f"exit {result.returncode}\n{result.stdout}\n{result.stderr[-4000:]}")
    return result
