"""TCP connections that end with this process: no forked child keeps one open.

The kernel closes a connection when the last process that has it ends. A forked child, such as a
worker of a DataLoader, may live on for a while after its parent has died, so it closes its copies.
"""

from __future__ import annotations

import os
import resource
import socket
import threading

# The kernel sends a probe after 5 s of silence and then every 5 s; after 4 probes without an answer
# of the other host it ends the connection with an error. The kernel of a stopped process answers.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_CONNECT_SECS = 10.0

_open: set[socket.socket] = set()
# Keeps a fork from happening between the creation of a socket and its entry in ``_open``.
_changing = threading.Lock()


def make_room(count: int) -> None:
    """Raises the limit of open files if need be; OSError if the system does not allow enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * count  # the program needs files too, and JAX a connection to each process
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(f"{count} connections need a limit of {needed} open files, found {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def listen(host: str, backlog: int) -> socket.socket:
    """Returns a socket that listens at the address of ``host``, and no other, on any port."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with _changing:
        listener = socket.create_server(address, family=family, backlog=backlog)
        _open.add(listener)
    listener.setblocking(False)
    return listener


def accept(listener: socket.socket) -> socket.socket:
    """Returns the next connection, which does not block; raises OSError if there is none."""
    with _changing:
        connection, _ = listener.accept()
        _open.add(connection)
    try:
        connection.setblocking(False)
        _keep_alive(connection)
    except OSError:  # the other end has closed it already
        close(connection)
        raise
    return connection


def connect(host: str, port: int) -> socket.socket:
    """Returns a connection to a port of another host; raises OSError if there is no way."""
    problem = OSError(f"{host} has no address")
    for family, kind, number, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with _changing:
            connection = socket.socket(family, kind, number)
            _open.add(connection)
        try:
            connection.settimeout(_CONNECT_SECS)
            connection.connect(address)
            connection.settimeout(None)
            _keep_alive(connection)
            return connection
        except OSError as error:
            problem = error
            close(connection)
    raise problem


def close(connection: socket.socket) -> None:
    """Closes a connection."""
    with _changing:
        _open.discard(connection)
        connection.close()  # before the next fork


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_in_child() -> None:
    for each in _open:
        each.close()
    _open.clear()
    _changing.release()


os.register_at_fork(
    before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_close_in_child
)
