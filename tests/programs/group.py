"""A training on several processes that does what it is told, and reports what came of it.

    python group.py INDEX COUNT PORT SETTINGS

SETTINGS is JSON: "directory"; "do": a list of actions, each the name of a function of this file or
of a call of the checkpointer, or a list of it and its arguments, the last of which may be a dict of
named ones; "seed" (default 0) of what is random; "width" of the model; "metrics" of each step
instead of its loss;
"every": a step is saved every so many (default 4), or only those of a list; "keep": how many are
kept (default all); "options" of ``CheckpointOptions``; "slices": over how many the state is
replicated; "is_replicated": on every device; "ramdisks": the folder of local tiers, which save
every "every_local" steps (default 1) and keep "keep_local" (default 2); "vanishes": the host of a
process that dies answers no packet any more, and closes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

# First, so that all that is imported finds the clock of this process.
from processes_program import COUNT, INDEX, P, Training, die, digest, listening, report, rule

# isort: split
import jax
import numpy as np
import safetensors.torch
from jax.experimental.multihost_utils import process_allgather, sync_global_devices
from jax.sharding import Mesh, NamedSharding
from support.damage import damage, flip_arrays
from support.unreadable import unreadable

from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    errors,
    load_torch_state_dict,
    policies,
    warm_start,
)
from torchax_ckpt.processes import connections
from torchax_ckpt.storage.arrays import block_digests
from torchax_ckpt.storage.directory.run_directory import RunDirectory

SETTINGS = json.loads(sys.argv[4])
directory = SETTINGS["directory"]
failing = contextlib.ExitStack()
mine = pathlib.Path(SETTINGS.get("ramdisks", "none"), str(INDEX))
start = 0


def fresh(seed: int) -> Training:
    if "slices" not in SETTINGS:
        return Training(seed, SETTINGS.get("width", 256))
    mesh = Mesh(np.array(jax.devices()).reshape(SETTINGS["slices"], -1), ("replica", "fsdp"))
    everywhere = NamedSharding(mesh, P())
    replicated = (lambda *_: everywhere) if SETTINGS.get("is_replicated") else None
    return Training(seed, mesh=mesh, rule=replicated)


if "vanishes" in SETTINGS:
    connections.KEEPALIVE.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_KEEPCNT=2)


def opened() -> TorchaxCheckpointer:
    every, keep, local = SETTINGS.get("every", 4), SETTINGS.get("keep"), None
    if "ramdisks" in SETTINGS:
        rule = policies.FixedIntervalPolicy(SETTINGS.get("every_local", 1))
        keep_local = SETTINGS.get("keep_local", 2)
        local = LocalTier(mine, save_decision_policy=rule, keep=keep_local)
    chosen = policies.SpecificStepsPolicy(every) if isinstance(every, list) else None
    return TorchaxCheckpointer(
        directory,
        save_decision_policy=chosen or policies.FixedIntervalPolicy(every),
        preservation_policy=policies.LatestN(keep) if keep else policies.PreserveAll(),
        local=local,
        options=CheckpointOptions(**{"process_timeout_secs": 60, **SETTINGS.get("options", {})}),
    )


training, ckpt = fresh(SETTINGS.get("seed", 0)), opened()

# --- actions -------------------------------------------------------------------------------------


def attach() -> None:
    """Resumes; reports from which step, of which tier if there are local ones, and its state."""
    global start
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        start = training.attach(ckpt)
    said = [str(warning.message) for warning in warned]
    whole, own = training.whole(), training.own()
    # Without local tiers the run goes on with what attach brought, not with what restore did.
    tier = ckpt.restore(start).tier if start and "ramdisks" in SETTINGS else None
    report(start=start, tier=tier, warned=said, whole=whole, own=own)


def reopen(seed: int) -> None:
    """Ends, and has another program begin with other values."""
    global training, ckpt
    ckpt.close()
    sync_global_devices("ended")
    training, ckpt = fresh(seed), opened()


def train(last: int, first: int | None = None) -> None:
    """Trains and saves; reports the state before the last save begins."""
    training.seen.clear()
    for step in range(start + 1 if first is None else first, last + 1):
        loss = training.step()
        if step == last:
            report(seen=training.seen, whole=training.whole(), own=training.own())
        ckpt.save(step, metrics=SETTINGS.get("metrics", {"loss": loss}))


def train_until_told() -> None:
    """Trains until a process is told to end; exits as a preempted program does."""
    report(ready=True)
    for step in range(1, 3000):
        training.step()
        ckpt.save(step)
        if ckpt.reached_preemption(step):
            break
    ckpt.wait_until_finished()
    report(step=step, durable=ckpt.all_steps("durable"), local=ckpt.all_steps("local"))
    ckpt.exit_if_preempted()


def save(step: int) -> None:
    """Forces a save of the step after the present one; reports how long it takes."""
    training.step()
    began = time.monotonic()
    ckpt.save(step, force=True)
    wait(began)
    whole, own = training.whole(), training.own()
    report(saved=step, secs=time.monotonic() - began, whole=whole, own=own)


def begin(step: int) -> None:
    ckpt.save(step, force=True)


def wait(began: float = 0.0) -> None:
    """Waits for what was saved; where it fails, reports that, and ends if a process has died."""
    try:
        ckpt.wait_until_finished()
    except errors.SaveError as error:
        secs, cause = time.monotonic() - began, type(error.__cause__).__name__
        report(failed=str(error), cause=cause, secs=secs, files=files_of(directory))
        if re.search("died|does not answer", str(error)):
            os._exit(3)  # JAX would wait for the dead one


def restore(step: int | None = None) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = ckpt.restore(step)
    skipped = found.skipped_steps
    report(step=found.step, tier=found.tier, skipped=skipped, said=len(warned))


def attempt(name: str, *args: Any, **kwargs: Any) -> None:
    """Reports the error of a call."""
    try:
        getattr(ckpt, name)(*args, **kwargs)
    except errors.CheckpointError as error:
        report(told=type(error).__name__)


def files_of(folder: Any) -> list[str]:
    # Process 0 may have given the lease back already.
    return sorted(set(os.listdir(folder)) - {"lease", "events"})


def steps() -> None:
    """Reports which steps there are, in which folders, and which this process has verified."""
    local = ckpt.all_steps("local") if "ramdisks" in SETTINGS else None
    place = mine if local is not None else directory
    files = files_of(place) if "://" not in str(place) else None
    marked = sorted(int(path.parent.name) for path in mine.glob("*/verified"))
    report(steps=ckpt.all_steps("durable"), local=local, files=files, marked=marked)


def sync() -> None:
    sync_global_devices("sync")


def listens() -> None:
    report(listening=listening())


def warm_starts() -> None:
    """Begins other runs with the weights, taken from the run and from a file."""

    def held(training: Training) -> dict[str, list[str]]:
        return {
            n: [digest(np.asarray(s.data)) for s in a.addressable_shards]
            for n, a in training.arrays().items()
        }

    second, third = Training(5), Training(6)
    taken = warm_start(second.model, directory, shardings=rule)
    weights = held(second)
    # Of a file each process needs other rows.
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "x.safetensors")
        safetensors.torch.save_file(load_torch_state_dict(directory), file)
        warm_start(third.model, file, shardings=rule)
    own, others = held(training), held(third)
    alike = all(weights[n] == own[n] == others[n] for n in weights)
    report(step=taken.step, alike=alike, count=len(weights))


# --- faults --------------------------------------------------------------------------------------


def flip(hosts: list[int], step: int) -> None:
    """Damages the arrays that hosts have of a local step."""
    if INDEX in hosts:
        flip_arrays(mine / str(step))


def lose(hosts: list[int], step: int) -> None:
    if INDEX in hosts:
        shutil.rmtree(mine / str(step))


def damage_state_of_last(host: int, step: int) -> None:
    """Damages what a host keeps of the random state of the last process."""
    keys = process_allgather(np.random.get_state(legacy=False)["state"]["key"])
    if host == INDEX:
        damage(mine / str(step), keys[-1].tobytes()[:64])


def fail_reads(host: int, what: str, number: int) -> None:
    """Has the reads of a host's local tier fail until ``stop_failing``."""
    if host == INDEX:
        failing.enter_context(unreadable(mine, what, number))


