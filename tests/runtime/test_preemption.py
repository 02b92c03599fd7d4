"""SIGTERM: real signals to real processes, in whatever their main thread is at."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import ROOT
from support.processes import Talking, environment

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer

EXAMPLES = ROOT / "examples"
EXIT_CODE = 143

PRELUDE = """
    import os, signal, sys, threading, time
    import torchax
    torchax.enable_globally()
    import jax, jax.numpy as jnp, numpy as np, torch
    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
    from torchax_ckpt.runtime import preemption

    NEVER = policies.SpecificStepsPolicy(())
    PATIENT = CheckpointOptions(preemption_grace_secs=300)  # on a machine with much else to do

    def say(*words):
        # In one piece: another thread's log may come between two.
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()

    def compile_for_long(operations):
        def function(x):
            for i in range(operations):
                x = jnp.sin(x @ x + i)
            return x
        lowered = jax.jit(function).lower(jnp.ones((8, 8)))
        say("working")  # from here on in C++
        lowered.compile()

    def transfer_for_long(rounds):
        step = lambda i, x: jnp.tanh(x @ x)
        pending = jax.jit(lambda x: jax.lax.fori_loop(0, rounds, step, x))(jnp.ones((400, 400)))
        say("working")
        np.asarray(pending)

    def state(step):
        return {"w": np.full(3, step)}
"""


class Program:
    """A program that runs, with what it has printed so far."""

    def __init__(self, talking: Talking) -> None:
        self.process, self._lines = talking.process, talking.lines
        self.output = ""

    def until(self, word: str) -> str:
        """Reads up to the line that begins with the word; gives the rest of that line."""
        for line in self._lines:
            self.output += line
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError(f"{word!r} was never printed:\n{self.output}")

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
def running(source: str, *args: object, prelude: str = PRELUDE) -> Iterator[Program]:
    program = textwrap.dedent(prelude) + textwrap.dedent(source)
    env = environment(1, {})
    with Talking("-c", program, *map(str, args), env=env) as talking:
        yield Program(talking)


# --- noticing, saving, ending --------------------------------------------------------------------

LOOP = """
    def handler(signum, frame):
        say("handled", signum)

    signal.signal(signal.SIGTERM, handler)
    model = torch.nn.Linear(4, 4).to("jax")
    work = {"compilation": compile_for_long, "transfer": transfer_for_long}[sys.argv[2]]
    policy = policies.FixedIntervalPolicy(1000)
    with TorchaxCheckpointer(
        sys.argv[1], save_decision_policy=policy, options=PATIENT
    ) as ckpt:
        ckpt.attach(model)
        for step in ckpt.steps(50):
            if step == 2:
                work(int(sys.argv[3]))
                say("worked", time.monotonic())
                say("noticed", preemption._watch.noticed_at)
                assert not ckpt.reached_preemption()
        say("durable", ckpt.all_steps(), ckpt.reached_preemption(), ckpt.reached_preemption(3))
        say("again", ckpt.save(step), ckpt.save(step + 1), ckpt.all_steps())
    say("closed", ckpt.reached_preemption())
    sys.exit(143)
"""


@pytest.mark.parametrize(("work", "amount"), [("compilation", 250), ("transfer", 4000)])
def test_sigterm_is_noticed_at_once_whatever_the_main_thread_is_at(
    work: str, amount: int, directory: Path
) -> None:
    with running(LOOP, directory, work, amount) as program:
        program.until("working")
        time.sleep(0.8)  # past what is Python in it
        sent = program.terminate()
        worked = float(program.until("worked"))
        noticed = float(program.until("noticed"))
        print(f"noticed after {1000 * (noticed - sent):.1f} ms")
        assert 0 <= noticed - sent < 1  # milliseconds, on a machine with nothing else to do
        assert worked - noticed > 0.5  # it did come in the middle
        # Whatever the policy says the step is saved and durable, and the loop ends.
        assert program.until("durable") == "[2] True True"
        assert program.until("again") == "False True [2, 3]"
        assert program.until("closed") == "True"
        assert program.exit_code() == EXIT_CODE
    assert program.output.count("handled 15") == 1
    assert "SIGTERM: the next save of a step is waited for" in program.output
    assert TorchaxCheckpointer(directory).all_steps() == [2, 3]


STUCK = """
    from torchax_ckpt.storage.arrays import write_step
    options = CheckpointOptions(preemption_grace_secs=float(sys.argv[2]))
    ckpt = TorchaxCheckpointer(sys.argv[1], options=options)
    ckpt.save(1, state=state(1), force=True)
    ckpt.wait_until_finished()
    write_step.write_step = lambda *args, **kwargs: time.sleep(600)
    ckpt.save(2, state=state(2), force=True)
    compile_for_long(2500)
