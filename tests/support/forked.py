"""Programs forked from a server process that has already imported their libraries.

Hundreds of tests start a program, and importing torch, JAX and Orbax takes 3.5 s of CPU, most of a
program's cost. A server imports them once and forks for each program. Before a fork it starts no
JAX backend and no thread, so that each program still has its own devices, environment, working
directory, signals and exit code.

A fork returns from the server's loop and runs its program as ``__main__``. The interpreter then
ends as usual: it reports uncaught errors, joins threads, calls ``atexit`` functions and tears down
modules. The processes of :mod:`multiprocessing`'s fork server would end in ``os._exit`` instead.

Programs share a server only if their environments agree except in :data:`READ_LATER`, because an
interpreter reads the other variables at start-up or at an import. The hash seed is also read then.
Two servers therefore take turns, so that programs started one after the other iterate over a set
in different orders. All workers of a run of pytest share the servers, which end with the run.

test_forked.py tests that a program cannot detect the fork, with these exceptions: modules that it
never imported are loaded, in the order of :data:`MODULES` (Lightning's logging depends on loaded
modules), ``torch._dynamo`` logs nothing at the end, JAX keeps compiled code as compiled.py says,
and its memory includes theirs. Tests of imports, of memory and of the interpreter's end start a new
interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import hashlib
import importlib
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import IO, Any, Protocol
from unittest import mock

MODULES = ("jax", "numpy", "orbax.checkpoint", "torch", "torchax", "torchax_ckpt.checkpointer")

# Variables that nothing reads at import.
READ_LATER = {
    "HEARTBEAT_SECS",  # of processes_program.py
    "JAX_COORDINATOR_BIND_ADDRESS",
    # Of JAX. A fork shares what it compiles as compiled.py says.
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
    "PYTEST_CURRENT_TEST",
    "PYTEST_XDIST_WORKER",
    "XLA_FLAGS",
    # Of gcsfs and TensorStore. The server does not import gcsfs.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING",
    "NO_GCE_CHECK",
    "STORAGE_EMULATOR_HOST",
    "TENSORSTORE_GCS_HTTP_URL",
}
MAX_REQUEST_BYTES = 1 << 20
# In a fork, variables that its imports have set: programs that it starts share its servers.
_added: dict[str, str] = {}
# The process whose end ends the servers: that of the run, also in its workers.
OWNER = "TORCHAX_CKPT_TESTS_OWNER"


class Process(Protocol):
    """The methods that a forked program shares with :class:`subprocess.Popen`."""

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
    """Starts what ``python ARGUMENTS`` would run in this environment, as a fork without stdin."""
    at_import = {k: v for k, v in env.items() if k not in READ_LATER and _added.get(k) != v}
    server = next(_servers(frozenset(at_import.items()), tuple(modules)))
    return server.start(arguments, env, stdout, stderr)


@functools.cache
def _servers(env: frozenset[tuple[str, str]], modules: tuple[str, ...]) -> Iterator[_Server]:
    def two() -> Iterator[_Server]:  # Starts the second server only when it is needed.
        yield (first := _Server(0, dict(env), modules))
        yield (second := _Server(1, dict(env), modules))
        yield from itertools.cycle([first, second])

    return two()


class _Server:
    """A server, seen from a test process. It ends when its owner ends, in any way."""

    def __init__(self, number: int, env: Mapping[str, str], modules: Sequence[str]) -> None:
        owner = int(env.get(OWNER, os.getpid()))
        form = json.dumps([owner, number, sorted(env.items()), *modules])
        address = f"\0torchax_ckpt-tests-{hashlib.sha256(form.encode()).hexdigest()}"
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while self._requests.connect_ex(address):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(address)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:  # another worker starts the server
                        raise
                    time.sleep(0.01)
                    continue
                listener.listen(64)
                call = f"serve({listener.fileno()}, {owner}, {list(modules)!r})"
                process = subprocess.Popen(
                    [sys.executable, "-c", f"exec(__import__('support.forked').forked.{call})"],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    # Ctrl-C then reaches only the test process, which ends the server.
                    process_group=0,
                )
                process.returncode = 0  # no warning that it still runs when this process ends
        atexit.register(self._requests.close)

    def start(
        self, arguments: Sequence[str], env: Mapping[str, str], stdout: IO[Any], stderr: IO[Any]
    ) -> Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": list(arguments), "env": dict(env), "directory": os.getcwd()}
        with theirs:
            files = [theirs.fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._requests, [json.dumps(request).encode()], files)
        return _Forked(ours)


class _Forked:
    """A forked program. No other process gets its pid before this object has read its exit."""

    def __init__(self, reports: socket.socket) -> None:
        self._reports = reports
        self.returncode: int | Any = None
        self.pid = self._report(None)

    def _report(self, timeout: float | None) -> int:
        self._reports.settimeout(timeout)
        if not (report := self._reports.recv(64)):
            self._reports.close()
            raise RuntimeError("the server of forked programs has exited; its stderr says why")
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
    """A program, seen from its server."""

    def __init__(self, pid: int, reports: socket.socket) -> None:
        self.pid, self.reports = pid, reports
        self.end = os.pidfd_open(pid)
        self.is_running = True
        with contextlib.suppress(BrokenPipeError):
            reports.send(str(pid).encode())

    def report(self) -> None:
        """Reports the exit code. Does not reap the process, so that its pid is not reused."""
        self.is_running = False
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with contextlib.suppress(BrokenPipeError):  # The loop sees the closed socket next.
            self.reports.send(str(code).encode())

    def close(self) -> None:
        """Kills the process if it still runs, and reaps it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.forget()

    def forget(self) -> None:
        os.close(self.end)
        self.reports.close()


