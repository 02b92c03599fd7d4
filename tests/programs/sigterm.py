"""Programs that are told to end by SIGTERM.

    python sigterm.py SCENARIO DIRECTORY ...

SCENARIO is a function of this file, which takes the other arguments.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
from jax._src import distributed
from support.stages import at

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.runtime import preemption

NEVER = policies.SpecificStepsPolicy(())
PATIENT = CheckpointOptions(preemption_grace_secs=300)  # on a machine with much else to do
EXIT_CODE = 128 + signal.SIGTERM


def say(*words: Any) -> None:
    # In one piece: another thread's log may come between two.
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(3, step)}


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def train(
    ckpt: TorchaxCheckpointer, first: int = 1, in_first: Callable[[], None] = lambda: None
) -> int:
    """Saves until a SIGTERM is noticed; returns the step."""
    for step in range(first, first + 3000):
        ckpt.save(step, state=state(step))
        if step == first:
            in_first()
        if ckpt.reached_preemption(step):
            break
        time.sleep(0.02)
    return step


# --- one process ---------------------------------------------------------------------------------


def noticed_in_work(directory: str, kind: str, amount: str) -> None:
    """Trains in the loop of ``steps()``; step 2 compiles, or transfers, for long."""
    signal.signal(signal.SIGTERM, lambda signum, frame: say("handled", signum))
    model = torch.nn.Linear(4, 4).to("jax")
    policy = policies.FixedIntervalPolicy(1000)
    with TorchaxCheckpointer(directory, save_decision_policy=policy, options=PATIENT) as ckpt:
        ckpt.attach(model)
        for step in ckpt.steps(50):
            if step == 2:
                {"compilation": compile_for_long, "transfer": transfer_for_long}[kind](int(amount))
                say("worked", time.monotonic())
                say("noticed", preemption._watch.noticed_at)
                assert not ckpt.reached_preemption()
        say("durable", ckpt.all_steps(), ckpt.reached_preemption(), ckpt.reached_preemption(3))
        say("again", ckpt.save(step), ckpt.save(step + 1), ckpt.all_steps())
    say("closed", ckpt.reached_preemption())
    ckpt.exit_if_preempted()


def compile_for_long(operations: int) -> None:
    def function(x: Any) -> Any:
        for i in range(operations):
            x = jnp.sin(x @ x + i)
        return x + os.getpid()  # another program, which no run before has compiled

    lowered = jax.jit(function).lower(jnp.ones((8, 8)))
    say("working")  # from here on in C++
    lowered.compile()


def transfer_for_long(rounds: int) -> None:
    def step(i: Any, x: Any) -> Any:
        return jnp.tanh(x @ x)

    pending = jax.jit(lambda x: jax.lax.fori_loop(0, rounds, step, x))(jnp.ones((400, 400)))
    say("working")
    np.asarray(pending)


def stuck(directory: str, grace_secs: str) -> None:
    """Compiles for long while a save is stuck."""
    options = CheckpointOptions(preemption_grace_secs=float(grace_secs))
    ckpt = TorchaxCheckpointer(directory, options=options)
    ckpt.save(1, state=state(1), force=True)
    ckpt.wait_until_finished()
    at("write the arrays", lambda: time.sleep(600))
    ckpt.save(2, state=state(2), force=True)
    compile_for_long(2500)


def in_loop(directory: str, what: str) -> None:
    """Trains until it is told to end; "handler": sets a handler later; "twice": signals itself."""

    def in_first() -> None:
        if what == "handler":
            signal.signal(signal.SIGTERM, lambda *_: say("handled later"))
        say("working")
        if what == "twice":
            terminate()
            time.sleep(0.02)
            terminate()

    ckpt = TorchaxCheckpointer(directory, save_decision_policy=NEVER, options=PATIENT)
    ckpt.attach()
    step = train(ckpt, 1, in_first)
    say("durable", ckpt.all_steps() == [step])
    ckpt.close()
    sys.exit(EXIT_CODE)


def handler_put_back(directory: str) -> None:
    """Puts the handler of a closed checkpointer back, opens another, and sends itself a SIGTERM."""
    ckpt = TorchaxCheckpointer(directory, options=PATIENT)
    ckpt.attach()
    kept = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    ckpt.close()
    signal.signal(signal.SIGTERM, kept)
    with TorchaxCheckpointer(directory, options=PATIENT) as ckpt:
        ckpt.attach()
        terminate()
        time.sleep(0)  # the handler runs
        say("noticed", ckpt.reached_preemption(1))
    sys.exit(EXIT_CODE)


def comes_and_goes(here: str) -> None:
    """Checks whose handler is set while checkpointers come and go."""

    def wakeup_fd() -> int:
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return fd

    def is_ours() -> bool:
        return signal.getsignal(signal.SIGTERM) == preemption._watch._handle

    def is_untouched() -> bool:
        threads = {thread.name for thread in threading.enumerate()}
        return not is_ours() and wakeup_fd() == -1 and "sigterm" not in threads

    num_files = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with TorchaxCheckpointer(here) as first, TorchaxCheckpointer(f"{here}-other") as second:
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
    def handler(signum: int, frame: Any) -> None:
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
    terminate()
    time.sleep(60)


def in_event_loop(directory: str) -> None:
    """Saves within an event loop that has signal handlers of its own."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen: list[str] = []
        loop.add_signal_handler(signal.SIGUSR1, seen.append, "earlier")
        theirs = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(theirs)
        model = torch.nn.Linear(4, 4).to("jax")
        with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
            ckpt.attach(model)
            ckpt.save(1, force=True)
            ckpt.wait_until_finished()
            assert ckpt.restore().step == 1
            assert "model" in ckpt.load(1)
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(0.2)
            assert seen == ["earlier"], seen
        assert signal.set_wakeup_fd(theirs) == theirs
        with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
            assert ckpt.attach(model) == 1
            # Takes our wakeup descriptor away, and our handler of SIGTERM with it.
            loop.add_signal_handler(signal.SIGTERM, seen.append, "later")
            ckpt.save(2)
            terminate()
            await asyncio.sleep(0.2)
            assert seen == ["earlier", "later"], seen
            assert ckpt.save(3) and ckpt.reached_preemption(3) and ckpt.all_steps() == [1, 3]
        say("done")

    asyncio.run(main())


