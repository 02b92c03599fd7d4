"""The life of a save: in the background, one at a time, never lost by accident."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support import PROGRAMS
from support.compare import assert_trees_identical, entries
from support.damage import fill_disk
from support.device_memory import OFFLOAD
from support.held import held
from support.models import Counter
from support.processes import run_python
from support.stages import Gate, at, fail_at
from support.steps import ALWAYS, two_tiers
from support.training import mlp, save_state, train_step

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import (
    ClosedError,
    DirectoryError,
    SaveError,
    SaveTimeoutError,
)
from torchax_ckpt.processes import call_log
from torchax_ckpt.saving import tier
from torchax_ckpt.storage.directory import lineage
from torchax_ckpt.storage.medium import bucket_medium
from torchax_ckpt.telemetry import recorder


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate("write the arrays")
    yield gate
    gate.opened.set()


@pytest.fixture
def failing() -> Callable[[], None]:
    """Storage that fails from now on; the answer ends that."""
    return fill_disk()


STATE = {"w": np.arange(3)}


def test_save_returns_while_the_step_is_still_being_written(directory: Path, gate: Gate) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.save(1, state=STATE)
        assert gate.entered.wait(30)
        assert ckpt.all_steps() == []
        assert not ckpt.should_save(2)  # continuous: not while a save is in flight
        assert not ckpt.save(2, state=STATE)
        with pytest.raises(SaveTimeoutError, match="step 1 .* still in flight after 0"):
            ckpt.wait_until_finished(timeout_secs=0.05)
        gate.opened.set()
        ckpt.wait_until_finished()
        assert ckpt.all_steps() == [1]
        assert ckpt.should_save(2)


def test_a_forced_save_waits_for_another_and_repeats_none(directory: Path, gate: Gate) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.save(1, state=STATE, force=True)
        threading.Timer(0.3, gate.opened.set).start()
        assert not ckpt.save(1, state=STATE, force=True)  # waits to see whether it succeeds
        assert ckpt.all_steps() == [1]
        assert not ckpt.save(1, state=STATE, force=True)
        gate.opened.clear()
        assert ckpt.save(2, state=STATE, force=True)
        threading.Timer(0.3, gate.opened.set).start()
        assert ckpt.save(3, state=STATE, force=True)
        assert ckpt.all_steps() == [1, 2]


copying = pytest.mark.parametrize("mode", ["copy", *OFFLOAD])


@copying
def test_what_is_saved_is_fixed_when_save_returns(mode: Any, directory: Path, gate: Gate) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    host = np.arange(4)
    device = jnp.arange(4.0)
    weight = np.array(torchax_backend.buffer(model.get_parameter("0.weight")))
    options = CheckpointOptions(snapshot=mode)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.attach(model, optimizer, stateful={"s": Counter()})
        ckpt.save(1, force=True)
        train_step(model, optimizer, 1)  # steps the CPU counters in place
        for parameter in model.parameters():
            torchax_backend.buffer(parameter).delete()
        gate.opened.set()
        ckpt.wait_until_finished()
        gate.opened.clear()
        ckpt.save(2, state={"host": host, "device": device}, force=True)
        host[:] = -1
        device.delete()
        gate.opened.set()
        ckpt.wait_until_finished()
        loaded = ckpt.load(2)
    np.testing.assert_array_equal(loaded["host"], np.arange(4))
    np.testing.assert_array_equal(loaded["device"], np.arange(4.0))
    saved = ckpt.load(1)
    np.testing.assert_array_equal(np.asarray(saved["model"]["0.weight"].jax()), weight)
    assert saved["optimizer"]["state"]["0.weight"]["step"].item() == 1


def test_a_storage_failure_is_logged_kept_until_read_and_raised_by_close(
    directory: Path, failing: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = TorchaxCheckpointer(directory)
    with caplog.at_level(logging.ERROR, logger="torchax_ckpt"):
        assert ckpt.save(1, state=STATE)
        ckpt._saver.wait()
    assert "saving step 1" in caplog.text
    assert str(directory) in caplog.text
    assert "No space left" in caplog.text
    assert ckpt.all_steps() == []
    assert ckpt.latest_step() is None
    with pytest.raises(SaveError, match=r"saving step 1 to .*No space left") as caught:
        ckpt.check_for_errors()
    assert caught.value.step == 1
    assert caught.value.path == str(directory)
    ckpt.check_for_errors()  # read once
    with pytest.raises(SaveError, match="step 1"):
        ckpt.close()
    ckpt.close()


def test_a_forced_save_tries_again_when_the_one_on_its_way_fails(
    directory: Path, gate: Gate
) -> None:
    fail_at("write the arrays", OSError("once"), number=1)
    ckpt = TorchaxCheckpointer(directory)
    ckpt.save(1, state=STATE)
    threading.Timer(0.2, gate.opened.set).start()
    assert ckpt.save(1, state=STATE, force=True)
    with pytest.raises(SaveError, match="once"):
        ckpt.wait_until_finished()
    ckpt.close()
    assert ckpt.all_steps() == [1]


def test_the_mediums_error_is_reported_despite_a_donation(directory: Path, gate: Gate) -> None:
    fill_disk()
    x = jnp.ones(4)
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(snapshot="reference"))
    ckpt.save(1, state={"x": x})
    assert gate.entered.wait(60)
    x.delete()
    gate.opened.set()
    with pytest.raises(SaveError, match="No space left"):
        ckpt.wait_until_finished()


@copying
def test_a_failed_save_keeps_no_copy_of_the_state_alive(
    mode: Any, directory: Path, failing: Callable[[], None]
) -> None:
    x = jnp.ones((256, 256))
    gc.collect()
    before = len(jax.live_arrays())
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(snapshot=mode))
    ckpt.save(1, state={"x": x}, force=True)
    ckpt._saver.wait()
    assert ckpt._saver.tier.failures.newest is not None
    ckpt._saver._in_flight = None
    gc.collect()
    held = [a.shape for a in jax.live_arrays()].count((256, 256))
    assert held == 1, f"{len(jax.live_arrays()) - before} arrays more"
    failing()


def test_a_save_at_a_preemption_is_tried_again_and_says_whether_it_is_durable(
    directory: Path, preempt: Callable[[], None]
) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(len(calls) + 1)
        if len(calls) != 2:
            raise OSError("no")

    at("write the arrays", fail)
    ckpt = TorchaxCheckpointer(directory)
    preempt()
    assert ckpt.save(1, state=STATE) is True
    assert ckpt.all_steps() == [1]
    assert len(calls) == 2
    assert ckpt.save(2, state=STATE) is False
    assert len(calls) == 4
    assert ckpt.all_steps() == [1]


def test_an_error_in_the_loop_comes_first(directory: Path, failing: Callable[[], None]) -> None:
    with pytest.raises(ZeroDivisionError), TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
        raise ZeroDivisionError


def test_an_error_in_the_loop_lets_the_save_in_flight_finish(directory: Path, gate: Gate) -> None:
    threading.Timer(0.3, gate.opened.set).start()
    with pytest.raises(ZeroDivisionError), TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
        raise ZeroDivisionError
    assert ckpt.all_steps() == [1]


def test_a_closed_checkpointer_reads_but_does_not_write(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
    assert ckpt.all_steps() == [1]
    for call in (
        lambda: ckpt.save(2, state=STATE),
        lambda: ckpt.attach(),
        lambda: ckpt.restore(),
        lambda: ckpt.delete(1),
        lambda: ckpt.steps(3),
    ):
        with pytest.raises(ClosedError):
            call()


def test_the_first_save_finds_out_that_the_directory_cannot_be_written(tmp_path: Path) -> None:
    ckpt = TorchaxCheckpointer(tmp_path / "file" / "run")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DirectoryError, match="cannot create and write .*file/run"):
        ckpt.save(1, state=STATE)
    with pytest.raises(DirectoryError, match="expected a directory, found a file") as caught:
        TorchaxCheckpointer(tmp_path / "file")
    assert caught.value.path == str(tmp_path / "file")
    assert isinstance(caught.value, OSError)
    assert (tmp_path / "file").read_text() == "mine"


def test_reading_changes_nothing_and_creates_nothing(directory: Path) -> None:
    reader = TorchaxCheckpointer(directory)
    assert reader.all_steps() == []
    assert reader.latest_step() is None
    assert not directory.exists()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE, metrics={"loss": 1.0})
    for leftover in ("7.orbax-checkpoint-tmp", "deleting-5", "incoming-6.orbax-checkpoint-tmp"):
        (directory / leftover).mkdir()
    (directory / "8").mkdir()  # no checkpoint: nothing was committed there
    before = {p: p.stat().st_mtime_ns for p in [directory, *directory.rglob("*")]}
    assert reader.all_steps() == [1]
    assert reader.metrics(1) == {"loss": 1.0}
    reader.load()
    assert {p: p.stat().st_mtime_ns for p in [directory, *directory.rglob("*")]} == before


def test_leftovers_of_killed_processes_go_with_the_next_save(directory: Path) -> None:
    for leftover in ("7.orbax-checkpoint-tmp", "deleting-5", "incoming-6.orbax-checkpoint-tmp"):
        (directory / leftover).mkdir(parents=True)
    (directory / "notes").mkdir()
    (directory / "abandoned-3").mkdir()
    save_state(directory, STATE)
    assert entries(directory) == {"1", "notes", "abandoned-3"}


def test_what_a_failed_save_goes_on_writing_harms_no_other(directory: Path) -> None:
    """The writers of the other arrays go on after one of them has failed."""
    stop = threading.Event()

    def go_on(state: Path) -> None:
        for i in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            with contextlib.suppress(FileNotFoundError):  # just removed
                state.mkdir(parents=True, exist_ok=True)
                (state / str(i)).touch()

    def fail_and_go_on() -> None:
        (written,) = directory.glob("writing-*")
        pool.submit(go_on, written / "state")
        time.sleep(0.05)
        raise OSError("one array")

    at("write the arrays", fail_and_go_on, number=1)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(stop.set)
        ckpt = stack.enter_context(TorchaxCheckpointer(directory))
        ckpt.save(1, state=STATE)
        with pytest.raises(SaveError, match="one array"):
            ckpt.wait_until_finished()
        assert ckpt.save(1, state=STATE, force=True)
        ckpt.wait_until_finished()
        assert ckpt.all_steps() == [1]
        assert not list((directory / "1" / "state").glob("[0-9]*"))
    save_state(directory, STATE, step=2)
    assert entries(directory) <= {"1", "2"}


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param("end", 0, marks=pytest.mark.slow),
        pytest.param("raise", 1, marks=pytest.mark.slow),
        ("exit", 3),
    ],
)
def test_a_program_that_ends_without_close_still_completes_its_save(
    ending: str, code: int, directory: Path
) -> None:
    arguments = "unclosed", str(directory), "1", "1", ending
    result = run_python(PROGRAMS / "saves.py", *arguments, devices=1, check=False, fresh=True)
    assert result.returncode == code
    assert "ending without close(): finishing the save of step 1" in result.stderr
    assert "Exception ignored" not in result.stderr
    assert not (directory / "lease").exists()
    np.testing.assert_array_equal(TorchaxCheckpointer(directory).load()["w"], np.arange(3))


def test_nothing_that_a_checkpointer_holds_grows_with_each_save(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit in (
        (call_log, "_REMEMBERED"),
        (recorder, "_MAX_VALUES"),
        (tier, "_LOGGED_SAVES"),
        (bucket_medium, "_USED_NAMES"),
        (lineage, "_MOST"),
    ):
        monkeypatch.setattr(module, limit, 5)
    local, looks = directory.with_name("local"), list[dict[str, int]]()
    with two_tiers(directory, local, durable=ALWAYS, keep=2) as ckpt:
        ckpt.attach(stateful={"counter": Counter()})
        for step in range(1, 21):
            assert ckpt.save(step, metrics={"loss": 1 / step})
            ckpt.wait_until_finished()
            ckpt.restore()
            for old in ckpt.all_steps("durable")[:-2]:
                ckpt.delete(old)
            if step % 10 == 0:
                looks.append(held(ckpt))
    grown = {owner: count - looks[0].get(owner, 0) for owner, count in looks[1].items()}
    assert max(grown.values()) < 10, grown


def test_loading_beside_a_save_in_flight_harms_neither(tmp_path: Path) -> None:
    state = {f"w{i}": jnp.full((8, 8), i) for i in range(20)}
    other = TorchaxCheckpointer(tmp_path / "other")
    other.save(1, state={"x": np.ones(2)})
    other.wait_until_finished()
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state=state, force=True)
            for _ in range(4):
                other.load()
            ckpt.wait_until_finished()
        assert_trees_identical(ckpt.load(), state, shardings=False)
