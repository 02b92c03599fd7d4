"""Knows which processes of a run have ended: the kernel closes their connections.

JAX finds that a process has died when no heartbeat arrives for some time, by default 100 s. This
module knows it within a second. Each process keeps a TCP connection to process 0 open, which the
kernel closes when the process ends, however it ends, but not while it is stopped or busy. Only
process 0 watches: the others wait for process 0 only, and JAX ends them at once if it ends.

A host that vanishes, or a network that fails, closes no connection: after some 25 s without an
answer, process 0 logs it, and waits on, because the host may come back in time for JAX's heartbeat.

Nothing that a connection carries is parsed. A new connection shows, with a secret that process 0
publishes through JAX's coordination service, that it belongs to a process of the run, and names its
host. Single bytes follow: the process has open checkpointers, has none any more, or has found that
the calls of the processes differ. Process 0 passes this last byte on to all processes.

Source: the address of the coordination service is private in JAX 0.10.2 (``_src/distributed.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hmac
import json
import logging
import secrets
import selectors
import socket
import threading
import time
import weakref
from typing import Any

from torchax_ckpt.errors import BackendError
from torchax_ckpt.processes import connections
from torchax_ckpt.runtime.background import Task
from torchax_ckpt.runtime.lazily import jax

logger = logging.getLogger(__name__)

_FOLDER = "torchax_ckpt/liveness"
_TOKEN_BYTES, _HOST_BYTES = 32, 64
_ALARM, _OPENS, _CLOSES = b"!", b"+", b"."
# A process that lost its connection, but lives, connects again within this time.
_GRACE_SECS = 0.5
_HELLO_SECS = 10.0
_RETRY_SECS = 5.0

# Held while a thread of this module is inside JAX's client, and for good once the program is
# ending: the interpreter would end the thread there, which aborts the process.
_speaking = threading.Lock()
atexit.register(_speaking.acquire, timeout=1)


class Liveness:
    """Tells which processes have ended. This base class knows of none, and connects nobody."""

    def __init__(self) -> None:
        # The ``CallLog`` of each open checkpointer.
        self._logs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._changing = threading.Lock()

    def connect(self) -> None:
        """Connects this process to process 0, once process 0 has said where it listens."""

    def ended(self) -> dict[int, str]:
        """Returns what is known of each process that has ended, by its index."""
        return {}

    def alarm(self) -> None:
        """Has all processes look for the error of their run; see ``CallLog.look``."""

    def add(self, log: Any) -> None:
        """Records that a checkpointer of this process was opened."""
        with self._changing:
            self._logs.add(log)
            self._tell(_OPENS)

    def remove(self, log: Any) -> None:
        """Records that a checkpointer of this process was closed."""
        with self._changing:
            self._logs.discard(log)
            if not self._logs:
                self._tell(_CLOSES)

    def _tell(self, byte: bytes) -> None:
        pass

    def _look(self) -> None:
        with self._changing:
            logs = list(self._logs)
        with _speaking:
            for log in logs:
                log.look()


@dataclasses.dataclass(eq=False)
class _Peer:
    """A connection that process 0 has accepted."""

    connection: socket.socket
    expires: float  # the ``time.monotonic()`` until which token and name of the host must arrive
    received: bytes = b""  # what has arrived of both
    index: int | None = None  # the process at the other end, and its host, once both are here
    host: str | None = None
    is_open: bool = True  # whether that process has open checkpointers


class Listener(Liveness):
    """Process 0: watches the others' connections, on a thread; OSError if it cannot listen."""

    def __init__(self, client: Any, count: int, host: str) -> None:
        super().__init__()
        self._count = count
        secret = secrets.token_bytes(32)
        self._indices = {_token(secret, index): index for index in range(1, count)}
        self._unknown: set[_Peer] = set()
        self._peers: dict[int, _Peer] = {}
        self._closed: dict[_Peer, float] = {}  # and the time.monotonic() at which it closed
        self._ended: dict[int, str] = {}
        connections.make_room(count)
        self._listener = connections.listen(host, count)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        Task("liveness", self._run).start()
        place = {"port": self._listener.getsockname()[1], "secret": secret.hex()}
        _publish(client, place)

    def ended(self) -> dict[int, str]:
        """Returns what is known of each process that has ended, by its index."""
        return dict(self._ended)

    def alarm(self) -> None:
        """Has all processes look for the error of their run; see ``CallLog.look``."""
        for peer in [*self._peers.values()]:
            _send(peer.connection, _ALARM)

    # --- on the thread ---

    def _run(self) -> None:
        while True:
            is_due = self._closed or self._unknown
            for key, _ in self._selector.select(_GRACE_SECS / 2 if is_due else None):
                key.data()
            now = time.monotonic()
            for peer in [peer for peer in self._unknown if peer.expires < now]:
                self._drop(peer)
            for peer in [p for p, since in self._closed.items() if now - since > _GRACE_SECS]:
                self._conclude(peer)

    def _accept(self) -> None:
        try:
            connection = connections.accept(self._listener)
        except OSError as error:
            logger.debug("a connection cannot be accepted: %s", error)
            time.sleep(_GRACE_SECS)  # for example if this process has too many open files
            return
        peer = _Peer(connection, time.monotonic() + _HELLO_SECS)
        self._unknown.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(peer))
        if len(self._unknown) > 2 * self._count:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._unknown.discard(peer)
        self._selector.unregister(peer.connection)
        connections.close(peer.connection)

    def _read(self, peer: _Peer) -> None:
        left = _TOKEN_BYTES + _HOST_BYTES - len(peer.received)
        try:
            received = peer.connection.recv(left or 4096)
        except BlockingIOError:
            return
        except ConnectionResetError:
            received = b""
        except OSError as error:  # an error of the network: the process may live
            self._drop(peer)
            self._report_silence(peer, error)
            return
        if not received:
            self._drop(peer)
            self._closed[peer] = time.monotonic()
        elif left:
            peer.received += received
            if len(received) == left:
                self._identify(peer)
        else:
            for byte in received:
                peer.is_open = byte == _OPENS[0] or (peer.is_open and byte != _CLOSES[0])
            if _ALARM in received:
                self.alarm()
                self._look()

    def _identify(self, peer: _Peer) -> None:
        index = self._indices.get(peer.received[:_TOKEN_BYTES])
        if index is None:
            self._drop(peer)
            return
        self._unknown.discard(peer)
        peer.index = index
        peer.host = peer.received[_TOKEN_BYTES:].rstrip(b"\0").decode(errors="replace")
        self._peers[index] = peer
        if self._ended.pop(index, None):
            logger.info("%s, has connected again", self._name(peer))

    def _conclude(self, peer: _Peer) -> None:
        """Records that a process has ended, unless it has connected again or was never known."""
        del self._closed[peer]
        if peer.index is None or self._peers.get(peer.index) is not peer:
            return
        if peer.is_open:
            end = f"{self._name(peer)}, died: its connection to process 0 was closed"
            logger.error("%s", end)
        else:
            end = f"{self._name(peer)}, has ended"
            logger.debug("%s", end)
        self._ended[peer.index] = end

    def _report_silence(self, peer: _Peer, error: OSError) -> None:
        if peer.index is not None and self._peers.get(peer.index) is peer:
            logger.error(
                "%s, does not answer (%s): its host has vanished, or the network has failed. "
                "Unless it comes back, JAX ends this program at its heartbeat timeout.",
                self._name(peer),
                error.strerror,
            )

    def _name(self, peer: _Peer) -> str:
        return f"process {peer.index} of {self._count}, on host {peer.host}"


