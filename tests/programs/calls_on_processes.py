"""Programs on several processes that do not make the same calls, or of which one is killed in one.

    python calls_on_processes.py INDEX COUNT PORT SCENARIO FOLDER ...

SCENARIO is a function of this file, which takes the other arguments.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
import torch
import torchax
from processes_program import COUNT, INDEX, report, spread
from support.stages import at
from support.waiting import wait_until

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies, warm_start
from torchax_ckpt.errors import CheckpointError, SaveError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.liveness import coordination_service, of_run
from torchax_ckpt.restoring.file_weights import FileWeights
from torchax_ckpt.runtime.background import Task
from torchax_ckpt.saving.save import Save
from torchax_ckpt.storage.arrays import block_digests

torchax.enable_globally()
STATE = {"w": np.arange(3)}
IS_BAD = INDEX == 1
ckpt: TorchaxCheckpointer  # the present one
meeting: Processes  # where the calls of one case end before those of the next begin


class Attached:
    """Something to attach; restoring it may be the death of process 1."""

    kills = False

    def state_dict(self) -> dict[str, Any]:
        return {"position": 1}

    def load_state_dict(self, state: Any) -> None:
        if self.kills and INDEX == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def opened(
    folder: str, rule: Any = None, keep: Any = None, local: Any = None, **options: Any
) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        folder,
        save_decision_policy=rule,
        preservation_policy=keep or policies.PreserveAll(),
        local=local,
        options=CheckpointOptions(process_timeout_secs=60, **options),
    )


def save(step: int, bad: Any = None, *, force: bool = True, state: Any = STATE) -> Any:
    """A call of save; with a metric, which of process 1 is ``bad``."""
    metrics = {} if bad is None else {"loss": bad if IS_BAD else 1.0}
    return lambda: ckpt.save(step, state=state, metrics=metrics, force=force)


def done() -> None:
    ckpt.wait_until_finished()


def told(name: str, *calls: Any) -> None:
    """Makes calls once all processes have come here; reports what came of each.

    A tuple has the calls of one process.
    """
    with meeting.round(f"coming to {name}"):
        pass
    began, found = time.monotonic(), []
    for call in calls[INDEX] if isinstance(calls[0], tuple) else calls:
        try:
            found.append(repr(call()))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    secs = time.monotonic() - began
    with meeting.round(f"ending {name}"):
        pass
    report(name=name, found=found, secs=secs, steps=ckpt.all_steps("durable"))


def restore(step: int) -> Any:
    return lambda: ckpt.restore(step).step


def ask(step: int) -> Any:
    return save(step, force=False)


def wait_secs(secs: float) -> Any:
    return lambda: time.sleep(secs)


class Slow:
    """A policy for every fifth step, which takes a second to decide on step 12."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        if step.step == 12:
            time.sleep(1)
        return step.step % 5 == 0


def differing(folder: str) -> None:
    """Two processes that do not make the same calls, in one way after another."""
    delete, verify, load = (
        lambda step, name=name: lambda: getattr(ckpt, name)(step)
        for name in ("delete", "verify", "load")
    )
    to_10 = [ask(step) for step in range(5, 10)]
    cases: dict[str, tuple[Any, Any]] = {
        "other steps": ((save(10), done), (save(12), done)),
        "left out": ((save(14), save(16), done), (save(16), done)),
        # The next step is declined, so process 1 begins no save and waits for nobody.
        "left out, unforced": ((*to_10, ask(10), done), (*to_10, ask(11))),
        "by 0": ((ask(20), done), (ask(18), done)),
        "by 1": ((ask(20), done), (ask(22), done)),
        "forced by 0": ((save(20), done), (ask(18), done)),
        "restoring": ((restore(2),), (save(24), done)),
        "while it decides": ((restore(1),), (ask(100),)),
        "other restores": ((restore(1),), (restore(2),)),
        "deleting": ((save(25), done), (delete(1),)),
        "reading": ((load(1),), (verify(1),)),
        "closing": ((save(28), done), (ckpt_close,)),
        "in flight": ((ask(5), restore(1)), (ask(5), save(6), done)),
    }
    for name, calls in cases.items():
        _open_for(folder, name)
        if name == "in flight":
            at("commit", wait_secs(1.5))
        told(name, *calls)
        later = save(30), ask(31), restore(1), delete(2), load(1), verify(1), on_thread(verify(1))
        told(f"after {name}", *later)
        told(f"never raising {name}", *NEVER_RAISING)
        told(f"closing {name}", leave_by_error if name == "restoring" else ckpt_close, ckpt_close)
        with opened(f"{folder}/{name}") as again:  # of the same directory
            found = [again.attach(stateful={"loader": Attached()})]
            found += [again.save(40, state=STATE, force=True)]
            again.wait_until_finished()
            report(name=f"again {name}", found=found, steps=again.all_steps())