"""


def test_a_second_sigterm_ends_the_process_at_once(directory: Path) -> None:
    with running(STUCK, directory, 600) as program:
        program.until("working")
        program.terminate()
        time.sleep(0.3)
        assert program.process.poll() is None
        second = program.terminate()
        assert program.exit_code() == EXIT_CODE
        assert time.monotonic() - second < 2
    assert "ending at once: a second SIGTERM" in program.output
    assert TorchaxCheckpointer(directory).all_steps() == [1]


def test_the_end_of_the_grace_time_ends_the_process_at_once(directory: Path) -> None:
    with running(STUCK, directory, 0.7) as program:
        program.until("working")
        first = program.terminate()
        assert program.exit_code() == EXIT_CODE
        assert 0.7 <= time.monotonic() - first < 3
    assert "ending at once: SIGTERM and 0.7 s of grace" in program.output
    assert TorchaxCheckpointer(directory).all_steps() == [1]


OWN_LOOP = """
    def later(signum, frame):
        say("handled later")

    ckpt = TorchaxCheckpointer(sys.argv[1], save_decision_policy=NEVER, options=PATIENT)
    for step in range(1, 100_000):
        ckpt.save(step, state=state(step))
        if step == 1:
            if sys.argv[2] == "handler":
                signal.signal(signal.SIGTERM, later)
            say("working")
            if sys.argv[2] == "twice":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.02)
                os.kill(os.getpid(), signal.SIGTERM)
        if ckpt.reached_preemption(step):
            break
        time.sleep(0.01)
    say("durable", ckpt.all_steps() == [step])
    ckpt.close()
    sys.exit(143)
"""


def test_a_handler_that_the_user_sets_later_is_left_in_place(directory: Path) -> None:
    with running(OWN_LOOP, directory, "handler") as program:
        program.until("working")
        program.terminate()
        assert program.until("durable") == "True"
        assert program.exit_code() == EXIT_CODE
    assert program.output.count("handled later") == 1


PUT_BACK = """
    ckpt = TorchaxCheckpointer(sys.argv[1], options=PATIENT)
    ckpt.attach()
    kept = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    ckpt.close()
    signal.signal(signal.SIGTERM, kept)
    with TorchaxCheckpointer(sys.argv[1], options=PATIENT) as ckpt:
        ckpt.attach()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # the handler runs
        say("noticed", ckpt.reached_preemption(1))
    sys.exit(143)