class Connection(Liveness):
    """A process other than process 0: keeps a connection to process 0, on ``host``, open."""

    def __init__(self, client: Any, index: int, host: str) -> None:
        super().__init__()
        self._client = client
        self._index, self._host = index, host
        self._connection: socket.socket | None = None
        self._has_begun = self._is_leaving = False
        self._beginning = threading.Lock()
        atexit.register(self._leave)  # runs before JAX's hook, which waits for all processes

    def connect(self) -> None:
        """Connects this process to process 0, once process 0 has said where it listens."""
        if self._has_begun:
            return
        with self._beginning, contextlib.suppress(jax.errors.JaxRuntimeError):
            found = self._client.key_value_dir_get_bytes(f"{_FOLDER}/")
            if found and not self._has_begun:
                self._has_begun = True
                if place := json.loads(found[0][1]):
                    run = functools.partial(self._stay_connected, **place)
                    Task("liveness", run).start()

    def alarm(self) -> None:
        """Has all processes look for the error of their run; see ``CallLog.look``."""
        self._tell(_ALARM)

    def _tell(self, byte: bytes) -> None:
        if (connection := self._connection) is not None:
            _send(connection, byte)

    def _leave(self) -> None:
        self._is_leaving = True
        self._tell(_CLOSES)
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    # --- on the thread ---

    def _stay_connected(self, port: int, secret: str) -> None:
        """Connects, and connects again if the connection is lost, while process 0 lives."""
        name = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
        hello = _token(bytes.fromhex(secret), self._index) + name
        has_connected = False
        while not self._is_leaving:
            began = time.monotonic()
            try:
                connection = connections.connect(self._host, port)
            except OSError as error:
                if not has_connected:
                    logger.warning(
                        "process %d cannot connect to process 0, at port %d of %s: %s. If this "
                        "process dies, process 0 learns it only from JAX's heartbeat timeout.",
                        *(self._index, port, self._host, error),
                    )
                if not has_connected or isinstance(error, ConnectionRefusedError):
                    return
            else:
                has_connected = True
                with contextlib.suppress(OSError):
                    connection.sendall(hello)
                    with self._changing:  # later changes are sent by the other methods
                        self._connection = connection
                        self._tell(_CLOSES if self._is_leaving or not self._logs else _OPENS)
                    while connection.recv(1):  # returns nothing when the connection is lost
                        self._look()
                self._connection = None
                connections.close(connection)
            if time.monotonic() - began < _RETRY_SECS:
                time.sleep(_RETRY_SECS)


