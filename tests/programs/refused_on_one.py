"""Two processes save; now and then one of them alone gives what cannot be saved.

python refused_on_one.py INDEX COUNT PORT FOLDER
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
import torchax
from processes_program import INDEX, report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.runtime.background import Task
from torchax_ckpt.runtime.save_in_flight import SaveInFlight

torchax.enable_globally()
STATE = {"w": np.arange(3)}
IS_BAD = INDEX == 1


def outcome(*calls: Callable[[], Any]) -> list[str]:
    """What each call returned or raised."""
    found = []
    for call in calls:
        try:
            found.append(repr(call()))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def told(name: str, *calls: Callable[[], Any]) -> None:
    with ckpt._processes.round(f"coming to {name}"):
        pass
    began = time.monotonic()
    found = outcome(*calls)
    report(name=name, found=found, secs=time.monotonic() - began, steps=ckpt.all_steps())


class Failing:
    """A policy that cannot decide on step 9, and saves every other."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        if step.step == 9:
            raise ZeroDivisionError("no decision")
        return not context.is_saving_in_progress


def opened(name: str, **options: Any) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        f"{sys.argv[4]}/{name}",
        save_decision_policy=Failing(),
        preservation_policy=policies.AnyPreservationPolicy(
            [policies.BestN(metric="loss"), policies.PreserveAll()]
        ),
        options=CheckpointOptions(process_timeout_secs=60, **options),
    )


def save(step: int, bad: Any = None, *, force: bool = False, state: Any = STATE) -> Any:
    metrics = {} if bad is None else {"loss": bad if IS_BAD else 1.0}
    return lambda: ckpt.save(step, state=state, metrics=metrics, force=force)


ckpt = opened("run")
told("at the first save", save(1, object()), ckpt.wait_until_finished)
told("forced, not to be ranked", save(2, math.nan, force=True), ckpt.wait_until_finished)
told("not to be ranked", save(3, math.nan), ckpt.wait_until_finished)
told("forced, not to be stored", save(4, object(), force=True), ckpt.wait_until_finished)
none = None if IS_BAD else STATE
told("nothing to save", save(5, force=True, state=none), ckpt.wait_until_finished)

start = Task.start


def refuse(task: Task) -> None:
    if isinstance(task, SaveInFlight):
        task.cancel()
        raise RuntimeError("can't start new thread")
    start(task)


if IS_BAD:
    Task.start = refuse  # type: ignore[method-assign,assignment]
told("no thread", save(6, force=True), ckpt.wait_until_finished)
Task.start = start  # type: ignore[method-assign]
told("nothing wrong", save(7, 0.5), ckpt.wait_until_finished)
told("no decision", save(9, 0.5), lambda: ckpt.should_save(9), save(10, 0.5))
ckpt.close()

ckpt = opened("strict", on_save_error="raise")
told("before", save(1), ckpt._saver.wait)
if IS_BAD:
    ckpt._saver._failures.report(SaveError("what only process 1 knows", step=1))
told("a failure that one knows", save(2, force=True), save(3, force=True), ckpt._saver.wait)
ckpt.close()

# Calls that read, and attach.


class Loader:
    """Something to attach."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 1}

    def load_state_dict(self, state: Any) -> None:
        pass


def init(name: str, abstract: Any) -> Any:
    if IS_BAD and is_failing:
        raise ValueError("no values")
    return np.zeros(abstract.shape, abstract.dtype)


def attach(place: str = "jax", **kwargs: Any) -> Any:
    torchax.disable_globally()
    with torch.device("cpu" if IS_BAD and place == "cpu" else "meta"):
        model = torch.nn.Linear(2, 2)
    torchax.enable_globally()
    return lambda: ckpt.attach(model, init=init, stateful={"loader": Loader()}, **kwargs)


ckpt, is_failing = opened("attached"), True
told("attach: on the CPU", attach("cpu"))
told("attach: no values", attach())
is_failing = False
told("attach", attach())
told("attach: again", lambda: ckpt.attach() if IS_BAD else ckpt.attach(stateful={}))
told("saved", lambda: ckpt.save(2, force=True), ckpt.wait_until_finished)
tier: Any = "nowhere" if IS_BAD else None
word: Any = "two" if IS_BAD else 2
told("restore: tier", lambda: ckpt.restore(2, tier=tier))
told("restore: pattern", lambda: ckpt.restore(2, include=3 if IS_BAD else "*"))  # type: ignore[arg-type]
told("restore: step", lambda: ckpt.restore(word))
told("restore", lambda: ckpt.restore(2).step)
told("load: tier", lambda: ckpt.load(2, tier=tier))
told("load: step", lambda: ckpt.load(word))
told("load: state", lambda: ckpt.load(2, {"model": {"other": 1}} if IS_BAD else None))
told("verify: tier", lambda: ckpt.verify(2, tier=tier))
told("verify: step", lambda: ckpt.verify(word))
told("verify", lambda: ckpt.verify(2))
told("delete: tier", lambda: ckpt.delete(2, tier=tier))
told("delete: step", lambda: ckpt.delete(word))
told("delete: gone", lambda: ckpt.delete(7))
told("should_save: step", lambda: ckpt.should_save(word))
told("delete", lambda: ckpt.delete(2))
jax.distributed.shutdown()
ckpt.close()  # has nobody left to tell
