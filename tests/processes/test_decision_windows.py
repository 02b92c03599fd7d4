"""Several processes agree on when to save, though none waits for another at every step."""

from __future__ import annotations

import pytest
from support.processes import run_processes

# Two processes that go at their own pace, each with pauses of its own, and are never more than some
# steps apart, as collectives have it. A save ends when both have taken part in it, as Orbax's do;
# each sees that in its own time.
PROGRAM = """
    import json, random, statistics, sys, threading, time
    import jax
    index, port, pace = int(sys.argv[1]), sys.argv[3], json.loads(sys.argv[4])[int(sys.argv[1])]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    from torchax_ckpt import policies
    from torchax_ckpt.processes.decision_windows import Appointments
    from torchax_ckpt.policies import CheckpointInfo
    from torchax_ckpt.policies.save_decision import decision_context
    from torchax_ckpt.processes.coordination import Processes

    training, saving = Processes("training", 60), Processes("saving", 60)
    own = random.Random(index)
    policy = policies.AnySavePolicy(
        [policies.ContinuousCheckpointingPolicy(), policies.SpecificStepsPolicy({123, 777})])
    durable, saves, took = [], [], []
    thread = None

    def info(step):
        return CheckpointInfo(step, "/x", metadata=None, commit_timestamp_nsecs=time.time_ns())

    def decide(step, coming):
        assert index == 0
        context = decision_context(
            is_saving_in_progress=bool(coming) or thread is not None and thread.is_alive(),
            reached_preemption=False)
        return policy.should_save(info(step), [*durable, *map(info, coming)], context=context)

    def save(step, delay):
        time.sleep(delay)
        with saving.round(f"saving {step}"):
            pass
        durable.append(info(step))

    appointments = Appointments(Processes("decisions", 60), decide)
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
    thread.join()
    with training.round("ending"):
        place = appointments._processes._place
        keys = len(training._client.key_value_dir_get(place))
    print(json.dumps({"saves": saves, "median": statistics.median(took), "keys": keys}))
"""


@pytest.mark.parametrize("paces", ["[0.001, 0.004]", "[0.004, 0.001]"], ids=["second", "first"])
def test_two_processes_save_the_same_steps_though_one_is_slow(paces: str) -> None:
    (first,), (second,) = run_processes(PROGRAM, 2, paces, devices=1)
    print(first, second)
    assert first["saves"] == second["saves"]
    assert first["saves"][0] == 1
    # A policy that names steps gets just those, decided ahead or not, each time they come.
    assert first["saves"].count(123) == 1
    assert first["saves"].count(777) == 1
    # Going back from 499 to 200 and longer strides from 700 on neither stop saving nor part them.
    for part in (range(2, 500), range(700, 2500)):
        assert len(set(first["saves"]) & set(part)) > 1
    assert first["saves"] != sorted(set(first["saves"]))
    # 20 us is what it may take; the rest is for a machine that is busy with other things.
    assert max(first["median"], second["median"]) < 10 * 20e-6
    assert first["keys"] < 200  # of the latest, not of all