def stop_failing() -> None:
    failing.close()


def exchange() -> None:
    """Has two hosts find each other's ramdisk."""
    global mine
    other = mine.with_name(str(1 - INDEX))
    mine = mine.with_name(f"new {INDEX}")
    shutil.copytree(other, mine)


def fail_disk(host: int) -> None:
    """Has the disk of one host fail in the next commit, when the others have committed."""
    commit = RunDirectory.publish

    def failing(self: Any, *args: Any) -> Any:
        if self.path != mine:
            return commit(self, *args)
        RunDirectory.publish = commit  # type: ignore[method-assign]
        time.sleep(1)
        raise OSError(5, "Input/output error")

    if host == INDEX:
        RunDirectory.publish = failing  # type: ignore[method-assign,assignment]


def die_half_committed(step: int) -> None:
    """Kills all hosts in the commit of a local step, of which every second has committed it."""
    commit = RunDirectory.publish

    def killed(self: Any, found: int, *args: Any) -> Any:
        if found != step or self.path != mine:
            return commit(self, found, *args)
        if INDEX % 2:
            commit(self, found, *args)
        places = [mine.with_name(str(index)) / str(step) for index in range(1, COUNT, 2)]
        while not all(path.exists() for path in places):
            time.sleep(0.01)
        die()
        return None

    RunDirectory.publish = killed  # type: ignore[method-assign,assignment]


