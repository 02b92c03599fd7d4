"""Programs in processes of their own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import PROGRAMS, ROOT, TESTS, forked

# For the environment of programs that come several times: they compile the same.
COMPILED_ONCE = {
    "JAX_COMPILATION_CACHE_DIR": os.environ.get("TORCHAX_CKPT_TESTS_COMPILED", ""),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def run_torture(program: Path, *args: str) -> tuple[int, dict[str, int], str]:
    """Exit code, table and output of a harness, which starts processes of its own."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), *args],
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    table = {
        name.strip(): int(value)
        for name, value in re.findall(r"^(.+?) +(\d+)$", result.stdout, re.MULTILINE)
    }
    return result.returncode, table, result.stdout + result.stderr[-4000:]


class Started:
    """A program in a process of its own, with what it writes.

    Args:
      arguments: of ``python``: ``-c`` and the source, or the path of a program; then its own.
      devices: that JAX has; as many as the program itself asks for, if None.
      env: more variables.
      fresh: an interpreter that has imported nothing yet, rather than one as in ``forked.py``.
      modules: what is imported already, if it is not fresh.
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
        variables = environment(devices, env)
        self.process: forked.Process
        if fresh:
            command = [sys.executable, *self._arguments]
            self.process = subprocess.Popen(command, env=variables, stdout=out, stderr=err)
        else:
            self.process = forked.start(
                self._arguments, env=variables, stdout=out, stderr=err, modules=modules
            )

    def output(self) -> tuple[str, str]:
        """What it has written to stdout and stderr so far."""
        # Not by seeking: the process writes where these files stand.
        out, err = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in self._outputs)
        return out, err

    def result(self, timeout_secs: float) -> subprocess.CompletedProcess[str]:
        """How it ended; it is killed if it has not after that time."""
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
    """A program in a process of its own, whose lines are read as they come.

    Args:
      arguments, env, fresh, modules: as of :class:`Started`; env is the whole environment.
    """

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
    """Processes of one program that runs on several, each with devices of its own.

    Args:
      program: its path or its source; ``tests`` is importable in it. Its first arguments are its
        index, how many processes there are, and the port of JAX's coordination service.
      count: how many processes.
      args: more arguments.
      devices: of each process.
      timeout_secs: they are ended by the kernel after that, whatever becomes of the test.
      fresh: see :class:`Started`.
    """

    def __init__(
        self,
        program: str | Path,
        count: int,
        *args: str,
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
        # Else JAX's coordination service listens on every address of this machine.
        bound = {"JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}"}
        variables = {**COMPILED_ONCE, **bound, **env}
        self._started = [
            Started(
                *("-c", lines, str(index), str(count), port, *args),
                devices=devices,
                env=variables,
                fresh=fresh,
            )
            for index in range(count)
        ]
        self.processes = [started.process for started in self._started]

    def kill(self, index: int) -> None:
        """SIGKILL."""
        self.processes[index].kill()

    def output(self, index: int) -> tuple[str, str]:
        """What a process has written to stdout and stderr so far."""
        return self._started[index].output()

    def reports(self, index: int) -> list[Any]:
        """The JSON objects that a process has printed so far, each on a line."""
        lines = self.output(index)[0].splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait(self) -> list[int]:
        """Exit codes, once all have ended."""
        return [process.wait(self._timeout_secs) for process in self.processes]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()  # all at once, before one is waited for
        for started in self._started:
            started.__exit__(*exc)


def run_processes(program: str | Path, count: int, *args: str, **kwargs: Any) -> list[list[Any]]:
    """What each process of a program has reported; all must succeed. See :class:`Running`."""
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
    """This one, for a program with that many devices, or with those that it asks for itself."""
    path = [*map(str, (TESTS, PROGRAMS, ROOT)), os.environ.get("PYTHONPATH")]
    variables = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        **env,
    }
    if devices is None:
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
    """Runs a program in a process of its own; ``tests`` is importable there, and this package.

    Args:
      program: its path, or its source where it is a few lines.
      args: of the program.
      check: raises if the program fails.
      devices, env, fresh: as of :class:`Started`.
      timeout_secs: the program is killed after that.
    """
    command = [program] if isinstance(program, Path) else ["-c", textwrap.dedent(program)]
    result = Started(*command, *args, devices=devices, env=env, fresh=fresh).result(timeout_secs)
    if check and result.returncode != 0:
        raise AssertionError(f"exit {result.returncode}\n{result.stdout}\n{result.stderr[-4000:]}")
    return result
