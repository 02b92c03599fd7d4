"""Calls from where they cannot work, the process's end, and saves that are stuck."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import PROGRAMS
from support.processes import run_python
from support.training import mlp
from support.waiting import wait_until

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.errors import CallError, SaveTimeoutError
from torchax_ckpt.saving.save import Save

STATE = {"w": np.arange(3)}


def training_calls(ckpt: TorchaxCheckpointer) -> dict[str, Callable[[], Any]]:
    return {
        "attach": ckpt.attach,
        "restore": lambda: ckpt.restore(1),
        "save": lambda: ckpt.save(2, state=STATE),
        "steps": lambda: ckpt.steps(3),
        "delete": lambda: ckpt.delete(1),
    }


def on_a_thread(call: Callable[[], Any], name: str = "other") -> Any:
    """What the call returns, or the error that it raises, on a thread of this name and number."""
    with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
        called = pool.submit(call)
        return called.exception(60) or called.result()


def test_training_calls_are_refused_on_a_second_thread(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
        for name, call in training_calls(ckpt).items():
            error = on_a_thread(call)
            assert isinstance(error, CallError), name
            assert f"{name} was called on thread 'other_0'" in str(error)
            assert "belongs to thread 'MainThread'" in str(error)
        # What does not touch the training's state works anywhere.
        assert on_a_thread(ckpt.wait_until_finished) is None
        assert on_a_thread(ckpt.all_steps) == [1]
        np.testing.assert_array_equal(on_a_thread(ckpt.load)["w"], STATE["w"])
        assert on_a_thread(lambda: ckpt.reached_preemption(1)) is False
        exits = on_a_thread(lambda: ckpt.exit_if_preempted(1), "trainer")
        assert isinstance(exits, CallError), "it would end the thread, and the program with 0"
        assert "exit_if_preempted was called on thread 'trainer_0'" in str(exits)
        assert on_a_thread(ckpt.close) is None


def test_a_checkpointer_may_be_made_on_one_thread_and_train_on_another(directory: Path) -> None:
    ckpt = TorchaxCheckpointer(directory)
    model = mlp()
    assert on_a_thread(lambda: (ckpt.attach(model), ckpt.save(1)), "trainer") == (0, True)
    with pytest.raises(CallError, match=r"save was called on thread 'MainThread' .* 'trainer_0'"):
        ckpt.save(2)
    ckpt.close()
    assert ckpt.all_steps() == [1]


def test_a_call_within_a_call_is_refused_and_the_next_one_works(directory: Path) -> None:
    class Curious:
        """Calls the checkpointer in the middle of a save, as a signal handler would."""

        call: Callable[[], Any] | None = None

        def state_dict(self) -> dict[str, int]:
            if self.call is not None:
                self.call()
            return {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    curious = Curious()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp(), stateful={"curious": curious})
        ckpt.save(1)
        calls = training_calls(ckpt) | {
            "load": ckpt.load,
            "wait_until_finished": ckpt.wait_until_finished,
            "close": ckpt.close,
        }
        for name, call in calls.items():
            curious.call = call
            with pytest.raises(CallError, match=f"{name} was called while save is running on the "):
                ckpt.save(2, force=True)
        curious.call = ckpt.all_steps  # reads names only
        assert ckpt.save(2, force=True)
    assert ckpt.all_steps() == [1, 2]


@pytest.mark.slow
def test_signal_handlers_that_call_in_at_any_moment_never_hang(directory: Path) -> None:
    arguments = PROGRAMS / "interruptions.py", "saves_in_handler", str(directory)
    run_python(*arguments, devices=1, timeout_secs=60)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.checkpoint])
def test_calls_within_a_traced_function_are_refused(transform: Any, directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
        x = jnp.ones(2) if transform is jax.vmap else jnp.ones(())
        for name, call in {**training_calls(ckpt), "load": ckpt.load}.items():

            def function(x: jax.Array, call: Callable[[], Any] = call) -> jax.Array:
                call()
                return x

            with pytest.raises(CallError, match=f"{name} was called while JAX traces a function"):
                transform(function)(x)
        assert ckpt.save(2, state=STATE, force=True)  # and outside of it they work


@pytest.mark.slow
def test_forked_processes_neither_write_nor_hang_nor_take_signals(directory: Path) -> None:
    result = run_python(
        PROGRAMS / "interruptions.py",
        "forks",
        str(directory),
        devices=1,
        env={"PYTHONWARNINGS": "ignore"},
        timeout_secs=120,
        fresh=True,
    )
    assert "done" in result.stdout
    assert result.stderr.count("finishing the save") == 0


def test_a_stuck_save_is_named_by_log_and_by_whoever_waits(
    directory: Path, opened: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    options = CheckpointOptions(save_timeout_secs=0.3, snapshot="transfer")
    ckpt = TorchaxCheckpointer(directory, options=options)
    began = time.monotonic()
    with pytest.raises(SaveTimeoutError, match="transferring"):
        ckpt.save(1, state={"w": jnp.arange(3)})  # does not hold the training thread forever
    stands = r"step 1 .*transferring the arrays from the devices, for \d+\.\d s"
    for call in (
        ckpt.wait_until_finished,
        lambda: ckpt.save(2, state=STATE, force=True),
        ckpt.attach,
        ckpt.check_for_errors,
    ):
        with pytest.raises(SaveTimeoutError, match=stands) as caught:
            call()
        assert (caught.value.step, caught.value.path) == (1, str(directory))
    ckpt.check_for_errors()  # said once

    def told() -> list[logging.LogRecord]:
        return [r for r in caplog.records if r.levelno == logging.ERROR]

    wait_until(lambda: len(told()) >= 3)
    late = told()
    assert len(late) <= 1 + math.log2((time.monotonic() - began) / 0.3)  # after 0.3, 0.6, 1.2 s, ..
    assert "_hold" in late[0].getMessage()  # where its thread stands
    with pytest.raises(SaveTimeoutError, match=stands):
        ckpt.close()
    opened.set()
    wait_until(lambda: ckpt.all_steps() == [1])  # it went on
    time.sleep(0.2)
    ckpt.check_for_errors()


def test_each_stage_of_a_save_has_a_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    enter = Save.enter

    def entered(save: Save, phase: str) -> None:
        seen.append(phase)
        enter(save, phase)
        assert re.match(rf"{phase}, for \d+\.\d s", save.where())

    monkeypatch.setattr(Save, "enter", entered)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": jnp.arange(3)}, metrics={"loss": jnp.ones(())})
    assert seen == [
        "starting its thread",
        "fetching metrics from the devices",
        "stacking the arrays",
        "cleaning up the directory",
        "transferring the arrays from the devices",
        "digesting and writing the arrays",
        "committing",
        "deleting what no rule keeps",
    ]


@pytest.mark.slow
def test_the_programs_end_gives_up_a_stuck_save_with_its_name(directory: Path) -> None:
    source = """
        import sys, time
        import torchax; torchax.enable_globally()
        import numpy as np
        from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
        from support.stages import at
        at("write the arrays", lambda: time.sleep(600))
        ckpt = TorchaxCheckpointer(
            sys.argv[1], options=CheckpointOptions(save_timeout_secs=0.5)
        )
        ckpt.save(1, state={"w": np.arange(3)})
    """
    result = run_python(source, str(directory), devices=1, timeout_secs=60, check=False, fresh=True)
    assert result.returncode == 120
    assert "giving up: the save of step 1" in result.stderr
    assert "transferring the arrays" in result.stderr
