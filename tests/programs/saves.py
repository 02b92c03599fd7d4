"""Programs of one process that save, and end or are killed in some way.

    python saves.py SCENARIO DIRECTORY ...

SCENARIO is a function of this file, which takes the other arguments.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import torchax
from support.compare import bits, training_state
from support.stages import at, die
from support.training import adamw, fsdp_mesh, fsdp_rule, mlp, train_step

from torchax_ckpt import CheckpointOptions, Event, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.errors import CheckpointError, DirectoryError, SaveError
from torchax_ckpt.storage.writing import array_writer
from torchax_ckpt.telemetry.journal import Journal

torchax.enable_globally()
ALL = policies.PreserveAll()
STATE = {"w": np.arange(3)}
ckpt: TorchaxCheckpointer


def steps(directory: str, back_to: str, *numbers: str) -> None:
    """Attaches to a run, goes back to a step unless it is "", and saves steps."""
    with TorchaxCheckpointer(directory, preservation_policy=ALL) as ckpt:
        ckpt.attach(mlp())
        if back_to:
            ckpt.restore(int(back_to))
        for step in map(int, numbers):
            ckpt.save(step, force=True)


def unclosed(directory: str, step: str, secs: str, ending: str) -> None:
    """Begins a save that takes so much longer, and ends without close; "exit" exits with 3."""

    global ckpt  # stays when the function ends
    at("write the arrays", lambda: time.sleep(float(secs)))
    ckpt = TorchaxCheckpointer(directory)
    ckpt.save(int(step), state=STATE)
    if ending == "raise":
        raise ZeroDivisionError
    if ending == "exit":
        sys.exit(3)


def unclosed_with_events(directory: str, ending: str) -> None:
    """Saves, prints its events, and ends without close; "drop": is collected before that."""
    global ckpt
    ckpt = TorchaxCheckpointer(directory, on_event=lambda event: print(event.name))
    ckpt.save(1, state=STATE)
    if ending == "drop":
        ckpt.wait_until_finished()
        task = ckpt._telemetry._task
        del ckpt
        gc.collect()
        assert task is not None
        assert task.ended.wait(30)


def killed_once_recorded(directory: str) -> None:
    """Is killed in the save of step 2 as soon as the journal says that it began."""
    append, is_written = Journal.append, threading.Event()

    def append_and_say(self: Any, lines: Any) -> None:
        append(self, lines)
        if any(b'"saving","step":2' in line for line in lines):
            is_written.set()

    def die_then() -> None:
        assert is_written.wait(60)
        die()

    Journal.append = append_and_say  # type: ignore[method-assign]
    at("write the arrays", die_then, number=2)
    ckpt = TorchaxCheckpointer(directory)
    for step in (1, 2):
        ckpt.save(step, state=STATE, force=True)
    ckpt.wait_until_finished()


def stops_in_save(directory: str) -> None:
    """Saves step 1, and stops in the save of step 2 until it gets a line on stdin."""

    def hold() -> None:
        print("writing", flush=True)
        sys.stdin.readline()

    ckpt = TorchaxCheckpointer(directory)
    ckpt.save(1, state=STATE)
    ckpt.wait_until_finished()
    at("complete the step", hold, when="after")
    ckpt.save(2, state=STATE, force=True)
    ckpt.wait_until_finished()


def killed_going_back(directory: str, stage: Any, step: str) -> None:
    """Goes back to step 2 of four and saves; is killed at a stage of that."""
    ckpt = TorchaxCheckpointer(directory, preservation_policy=ALL)
    ckpt.attach(stateful={})
    for number in (1, 2, 3, 4):
        ckpt.save(number, state={"w": np.full(3, number)}, force=True)
    ckpt.wait_until_finished()
    ckpt.restore(2)
    at(stage, die)
    ckpt.save(int(step), state={"w": np.full(3, 100)}, force=True)
    ckpt.wait_until_finished()


def killed_with_two_tiers(directory: str, ramdisk: str, last: str, kill_at: str) -> None:
    """Trains a model with tied weights, with two tiers, and is killed after a step; 0: never."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
    model = torch.nn.Sequential(*layers)
    model[1].weight = model[0].weight
    model.to("jax")
    optimizer = adamw(model)
    every = policies.FixedIntervalPolicy
    local = LocalTier(ramdisk, save_decision_policy=every(1))
    ckpt = TorchaxCheckpointer(directory, save_decision_policy=every(4), local=local)
    start = ckpt.attach(model, optimizer, shardings=fsdp_rule(fsdp_mesh()))
    print("start", start, ckpt.restore().tier if start else None, flush=True)
    for step in range(start + 1, int(last) + 1):
        train_step(model, optimizer, step)
        ckpt.save(step)
        if step == int(kill_at):
            ckpt.wait_until_finished()
            die()
    ckpt.close()
    (found,) = training_state(model)
    print("end", {name: bits(tensor) for name, tensor in found.items()}, flush=True)
    assert model[1].weight is model[0].weight