# --- with jax.distributed ------------------------------------------------------------------------


def jax_takes_over(directory: str, port: str) -> None:
    """Trains until a SIGTERM is noticed, of which JAX takes the notice over after step 1."""

    def in_first() -> None:
        # What jax.distributed.initialize does, without the check that no backend was started.
        place = f"127.0.0.1:{port}"
        distributed.global_state.initialize(place, 1, 0, coordinator_bind_address=place)
        say("working")

    ckpt = TorchaxCheckpointer(directory, save_decision_policy=NEVER)
    ckpt.attach()
    step = train(ckpt, 1, in_first)
    say("ended at", step, "preempted:", ckpt.reached_preemption(), "durable:", ckpt.all_steps())
    say("durable", ckpt.all_steps() == [step], preemption._watch.noticed_at)
    assert ckpt.reached_preemption(step + 1)
    ckpt.close()
    sys.exit(EXIT_CODE)


def of_two(directory: str, port: str, index: str, first: str, secs: str) -> None:
    """One of two processes, whose first step comes some seconds after it is ready."""
    theirs = signal.getsignal(signal.SIGTERM)
    ckpt = TorchaxCheckpointer(directory, save_decision_policy=NEVER)
    ckpt.attach()
    assert signal.getsignal(signal.SIGTERM) is theirs
    say("ready")
    time.sleep(float(secs))
    for step in range(int(first), int(first) + 3000):
        if ckpt.reached_preemption(step):
            break
        time.sleep(0.02)
    assert all(ckpt.reached_preemption(later) for later in (step, step + 1, step + 2))
    assert ckpt.reached_preemption() and ckpt.should_save(step)
    say("reached", step)
    ckpt.close()
    say("closed", ckpt.reached_preemption())
    sys.exit(EXIT_CODE)


def policy_of_two(directory: str, port: str, index: str) -> None:
    """One of two processes whose policy records at which steps it was told of a preemption."""
    told: set[int] = set()

    class Recording(policies.PreemptionCheckpointingPolicy):
        def should_save(
            self, step: Any, previous_steps: Sequence[Any], *, context: policies.DecisionContext
        ) -> bool:
            if context.reached_preemption:
                told.add(step.step)
            return super().should_save(step, previous_steps, context=context)

    ckpt = TorchaxCheckpointer(directory, save_decision_policy=Recording())
    say("ready")
    for step in range(1, 3000):
        should_save = ckpt.should_save(step)
        assert ckpt.save(step, state=state(step)) == should_save
        if ckpt.reached_preemption(step):
            break
        time.sleep(0.02)
    expected = [step] if index == "0" else []  # process 0 alone asks policies
    say("durable", ckpt.all_steps() == [step] and sorted(told) == expected)
    ckpt.close()
    sys.exit(EXIT_CODE)


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    if scenario.endswith("of_two"):
        place = f"127.0.0.1:{arguments[1]}"
        jax.distributed.initialize(place, 2, int(arguments[2]), coordinator_bind_address=place)
    torchax.enable_globally()
    globals()[scenario](*arguments)