NEVER_RAISING = (
    lambda: ckpt.should_save(32),
    lambda: ckpt.reached_preemption(32),
    lambda: ckpt.record(loss=1.0),
    lambda: len(ckpt.all_steps()) > 0,
    lambda: ckpt.stats().num_skipped >= 0,
    lambda: ckpt.metrics(1),
    lambda: expecting(SaveError, ckpt.wait_until_finished),
    lambda: expecting(SaveError, ckpt.check_for_errors),
)


def expecting(kind: type[Exception], call: Any) -> None:
    """Calls what may raise the failure of a save that was in the background."""
    with contextlib.suppress(kind):
        call()


def ckpt_close() -> None:
    ckpt.close()


def leave_by_error() -> str:
    """Leaves a ``with`` block of the checkpointer by an error of the user's program."""
    try:
        with ckpt:
            raise KeyError("the user's own")
    except KeyError as error:
        return str(error)


def on_thread(call: Any) -> Any:
    def act() -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    return act


def _open_for(folder: str, name: str) -> None:
    """Opens a checkpointer that has saved the steps 1 and 2 and declined 3 and 4."""
    global ckpt
    local = LocalTier(f"{folder}/local {name} {INDEX}", save_decision_policy=Slow(), keep=99)
    ckpt = opened(f"{folder}/{name}", Slow(), local=local)
    ckpt.attach(stateful={"loader": Attached()})
    told(f"before {name}", save(1), done, save(2), done, ask(3), ask(4))


def looking_on(folder: str) -> None:
    """Two processes save other steps, while process 2 only asks and has each step declined."""
    global ckpt
    ckpt = opened(f"{folder}/run", policies.SpecificStepsPolicy(()))
    ckpt.attach(stateful={"loader": Attached()})
    told("before", save(1), done, *[ask(step) for step in range(2, 40)])

    def ask_until_told() -> None:
        for _ in range(1000):
            ckpt.save(39, state=STATE)  # this decision is known already
            time.sleep(0.01)

    told("differing", (save(100), done), (save(101), done), (ask_until_told,))
    told("closing", ckpt_close)


def not_differing(folder: str) -> None:
    """Calls that fail or come late on one process, after which all go on together."""
    global ckpt
    _open_for(folder, "run")
    told("late", (restore(2),), (wait_secs(1.5), restore(2)))
    told("late save", (save(10), save(11), done), (wait_secs(1.5), save(10), save(11), done))
    told("slow decision", ask(12), ask(13))
    told("no step", (save(26), done, save(27), done), (save("26"), save("27")))  # type: ignore
    told("after no step", save(28), done)
    told("no step, declined", (ask(29),), (ask("29"),))  # type: ignore[arg-type]
    told("after no step, declined", ask(30), done, ask(31))
    # A process that leaves out a step that the policy declines is not told of it.
    told("declined", (ask(32), ask(33)), (ask(33),))
    told("no step after that", (save(34), done, save(37), done), (save("34"), save(37), done))  # type: ignore
    told("undecided after that", (ask(40), done, done, ask(44)), (ask("40"), ask(44)))  # type: ignore
    told("not foreseen", (ask(46), ask(49)), (ask(49),))
    told("after declined", save(54), done, restore(54), ask(55), done)
    told("no step to restore", (restore(55),), (lambda: ckpt.restore("55"),))
    told("in the end", restore(55), lambda: ckpt.delete(54), save(56), done)
    told("closing", ckpt_close)


