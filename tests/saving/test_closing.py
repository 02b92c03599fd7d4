"""The end of a checkpointer: closed, closed while a save is late, unreachable, replaced."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.compare import entries
from support.damage import fill_disk
from support.live import Together
from support.processes import run_python
from support.training import save_state
from support.waiting import wait_until

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.errors import ClosedError, LeaseError, SaveError, SaveTimeoutError
from torchax_ckpt.runtime import preemption
from torchax_ckpt.telemetry.events import Event

STATE = {"w": np.arange(3)}
LATE = CheckpointOptions(save_timeout_secs=0.3)
ALWAYS = policies.FixedIntervalPolicy(1)


@pytest.fixture(autouse=True)
def _no_other_checkpointer() -> None:
    """Removes the handler of SIGTERM if a checkpointer that an earlier test forgot has left it."""
    gc.collect()
    watch = preemption._watch
    if watch._pipe is not None and not watch._listeners:
        watch._uninstall()


@pytest.fixture
def gate(opened: threading.Event) -> Iterator[threading.Event]:
    """Saves are written once this is set."""
    yield opened
    opened.set()
    wait_until(lambda: names() <= {"sigterm"})


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    """Tests of other files may leave a lease to its thread."""
    EARLIER[:] = threading.enumerate()


def names() -> set[str]:
    """What threads of this package the test has started."""
    mine = {"lease", "events", "sigterm", "closing", "decisions"}
    threads = [t.name for t in threading.enumerate() if t not in EARLIER]
    return {name for name in threads if name in mine or name.startswith("save-")}


EARLIER: list[threading.Thread] = []


@pytest.fixture
def local(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "local", save_decision_policy=ALWAYS)


def test_close_can_be_tried_again_after_a_late_save(
    directory: Path, local: LocalTier, gate: threading.Event
) -> None:
    ours = signal.getsignal(signal.SIGTERM)
    ckpt = TorchaxCheckpointer(directory, options=LATE, local=local)
    ckpt.save(1, state=STATE, force=True)
    for _ in range(2):
        with pytest.raises(SaveTimeoutError, match="the save of step 1 .* is still in flight"):
            ckpt.close()
    with pytest.raises(ClosedError):
        ckpt.save(2, state=STATE)
    assert (directory / "lease").exists()
    assert signal.getsignal(signal.SIGTERM) == preemption._watch._handle  # a save may be finished
    gate.set()
    wait_until(lambda: ckpt.all_steps() == [1])
    ckpt._saver.join()
    ckpt.close()
    ckpt.close()
    assert entries(directory) <= {"1", "run"}
    assert signal.getsignal(signal.SIGTERM) is ours
    wait_until(lambda: not names())


def test_a_late_save_ends_the_close_that_gave_up_on_it(
    directory: Path, local: LocalTier, gate: threading.Event
) -> None:
    told: list[str] = []
    ckpt = TorchaxCheckpointer(
        directory, options=LATE, local=local, on_event=lambda event: told.append(event.name)
    )
    ckpt.save(1, state=STATE, force=True)
    with pytest.raises(SaveTimeoutError):
        ckpt.close()
    gate.set()
    # The thread that hears SIGTERM can be ended on the main thread alone.
    wait_until(lambda: names() <= {"sigterm"})
    assert entries(directory) <= {"1", "run"}
    assert not Path(local.path, "lease").exists()
    assert told == ["started", "saving", "durable", "closed"]
    assert not preemption._watch._listeners
    save_state(directory, STATE, step=2)
    assert not names()
    ckpt.close()


def test_a_close_that_gave_up_raises_the_failure_when_it_is_tried_again(
    directory: Path, gate: threading.Event
) -> None:
    fill_disk()  # once the gate is open
    ckpt = TorchaxCheckpointer(directory, options=LATE)
    ckpt.save(1, state=STATE)
    with pytest.raises(SaveTimeoutError):
        ckpt.close()
    gate.set()
    ckpt._saver.join()
    with pytest.raises(SaveError, match="No space left"):
        ckpt.close()
    ckpt.close()


def test_a_new_one_waits_for_a_save_given_up(directory: Path, gate: threading.Event) -> None:
    first = TorchaxCheckpointer(directory, options=LATE)
    first.save(1, state=STATE)
    with pytest.raises(SaveTimeoutError):
        first.close()
    second = TorchaxCheckpointer(directory)
    with pytest.raises(SaveTimeoutError, match="the save of step 1"):
        second.save(2, state=STATE, force=True)
    gate.set()
    first._saver.join()
    assert second.save(2, state=STATE, force=True)
    second.close()
    first.close()
    assert entries(directory) == {"1", "2"}


class Trainer:
    """Logs the events of the checkpointer that it has: a cycle of references."""

    def __init__(self, directory: Path, **kwargs: Any) -> None:
        self.ckpt = TorchaxCheckpointer(directory, on_event=self.log, **kwargs)
        self.told: list[str] = []
        all_told.append(self.told)

    def log(self, event: Event) -> None:
        self.told.append(event.name)


all_told: list[list[str]] = []


@pytest.mark.parametrize("is_cell_late", [False, True], ids=["after", "during"])
def test_a_cell_that_is_run_again_goes_on_from_the_checkpointer_it_replaces(
    is_cell_late: bool,
    directory: Path,
    local: LocalTier,
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = signal.getsignal(signal.SIGTERM)
    trainer = Trainer(directory, local=local)
    trainer.ckpt.save(1, state=STATE, force=True)
    if is_cell_late:
        threading.Timer(0.3, gate.set).start()
    else:
        gate.set()
        trainer.ckpt.wait_until_finished()
    trainer = Trainer(directory, local=local)
    assert trainer.ckpt.save(2, state=STATE, force=True)
    trainer.ckpt.close()
    assert trainer.ckpt.all_steps() == [1, 2]
    assert "taking over from a checkpointer of this program" in caplog.text
    first, second = all_told[-2:]
    assert first == ["started", "saving", "durable", "closed"]
    assert second == ["started", "saving", "durable", "closed"]
    assert entries(directory) <= {"1", "2", "run"}
    wait_until(lambda: not names())
    assert signal.getsignal(signal.SIGTERM) is ours


def test_a_hook_is_let_go_of_with_the_closed_checkpointer(directory: Path) -> None:
    class Owner:
        def log(self, event: Event) -> None:
            """Does nothing."""

    owner = Owner()
    with TorchaxCheckpointer(directory, on_event=owner.log) as ckpt:
        ckpt.save(1, state=STATE)
    seen = weakref.ref(owner)
    gc.collect()
    gc.disable()
    try:
        del owner, ckpt
        wait_until(lambda: seen() is None)
    finally:
        gc.enable()


def test_what_a_replaced_one_is_saving_is_resumed(directory: Path, gate: threading.Event) -> None:
    ckpt = TorchaxCheckpointer(directory)
    ckpt.attach()
    ckpt.save(7, state=STATE)
    threading.Timer(0.3, gate.set).start()
    ckpt = TorchaxCheckpointer(directory)
    assert ckpt.attach() == 7
    assert ckpt.save(8, state=STATE, force=True)
    ckpt.close()
    assert entries(directory) == {"7", "8"}


def test_one_that_can_still_be_reached_is_said_to_be(directory: Path) -> None:
    out = {1: TorchaxCheckpointer(directory)}  # as a notebook keeps what a cell has shown
    out[1].save(1, state=STATE)
    ckpt = TorchaxCheckpointer(directory)
    with pytest.raises(
        LeaseError,
        match=r"another checkpointer of this very process .*, which is still referenced\. Close "
        r"that one first\. .*a notebook's Out and _, or the traceback of the last error",
    ):
        ckpt.save(2, state=STATE, force=True)
    out.clear()
    assert ckpt.save(2, state=STATE, force=True)
    ckpt.close()


def test_failures_of_one_that_was_replaced_are_logged(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free_disk = fill_disk()
    ckpt = TorchaxCheckpointer(directory)
    ckpt.save(1, state=STATE)
    ckpt._saver.join()
    free_disk()
    caplog.clear()
    ckpt = TorchaxCheckpointer(directory)
    ckpt.save(2, state=STATE)
    ckpt.close()
    (told,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "Its newest save failed: saving step 1" in told.getMessage()


def test_one_that_nobody_replaces_finishes_its_save(directory: Path, gate: threading.Event) -> None:
    TorchaxCheckpointer(directory).save(1, state=STATE)
    gc.collect()
    assert (directory / "lease").exists()
    gate.set()
    wait_until(lambda: entries(directory) == {"1"})
    wait_until(lambda: names() <= {"sigterm"})
    with TorchaxCheckpointer(directory) as ckpt:  # on the main thread, which can let go of SIGTERM
        ckpt.attach()
    assert not names()


LEFT = """
    import ctypes, gc, os, signal, sys, threading
    import jax, torchax
    torchax.enable_globally()
    import numpy as np
    from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

    def everything():
        gc.collect()
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        return {
            "threads": sorted(t.name for t in threading.enumerate()),
            "environment": dict(os.environ),
            "files": sorted(os.listdir("/proc/self/fd")),
            "handlers": [signal.getsignal(n) for n in signal.valid_signals()],
            "wakeup": wakeup,
            "arrays": len(jax.live_arrays()),
        }

    def resident_bytes():
        ctypes.CDLL(None).malloc_trim(0)
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    state = {"w": np.arange(3)}
    large = {"w": jax.numpy.ones(8 << 20)}  # 32 MiB
    often = policies.FixedIntervalPolicy(1)

    def use(number, **kwargs):
        place = f"{sys.argv[1]}/{number}"
        with TorchaxCheckpointer(place, save_decision_policy=often, **kwargs) as c:
            c.attach()
            for step in range(1, 4):
                c.save(step, state=large if step == 3 else state)
            c.wait_until_finished()
            c.load(2)

    use(0)  # what Orbax and JAX begin once in a process
    before, resident = everything(), resident_bytes()
    use(1, on_event=lambda event: None)
    use(2, local=LocalTier(f"{sys.argv[1]}/local", save_decision_policy=often))
    after = everything()
    assert resident_bytes() - resident < 16 << 20
    for key in before:
        assert before[key] == after[key], (key, before[key], after[key])
