"""SIGTERM: real signals to real processes, in whatever their main thread is at."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from starts import free_port
from support import PROGRAMS, ROOT
from support.processes import Talking, environment

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.runtime import preemption

EXAMPLES = ROOT / "examples"
EXIT_CODE = 143


class Program:
    """A program that runs, with what it has printed so far."""

    def __init__(self, talking: Talking) -> None:
        self.process, self._lines = talking.process, talking.lines
        self.output = ""

    def until(self, word: str) -> str:
        """Reads up to the line that begins with the word; gives the rest of that line."""
        return self._until(lambda line: line.startswith(word), word).removeprefix(word).strip()

    def until_logged(self, text: str) -> None:
        """Reads up to a line that has the text."""
        self._until(lambda line: text in line, text)

    def _until(self, is_it: Callable[[str], bool], text: str) -> str:
        for line in self._lines:
            self.output += line
            if is_it(line):
                return line
        raise AssertionError(f"{text!r} was never printed:\n{self.output}")

    def terminate(self) -> float:
        sent = time.monotonic()  # before: it may be noticed before this process goes on
        self.process.send_signal(signal.SIGTERM)
        return sent

    def exit_code(self) -> int:
        watchdog = threading.Timer(60, self.process.kill)
        watchdog.start()
        self.output += self._lines.read()
        watchdog.cancel()
        return self.process.wait(60)


@contextlib.contextmanager
def running(scenario: str, *args: object) -> Iterator[Program]:
    """A program of ``sigterm.py`` that runs with these arguments."""
    program, words = PROGRAMS / "sigterm.py", map(str, args)
    with Talking(program, scenario, *words, env=environment(1, {})) as talking:
        yield Program(talking)


@pytest.mark.slow
@pytest.mark.parametrize(("work", "amount"), [("compilation", 250), ("transfer", 4000)])
def test_sigterm_is_noticed_at_once_in_any_work(work: str, amount: int, directory: Path) -> None:
    with running("noticed_in_work", directory, work, amount) as program:
        program.until("working")
        time.sleep(0.8)  # past what is Python in it
        sent = program.terminate()
        worked = float(program.until("worked"))
        noticed = float(program.until("noticed"))
        print(f"noticed after {1000 * (noticed - sent):.1f} ms")
        # Milliseconds, on a machine with nothing else to do.
        assert 0 <= noticed - sent < max(1, (worked - sent) / 2)
        assert worked - noticed > 0.5  # it did come in the middle
        # Whatever the policy says the step is saved and durable, and the loop ends.
        assert program.until("durable") == "[2] True True"
        assert program.until("again") == "False True [2, 3]"
        assert program.until("closed") == "True"
        assert program.exit_code() == EXIT_CODE
    assert program.output.count("handled 15") == 1
    assert "SIGTERM: the next call of save waits until its step is durable" in program.output
    assert TorchaxCheckpointer(directory).all_steps() == [2, 3]


def test_a_second_sigterm_ends_the_process_at_once(directory: Path) -> None:
    with running("stuck", directory, 600) as program:
        program.until("working")
        program.terminate()
        program.until_logged("SIGTERM: the next call of save waits")  # two may arrive as one
        time.sleep(0.3)
        assert program.process.poll() is None
        second = program.terminate()
        assert program.exit_code() == EXIT_CODE
        assert time.monotonic() - second < 60, "the grace time is 600 s"
    assert "ending at once: a second SIGTERM" in program.output
    assert TorchaxCheckpointer(directory).all_steps() == [1]


def test_the_end_of_the_grace_time_ends_the_process_at_once(directory: Path) -> None:
    with running("stuck", directory, 0.7) as program:
        program.until("working")
        first = program.terminate()
        assert program.exit_code() == EXIT_CODE
        assert 0.7 <= time.monotonic() - first < 60
    assert "ending at once: SIGTERM and 0.7 s of grace" in program.output
    assert TorchaxCheckpointer(directory).all_steps() == [1]


@pytest.mark.parametrize("how", ["handler", pytest.param("twice", marks=pytest.mark.slow)])
def test_a_later_handler_stays_and_two_signals_are_one(how: str, directory: Path) -> None:
    """GNU's timeout sends two in a row."""
    with running("in_loop", directory, how) as program:
        if how == "handler":
            program.until("working")
            program.terminate()
        assert program.until("durable") == "True"
        assert program.exit_code() == EXIT_CODE
    assert program.output.count("handled later") == (how == "handler")
    assert "at once" not in program.output