"""


def test_our_handler_may_be_put_back_after_it_was_given_up(directory: Path) -> None:
    with running(PUT_BACK, directory) as program:
        assert program.until("noticed") == "True"
        assert program.exit_code() == EXIT_CODE


def test_two_signals_in_a_row_as_gnu_timeout_sends_are_one_notice(directory: Path) -> None:
    with running(OWN_LOOP, directory, "twice") as program:
        assert program.until("durable") == "True"
        assert program.exit_code() == EXIT_CODE
    assert "at once" not in program.output


# --- coming and going ----------------------------------------------------------------------------


LIFETIME = """
    import gc

    def wakeup_fd():
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return fd

    def is_ours():
        return signal.getsignal(signal.SIGTERM) == preemption._watch._handle

    def is_untouched():
        threads = {thread.name for thread in threading.enumerate()}
        return not is_ours() and wakeup_fd() == -1 and "sigterm" not in threads

    here, elsewhere = sys.argv[1:]
    num_files = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with TorchaxCheckpointer(here) as first, TorchaxCheckpointer(elsewhere) as second:
            assert is_untouched()
            first.save(1, state=state(1))
            assert is_ours()
            second.attach()
            first.close()
            assert is_ours()
        assert is_untouched()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert len(os.listdir("/proc/self/fd")) == num_files

    # Who only reads still ends at once, and who does not want notices.
    reader = TorchaxCheckpointer(here)
    reader.all_steps(), reader.load(), reader.metrics(1), reader.reached_preemption(1)
    assert is_untouched()
    deaf = TorchaxCheckpointer(here, options=CheckpointOptions(preemption_grace_secs=None))
    deaf.attach()
    assert is_untouched()

    # On another thread there is no notice, and that is said.
    thread = threading.Thread(target=lambda: TorchaxCheckpointer(here).attach())
    thread.start()
    thread.join()
    assert is_untouched()

    # A handler set meanwhile is the user's, and stays; so does the wish to ignore it.
    def handler(signum, frame):
        pass

    with TorchaxCheckpointer(here) as ckpt:
        ckpt.attach()
        signal.signal(signal.SIGTERM, handler)
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    TorchaxCheckpointer(here).attach()
    assert is_untouched()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # Never closed, and gone: nobody would act on a notice.
    forgotten = TorchaxCheckpointer(here)
    forgotten.attach()
    assert is_ours()
    del forgotten
    gc.collect()
    say("forgotten")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_sigterm_belongs_to_a_checkpointer_only_while_it_may_write(directory: Path) -> None:
    with running(LIFETIME, directory, directory.with_name("other")) as program:
        program.until("forgotten")
        assert program.exit_code() == EXIT_CODE
    assert program.output.count("SIGTERM is not noticed: Python lets only the main thread") == 1
    assert program.output.count("SIGTERM is not noticed: this process ignores it") == 1
    assert "ending at once: SIGTERM" in program.output


def test_it_lives_with_an_event_loop_that_has_signal_handlers(directory: Path) -> None:
    source = """
        import asyncio

        async def main():
            loop = asyncio.get_running_loop()
            seen = []
            loop.add_signal_handler(signal.SIGUSR1, seen.append, "earlier")
            theirs = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(theirs)
            model = torch.nn.Linear(4, 4).to("jax")
            with TorchaxCheckpointer(sys.argv[1], save_decision_policy=NEVER) as ckpt:
                ckpt.attach(model)
                ckpt.save(1, force=True)
                ckpt.wait_until_finished()
                assert ckpt.restore().step == 1
                assert "model" in ckpt.load(1)
                os.kill(os.getpid(), signal.SIGUSR1)
                await asyncio.sleep(0.2)
                assert seen == ["earlier"], seen
            assert signal.set_wakeup_fd(theirs) == theirs
            with TorchaxCheckpointer(sys.argv[1], save_decision_policy=NEVER) as ckpt:
                assert ckpt.attach(model) == 1
                # Takes our wakeup descriptor away, and our handler of SIGTERM with it.
                loop.add_signal_handler(signal.SIGTERM, seen.append, "later")
                ckpt.save(2)
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.2)
                assert seen == ["earlier", "later"], seen
                assert ckpt.save(3) and ckpt.reached_preemption(3) and ckpt.all_steps() == [1, 3]
            say("done")

        asyncio.run(main())
    """
    with running(source, directory) as program:
        program.until("done")
        assert program.exit_code() == 0
    assert "Traceback" not in program.output


@pytest.mark.parametrize("secs", [0, -1, float("inf"), float("nan"), "30", True])
@pytest.mark.parametrize("name", ["preemption_grace_secs", "save_timeout_secs"])
def test_seconds_are_positive_numbers(name: str, secs: object) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected None or a positive number of seconds"):
        CheckpointOptions(**{name: secs})  # type: ignore[arg-type]


# --- with jax.distributed ------------------------------------------------------------------------