"""


def test_a_closed_checkpointer_leaves_nothing_behind(tmp_path: Path) -> None:
    run_python(LEFT, str(tmp_path), devices=1)


TWO = """
    import sys, threading, time
    from processes_program import INDEX, MESH, P, NamedSharding, jax, np, report, torchax
    torchax.enable_globally()
    from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
    from torchax_ckpt.errors import SaveTimeoutError
    from support.stages import at

    place = sys.argv[4]
    ALWAYS = policies.FixedIntervalPolicy(1)

    def names():
        ours = ("lease", "events", "sigterm", "closing", "decisions", "save-")
        return sorted(t.name for t in threading.enumerate() if t.name.startswith(ours))

    gate = threading.Event()
    gate.set()
    at("write the arrays", lambda: gate.wait(60))
    state = {"w": jax.device_put(np.arange(8.0), NamedSharding(MESH, P("fsdp")))}

    def made(name, **kwargs):
        local = LocalTier(f"{place}/{name}-{INDEX}", save_decision_policy=ALWAYS)
        return TorchaxCheckpointer(
            f"{place}/{name}", save_decision_policy=ALWAYS, local=local, **kwargs)

    # Closed: no thread is left.
    with made("closed") as ckpt:
        for step in range(1, 30):
            ckpt.save(step, state=state)
        assert any(name.startswith("decisions") for name in names())
    assert names() == [], names()

    # Closed while a save is late.
    ckpt = made("late", options=CheckpointOptions(save_timeout_secs=0.5))
    gate.clear()
    ckpt.save(1, state=state)
    try:
        ckpt.close()
        raise AssertionError
    except SaveTimeoutError:
        pass
    gate.set()
    while names():
        time.sleep(0.05)
    ckpt.close()

    # Made again by the same cell of a notebook.
    gate.clear()
    ckpt = made("again")
    ckpt.save(1, state=state, force=True)
    threading.Timer(0.5, gate.set).start()
    ckpt = made("again")
    assert ckpt.save(2, state=state, force=True)
    ckpt.close()
    assert ckpt.all_steps() == [1, 2], ckpt.all_steps()
    while names():
        time.sleep(0.05)
    report(is_done=True)
"""


@pytest.mark.slow
def test_on_two_processes(together: Together, tmp_path: Path) -> None:
    for reports in together(TWO, 2, tmp_path):
        assert reports == [{"is_done": True}]
    assert not list(tmp_path.glob("*/lease"))