def to_a_faulty_bucket(url: str, count: str, kept: str, *reuse: str) -> None:
    """Goes on from the newest step with so many saves; with none, restores every step there is.

    Says what came of it: JSON lists of word, step and text.
    """

    def say(word: str, step: int, text: object = "") -> None:
        print(json.dumps([word, step, str(text)[:400]]), flush=True)

    while True:  # as whoever starts the program again would
        try:
            ckpt = TorchaxCheckpointer(
                url,
                preservation_policy=policies.LatestN(int(kept)),
                options=CheckpointOptions(reuse=["state/base"] if reuse else False),
            )
            there = ckpt.all_steps()
            break
        except DirectoryError as error:
            say("unreachable", 0, error)
    if count == "0":
        for step in there:
            say(*compared(ckpt, step, reuse))
        return
    start = max(there, default=0)
    say("resumed", start)
    if int(url[-1]) % 2:
        array_writer.STACK_BYTES = 1
    for step in range(start + 1, start + 1 + int(count)):
        say("saving", step)
        try:
            ckpt.save(step, state=state_of(url, step, reuse), force=True)
            ckpt.wait_until_finished()
            say("durable", step)
        except DirectoryError as error:  # the very first one
            say("failed", step, error)
        except SaveError as error:
            say("durable" if "is durable" in str(error) else "failed", step, error)
        if step % 10 == 0:
            try:
                if (newest := ckpt.latest_step()) is not None:
                    say(*compared(ckpt, newest, reuse))
            except CheckpointError as error:  # not now, which is said so, and is no loss
                say("unreachable", step, error)


def state_of(url: str, step: int, reuse: Sequence[str]) -> dict[str, Any]:
    """What a step of a run holds."""
    bits = np.random.default_rng([step, *url.encode()]).integers(0, 1 << 32, 3000, np.uint32)
    found = {"device": jnp.asarray(bits[:1500]), "host": bits[1500:2400], "step": step}
    # Three stacks, which odd runs write in a batch each, but in the first save of a process.
    found |= {
        f"layers{i // 2}.{i % 2}": jnp.asarray(bits[-100 * (i + 1) :][:100]) for i in range(6)
    }
    if reuse:
        base = np.random.default_rng([*url.encode()]).integers(0, 1 << 32, 300_000, np.uint32)
        found["base"] = jnp.asarray(base)
    return found


def compared(ckpt: TorchaxCheckpointer, step: int, reuse: Sequence[str]) -> tuple[str, int, str]:
    """Whether a step is, bit by bit, what was saved."""
    try:
        found, expected = ckpt.load(step), state_of(str(ckpt.directory), step, reuse)
        same = found["step"] == step and all(
            np.asarray(found[k]).tobytes() == np.asarray(expected[k]).tobytes()
            for k in expected.keys() - {"step"}
        )
    except Exception as error:
        word = "unreachable" if isinstance(error, DirectoryError) else "corrupt"
        return word, step, f"{type(error).__name__}: {error}"
    return "exact" if same else "wrong", step, ""


def to_a_mirror(directory: str, url: str, weakened: str, plan: str) -> None:
    """Goes on from the run or its mirror, and saves; says so, in lines of JSON.

    ``plan`` may say after how many saves to go back or to close, and when to be killed. The numbers
    of the steps tell which identity, a number, has saved them. Ends with 3 if it cannot begin.
    """
    given = json.loads(plan)
    identity = given["identity"]

    def content(step: int, identity: int) -> dict[str, Any]:
        random = np.random.default_rng([step, identity])
        frozen = np.arange(50_000.0)
        return {"w": random.standard_normal(20_000), "frozen": frozen, "by": np.array(identity)}

    def say(word: str, step: int | None, text: str = "") -> None:
        print(json.dumps([word, step or 0, text]), flush=True)

    def take(event: Event) -> None:
        if event.name == "mirrored":
            say("mirrored", event.step)

    if "die_in" in given:
        stage, number, secs = given["die_in"]
        at(stage, lambda: threading.Timer(secs, die).start(), number=number)
    options = CheckpointOptions(reuse=["state.frozen"])
    ckpt = TorchaxCheckpointer(directory, mirror=url, options=options, on_event=take)
    try:
        step = ckpt.attach(stateful={}, resume=weakened != "forgetful")
    except CheckpointError as error:
        say("refused", None, f"{type(error).__name__}: {error}")
        os._exit(3)
    found = ckpt.load(step) if step else {}
    by = int(found.get("by", -1))
    wanted = content(step, by) if found else {}
    say("resumed", step, str(by) * all(bits(found[name]) == bits(wanted[name]) for name in wanted))
    for number in itertools.count(1):
        if number == given.get("back_after"):
            step = ckpt.all_steps()[0]
            ckpt.restore(step)
            identity += 1
            say("back", step)
        step += 1 + (identity - step - 1) % 3
        say("saving", step)
        ckpt.save(step, state=content(step, identity), force=True)
        ckpt.wait_until_finished()
        if number == given.get("close_after"):
            ckpt.close()
            return
        time.sleep(0.05)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