class Failing:
    """A policy that cannot decide on step 9, and saves every other."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        if step.step == 9:
            raise ZeroDivisionError("no decision")
        return not context.is_saving_in_progress


def refused_on_one(folder: str) -> None:
    """Two processes save; now and then one of them alone gives what cannot be saved."""
    global ckpt
    keep = policies.AnyPreservationPolicy([policies.BestN(metric="loss"), policies.PreserveAll()])
    ckpt = opened(f"{folder}/run", Failing(), keep)

    def ask(step: int, bad: Any = None) -> Any:
        return save(step, bad, force=False)

    told("at the first save", ask(1, object()), done)
    told("forced, not to be ranked", save(2, math.nan), done)
    told("not to be ranked", ask(3, math.nan), done)
    told("forced, not to be stored", save(4, object()), done)
    told("nothing to save", save(5, state=None if IS_BAD else STATE), done)
    start = Task.start

    def refuse(task: Task) -> None:
        if isinstance(task, Save):
            task.cancel()
            raise RuntimeError("can't start new thread")
        start(task)

    if IS_BAD:
        Task.start = refuse  # type: ignore[method-assign,assignment]
    told("no thread", save(6), done)
    Task.start = start  # type: ignore[method-assign]
    told("nothing wrong", ask(7, 0.5), done)
    told("no decision", ask(9, 0.5), lambda: ckpt.should_save(9), ask(10, 0.5))
    ckpt.close()

    ckpt = opened(f"{folder}/strict", Failing(), keep, on_save_error="raise")
    told("before", ask(1), ckpt._saver.wait)
    if IS_BAD:
        ckpt._saver.tier.failures.report(SaveError("what only process 1 knows", step=1))
    told("a failure that one knows", save(2), save(3), ckpt._saver.wait)
    ckpt.close()
    _calls_that_read(folder, keep)


def _calls_that_read(folder: str, keep: Any) -> None:
    global ckpt
    is_failing = True

    def init(name: str, abstract: Any) -> Any:
        if IS_BAD and is_failing:
            raise ValueError("no values")
        return np.zeros(abstract.shape, abstract.dtype)

    def attach(place: str = "jax") -> Any:
        torchax.disable_globally()
        with torch.device("cpu" if IS_BAD and place == "cpu" else "meta"):
            model = torch.nn.Linear(2, 2)
        torchax.enable_globally()
        return lambda: ckpt.attach(model, init=init, stateful={"loader": Attached()})

    ckpt = opened(f"{folder}/attached", Failing(), keep)
    told("attach: on the CPU", attach("cpu"))
    told("attach: no values", attach())
    is_failing = False
    told("attach", attach())
    told("attach: again", lambda: ckpt.attach() if IS_BAD else ckpt.attach(stateful={}))
    told("saved", lambda: ckpt.save(2, force=True), done)
    tier: Any = "nowhere" if IS_BAD else None
    word: Any = "two" if IS_BAD else 2
    for name in ("restore", "load", "verify", "delete"):
        told(f"{name}: tier", lambda name=name: getattr(ckpt, name)(2, tier=tier))
    told("load: state", lambda: ckpt.load(2, {"model": {"other": 1}} if IS_BAD else None))
    told("restore: step", lambda: ckpt.restore(word))
    told("restore", lambda: ckpt.restore(2).step)
    told("should_save: step", lambda: ckpt.should_save(word))
    told("delete", lambda: ckpt.delete(2))
    jax.distributed.shutdown()
    ckpt.close()  # has nobody left to tell


def ranked_by_the_first(folder: str) -> None:
    """Process 0 alone records what a best-N rule ranks; each gives another metric besides."""
    best = policies.BestN(metric="val", mode="max")
    keep = policies.AnyPreservationPolicy([best, policies.PreserveAll()])
    never = policies.SpecificStepsPolicy(())
    for name, is_recorded in {
        "at every fifth": lambda step: step % 5 == 0,
        "at every step": lambda step: True,
    }.items():
        at_18 = policies.SpecificStepsPolicy([18])
        local = LocalTier(f"{folder}/ram-{name}-{INDEX}", save_decision_policy=at_18)
        ckpt = opened(f"{folder}/{name}", never, keep, local)
        answers = []
        for step in range(1, 44):
            if INDEX == 0 and is_recorded(step):
                ckpt.record(val=-abs(step - 11))
            if step in (15, 16):
                answers.append(ckpt.should_save(step))
            ckpt.save(step, state=STATE, metrics={"own": INDEX})
        ckpt.wait_until_finished()
        told: dict[str, Any] = {
            "steps": ckpt.all_steps("durable"),
            "best": ckpt.best_step(),
            "answers": answers,
        }
        told["metrics"] = [ckpt.metrics(step) for step in ckpt.all_steps()]
        ckpt.close()
        again = opened(f"{folder}/{name}", never, keep, local)
        told["reopened"] = [again.metrics(step) for step in again.all_steps()]
        again.close()
        report(**told)


def loads_on_thread(folder: str) -> None:
    """Loads a step on another thread than the one that trains."""
    single = CheckpointOptions(single_replica_restore=True, process_timeout_secs=60)
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "one reads for all": {"options": single},
        "a local tier": {"local": LocalTier(f"{folder}/ramdisk-{INDEX}")},
    }
    for name, given in settings.items():
        with TorchaxCheckpointer(f"{folder}/{name}", **given) as ckpt:
            ckpt.save(1, state=STATE, force=True)
            ckpt.wait_until_finished()
            found: list[Any] = []

            def load(ckpt: TorchaxCheckpointer = ckpt, found: list[Any] = found) -> None:
                try:
                    found.append(ckpt.load()["w"].tolist())
                except Exception as error:
                    found.append(f"{type(error).__name__}: {error}")

            thread = threading.Thread(target=load, name="other")
            thread.start()
            thread.join()
            report(name=name, found=found[0], here=ckpt.load()["w"].tolist())


def reads_beside(folder: str, on_save_error: str) -> None:
    """Two threads read while another trains; every second process makes the calls the other way."""
    ckpt = opened(folder, policies.FixedIntervalPolicy(1), on_save_error=on_save_error)
    ckpt.attach(stateful={"loader": Attached()})
    for step in (1, 2):
        ckpt.save(step, state=STATE)
        ckpt.wait_until_finished()

    def read(*calls: Any) -> list[Any]:
        return [call() for call in calls]

    def load(step: int) -> Any:
        return ckpt.load(step)["w"].tolist()

    def train(step: int) -> list[Any]:
        found = [ckpt.restore(2).step, ckpt.save(step, state=STATE), ckpt.save(step + 1)]
        ckpt.wait_until_finished()
        return found

    for number, step in enumerate((3, 5)):
        calls = lambda: ckpt.verify(1), lambda: load(2), lambda: ckpt.all_steps()[:2]
        is_late = (INDEX + number) % 2
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            # Late by so much that the others look what this process has called instead.
            time.sleep(is_late)
            one = pool.submit(read, *(calls[::-1] if is_late else calls))
            other = pool.submit(read, *(calls if is_late else calls[::-1]))
            time.sleep(1 - is_late)
            trained = train(step)
            found = [other.result(), one.result()] if is_late else [one.result(), other.result()]
        report(trained=trained, read=found, secs=time.monotonic() - began)
    ckpt.close()


def killed(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_once_connected(*args: Any, **kwargs: Any) -> None:
    """Before the thread that connects has come so far, only JAX's heartbeat tells of a death."""
    liveness: Any = of_run(coordination_service())
    wait_until(lambda: liveness._connection is not None, 30)
    killed()


