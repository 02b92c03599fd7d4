"""Programs of one process that are interrupted, or fork, beside a checkpointer.

    python interruptions.py SCENARIO DIRECTORY ...

SCENARIO is a function of this file, which takes the other arguments.
"""

from __future__ import annotations

import collections
import json
import logging
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torchax
from support.stages import at

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import CallError, LeaseError
from torchax_ckpt.runtime import preemption
from torchax_ckpt.storage.directory.lease import Lease

STATE = {"w": np.arange(3)}
ALWAYS = policies.FixedIntervalPolicy(1)
ckpt: TorchaxCheckpointer  # that stays until the program ends


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


# --- Ctrl-C, and calls of signal handlers --------------------------------------------------------


def interrupted(directory: str, where: str) -> None:
    """A Ctrl-C comes while the program waits: wait, close, with, again, exit or twice."""
    global ckpt
    writing, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        writing.set()
        go_on.wait(60)

    def lease() -> bool:
        return pathlib.Path(directory, "lease").exists()

    def interrupt() -> None:
        """Sends a Ctrl-C to this process once the main thread waits for the save."""
        writing.wait(60)
        while not _waits(sys._current_frames()[threading.main_thread().ident or 0]):
            time.sleep(0.005)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(call: Callable[[], Any]) -> None:
        """Reports what the library says of the save after a call that a Ctrl-C interrupts."""
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            call()
        except KeyboardInterrupt:
            report(interrupted=True, is_saving=ckpt._saver.is_saving, lease=lease())
        threading.Timer(0.1, go_on.set).start()

    def leave() -> None:
        with ckpt:
            pass

    at("write the arrays", hold)
    ckpt = TorchaxCheckpointer(directory)
    ckpt.save(1, state=STATE)
    if where in ("exit", "twice"):
        _interrupt_at_exit(interrupt, go_on, is_twice=where == "twice")
        return
    interrupted({"wait": ckpt.wait_until_finished, "with": leave}.get(where, ckpt.close))
    if where == "wait":
        ckpt.wait_until_finished()
        report(steps=ckpt.all_steps())
    if where == "again":  # the cell of a notebook that is run again
        ckpt = TorchaxCheckpointer(directory)
    if where in ("wait", "again"):
        ckpt.save(2, state=STATE)
    ckpt.close()
    report(steps=ckpt.all_steps(), lease=lease())


def _waits(frame: Any) -> bool:
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return bool(names & {"wait", "join", "_wait_for_tstate_lock"})


def _interrupt_at_exit(
    interrupt: Callable[[], None], go_on: threading.Event, is_twice: bool
) -> None:
    is_logged = threading.Event()

    class Logged(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "at the program's end" in record.msg:
                is_logged.set()

    def at_exit() -> None:
        interrupt()
        is_logged.wait(60)  # before the save may end
        if is_twice:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        go_on.set()

    logging.basicConfig()  # which shows what the end of the program says
    logging.getLogger("torchax_ckpt").addHandler(Logged())
    threading.Thread(target=at_exit, daemon=True).start()


def saves_in_handler(directory: str) -> None:
    """Trains while a timer's signal handler saves and waits at any moment."""
    torchax.enable_globally()
    model = torch.nn.Linear(8, 8).to("jax")
    outcomes: collections.Counter[str] = collections.Counter()
    with TorchaxCheckpointer(directory, save_decision_policy=ALWAYS) as ckpt:
        ckpt.attach(model)

        def handler(signum: int, frame: Any) -> None:
            try:
                ckpt.save(ckpt._loop.position or 0, force=True)
                ckpt.wait_until_finished()
                outcomes["worked"] += 1
            except CallError:
                outcomes["refused"] += 1

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0037)
        deadline = time.monotonic() + 2.5
        for step in ckpt.steps(100_000):  # noqa: B007 - the last one is looked at below
            time.sleep(0.003)
            if time.monotonic() > deadline:
                break
        signal.setitimer(signal.ITIMER_REAL, 0)
        ckpt.wait_until_finished()
        assert ckpt.all_steps()[-1] == step - 1
    assert outcomes["refused"] > 5 and outcomes["worked"] > 0, outcomes


# --- forks ---------------------------------------------------------------------------------------


def forked_lease(directory: str) -> None:
    """Takes the lease, and forks a child that tries to take, renew and release it."""
    place = pathlib.Path(directory)
    place.mkdir()
    lease = Lease(place)
    lease.hold()
    child = os.fork()
    if child == 0:
        for attempt, expected in (
            (lease, "this process was forked from the process that writes"),
            (Lease(place), "another program writes to this directory: "),
        ):
            try:
                attempt.hold()
            except LeaseError as error:
                assert expected in str(error) and f"pid {os.getppid()}" in str(error), error
            else:
                os._exit(1)
        lease.renew()
        lease.release()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lease.hold()
    lease.release()
    assert list(place.iterdir()) == []
    print("all is well")


class Examples(torch.utils.data.Dataset):
    """Each item names the calls that are refused in the worker that makes it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> str:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert ckpt.all_steps() == [1]
        refused = []
        for call in (
            lambda: ckpt.save(9, state=STATE),
            ckpt.attach,
            ckpt.load,
            ckpt.close,
            ckpt.restore,
            lambda: ckpt.delete(1),
            ckpt.wait_until_finished,
            lambda: TorchaxCheckpointer(ckpt.directory).load(),
        ):
            try:
                call()
            except CallError as error:
                assert "which was forked from process" in str(error), error
                refused.append(str(error).split()[0])
        return ",".join(refused)


def forks(directory: str) -> None:
    """Forks children of every kind: workers of loaders, killed ones, ones that end."""
    global ckpt
    torchax.enable_globally()
    ckpt = TorchaxCheckpointer(directory, save_decision_policy=ALWAYS)
    ckpt.attach()
    ckpt.save(1, state=STATE)
    ckpt.wait_until_finished()

    # DataLoader's workers, which it ends by SIGTERM if they do not end by themselves.
    loader = torch.utils.data.DataLoader(
        Examples(), batch_size=2, num_workers=2, persistent_workers=True, collate_fn=list
    )
    expected = "save,attach,load,close,restore,delete,wait_until_finished,load"
    assert {item for batch in loader for item in batch} == {expected}
    workers = list(cast(Any, loader._iterator)._workers)
    del loader
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0, worker.exitcode

    # Ended by SIGTERM right after the fork or later: that is the child's own affair.
    fork = multiprocessing.get_context("fork")
    for delay in [0] * 20 + [0.2] * 2:
        child = fork.Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(delay)
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM, child.exitcode
    time.sleep(0.2)
    assert preemption._watch.noticed_at is None
    assert not ckpt.reached_preemption(1)

    # A child that runs to the end of the program while a save is in flight.
    at("write the arrays", lambda: time.sleep(1.5))
    ckpt.save(2, state=STATE)
    pid = os.fork()
    if pid == 0:
        # Not sys.exit: JAX's own end in a fork may crash.
        threading._shutdown()  # type: ignore[attr-defined]
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert ckpt.all_steps() == [1]  # the child did not wait for its parent's save
    os.kill(os.getpid(), signal.SIGTERM)
    ckpt.save(3, state=STATE)
    assert ckpt.all_steps() == [1, 2, 3] and ckpt.reached_preemption(3)
    print("done")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
