"""Two processes that go at their own pace ask when to save.

    python unequal_paces.py INDEX COUNT PORT PACES

PACES is JSON: the seconds that a step takes on each process. Each pauses now and then besides, and
they are never more than some steps apart, as collectives have it. A save ends when both have taken
part in it, as Orbax's do; each sees that in its own time.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from typing import Any

import jax

from torchax_ckpt import policies
from torchax_ckpt.policies.save_decision import decision_context
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.decision_windows import DecisionWindows
from torchax_ckpt.processes.liveness import coordination_service

index, port, pace = int(sys.argv[1]), sys.argv[3], json.loads(sys.argv[4])[int(sys.argv[1])]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)

training, saving = (Processes(name, 60, coordination_service()) for name in ("training", "saving"))
own = random.Random(index)
policy = policies.AnySavePolicy(
    [policies.ContinuousCheckpointingPolicy(), policies.SpecificStepsPolicy({123, 777})]
)
durable: list[Any] = []
saves: list[int] = []
took: list[float] = []
thread: threading.Thread | None = None


def info(step: int) -> Any:
    return policies.CheckpointInfo(step, "/x", metadata=None, commit_timestamp_nsecs=time.time_ns())


def decide(step: int, coming: Any) -> Any:
    assert index == 0
    context = decision_context(
        is_saving_in_progress=bool(coming) or (thread is not None and thread.is_alive()),
        reached_preemption=False,
    )
    return policy.should_save(info(step), [*durable, *map(info, coming)], context=context)


def save(step: int, delay: float) -> None:
    time.sleep(delay)
    with saving.round(f"saving {step}"):
        pass
    durable.append(info(step))


appointments = DecisionWindows(Processes("decisions", 60, coordination_service()), decide)
for number, step in enumerate([*range(1, 500), *range(200, 500), *range(700, 2500, 7)]):
    if number % 20 == 0:
        with training.round("training"):
            pass
    began = time.perf_counter()
    answer = appointments.ask(step)
    took.append(time.perf_counter() - began)
    assert appointments.ask(step) == answer
    if answer:
        if thread is not None:
            thread.join()
        saves.append(step)
        thread = threading.Thread(target=save, args=(step, own.random() / 10))
        thread.start()
    time.sleep(pace + (own.random() < 0.01) * 0.1)
assert thread is not None
thread.join()
with training.round("ending"):
    place = appointments._processes._place
    keys = len(training._client.key_value_dir_get(place))
print(json.dumps({"saves": saves, "median": statistics.median(took), "keys": keys}))
