"""Saves that begin after the last line of the program: they are kept, or said to be lost."""

from __future__ import annotations

import _thread
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from support import PROGRAMS
from support.processes import run_processes, run_python

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import ClosedError, SaveError
from torchax_ckpt.runtime import background

STATE = {"w": np.arange(3)}
# What docs/guarantees.md says of Python 3.12.0 and 3.12.1.
STARTS_THREADS = not (3, 12, 0) <= sys.version_info < (3, 12, 2)


def ended(scenario: str, place: Path) -> CompletedProcess[str]:
    return run_python(PROGRAMS / "ends.py", scenario, str(place), devices=1, check=False)


def steps(path: Path) -> list[int]:
    assert not (path / "lease").exists()
    return TorchaxCheckpointer(path).all_steps()


def is_refused(result: CompletedProcess[str], step: int) -> bool:
    """Returns whether this Python starts no thread for a save; asserts that it is said then."""
    if not STARTS_THREADS:
        assert result.returncode == 120, result.stderr
        said = rf"its newest save failed: saving step {step} .*This Python starts no thread"
        assert re.search(said, result.stderr)
    return not STARTS_THREADS


@pytest.mark.parametrize("on", ["thread", pytest.param("executor", marks=pytest.mark.slow)])
def test_a_training_thread_that_outlives_the_main_thread_saves(on: str, tmp_path: Path) -> None:
    result = ended(on, tmp_path)
    if is_refused(result, 1):
        assert steps(tmp_path / "run") == []
        return
    assert result.returncode == 0, result.stderr
    assert "ERROR" not in result.stderr
    assert result.stderr.count("ending without close(): finishing") == 1
    assert steps(tmp_path / "run") == [2, 3, 4]
    assert steps(tmp_path / "left") == [1]
    np.testing.assert_array_equal(TorchaxCheckpointer(tmp_path / "left").load()["w"], np.arange(3))


def test_gcsfs_looks_up_hosts_for_such_a_thread(tmp_path: Path) -> None:
    result = ended("lookups", tmp_path)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


TWO = """
    import concurrent.futures, sys, threading, time
    from processes_program import INDEX, MESH, P, NamedSharding, jax, np, report, torchax
    from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

    ALWAYS = policies.FixedIntervalPolicy(1)
    place = sys.argv[4]

    def train():
        torchax.enable_globally()
        while not concurrent.futures.thread._shutdown:
            time.sleep(0.01)
        local = LocalTier(f"{place}/local-{INDEX}", save_decision_policy=ALWAYS)
        with TorchaxCheckpointer(f"{place}/run", save_decision_policy=ALWAYS, local=local) as ckpt:
            for step in range(1, 13):
                array = jax.device_put(np.arange(8.0) + step, NamedSharding(MESH, P("fsdp")))
                assert ckpt.save(step, state={"w": array})
            ckpt.wait_until_finished()
            report(steps=ckpt.all_steps("durable"), local=ckpt.all_steps("local"))

    threading.Thread(target=train).start()
"""


@pytest.mark.slow
def test_training_threads_of_two_processes_outlive_the_main_threads(tmp_path: Path) -> None:
    if not STARTS_THREADS:
        with pytest.raises(AssertionError, match="This Python starts no thread"):
            run_processes(TWO, 2, str(tmp_path), devices=2)
        return
    for (found,) in run_processes(TWO, 2, str(tmp_path), devices=2):
        assert found == {"steps": [10, 11, 12], "local": [11, 12]}


def test_an_exit_handler_saves(tmp_path: Path) -> None:
    result = ended("handler", tmp_path)
    if is_refused(result, 2):
        assert steps(tmp_path / "left") == [1]
        return
    assert result.returncode == 0, result.stderr
    assert steps(tmp_path / "left") == [1, 2]
    first = ["started None", "saving 1", "durable 1", "closed 1"]
    assert result.stdout.splitlines() == [*first, "saving 2", "durable 2", "closed 2"]


def test_a_finalizer_is_refused(tmp_path: Path) -> None:
    result = ended("finalizer", tmp_path)
    assert result.returncode == 120, result.stderr
    assert "ClosedError: the program is ending, and torchax_ckpt has finished" in result.stderr
    assert steps(tmp_path / "left") == [1]


def test_failures_that_nothing_mends_are_all_said_and_fail_the_exit_code(tmp_path: Path) -> None:
    result = ended("failing", tmp_path)
    assert result.returncode == 120, result.stderr
    tried = [("left", 1)] if is_refused(result, 1) else [("left", 1), ("run", 1), ("run", 2)]
    for name, step in tried:
        assert f"saving step {step} to {tmp_path / name} failed: OSError" in result.stderr
    for name in ("left", "run"):
        path = tmp_path / name
        assert f"{path}: the program ends, and its newest save failed: saving" in result.stderr
    lines = [line for line in result.stderr.splitlines() if f"to {tmp_path / 'run'} failed" in line]
    assert lines
    assert not [line for line in lines if "the next save tries again" in line]


@pytest.mark.slow
def test_a_failure_that_a_later_save_mends_fails_nothing(tmp_path: Path) -> None:
    result = ended("mended", tmp_path)
    if is_refused(result, 1):
        return
    assert result.returncode == 0, result.stderr
    assert steps(tmp_path / "run") == [2]


def test_a_save_that_gets_no_thread_any_more_is_refused_each_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.12.1 does once the main thread has ended, and others in exit handlers."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
        ckpt.wait_until_finished()
        with monkeypatch.context() as end:
            end.setattr(background.ending, "is_set", True)
            end.setattr(_thread, "start_new_thread", refuse)
            for step in (2, 3):
                said = rf"so no later save can mend this: .*step {step} .*\. This Python starts no"
                with pytest.raises(ClosedError, match=said):
                    ckpt.save(step, state=STATE, force=True)
        with pytest.raises(SaveError):
            ckpt.check_for_errors()
        assert ckpt.save(4, state=STATE, force=True)
    assert ckpt.all_steps() == [1, 4]
