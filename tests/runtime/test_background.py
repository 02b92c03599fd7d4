"""Waits for threads of the library, and exceptions of signal handlers within them."""

from __future__ import annotations

import _thread
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support import PROGRAMS
from support.processes import run_python
from support.waiting import wait_until

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.runtime import background
from torchax_ckpt.runtime.background import Executor, Flag, Task
from torchax_ckpt.storage.directory import lease
from torchax_ckpt.storage.medium.compare_and_swap import AtomicRecord


class Interrupt(Exception):  # noqa: N818 - stands for KeyboardInterrupt, which would end pytest
    pass


@pytest.fixture
def handler() -> Any:
    """SIGUSR1 raises ``Interrupt`` on the main thread."""

    def handle(number: int, frame: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, before)


def run(directory: Path, where: str) -> tuple[int, list[Any], str]:
    arguments = PROGRAMS / "interruptions.py", "interrupted", str(directory), where
    result = run_python(*arguments, check=False, fresh=where != "wait")
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    return result.returncode, reports, result.stderr


INTERRUPTED = {"interrupted": True, "is_saving": True, "lease": True}


def test_an_interrupted_wait_leaves_the_save_as_it_is(directory: Path) -> None:
    code, reports, errors = run(directory, "wait")
    after = [{"steps": [1]}, {"steps": [1, 2], "lease": False}]
    assert (code, reports) == (0, [INTERRUPTED, *after]), errors


@pytest.mark.slow
@pytest.mark.parametrize("where", ["close", "with", "again"])
def test_an_interrupted_close_keeps_the_lease_till_the_end(where: str, directory: Path) -> None:
    code, reports, errors = run(directory, where)
    end = {"steps": [1, 2] if where == "again" else [1], "lease": False}
    assert (code, reports) == (0, [INTERRUPTED, end]), errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("exit", 0, "KeyboardInterrupt at the program's end: still waiting for step 1 of "),
        ("twice", 130, "KeyboardInterrupt again: ending at once. Lost: step 1 of "),
    ],
)
def test_the_second_interrupt_at_the_end_of_a_program_ends_the_save_and_not_the_first(
    where: str, code: int, said: str, directory: Path
) -> None:
    found, _, errors = run(directory, where)
    assert found == code, errors
    assert f"{said}{directory}" in errors
    assert (directory / "1").exists() == (where == "exit")
    assert where == "twice" or not (directory / "lease").exists()


@pytest.mark.usefixtures("handler")
def test_a_function_that_must_not_end_halfway_continues_after_an_interrupt() -> None:
    go_on, ended = Flag(), Flag()

    def function() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        go_on.wait()
        ended.set()

    with pytest.raises(Interrupt):
        background.run_whole("whole", function)
    assert not ended.is_set
    go_on.set()
    assert ended.wait(30)
    with pytest.raises(ZeroDivisionError):
        background.run_whole("whole", lambda: 1 // 0)  # type: ignore[arg-type]


@pytest.mark.usefixtures("handler")
def test_an_interrupt_while_a_save_begins_leaves_nothing_to_wait_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Task.start

    def interrupted(task: Task, *, before: bool) -> None:
        if not task._thread.name.startswith("save-"):
            start(task)
            return
        monkeypatch.setattr(Task, "start", start)
        if not before:
            start(task)
            wait_until(lambda: not task._run)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

    with TorchaxCheckpointer(directory) as ckpt:
        for step, before in ((1, True), (2, False)):
            monkeypatch.setattr(Task, "start", lambda t, b=before: interrupted(t, before=b))
            with pytest.raises(Interrupt):
                ckpt.save(step, state={"w": np.arange(3)})
            ckpt._saver.wait(30)
        ckpt.save(3, state={"w": np.arange(3)})
    assert ckpt.all_steps() == [2, 3]


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_lease_that_an_interrupt_left_is_taken_over_at_once(
    is_taken: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: tuple[Any, str] = (lease._Hold, "__init__") if is_taken else (AtomicRecord, "swap")
    original = getattr(*place)

    def interrupted(*args: Any) -> None:
        original(*args)
        if args[0].__class__ is place[0]:
            raise KeyboardInterrupt

    ckpt = TorchaxCheckpointer(directory)
    monkeypatch.setattr(*place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(1, state={"w": np.arange(3)})
    monkeypatch.setattr(*place, original)
    ckpt.save(2, state={"w": np.arange(3)})
    ckpt.close()
    assert ckpt.all_steps() == [2]
    assert not (directory / "lease").exists()


def test_a_task_that_no_thread_runs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))

    ran: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    background.run_whole("whole", lambda: ran.append(1))  # on the thread that starts threads
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    task = Task("task", lambda: sys.exit(1))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        task.start()
    assert task.ended.is_set
    background.run_whole("whole", lambda: ran.append(2))
    assert ran == [1, 2]


def test_an_executor_is_one_of_pythons() -> None:
    with Executor(2) as pool:
        assert list(pool.map(lambda n: 12 // n, [1, 2, 3, 4])) == [12, 6, 4, 3]
        failed = pool.submit(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failed.result()
        both = threading.Barrier(2, timeout=30)
        waiting = [pool.submit(both.wait) for _ in range(2)]  # at the same time
        cancelled = pool.submit(both.wait)
        assert {each.result() for each in waiting} == {0, 1}
        both.abort()
        with pytest.raises(threading.BrokenBarrierError):
            cancelled.result()
        tasks = pool._tasks
    assert all(task.ended.is_set for task in tasks)


def test_an_executor_starts_as_many_threads_as_functions_run_at_the_same_time() -> None:
    with Executor(8) as pool:
        for _ in range(20):
            pool.submit(int).result()
        go = threading.Event()
        waiting = [pool.submit(go.wait, 30) for _ in range(3)]
        assert pool.submit(threading.active_count).result() >= 4
        go.set()
        assert all(each.result() for each in waiting)
        assert 4 <= len(pool._tasks) <= 5  # one may have just given its result
    assert all(task.ended.is_set for task in pool._tasks)


def test_an_executor_that_is_shut_takes_no_function_that_nobody_would_run() -> None:
    with Executor(2) as pool:
        assert pool.submit(int, "3").result(60) == 3
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int, "4")


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_the_threads_are_looked_at(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python before 3.11.9, all threads could then wait for one another."""
    found: list[bool] = []
    look = sys._current_frames
    entered, opened = Flag(), Flag()

    def looked() -> Any:
        found.append(gc.isenabled())
        return look()

    def hold() -> None:
        entered.set()
        opened.wait()

    monkeypatch.setattr(sys, "_current_frames", looked)
    task = Task("held", hold)
    task.start()
    entered.wait()
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert "in hold" in task.stack()
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
        opened.set()
    assert found == [False]
    wait_until(lambda: task.stack() == "unknown")  # it has ended
