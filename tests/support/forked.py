"""Programs forked from a process that has imported what they import.

Hundreds of tests run a program in a process of its own, and importing torch, JAX and Orbax is most
of what such a program costs: 2.4 s of CPU. A server imports them once and forks for each program.
Until it forks it starts no JAX backend and no thread, so that each program still has devices, an
environment, a working directory, signals and an exit code of its own.

The fork returns from the server's loop and runs its program as ``__main__``; when that ends, so
does the interpreter, in its own way: uncaught errors, threads that are waited for, functions of
``atexit``, modules torn down. This is why it is not :mod:`multiprocessing`'s fork server, whose
processes end in ``os._exit``.

What an interpreter reads once, at its start or when a library is imported, is that of the server.
So programs share one only if their environments agree, but for what is :data:`READ_LATER`. The
seed of hashes is such a thing too: there are two servers, which take turns, and so programs that
run beside or after each other do not agree on the order of a set by chance.

What a program may not tell from being forked is tested in test_forked.py. What it can: modules
that it never imported are there, and were imported in this order (Lightning sets up its logging by
what it finds); its memory begins with theirs. Tests about importing, about memory and about the
end of the interpreter start a fresh one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import IO, Any, Protocol

MODULES = ("jax", "numpy", "orbax.checkpoint", "torch", "torchax", "torchax_ckpt.checkpointer")

# Variables that nothing reads at import, and those of JAX's that can be set afterwards.
READ_LATER = {
    "DIES_AFTER_SECS",  # of killed_once_all_have_step.py
    "HEARTBEAT_SECS",  # of processes_program.py
    "JAX_COORDINATOR_BIND_ADDRESS",
    "PYTEST_CURRENT_TEST",
    "XLA_FLAGS",
    # Of gcsfs and TensorStore; the server has not imported gcsfs.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING",
    "NO_GCE_CHECK",
    "STORAGE_EMULATOR_HOST",
    "TENSORSTORE_GCS_HTTP_URL",
}
SETTINGS: dict[str, Callable[[str], Any]] = {
    "JAX_COMPILATION_CACHE_DIR": str,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": float,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": int,
}
MAX_REQUEST_BYTES = 1 << 20


class Process(Protocol):
    """What a forked program has in common with a :class:`subprocess.Popen`."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: IO[Any],
    stderr: IO[Any],
    modules: Sequence[str] = MODULES,
) -> Process:
    """Starts what ``python ARGUMENTS`` would start, forked; it reads nothing.

    Args:
      arguments: ``-c``, the program and its arguments; or the path of a script and its arguments.
      env: the whole environment.
      stdout, stderr: files of this process that the program writes to.
      modules: what is imported before.
    """
    at_import = {k: v for k, v in env.items() if k not in READ_LATER and k not in SETTINGS}
    server = next(_servers(frozenset(at_import.items()), tuple(modules)))
    return server.start(arguments, env, stdout, stderr)


@functools.cache
def _servers(env: frozenset[tuple[str, str]], modules: tuple[str, ...]) -> Iterator[_Server]:
    def two() -> Iterator[_Server]:  # the second only when it is needed
        yield (first := _Server(dict(env), modules))
        yield (second := _Server(dict(env), modules))
        yield from itertools.cycle([first, second])

    return two()


class _Server:
    """A server, as seen from here. It ends with this process, however that ends."""

    def __init__(self, env: Mapping[str, str], modules: Sequence[str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        call = f"serve({theirs.fileno()}, {list(modules)!r})"
        lines = f"exec(__import__('support.forked').forked.{call})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", lines],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # an interrupt is for this process, which ends the others
            )
        atexit.register(self._end)

    def start(
        self, arguments: Sequence[str], env: Mapping[str, str], stdout: IO[Any], stderr: IO[Any]
    ) -> Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": list(arguments), "env": dict(env), "directory": os.getcwd()}
        with theirs:
            files = [theirs.fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._requests, [json.dumps(request).encode()], files)
        return _Forked(ours)

    def _end(self) -> None:
        self._requests.close()
        self._process.wait()


class _Forked:
    """A program that was forked. Its pid is its own until its end has been seen here."""

    def __init__(self, reports: socket.socket) -> None:
        self._reports = reports
        self.returncode: int | Any = None
        self.pid = self._report(None)

    def _report(self, timeout: float | None) -> int:
        self._reports.settimeout(timeout)
        if not (report := self._reports.recv(64)):
            self._reports.close()
            raise RuntimeError("the server of forked programs has ended; its stderr says why")
        return int(report)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                self.returncode = self._report(timeout)
            except TimeoutError:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from None
            self._reports.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# --- in the server -------------------------------------------------------------------------------


class _Child:
    """A program, as seen from its server."""

    def __init__(self, pid: int, reports: socket.socket) -> None:
        self.pid, self.reports = pid, reports
        self.end = os.pidfd_open(pid)
        self.is_running = True
        with contextlib.suppress(BrokenPipeError):
            reports.send(str(pid).encode())

    def report(self) -> None:
        """Says how it ended. It is not reaped yet: nobody else is to get its pid."""
        self.is_running = False
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with contextlib.suppress(
            BrokenPipeError
        ):  # nobody listens any more: the next round sees it
            self.reports.send(str(code).encode())

    def close(self) -> None:
        """Ends it, unless it has ended."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.forget()

    def forget(self) -> None:
        os.close(self.end)
        self.reports.close()


def serve(requests_fd: int, modules: Sequence[str]) -> CodeType:
    """Forks for each request; returns in the forks, with what is to run there.

    When nobody can ask any more it ends the programs that still run, and itself.
    """
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # the forks share what is here, and do not look through it for garbage
    requests = socket.socket(fileno=requests_fd)
    children: list[_Child] = []
    while True:
        ends = [child.end for child in children if child.is_running]
        files: list[Any] = [requests, *ends, *(child.reports for child in children)]
        ready, _, _ = select.select(files, [], [])
        for child in list(children):
            if child.is_running and child.end in ready:
                child.report()
            if child.reports in ready:  # nobody listens any more
                child.close()
                children.remove(child)
        if requests not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
        if not message:
            for child in children:
                child.close()
            sys.exit()
        reports = socket.socket(fileno=fds[0])
        pid = os.fork()
        if pid == 0:
            for child in children:
                child.forget()
            requests.close()
            reports.close()
            return _become(fds[1:], **json.loads(message))
        for fd in fds[1:]:
            os.close(fd)
        children.append(_Child(pid, reports))
        # A thread of OpenBLAS ends when its process first forks.
        assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread"


def _become(
    outputs: Sequence[int], arguments: Sequence[str], env: Mapping[str, str], directory: str
) -> CodeType:
    """Makes this process what a fresh interpreter is when its program begins."""
    import jax
    import numpy as np
    import torch

    for fd, output in enumerate(outputs, start=1):
        os.dup2(output, fd)
        os.close(output)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    for name, parse in SETTINGS.items():
        if name in env:
            jax.config.update(name.lower(), parse(env[name]))
    torch.default_generator.seed()
    np.random.seed()  # random sees to its own
    if arguments[0] == "-c":
        source, name = arguments[1], "<string>"
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
    else:
        source, name = Path(arguments[0]).read_text(), arguments[0]
        sys.argv, sys.path[0] = list(arguments), str(Path(name).resolve().parent)
        sys.modules["__main__"].__dict__.update(__file__=name, __cached__=None)
    return compile(source, name, "exec", dont_inherit=True)
