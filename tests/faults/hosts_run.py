"""A training program on one to four processes that is made to be disturbed, and its oracle.

The oracle of ``killed_run.py`` computes the state of every step. The processes write what they
restored, shard by shard, into one log; so the oracle checks each of them, and the steps of the
durable directory once more by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import hashlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import killed_run
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from killed_run import BASE_STEPS, Lineage, Log, Oracle, Phase, Settings, Training, Verdict, up_to

from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    errors,
    policies,
    torchax_backend,
)
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.tiers import Tiers
from torchax_ckpt.saving.unchanged.copies import Copies
from torchax_ckpt.saving.writer import Writer
from torchax_ckpt.snapshot.sharding import shards_of
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_identity import RunName
from torchax_ckpt.storage.writing import array_writer

DEVICES = 2  # of each process
DURABLE_STEPS = 3  # a step is saved to the durable tier every so many
BASE_ELEMENTS = 300_000  # fewer would not be kept apart from the others
# How the program can be weakened: see ``killed_run``; it deletes local steps before it writes one;
# or its bounds are ten minutes.
WEAKENINGS = ("mixed", "delete-first", "delete-local-first", "patient")
# Exit codes, beside those of signals.
PREEMPTED, TOLD, RAISED, JAX_ENDED = 143, 3, 4, 5
# Where a process may end itself: the function, and in how many of its first calls.
DEATHS: dict[str, tuple[Any, str, int]] = {
    "claim": (RunDirectory, "claim", 1),
    "recover": (RunDirectory, "recover", 1),
    "naming the run": (Tiers, "_name_run", 1),
    "writing a name": (RunName, "write", 3),
    "write_step": (array_writer, "write_arrays", 6),
    "commit": (Writer, "_commit", 4),  # by process 0
    "committed": (Writer, "committed", 6),
    "commit of a part": (Writer, "_commit_part", 6),
    "commit of a folder": (RunDirectory, "commit", 6),
    "settle": (RunDirectory, "settle", 4),
    "set_aside": (RunDirectory, "set_aside", 4),
    "prune": (RunDirectory, "prune", 4),
    "gather": (Processes, "gather", 40),
    "share": (Processes, "share", 40),
    "end of a round": (Processes, "_end", 30),
}


class RaisedError(Exception):
    """What a program raises that has a defect of its own."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How long the processes wait for each other.

    Attributes:
      process_secs: ``CheckpointOptions(process_timeout_secs=)``.
      heartbeat_secs: how long JAX waits for a silent process, and at its end for the others.
      start_secs: how long JAX waits for all processes to start.
    """

    process_secs: float
    heartbeat_secs: int
    start_secs: int


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of the program.

    Attributes:
      attempt: its number; the branch that its steps belong to begins with it.
      count, port: the number of processes, and where JAX's service listens.
      has_local: whether there is a local tier.
      seed, num_actions: what the processes do, the same on each of them.
      bounds: see there.
      culprit: the process that does what ``trouble`` says.
      trouble: name -> value: ``skew``, of its clock in seconds; ``raise`` or ``differ``, at which
        action; ``die``, in a function, as (name, number of the call, "before" or "after").
      weakening: one of ``WEAKENINGS`` or None.
      durable_steps: a step is saved to the durable tier every so many.
      reuse: of ``CheckpointOptions``; None for True in every second start.
    """

    attempt: int
    count: int
    port: int
    has_local: bool
    seed: int
    num_actions: int
    bounds: Bounds
    culprit: int = 0
    trouble: dict[str, Any] = dataclasses.field(default_factory=dict)
    weakening: str | None = None
    durable_steps: int = DURABLE_STEPS
    reuse: bool | None = None


