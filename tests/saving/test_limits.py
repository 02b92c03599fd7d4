"""What the system refuses in ``save``: threads, files, memory. The save fails, training goes on."""

from __future__ import annotations

import _thread
import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.live import Together

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.runtime import preemption
from torchax_ckpt.snapshot import snapshotter

STATE = {"w": np.arange(3)}
ALWAYS = policies.FixedIntervalPolicy(1)
Refuse = Callable[[pytest.MonkeyPatch], None]


def raising(error: BaseException) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    return refuse


def no_thread(patch: pytest.MonkeyPatch) -> None:
    """As pthread_create fails: every start of a thread, in this library and in all others."""
    refuse = raising(RuntimeError("can't start new thread"))
    patch.setattr(_thread, "start_new_thread", refuse)
    # threading keeps a reference, whose name is another one since Python 3.13.
    names = {"_start_new_thread", "_start_joinable_thread"} & set(vars(threading))
    for name in names:
        patch.setattr(threading, name, refuse)


def no_file(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "open", raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))


def no_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshotter.Snapshotter, "take", raising(MemoryError("cannot allocate")))


LIMITS = pytest.mark.parametrize(
    ("refuse", "said"),
    [
        (no_thread, r"can't start new thread\. Too many threads or processes"),
        (no_file, r"Too many open files.*ulimit -n"),
        (no_memory, r"cannot allocate\. The host's memory does not suffice"),
    ],
)


@LIMITS
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_save_that_meets_a_limit_fails_and_the_next_succeeds(
    first: bool, refuse: Refuse, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalTier(tmp_path / "local", save_decision_policy=ALWAYS)
    with TorchaxCheckpointer(tmp_path / "run", local=local, save_decision_policy=ALWAYS) as ckpt:
        if not first:
            ckpt.save(1, state=STATE)
            ckpt.wait_until_finished()
        with monkeypatch.context() as limited:
            refuse(limited)
            began = ckpt.save(2, state=STATE)
            ckpt._run.wait()
        assert began == (refuse is no_file and not first)  # that one fails in the background
        with pytest.raises(SaveError, match=said) as caught:
            ckpt.check_for_errors()
        assert caught.value.step == 2
        assert ckpt.save(3, state=STATE)
    assert ckpt.all_steps("durable") == ckpt.all_steps("local")[-2:] == [1] * (not first) + [3]


def test_steps_and_attach_meet_a_limit(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=ALWAYS) as ckpt:
        with monkeypatch.context() as limited:
            no_thread(limited)
            preemption._watch._said.clear()
            assert ckpt.attach(torch.nn.Linear(2, 2).to("jax")) == 0
            assert "SIGTERM is not noticed for now: can't start new thread" in caplog.text
            for step in ckpt.steps(2):
                ckpt.record(loss=step)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with pytest.raises(SaveError, match="step 1 .*can't start new thread"):
            ckpt.check_for_errors()
        for step in ckpt.steps(3):
            ckpt.record(loss=step)
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert ckpt.all_steps() == [3]


def test_strict_options_raise_what_a_limit_prevented(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CheckpointOptions(on_save_error="raise")
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        with monkeypatch.context() as limited:
            no_thread(limited)
            assert not ckpt.save(1, state=STATE)
        with pytest.raises(SaveError, match="step 1 .*can't start new thread"):
            ckpt.save(2, state=STATE)
        assert ckpt.save(3, state=STATE)


def test_a_save_goes_on_if_only_what_watches_it_gets_no_thread(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torchax_ckpt.runtime.background import Task

    start = Task.start

    def refuse(task: Task) -> None:
        if task._thread.name.startswith("watch-save"):
            raise RuntimeError("can't start new thread")
        start(task)

    monkeypatch.setattr(Task, "start", refuse)
    with TorchaxCheckpointer(directory, options=CheckpointOptions(save_timeout_secs=60)) as ckpt:
        assert ckpt.save(1, state=STATE)
    assert ckpt.all_steps() == [1]
    assert "the save of step 1 is not reported if it takes longer" in caplog.text


TWO = """
    import errno, os, sys, _thread
    from processes_program import INDEX, MESH, P, NamedSharding, jax, np, report, torchax
    torchax.enable_globally()
    from torchax_ckpt import TorchaxCheckpointer, policies
    from torchax_ckpt.errors import SaveError
    from torchax_ckpt.storage.medium import permissions

    ERRORS = {
        "files": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        "threads": RuntimeError("can't start new thread"),
        "memory": OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    }
    state = {"w": jax.device_put(np.arange(8.0), NamedSharding(MESH, P("fsdp")))}
    prove = permissions.prove_writable

    def refuse(*args):
        raise ERRORS[kind]

    for kind in ERRORS:
        with TorchaxCheckpointer(f"{sys.argv[4]}/{kind}") as ckpt:
            permissions.prove_writable = refuse  # on process 0 alone, at the first lease
            began = ckpt.save(1, state=state, force=True)
            permissions.prove_writable = prove
            try:
                ckpt.check_for_errors()
                said = ""
            except SaveError as error:
                said = str(error)
            began = [began, ckpt.save(2, state=state, force=True)]
        report(kind=kind, began=began, said=said, steps=ckpt.all_steps())
"""


@pytest.mark.slow
def test_a_limit_at_the_first_lease_fails_the_save_on_all_processes(
    together: Together, tmp_path: Path
) -> None:
    expected = {"files": "ulimit -n", "threads": "ulimit -u", "memory": "ulimit -v"}
    for index, found in enumerate(together(TWO, 2, tmp_path)):
        assert [each["kind"] for each in found] == [*expected]
        for each in found:
            assert (each["began"], each["steps"]) == ([False, True], [2])
            assert f"saving step 1 to {tmp_path / each['kind']} failed" in each["said"]
            assert each["said"].count(expected[each["kind"]]) == 1
            assert ("on process 0" in each["said"]) == (index == 1)


def test_metrics_of_a_save_that_met_a_limit_are_those_of_the_next_save_of_the_step(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        with monkeypatch.context() as patch:
            no_memory(patch)
            assert not ckpt.save(1, state=STATE, metrics={"val": 1.0})
        assert ckpt.save(1, state=STATE, force=True)
    assert TorchaxCheckpointer(directory).metrics(1) == {"val": 1.0}