DISTRIBUTED = """
    import os, signal, sys, time
    import jax
    port, index, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    place = f"127.0.0.1:{port}"
    jax.distributed.initialize(place, 2, index, coordinator_bind_address=place)
    theirs = signal.getsignal(signal.SIGTERM)
    import numpy as np
    import torchax
    torchax.enable_globally()
    from torchax_ckpt import TorchaxCheckpointer, policies
    ckpt = TorchaxCheckpointer(directory, save_decision_policy=policies.SpecificStepsPolicy(()))
    ckpt.attach()
    assert signal.getsignal(signal.SIGTERM) is theirs
    print("ready", flush=True)
    for step in range(1, 3000):
        if ckpt.reached_preemption(step):
            break
        time.sleep(0.02)
    assert all(ckpt.reached_preemption(later) for later in (step, step + 1, step + 2))
    assert ckpt.reached_preemption() and ckpt.should_save(step)
    print("reached", step, flush=True)
    ckpt.close()
    print("closed", ckpt.reached_preemption(), flush=True)
    sys.exit(143)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_under_jax_distributed_all_processes_end_on_the_same_step(directory: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(running(DISTRIBUTED, port, i, directory, prelude=""))
            for i in range(2)
        ]
        for program in programs:
            program.until("ready")
        programs[1].terminate()
        steps = {program.until("reached") for program in programs}
        assert len(steps) == 1
        for program in programs:
            assert program.until("closed") == "True"
            assert program.exit_code() == EXIT_CODE


DISTRIBUTED_POLICY = """
    import sys, time
    import jax
    port, index, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    place = f"127.0.0.1:{port}"
    jax.distributed.initialize(place, 2, index, coordinator_bind_address=place)
    import numpy as np
    import torchax
    torchax.enable_globally()
    from torchax_ckpt import TorchaxCheckpointer, policies

    class Recording(policies.PreemptionCheckpointingPolicy):
        told = set()

        def should_save(self, step, previous_steps, *, context):
            if context.reached_preemption:
                self.told.add(step.step)
            return super().should_save(step, previous_steps, context=context)

    ckpt = TorchaxCheckpointer(directory, save_decision_policy=Recording())
    print("ready", flush=True)
    for step in range(1, 3000):
        should_save = ckpt.should_save(step)
        assert ckpt.save(step, state={"w": np.full(3, step)}) == should_save
        if ckpt.reached_preemption(step):
            break
        time.sleep(0.02)
    told = [step] if index == 0 else []  # process 0 alone asks policies
    print("durable", ckpt.all_steps() == [step] and sorted(Recording.told) == told, flush=True)
    ckpt.close()
    sys.exit(143)
"""


def test_under_jax_distributed_the_policy_of_process_0_is_told(directory: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(running(DISTRIBUTED_POLICY, port, i, directory, prelude=""))
            for i in range(2)
        ]
        for program in programs:
            program.until("ready")
        programs[1].terminate()
        for program in programs:
            assert program.until("durable") == "True"
            assert program.exit_code() == EXIT_CODE


def test_jax_may_take_sigterm_over_later(directory: Path) -> None:
    source = f"""
        place = "127.0.0.1:{free_port()}"
        ckpt = TorchaxCheckpointer(sys.argv[1], save_decision_policy=NEVER)
        ckpt.attach()
        ckpt.save(1, state=state(1))
        # What jax.distributed.initialize does, without the check that no backend was started.
        from jax._src import distributed
        distributed.global_state.initialize(place, 1, 0, coordinator_bind_address=place)
        say("working")
        for step in range(2, 3000):
            ckpt.save(step, state=state(step))
            if ckpt.reached_preemption(step):
                break
            time.sleep(0.02)
        say("durable", ckpt.all_steps() == [step], preemption._watch.noticed_at)
        assert ckpt.reached_preemption(step + 1)
        ckpt.close()
        sys.exit(143)
    """
    with running(source, directory) as program:
        program.until("working")
        program.terminate()
        assert program.until("durable") == "True None"
        assert program.exit_code() == EXIT_CODE


# --- the examples --------------------------------------------------------------------------------


@pytest.mark.parametrize(("example", "first"), [("train_digits", 50), ("train_gpt", 20)])
def test_a_preempted_example_asks_to_be_started_again(
    example: str, first: int, tmp_path: Path
) -> None:
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