def die_once_all_have(step: int, secs: float) -> None:
    """Kills process 0 once all have a local step, while the other asks how that went."""
    there = [mine.with_name(str(index)) / str(step) for index in range(COUNT)]
    commit = RunDirectory.publish

    def fatal(self: Any, *args: Any) -> Any:
        durable = commit(self, *args)
        if durable.path in there:
            while not all(path.exists() for path in there):
                time.sleep(0.01)
            time.sleep(secs)  # the other asks for this one meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
        return durable

    if INDEX == 0:
        RunDirectory.publish = fatal  # type: ignore[method-assign,assignment]


def die_in_save(victim: int) -> None:
    """Has a process die while arrays are written; a child of it lives on, as workers may."""

    def killed(*args: Any, **kwargs: Any) -> None:
        if "vanishes" in SETTINGS:
            for each in connections._open:
                _fall_silent(each)
            os.kill(os.getpid(), signal.SIGSTOP)
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    if victim == INDEX:
        block_digests.take = killed  # type: ignore[assignment]


def _fall_silent(connection: socket.socket) -> None:
    """Makes this host ignore what arrives at a connection, and send nothing more.

    Without the first, its kernel would answer probes. Without the second, its kernel would send
    probes too, and, because it drops their answers, end the connection with a message of its own.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    drop = ctypes.create_string_buffer(b"\x06" + bytes(7))  # one instruction: return 0
    program = (ctypes.c_size_t * 2)(1, ctypes.addressof(drop))
    so_attach_filter = 26
    connection.setsockopt(socket.SOL_SOCKET, so_attach_filter, bytes(program))


def stop_in_save(host: int, secs: float) -> None:
    """Stops a process for some time while it writes arrays."""
    take = block_digests.take

    def stopped(*args: Any, **kwargs: Any) -> Any:
        block_digests.take = take
        subprocess.Popen(["sh", "-c", f"sleep {secs}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return take(*args, **kwargs)

    if host == INDEX:
        block_digests.take = stopped


if __name__ == "__main__":
    for action in SETTINGS["do"]:
        name, *arguments = [action] if isinstance(action, str) else action
        keywords: Any = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        if act := globals().get(name):
            act(*arguments, **keywords)
        else:
            report(**{name: getattr(ckpt, name)(*arguments, **keywords)})
