"""A training program on one or several processes that is made to be disturbed.

Its state follows from the step and from the branch that the step belongs to, on any mesh. So what
a checkpoint must hold can be computed again from its number and its lineage: which branch began
after which step. ``oracle.py`` does that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import torchax
from jax.sharding import Mesh
from support.stages import at, die
from support.training import fsdp_rule

from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    errors,
    policies,
    torchax_backend,
)
from torchax_ckpt.devices.sharding import shards_of
from torchax_ckpt.processes.messages import OTHER_CALLS
from torchax_ckpt.runtime import stages
from torchax_ckpt.runtime.stages import Stage
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.writing import array_writer

Lineage = tuple[tuple[int, int], ...]
DEVICES = 2  # of each process
KEPT = 3
ENDLESS = 1 << 30  # actions
BRANCHES = 1_000_000  # of one start
# Frozen for some steps at a time, so that saves reuse it. The leaves on the host: the values in
# one, and how often it changes.
BASE_ELEMENTS, BASE_STEPS = 300_000, 9
HOST_LEAVES = {"table": (300_000, 13), "counts": (8_192, 8), "statistics": (4_096, 1)}
REUSED = ["model/base", "model/table", "model/counts"]
LAYERS = {"0.weight": (24, 8), "0.bias": (24,), "1.weight": (12, 24), "1.bias": (12,)}
# Lists of two parameters. They and their moments are stored as stacks, one in each batch where
# batches have BATCH_BYTES, as in every second start. If one process has them all, both parts of a
# stack are made in memory that is used again; those of several processes are too small for that.
STACKED = ("first", "second", "third")
BATCH_BYTES = 160 << 10
STACKS = {f"{name}.{i}": (48, 384) for name in STACKED for i in (0, 1)}
TRAINED: dict[str, tuple[int, ...]] = {**LAYERS, "odd": (5, 7), **STACKS}  # "odd" on every device
SHAPES: dict[str, Any] = {
    "base": (BASE_ELEMENTS,), **{name: (size,) for name, (size, _) in HOST_LEAVES.items()},
    **TRAINED, **{f"moment of {name}": shape for name, shape in TRAINED.items()},
}  # fmt: skip
WEAKENINGS = ("copy", "delete-first", "delete-local-first", "mixed")
# Exit codes, beside those of signals.
PREEMPTED, TOLD, RAISED, JAX_ENDED = 143, 3, 4, 5
# Where a process may end itself, and in how many of its first times.
DEATHS: dict[Stage, int] = {
    "claim the directory": 1,
    "recover the directory": 1,
    "name the run": 1,
    "write the name": 3,
    "write the arrays": 6,
    "commit": 4,  # by process 0
    "end a durable save": 6,
    "commit a part": 6,
    "commit the folder": 6,
    "settle a step": 4,
    "set steps aside": 4,
    "delete a step": 4,
    "gather": 40,
    "share": 40,
    "end a round": 30,
}
# What the program is seen at, in what changes a directory.
WATCHED: dict[Stage, str] = {
    "claim the directory": "claiming",
    "recover the directory": "recovering",
    "write the arrays": "writing",
    "link unchanged arrays": "linking",
    "commit the folder": "committing",
    "set steps aside": "setting aside",
    "settle a step": "settling",
    "delete a step": "pruning",
}
PHASES = [
    "starting", "restoring", "training", "going back", "deleting", "waiting", "idle",
    *WATCHED.values(),
]  # fmt: skip


class RaisedError(Exception):
    """What a program raises that has a defect of its own."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run saves; ``forced``, ``back`` and ``delete``: how often, of all that it does."""

    keep: Any = dataclasses.field(default_factory=lambda: policies.LatestN(KEPT))
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    every: int = 0  # a step is saved to the durable tier every so many; 0: by the usual policy
    forced: float = 0.7
    back: float = 0.1
    delete: float = 0.1  # of one process; several delete none
    has_local: bool = False  # whether each process has a local tier, which saves every step
    # How long this package waits for a process; JAX for a silent one, and at its end; at a start.
    process_secs: float = 5
    heartbeat_secs: int = 10
    start_secs: int = 20

    def local(self, directory: Path, index: int = 0) -> Path:
        """The directory of a process's local tier."""
        return directory.with_name("local") / str(index)

    def opened(
        self, directory: Path, index: int = 0, *, has_local: bool | None = None, reuse: bool = False
    ) -> TorchaxCheckpointer:
        every = policies.FixedIntervalPolicy
        local = None
        if self.has_local if has_local is None else has_local:
            place = self.local(directory, index)
            local = LocalTier(place, save_decision_policy=every(1), keep=2)
        return TorchaxCheckpointer(
            directory,
            save_decision_policy=every(self.every) if self.every else None,
            preservation_policy=self.keep,
            local=local,
            options=CheckpointOptions(
                process_timeout_secs=self.process_secs,
                on_save_error="raise",
                preemption_grace_secs=20,
                reuse=REUSED if reuse else False,
                **self.options,
            ),
        )


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of the program: what its processes do, and what disturbs it from within."""

    attempt: int  # the branches that its steps belong to begin with it
    count: int
    port: int  # of JAX's service
    seed: int
    num_actions: int
    reuse: bool
    culprit: int = 0  # the process that does what ``trouble`` says
    # ``skew``, of its clock in seconds; ``raise`` or ``differ``, at which action; ``die``, in a
    # function, as (name, number of the call, "before" or "after").
    trouble: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weakening: str | None = None


class Log:
    """Lines that are on the medium when ``__call__`` returns."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, what: str, **details: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **details}).encode() + b"\n")
        os.fsync(self._file)


