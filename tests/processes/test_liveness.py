"""Process 0 learns from their connections which processes have ended."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator

import jax
import pytest
from jax._src import distributed
from support.group import Service
from support.waiting import wait_until

from torchax_ckpt.errors import BackendError
from torchax_ckpt.processes import connections, liveness
from torchax_ckpt.processes.liveness import Connection, Listener


class Log:
    """Stands for the calls of a checkpointer."""

    def __init__(self) -> None:
        self.num_looks = 0

    def look(self) -> None:
        self.num_looks += 1


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def listener(service: Service) -> Iterator[Listener]:
    yield (made := Listener(service, 3, "127.0.0.1"))
    connections.close(made._listener)


@pytest.fixture
def connected(service: Service, listener: Listener) -> Connection:
    made = Connection(service, 1, "127.0.0.1")
    made.connect()
    wait_until(lambda: 1 in listener._peers)
    wait_until(lambda: made._connection)
    return made


def test_a_process_that_leaves_has_ended_and_has_not_died(
    listener: Listener, connected: Connection
) -> None:
    log = Log()
    connected.add(log)
    connected.remove(log)
    connected._leave()
    wait_until(listener.ended)
    name = socket.gethostname()
    assert listener.ended() == {1: f"process 1 of 3, on host {name}, has ended"}


def test_a_process_whose_connection_a_network_breaks_connects_again(
    listener: Listener, connected: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_RETRY_SECS", 0.1)
    first = listener._peers[1]
    assert connected._connection is not None
    connected._connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: listener._peers[1] is not first)
    time.sleep(2 * liveness._GRACE_SECS)
    assert listener.ended() == {}


@pytest.mark.parametrize("finder", [0, 1])
def test_all_processes_look_for_an_error_that_one_has_found_also_those_that_do_not_wait(
    finder: int, service: Service, listener: Listener, connected: Connection
) -> None:
    other = Connection(service, 2, "127.0.0.1")
    other.connect()
    wait_until(lambda: 2 in listener._peers)
    logs = Log(), Log(), Log()
    for each, log in zip((listener, connected, other), logs, strict=True):
        each.add(log)
    (listener, connected)[finder].alarm()
    wait_until(lambda: all(log.num_looks == 1 for log in logs[1:]))
    wait_until(lambda: logs[0].num_looks == finder)  # process 0 knows what it has found


def test_a_stranger_is_no_process_of_the_run(service: Service, listener: Listener) -> None:
    port = json.loads(service.known["torchax_ckpt/liveness/0"])["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        stranger.sendall(bytes(96))
        assert stranger.recv(1) == b""
    assert listener._peers == {}


def test_a_forked_process_keeps_no_connection_open(
    listener: Listener, connected: Connection
) -> None:
    assert connected._connection is not None
    number = connected._connection.fileno()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        is_there = os.path.exists(f"/proc/self/fd/{number}")
        os.write(writing, b"open" if is_there else b"closed")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"closed"
    os.close(reading)
    os.close(writing)
    assert connected._connection.fileno() == number


def test_without_a_way_to_process_0_the_process_says_so_once(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    said = "process 1 cannot connect to process 0, at port"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        place = {"port": taken.getsockname()[1], "secret": "00"}
        service.known["torchax_ckpt/liveness/0"] = json.dumps(place).encode()
        lonely = Connection(service, 1, "127.0.0.1")
        lonely.connect()
        lonely.connect()
        wait_until(lambda: said in caplog.text)
        lonely.alarm()
    [message] = [text for text in caplog.messages if said in text]
    assert "only from JAX's heartbeat timeout" in message


def test_many_connections_raise_the_limit_of_open_files_or_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (1024, 65536))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda kind, new: raised.append(new))
    connections.make_room(256)
    assert raised == []
    connections.make_room(1024)
    assert raised == [(4096, 65536)]
    with pytest.raises(OSError, match="80000 open files, found 65536"):
        connections.make_room(20_000)


def test_a_jax_without_the_client_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(BackendError, match=r"several processes: .*pip install 'jax>="):
        liveness.coordination_service()