def killed_in(directory: str, call: str) -> None:
    """Process 1 is killed in a call; who is told of that exits with 3."""
    act = _about_to_start_warm(directory) if call == "warm_start" else _trained(directory, call)
    began = time.monotonic()
    try:
        act()
    except CheckpointError as error:
        report(kind=type(error).__name__, told=str(error), secs=time.monotonic() - began)
        last = Path(f"{directory}-told-2")
        last.touch() if INDEX == 2 else None
        while not last.exists():  # the end of process 0 would end process 2 before it is told
            time.sleep(0.1)
        os._exit(3)  # JAX would wait for the dead one


def _trained(directory: str, call: str) -> Any:
    loader = Attached()
    loader.kills = call == "restore"
    ckpt = TorchaxCheckpointer(directory)
    ckpt.attach(stateful={"loader": loader})
    state = {"w": spread(np.arange(600))}  # each process writes a part
    ckpt.save(1, state=state, force=True)
    ckpt.wait_until_finished()
    if call == "close":
        if INDEX == 1:
            block_digests.take = killed  # type: ignore[assignment]
        ckpt.save(2, state=state, force=True)
    return ckpt.close if call == "close" else lambda: ckpt.restore(1)


def _about_to_start_warm(directory: str) -> Any:
    """Nothing has connected the processes before."""
    model = torch.nn.Linear(2, 2).to("jax")
    file = Path(f"{directory}-{INDEX}.safetensors")
    weights = {"weight": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
    safetensors.numpy.save_file(weights, file)
    if INDEX == 1:
        FileWeights.read_leaves = killed_once_connected  # type: ignore[method-assign,assignment]
    return lambda: warm_start(model, file)


class Samples:
    """The numbers ``INDEX``, ``INDEX + COUNT``, ... from ``start`` on."""

    start = read = 0

    def get_state(self) -> dict[str, int]:
        return {"start": self.start, "read": self.read}

    def set_state(self, state: dict[str, int]) -> None:
        self.start, self.read = state["start"], state["read"]

    def __next__(self) -> int:
        self.read += 1
        return self.start + INDEX + COUNT * (self.read - 1)


def redistributed(directory: str) -> None:
    """Draws samples, each process from its shard, and goes on where other processes stopped."""

    def redistribute(states: list[Any], count: int) -> list[Any]:
        start = states[0]["start"] + sum(state["read"] for state in states)
        return [{"start": start, "read": 0} for _ in range(count)]

    loader = Samples()
    with TorchaxCheckpointer(directory) as ckpt:
        start = ckpt.attach(dataloader=loader, redistribute=redistribute)
        report(samples=[next(loader) for _ in range(8 // COUNT)])
        ckpt.save(start + 1, force=True)


if __name__ == "__main__":
    ckpt = opened(f"{sys.argv[5]}-meeting")
    meeting = ckpt._processes
    globals()[sys.argv[4]](*sys.argv[5:])