def read_log(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The lines since an offset; one that was cut off by a kill is dropped."""
    content = path.read_bytes()[offset:] if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], offset + len(content)


class Phase:
    """Where a process is, in a file that it and those who watch it have in memory.

    One byte for the training thread, one for that of the save, and whether a save has begun.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes([PHASES.index("starting"), PHASES.index("idle"), 0]))
        self.__setstate__(path)

    def __getstate__(self) -> Path:
        return self._path

    def __setstate__(self, path: Path) -> None:
        self._path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 3)

    def has_saved(self) -> bool:
        return bool(self._memory[2])

    def say_saved(self) -> None:
        """Notes that a save has begun, for a program that saves on its main thread."""
        self._memory[2] = 1

    def describe(self) -> str:
        saving = PHASES[self._memory[1]]
        return PHASES[self._memory[0]] if saving == "idle" else saving

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        thread = 0 if threading.current_thread() is threading.main_thread() else 1
        self._memory[2] |= thread
        before = self._memory[thread]
        self._memory[thread] = PHASES.index(name)
        try:
            yield
        finally:
            self._memory[thread] = before

    def watch_package(self) -> None:
        """Notes where the package is in what changes a directory."""
        stages.observers.append(
            lambda stage, _: self(WATCHED[stage]) if stage in WATCHED else contextlib.nullcontext()
        )


# --- the state -----------------------------------------------------------------------------------

# Each call would stack another pair of modes on torch, until Python's stack is too small for them.
enable_torchax = functools.cache(torchax.enable_globally)


def up_to(lineage: Lineage, step: int) -> Lineage:
    """The part of a lineage that the state of this step depends on."""
    return tuple(pair for pair in lineage if pair[0] < step)


def as_lineage(pairs: Any) -> Lineage:
    return tuple((after, branch) for after, branch in pairs)


def num_parts(count: int) -> int:
    """How many hosts have one state together: two slices, or all hosts of one."""
    return count // 2 if count % 2 == 0 else count


def digest(array: Any) -> str:
    content = np.ascontiguousarray(array).tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def drawn(name: str, since: int, branch: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(f"{name}/{since}/{branch}".encode()).digest()[:8])
    return np.random.default_rng(seed).standard_normal(SHAPES[name]).astype(np.float32)