def serve(listener_fd: int, owner: int, modules: Sequence[str]) -> CodeType:
    """Forks for each request; returns in each fork, with the code to run.

    Kills the programs of a test process that has closed its end; ends when the owner does.
    """
    before = set(os.environ)
    end_of_owner = os.pidfd_open(owner)
    for module in modules:
        importlib.import_module(module)
    # Every optimizer of torch imports this, which takes a second of CPU. It changes how the
    # interpreter ends: functions that it registers make Ctrl-C end the program with exit code 1.
    with mock.patch.object(atexit, "register"):
        importlib.import_module("torch._dynamo")
    added = {name: value for name, value in os.environ.items() if name not in before}
    gc.freeze()  # Garbage collection in a fork would copy the memory that it shares.
    listener = socket.socket(fileno=listener_fd)
    clients: list[socket.socket] = []
    children: list[_Child] = []
    while True:
        ends = [child.end for child in children if child.is_running]
        files: list[Any] = [listener, end_of_owner, *clients, *ends]
        ready, _, _ = select.select([*files, *(child.reports for child in children)], [], [])
        for child in list(children):
            if child.is_running and child.end in ready:
                child.report()
            if child.reports in ready:  # The test process has closed its end.
                child.close()
                children.remove(child)
        if end_of_owner in ready:
            for child in children:
                child.close()
            os._exit(0)
        if listener in ready:
            clients.append(_accepted(listener))
        for requests in [client for client in clients if client in ready]:
            message, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
            if not message:
                requests.close()
                clients.remove(requests)
                continue
            reports = socket.socket(fileno=fds[0])
            pid = os.fork()
            if pid == 0:
                for child in children:
                    child.forget()
                for file in (listener, *clients, reports):
                    file.close()
                os.close(end_of_owner)
                return _become(fds[1:], added, **json.loads(message))
            for fd in fds[1:]:
                os.close(fd)
            children.append(_Child(pid, reports))
            # OpenBLAS ends its thread at the first fork.
            assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread"


def _accepted(listener: socket.socket) -> socket.socket:
    """Returns the connection of a test process; any user of the machine can see the address."""
    client, _ = listener.accept()
    peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    assert struct.unpack("3i", peer)[1] == os.getuid(), "another user"
    return client


def _become(
    outputs: Sequence[int],
    added: Mapping[str, str],
    arguments: Sequence[str],
    env: Mapping[str, str],
    directory: str,
) -> CodeType:
    """Makes this process like a new interpreter at the start of its program; returns the code.

    The environment also has the variables that the imported modules have ``added``.
    """
    import numpy as np
    import torch

    for fd, output in enumerate(outputs, start=1):
        os.dup2(output, fd)
        os.close(output)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update({**added, **env})
    _added.update(added)
    if (folder := env.get("JAX_COMPILATION_CACHE_DIR")) and "jax" in sys.modules:
        from support import compiled

        compiled.share(Path(folder))
    torch.default_generator.seed()
    np.random.seed()  # The random module reseeds itself after a fork.
    if arguments[0] == "-c":
        source, name = arguments[1], "<string>"
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
    else:
        source, name = Path(arguments[0]).read_text(), arguments[0]
        sys.argv, sys.path[0] = list(arguments), str(Path(name).resolve().parent)
        sys.modules["__main__"].__dict__.update(__file__=name, __cached__=None)
    return compile(source, name, "exec", dont_inherit=True)