def test_sigterm_belongs_to_a_checkpointer_only_while_it_may_write(directory: Path) -> None:
    with running("comes_and_goes", directory) as program:
        program.until("forgotten")
        assert program.exit_code() == EXIT_CODE
    assert program.output.count("SIGTERM is not noticed: Python lets only the main thread") == 1
    assert program.output.count("SIGTERM is not noticed: this process ignores it") == 1
    assert "ending at once: SIGTERM" in program.output


@pytest.mark.slow
def test_it_lives_with_an_event_loop_that_has_signal_handlers(directory: Path) -> None:
    with running("in_event_loop", directory) as program:
        program.until("done")
        assert program.exit_code() == 0
    assert "Traceback" not in program.output


def of_two(stack: contextlib.ExitStack, scenario: str, *args: object) -> list[Program]:
    """Two processes of one program that are ready, of which the second is told to end."""
    directory, *rest = args
    port = free_port()
    started = [running(scenario, directory, port, index, *rest) for index in range(2)]
    programs = [stack.enter_context(each) for each in started]
    for program in programs:
        program.until("ready")
    programs[1].terminate()
    return programs


# JAX looks for a notice once a second: after 3 s it has chosen its step before the first question.
@pytest.mark.parametrize(
    ("first", "secs"),
    [(1, 0), pytest.param(1000, 3, id="before the first step", marks=pytest.mark.slow)],
)
def test_all_processes_end_on_the_same_step(first: int, secs: float, directory: Path) -> None:
    with contextlib.ExitStack() as stack:
        programs = of_two(stack, "of_two", directory, first, secs)
        steps = {program.until("reached") for program in programs}
        assert len(steps) == 1
        for program in programs:
            assert program.until("closed") == "True"
            assert program.exit_code() == EXIT_CODE


@pytest.mark.slow
def test_under_jax_distributed_the_policy_of_process_0_is_told(directory: Path) -> None:
    with contextlib.ExitStack() as stack:
        for program in of_two(stack, "policy_of_two", directory):
            assert program.until("durable") == "True"
            assert program.exit_code() == EXIT_CODE


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["jax_takes_over", "handler_put_back"])
def test_another_may_take_sigterm_over_or_give_it_back(scenario: str, directory: Path) -> None:
    port = [free_port()] if scenario == "jax_takes_over" else []
    with running(scenario, directory, *port) as program:
        if port:
            program.until("working")
            program.terminate()
            assert program.until("durable") == "True None", program.output
        else:
            assert program.until("noticed") == "True"
        assert program.exit_code() == EXIT_CODE


@pytest.mark.parametrize(
    ("example", "first"),
    [("train_digits", 50), pytest.param("train_gpt", 20, marks=pytest.mark.long)],
)
@pytest.mark.slow
def test_a_preempted_example_asks_for_a_restart(example: str, first: int, tmp_path: Path) -> None:
    script = str(EXAMPLES / f"{example}.py")
    arguments = ("--directory", str(tmp_path), "--steps", "1000000")
    with Talking(script, *arguments, env=environment(None, {})) as talking:
        program = Program(talking)
        program.until(f"step {first}:")
        program.terminate()
        assert program.exit_code() == EXIT_CODE, program.output
    saved = re.search(r"^preempted: saved step (\d+)$", program.output, re.MULTILINE)
    assert saved, program.output
    assert TorchaxCheckpointer(tmp_path).latest_step() == int(saved[1])


def test_a_program_that_only_reads_keeps_its_own_sigterm(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": np.zeros(2)}, force=True)
    before = signal.getsignal(signal.SIGTERM)
    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as ckpt:
        assert ckpt.attach() == 1
        assert signal.getsignal(signal.SIGTERM) is before


def test_one_sigterm_that_is_heard_twice_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    watch = preemption._Watch()
    watch.noticed_at, now = 0.0, [0.0]
    monkeypatch.setattr(preemption, "_end", ends.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for secs, byte, is_over in (
        (0.0, signal.SIGTERM, False),
        (9.0, preemption._HANDLED, False),  # by a handler that waited for a device transfer
        (10.0, signal.SIGTERM, True),
    ):
        now[0] = secs
        watch._notice(byte)
        assert bool(ends) is is_over


def test_a_step_beyond_the_counter_of_jax_is_said_and_gets_no_notice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption._watch, "_said", set())
    assert not preemption._at_sync_point(2**31)
    assert "JAX's service takes no step above 2147483647; no step is saved at" in caplog.text