def values(step: int, lineage: Lineage) -> dict[str, np.ndarray]:
    """What a step of a lineage holds; there are moments from the first step on.

    The frozen parameter and the leaves on the host stay as they are for some steps.
    """
    lasts = {"base": BASE_STEPS, **{name: every for name, (_, every) in HOST_LEAVES.items()}}
    found = {name: drawn(name, step // every, 0) for name, every in lasts.items()}
    branch = lineage[-1][1] if lineage else 0
    trained = [*TRAINED, *(f"moment of {name}" for name in TRAINED if step)]
    return found | {name: drawn(name, step, branch) for name in trained}


class Training:
    """A sharded model, host leaves, and their lineage; without index, all of it on one device."""

    def __init__(self, index: int | None = None, count: int = 1) -> None:
        self._index, self._count, self._is_whole = index, count, index is None
        with contextlib.nullcontext() if self._is_whole else torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Linear(24, 12))
            model.odd = torch.nn.Parameter(torch.zeros(5, 7))
            model.base = torch.nn.Parameter(torch.zeros(BASE_ELEMENTS), requires_grad=False)
            for name in STACKED:
                pair = [torch.nn.Parameter(torch.zeros(STACKS[f"{name}.{i}"])) for i in (0, 1)]
                setattr(model, name, torch.nn.ParameterList(pair))
        enable_torchax()
        self.model = model.to("jax") if self._is_whole else model
        trained = [model.get_parameter(name) for name in TRAINED]
        self.optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        for name in HOST_LEAVES:
            self.model.register_buffer(name, torch.from_numpy(values(0, ())[name].copy()))
        self.lineage: Lineage = ()
        self.own: list[Any] = [index, count, 0]  # of this process, as it was restored

    def state_dict(self) -> dict[str, Any]:
        lineage = [list(pair) for pair in self.lineage]
        return {"lineage": lineage, "own": [self._index, self._count, self.step]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lineage, self.own = as_lineage(state["lineage"]), list(state["own"])

    @property
    def step(self) -> int:
        return int(self.own[2])

    def attach_to(self, ckpt: TorchaxCheckpointer) -> int:
        settings: dict[str, Any] = {}
        if not self._is_whole:
            num_slices = self._count // num_parts(self._count)
            mesh = Mesh(np.array(jax.devices()).reshape(num_slices, -1), ("replica", "fsdp"))
            settings = {"shardings": fsdp_rule(mesh), "init": lambda name, _: values(0, ())[name]}
        return ckpt.attach(self.model, self.optimizer, stateful={"training": self}, **settings)

    def train(self, step: int) -> None:
        """Gives each array the values of this step; those on the host change in place."""
        for name, host in values(step, self.lineage).items():
            if name in HOST_LEAVES:
                self.model.get_buffer(name).numpy()[...] = host
                continue
            parameter = self.model.get_parameter(name.removeprefix("moment of "))
            sharding = torchax_backend.buffer(parameter).sharding
            if name == "base" and step % BASE_STEPS:
                continue
            array = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
            if name.startswith("moment of "):
                state = self.optimizer.state[parameter]
                state["momentum_buffer"] = torchax_backend.wrap(array)
            else:
                torchax_backend.set_buffer(parameter, array)
        self.own[2] = step

    def arrays(self) -> dict[str, Any]:
        """All arrays by their names; those on the host may change later."""
        found: dict[str, Any] = {n: self.model.get_buffer(n).numpy() for n in HOST_LEAVES}
        for name, parameter in self.model.named_parameters():
            found[name] = torchax_backend.buffer(parameter)
            if (moment := self.optimizer.state[parameter].get("momentum_buffer")) is not None:
                found[f"moment of {name}"] = torchax_backend.buffer(moment)
        return found

    def shards(self) -> list[list[Any]]:
        """Of every shard here: the name of its array, its bounds in it, and its digest.

        A leaf on the host is one shard.
        """
        found: list[list[Any]] = []
        for name, array in self.arrays().items():
            here = [(tuple(slice(None) for _ in array.shape), array)]
            if not isinstance(array, np.ndarray):
                here = [(shard.index, shard.data) for shard in shards_of(array)]
            for index, host in here:
                pairs = zip(index, array.shape, strict=True)
                bounds = [list(part.indices(length)[:2]) for part, length in pairs]
                found.append([name, bounds, digest(host)])
        return found


# --- the program ---------------------------------------------------------------------------------


def run(
    directory: Path,
    log_path: Path,
    settings: Settings,
    start: Start,
    index: int,
    on_durable: Callable[[], None] | None,
    phase: Phase,
) -> int:
    """Runs one process to its end; returns its exit code."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    try:
        _prepare(directory, settings, start, phase, index)
        return _train(directory, Log(log_path), settings, start, phase, index, on_durable)
    except errors.CheckpointError as error:
        traceback.print_exc()
        # Also in the error of a save that failed because of it.
        if named := re.search(f"{OTHER_CALLS}: .* This checkpointer makes no more", str(error)):
            Log(log_path)("differed", index=index, calls=named.group())
        return TOLD
    except RaisedError:
        return RAISED
    except jax.errors.JaxRuntimeError:
        traceback.print_exc()
        return JAX_ENDED
    finally:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()


def _prepare(directory: Path, settings: Settings, start: Start, phase: Phase, index: int) -> None:
    phase.watch_package()
    if start.attempt % 2:
        array_writer.STACK_BYTES = BATCH_BYTES
    if start.weakening in WEAKENINGS:
        weaken(start.weakening, directory, settings.local(directory, index))
    trouble = start.trouble if index == start.culprit else {}
    if skew_secs := trouble.get("skew"):
        secs, nanoseconds = time.time, time.time_ns
        time.time = lambda: secs() + skew_secs
        time.time_ns = lambda: nanoseconds() + skew_secs * 10**9
    if "die" in trouble:
        stage, number, when = trouble["die"]
        at(stage, die, when=when, number=number)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    if start.count > 1:
        place = f"127.0.0.1:{start.port}"
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            place,
            start.count,
            index,
            initialization_timeout=settings.start_secs,
            heartbeat_timeout_seconds=settings.heartbeat_secs,
            shutdown_timeout_seconds=settings.heartbeat_secs,
            coordinator_bind_address=place,
        )


def _train(
    directory: Path,
    log: Log,
    settings: Settings,
    start: Start,
    phase: Phase,
    index: int,
    on_durable: Callable[[], None] | None,
) -> int:
    """Resumes, and trains, saves, deletes and goes back at random."""
    choose, pace = random.Random(start.seed), random.Random(start.seed + index)
    trouble = start.trouble if index == start.culprit else {}
    training = Training(index, start.count)
    ckpt = settings.opened(directory, index, reuse=start.reuse)
    with phase("restoring"):
        step = training.attach_to(ckpt)
    branch = start.attempt * BRANCHES
    found = {"step": step, "lineage": training.lineage, "own": training.own, "branch": branch}
    log("resumed", index=index, **found, shards=training.shards())
    training.lineage = (*up_to(training.lineage, step), (step, branch))
    begun: list[dict[str, Any]] = []  # saves that nobody has waited for
    durable: list[int] = []  # steps of this start
    saved: set[int] = set()  # by this start, to any tier
    newest = ENDLESS  # of this branch: until a save has begun, those of the branch before are there

    def wait() -> None:
        with phase("waiting"):
            ckpt.wait_until_finished()
        if begun and on_durable is not None:
            on_durable()
        for details in begun:
            log("told", **details)
            durable.extend([details["step"]] * ("durable" in details["tiers"]))
            saved.add(details["step"])
        begun.clear()

    with ckpt, phase("training"):
        for action in range(start.num_actions):
            if trouble.get("raise") == action:
                raise RaisedError
            what = choose.random()
            is_forced, waits = choose.random() < settings.forced, choose.random() < 0.6
            if step == 0:
                # Local steps alone would be of no use to other numbers of hosts.
                is_forced = waits = True
            others: list[int] = []
            if what < settings.back + settings.delete:
                wait()  # pruning, too, has then ended
                # What others list meanwhile may differ; of several processes each knows its own.
                others = ckpt.all_steps()[:-1] if start.count == 1 else durable[-2:-1]
                # A local step of another number of processes has one process's part.
                known = saved.union(ckpt.all_steps("durable"))
                others = [other for other in others if other <= newest and other in known]
            if what < settings.back and others:
                step = newest = choose.choice(others)
                durable[:] = [step]  # older ones may be pruned
                branch = start.attempt * BRANCHES + action
                log("back", step=step, branch=branch, lineage=up_to(training.lineage, step))
                with phase("going back"):
                    ckpt.restore(step)
                log("restored", index=index, step=step, shards=training.shards())
                training.lineage = (*up_to(training.lineage, step), (step, branch))
            elif len(others) > 1:
                doomed = choose.choice(ckpt.all_steps())
                log("delete", step=doomed)
                with phase("deleting"):
                    ckpt.delete(doomed)
                continue
            step += 1
            training.train(step)
            time.sleep(pace.uniform(0, 0.03) if start.count > 1 else 0)
            if trouble.get("differ") == action and _differs(ckpt, training, step, pace):
                continue
            is_due = is_forced or not settings.every or step % settings.every == 0
            tiers = ["durable"] * is_due + ["local"] * (settings.has_local and not is_forced)
            details = {"step": step, "lineage": training.lineage, "tiers": tiers}
            is_saved = ckpt.save(step, metrics={"loss": step * 7 % 10}, force=is_forced)
            if ckpt.reached_preemption(step):
                assert is_saved, "a preempted step was not saved"
                log("told", **details | {"tiers": ["durable"]})
                return PREEMPTED
            begun.extend([details] * is_saved)
            newest = ENDLESS if is_saved else newest
            if waits:
                wait()
        wait()
    return 0


def _differs(
    ckpt: TorchaxCheckpointer, training: Training, step: int, choose: random.Random
) -> bool:
    """Makes another call than the other processes; returns whether in place of the save.

    If the others decline the save, the calls differ only once they make another one.
    """
    match choose.randrange(5):
        case 0:
            ckpt.restore()
        case 1:
            ckpt.delete(ckpt.latest_step() or 0)
        case 2:
            training.train(step + 1)
            ckpt.save(step + 1, force=True)
        case 3:
            ckpt.load()
            return False
        case _:
            pass  # leaves out the save
    return True


# --- weaker programs, to show that the oracle notices --------------------------------------------


def steps_in(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.exists() else ()
    return sorted((path for path in found if path.name.isdigit()), key=lambda path: int(path.name))


def weaken(how: str, directory: Path, local: Path) -> None:
    """Has the program write worse than it does."""
    write = array_writer.write_arrays
    previous: dict[str, Any] = {}
    place = local if how == "delete-local-first" else directory

    def copied(self: RunDirectory, step: int, written: Any) -> Any:
        # Copied into place, file by file, as a script would.
        final = directory / str(step)
        shutil.rmtree(final, ignore_errors=True)
        for source in sorted([Path(written), *Path(written).rglob("*")]):
            target = final / source.relative_to(written)
            shutil.copy(source, target) if source.is_file() else target.mkdir()
            time.sleep(0.01)
        return self.candidates(step)[-1]

    def delete() -> None:
        for child in steps_in(place):
            shutil.rmtree(child)
        time.sleep(0.3)  # a kill must be likely to come now

    def mixed(path: Any, arrays: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # One array is still the one of the step before.
        name = min(arrays)
        stale = {name: previous.get(name, arrays[name])}
        previous.update(arrays)
        return write(path, {**arrays, **stale}, *args, **kwargs)

    if how == "copy":
        RunDirectory.publish = copied  # type: ignore[method-assign]
    elif how == "mixed":
        array_writer.write_arrays = mixed  # type: ignore[assignment]
    else:
        at("write the arrays", delete, below=place)