def _send(connection: socket.socket, byte: bytes) -> None:
    with contextlib.suppress(OSError):  # the connection is lost
        connection.send(byte, socket.MSG_DONTWAIT)


def _token(secret: bytes, index: int) -> bytes:
    return hmac.digest(secret, str(index).encode(), "sha256")


def _publish(client: Any, place: dict[str, Any]) -> None:
    client.key_value_set_bytes(f"{_FOLDER}/0", json.dumps(place).encode(), allow_overwrite=True)


def coordination_service() -> Any:
    """Returns the client of JAX's coordination service; None if there is only one process."""
    if jax.process_count() == 1:
        return None
    try:
        from jax._src import distributed

        return distributed.global_state.client
    except (ImportError, AttributeError) as error:
        raise BackendError(
            f"jax {jax.__version__} does not work as torchax_ckpt expects on several processes: "
            f"{error}. Install a release that was tried: pip install 'jax>=0.6.2,<=0.12.0.1'."
        ) from error


_beginning = threading.Lock()  # lru_cache alone may call the function twice


def of_run(client: Any) -> Liveness:
    """Returns the ``Liveness`` of this process in its run, the same one at each call."""
    if client is None:
        return Liveness()
    with _beginning:
        return _begun(client)


@functools.lru_cache(1)
def _begun(client: Any) -> Liveness:
    try:
        from jax._src import distributed

        address = distributed.global_state.coordinator_address or ""
        host = address.rpartition(":")[0].strip("[]")
        if jax.process_index():
            return Connection(client, jax.process_index(), host)
        return Listener(client, jax.process_count(), host)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        # RuntimeError: no more threads
        logger.warning(
            "process %d cannot connect the processes of this run: %s. If a process dies, the "
            "others learn it only from JAX's heartbeat timeout.",
            *(jax.process_index(), error),
        )
    if not jax.process_index():
        _publish(client, {})
    return Liveness()