def initial(name: str, abstract: Any) -> np.ndarray:
    """What a parameter is before the first step."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    return np.random.default_rng(seed).standard_normal(tuple(abstract.shape)).astype(np.float32)


def changed(array: jax.Array, new: Callable[[int, Any], np.ndarray]) -> jax.Array:
    """An array of the same sharding; ``new`` makes a shard of its number and its index."""
    shards = [
        jax.device_put(new(number, shard.index), shard.device)
        for number, shard in enumerate(shards_of(array))
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


class HostTraining(Training):
    """A sharded model with momentum, whose every shard follows from itself at the step before.

    Each shard is computed in numpy, in the same way on any mesh. The arrays' own lists of shards
    are not safe to read while a save reads them.

    Args:
      index, count: of the process that trains; None for an oracle, which has it all on one device.
    """

    def __init__(self, index: int | None = None, count: int = 1) -> None:
        self._index, self._count, self._is_whole = index, count, index is None
        with torch.device("meta") if not self._is_whole else contextlib.nullcontext():
            model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Linear(24, 12))
            model.odd = torch.nn.Parameter(torch.zeros(5, 7))  # on every device
            model.base = torch.nn.Parameter(torch.zeros(BASE_ELEMENTS), requires_grad=False)
        killed_run.enable_torchax()
        self.model = model
        if self._is_whole:
            self.model.to("jax")
            for name, parameter in self.model.named_parameters():
                array = jax.device_put(initial(name, parameter))
                torchax_backend.set_buffer(parameter, array)
        self._take_parameters()
        self.add_host_leaves()
        self.lineage: Lineage = ()
        self.step = 0
        self.own: list[Any] = [index, count, 0]  # of this process, as it was restored

    def _take_parameters(self) -> None:
        self.trained = [p for n, p in self.model.named_parameters() if n != "base"]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.1, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": [self._index, self._count, self.step]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.own = list(state["own"])
        self.step = self.own[2]

    def attach_to(self, ckpt: TorchaxCheckpointer) -> int:
        if self._is_whole:
            return super().attach_to(ckpt)
        num_slices = self._count // num_parts(self._count)
        mesh = Mesh(np.array(jax.devices()).reshape(num_slices, -1), ("replica", "fsdp"))

        def rule(name: str, abstract: Any) -> NamedSharding:
            for dim, length in enumerate(abstract.shape):
                if length % mesh.shape["fsdp"] == 0:
                    return NamedSharding(mesh, PartitionSpec(*[None] * dim, "fsdp"))
            return NamedSharding(mesh, PartitionSpec())

        return ckpt.attach(
            self.model,
            self.optimizer,
            stateful={"training": self},
            shardings=rule,
            init=initial,
        )

    def train(self, step: int) -> None:
        branch = self.lineage[-1][1] if self.lineage else 0
        for number, parameter in enumerate(self.trained):
            source = np.random.default_rng((step, branch, number))
            data = source.standard_normal(tuple(parameter.shape)).astype(np.float32)
            array, state = torchax_backend.buffer(parameter), self.optimizer.state[parameter]
            before = state.get("momentum_buffer")
            moments = self._parts(before) if before is not None else None
            values = self._parts(parameter)

            def moment(at: int, index: Any, moments: Any = moments, data: Any = data) -> Any:
                old = np.float32(0) if moments is None else moments[at]
                return np.ascontiguousarray(old * np.float32(0.9) + data[index])

            new = changed(array, moment)
            added = [np.asarray(shard.data) for shard in shards_of(new)]

            def value(at: int, index: Any, values: Any = values, added: Any = added) -> Any:
                return values[at] - np.float32(0.1) * added[at]

            torchax_backend.set_buffer(parameter, changed(array, value))
            self.optimizer.state[parameter]["momentum_buffer"] = torchax_backend.wrap(new)
        if step % BASE_STEPS == 0:
            drawn = np.random.default_rng((step, branch)).standard_normal(BASE_ELEMENTS)
            array = torchax_backend.buffer(self.model.base)
            fresh = changed(array, lambda at, index: drawn.astype(np.float32)[index])
            torchax_backend.set_buffer(self.model.base, fresh)
        self.change_host_leaves(step, branch)
        self.step = step

    @staticmethod
    def _parts(tensor: Any) -> list[np.ndarray]:
        return [np.asarray(s.data) for s in shards_of(torchax_backend.buffer(tensor))]

    def shards(self) -> list[list[Any]]:
        """Of every shard here: the number of its array, its bounds in it, and its digest.

        A leaf on the host is one shard.
        """
        return [
            [number, bounds(index, array.shape), digest(np.asarray(values))]
            for number, array in enumerate(self.buffers())
            for index, values in (
                [((slice(None),), array)]
                if isinstance(array, np.ndarray)
                else [(shard.index, shard.data) for shard in shards_of(array)]
            )
        ]


def bounds(index: Iterable[slice], shape: tuple[int, ...]) -> list[list[int]]:
    return [list(part.indices(length)[:2]) for part, length in zip(index, shape, strict=True)]


def digest(array: np.ndarray) -> str:
    content = np.ascontiguousarray(array).tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


# --- the program ---------------------------------------------------------------------------------


def run(
    directory: Path, log_path: Path, output: Path, phase: Phase, index: int, start: Start
) -> None:
    """Runs one process to its end; never returns."""
    out = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(out, 1), os.dup2(out, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 1
    try:
        warnings.simplefilter("ignore")
        log = functools.partial(Log(log_path), attempt=start.attempt, index=index)
        _prepare(directory, phase, index, start)
        code = _train(directory, log, phase, index, start)
    except errors.CheckpointError:
        traceback.print_exc()
        code = TOLD
    except RaisedError:
        code = RAISED
    except jax.errors.JaxRuntimeError:
        traceback.print_exc()
        code = JAX_ENDED
    except BaseException:
        traceback.print_exc()
    try:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _prepare(directory: Path, phase: Phase, index: int, start: Start) -> None:
    phase.watch_package()
    if start.weakening in killed_run.WEAKENINGS:
        killed_run.weaken(start.weakening, directory)
    if start.weakening == "delete-local-first":
        _delete_first(directory.with_name("local") / str(index))
    trouble = start.trouble if index == start.culprit else {}
    if skew_secs := trouble.get("skew"):
        secs, nanoseconds = time.time, time.time_ns
        time.time = lambda: secs() + skew_secs
        time.time_ns = lambda: nanoseconds() + skew_secs * 10**9
    if "die" in trouble:
        _die_in(*trouble["die"])
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    if start.count > 1:
        place = f"127.0.0.1:{start.port}"
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            place,
            start.count,
            index,
            initialization_timeout=start.bounds.start_secs,
            heartbeat_timeout_seconds=start.bounds.heartbeat_secs,
            shutdown_timeout_seconds=start.bounds.heartbeat_secs,
            coordinator_bind_address=place,
        )


def _delete_first(local: Path) -> None:
    """Has this process delete its local steps before it writes another one."""
    write = array_writer.write_arrays

    def delete_first(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path).parent.parent == local:
            for child in local.iterdir():
                if child.name.isdigit():
                    shutil.rmtree(child)
            time.sleep(0.2)
        return write(path, *args, **kwargs)

    array_writer.write_arrays = delete_first  # type: ignore[assignment]


def _die_in(name: str, number: int, when: str) -> None:
    """Has this process end in the n-th call of a function of the package."""
    owner, function, _ = DEATHS[name]
    call = getattr(owner, function)
    num_calls = 0

    def fatal(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        is_last = num_calls == number
        if is_last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, function, fatal)


def _opened(directory: Path, index: int, start: Start) -> TorchaxCheckpointer:
    every = policies.FixedIntervalPolicy
    local = None
    if start.has_local:
        place = directory.with_name("local") / str(index)
        local = LocalTier(place, save_decision_policy=every(1), keep=2)
    if start.weakening == "one-copy":  # all steps share the files of unchanged arrays
        init, kind = Copies.__init__, Copies
        setattr(kind, "__init__", lambda self, _, steps: init(self, False, steps))  # noqa: B010
    return TorchaxCheckpointer(
        directory,
        save_decision_policy=every(start.durable_steps),
        preservation_policy=policies.LatestN(killed_run.KEPT),
        local=local,
        options=CheckpointOptions(
            process_timeout_secs=start.bounds.process_secs,
            on_save_error="raise",
            preemption_grace_secs=20,
            reuse=start.attempt % 2 == 0 if start.reuse is None else start.reuse,
        ),
    )


def _train(
    directory: Path, log: Callable[..., None], phase: Phase, index: int, start: Start
) -> int:
    training = HostTraining(index, start.count)
    with _opened(directory, index, start) as ckpt:
        with phase("restoring"):
            step = training.attach_to(ckpt)
        log(
            "resumed", step=step, lineage=training.lineage, own=training.own,
            shards=training.shards(),
        )  # fmt: skip
        training.lineage = (*up_to(training.lineage, step), (step, start.attempt * 1_000_000))
        with phase("training"):
            return _actions(ckpt, training, log, phase, index, start)


def _actions(
    ckpt: TorchaxCheckpointer,
    training: HostTraining,
    log: Callable[..., None],
    phase: Phase,
    index: int,
    start: Start,
) -> int:
    """Trains and saves and goes back; returns the exit code."""
    choose, pace = random.Random(start.seed), random.Random(start.seed + index)
    trouble = start.trouble if index == start.culprit else {}
    step = training.step
    begun: list[dict[str, Any]] = []  # saves that nobody has waited for
    durable: list[int] = []  # steps of this start

    def tell() -> None:
        for details in begun:
            log("told", **details)
            if "durable" in details["tiers"]:
                durable.append(details["step"])
        begun.clear()

    def wait() -> None:
        with phase("waiting"):
            ckpt.wait_until_finished()
        tell()

    for action in range(start.num_actions):
        if trouble.get("raise") == action:
            raise RaisedError
        goes_back, is_forced, waits = (choose.random() < often for often in (0.15, 0.25, 0.6))
        if step == 0:
            is_forced = waits = True  # local steps alone are of no use to other numbers of hosts
        if goes_back and len(durable) > 1:
            wait()
            step = durable[-2]
            durable[:] = [step]  # older ones may be pruned
            branch = start.attempt * 1_000_000 + action
            log("back", step=step, branch=branch, lineage=up_to(training.lineage, step))
            with phase("going back"):
                ckpt.restore(step)
            training.lineage = (*up_to(training.lineage, step), (step, branch))
        step += 1
        training.train(step)
        time.sleep(pace.uniform(0, 0.03))
        if trouble.get("differ") == action and _differs(ckpt, step, pace):
            continue
        tiers = ["durable"] if is_forced or step % start.durable_steps == 0 else []
        tiers += ["local"] if start.has_local and not is_forced else []
        details = {"step": step, "lineage": training.lineage, "tiers": tiers}
        is_saved = ckpt.save(step, metrics={"loss": step * 7 % 10}, force=is_forced)
        if ckpt.reached_preemption(step):
            assert is_saved, "a preempted step was not saved"
            log("told", **details | {"tiers": ["durable"]})
            return PREEMPTED
        if is_saved:
            begun.append(details)
        if waits:
            wait()
    wait()
    return 0


def _differs(ckpt: TorchaxCheckpointer, step: int, choose: random.Random) -> bool:
    """Makes another call than the other processes; returns whether in place of the save."""
    match choose.randrange(5):
        case 0:
            ckpt.restore()
        case 1:
            ckpt.delete(ckpt.latest_step() or 0)
        case 2:
            ckpt.save(step + 1, force=True)
        case 3:
            ckpt.load()
            return False
        case _:
            pass  # leaves out the save
    return True


# --- the oracle ----------------------------------------------------------------------------------


class HostsOracle(Oracle):
    """Checks what every process restored, and knows what local tiers must still have.

    A step of the local tiers must be resumed from if a process was told that it is durable, the
    next start has as many processes, and the local directories together have every part of it.
    Where a program went back to a step, and what it saved since is in local tiers that a start
    with another number of processes cannot use, the run resumes from the step it went back to.
    """

    def __init__(self, directory: Path, log_path: Path) -> None:
        super().__init__(directory, log_path, Settings(), HostTraining)
        self._told: set[tuple[str, int, Lineage]] = set()
        self._local: tuple[int, Lineage] | None = None
        self._count = 0  # of the processes that saved it
        self._parts: dict[int, int] = {}  # local directory -> which part of the step it has
        self._start: dict[str, Any] = {}
        self._needs_local = False
        self._forks: set[tuple[int, Lineage]] = set()  # gone back to since the newest durable step
        self._resumed: tuple[int, Lineage] | None = None
        self.num_resumed = 0

    def inspect(self, is_finished: bool = False) -> Verdict:
        verdict = super().inspect(is_finished)
        verdict.num_states += self.num_resumed
        self.num_resumed = 0
        return verdict

    def _take_in(self, line: dict[str, Any], verdict: Verdict) -> None:
        what = line["what"]
        if what == "starting":
            self._start, self._resumed = line, None
            is_whole = set(self._parts.values()) == set(range(num_parts(self._count)))
            self._needs_local = line["has_local"] and line["count"] == self._count and is_whole
        elif what == "wiped":
            self._parts.pop(line["place"], None)
        elif what == "swapped":
            self._parts = {
                now: self._parts[before]
                for now, before in enumerate(line["places"])
                if before in self._parts
            }
        elif what == "resumed":
            self._check_resumed(line, verdict)
        elif what == "back":
            self._begun.add(line["branch"])
            self._forks.add((line["step"], as_lineage(line["lineage"])))
            self._local = None
        elif what == "told":
            self._take_told(line)

    def _take_told(self, line: dict[str, Any]) -> None:
        step, lineage = line["step"], as_lineage(line["lineage"])
        self.expected(step, lineage)
        for tier in line["tiers"]:
            if (tier, step, lineage) in self._told:
                continue  # by another process
            self._told.add((tier, step, lineage))
            if tier == "durable":
                self._note_durable(step, lineage)
                continue
            self._local = (step, up_to(lineage, step))
            self._count = self._start["count"]
            self._parts = {place: place % num_parts(self._count) for place in range(self._count)}

    def _check_resumed(self, line: dict[str, Any], verdict: Verdict) -> None:
        step, lineage = line["step"], as_lineage(line["lineage"])
        subject = f"process {line['index']} of {self._start['count']} resumed from"
        self.num_resumed += 1
        if self._resumed not in (None, (step, lineage)):
            verdict.wrong.append(f"{subject} step {step} of {lineage}, others {self._resumed}")
        self._resumed = (step, lineage)
        self.expected(step, lineage)
        arrays = [np.asarray(array) for array in self._states[step, up_to(lineage, step)]]
        differing = {
            number
            for number, index, found in line["shards"]
            if digest(arrays[number][tuple(slice(*part) for part in index)]) != found
        }
        if differing or {number for number, *_ in line["shards"]} != set(range(len(arrays))):
            verdict.wrong.append(f"{subject} step {step}: arrays {sorted(differing)} are wrong")
        index, count, at = line["own"]
        if step and (index, at) != (line["index"] % count, step):
            verdict.wrong.append(f"{subject} step {step} with the state of {line['own']}")
        if (step, up_to(lineage, step)) not in self._forks:
            self._require_newest(step, lineage, subject, verdict)
        if not self._needs_local:
            self._local = None  # the run goes on without it
        elif self._local is not None:
            local, branch = self._local
            if step < local or up_to(lineage, local) != branch:
                verdict.losses.append(
                    f"{subject} step {step} of {lineage}, but the local step {local} of {branch} "
                    "had been reported durable"
                )

    def _note_durable(self, step: int, lineage: Lineage) -> None:
        # What is found again says nothing of branches begun since.
        if not self._durable or self._durable[-1] != (step, up_to(lineage, step)):
            super()._note_durable(step, lineage)
            self._forks.clear()


def num_parts(count: int) -> int:
    """How many hosts have one state together: two slices, or all hosts of one."""
    return count // 2 if count % 2 == 0 else count


def as_lineage(pairs: Any) -> Lineage:
    return tuple((after, branch) for after, branch in pairs)
