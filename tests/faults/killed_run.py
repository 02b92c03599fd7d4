"""A training program that is made to be killed, and the oracle that says what must be left of it.

The state of every step follows from the one before and from the branch it belongs to, so what a
checkpoint must hold can be computed again from its number and its lineage: which branch began after
which step.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchax

from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    policies,
    torchax_backend,
)
from torchax_ckpt.options import TierName
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import links
from torchax_ckpt.storage.writing import array_writer

Lineage = tuple[tuple[int, int], ...]
Key = tuple[int, Lineage]
KEPT = 3
BASE_ELEMENTS, BASE_STEPS = 300_000, 9
# The leaves on the host: the values in one, and how often it changes. With less than 1 MiB that
# does not change, or below 16 KiB, they would not be reused.
HOST_LEAVES = {"table": (300_000, 13), "counts": (8_192, 8), "statistics": (4_096, 1)}
WEAKENINGS = ("copy", "delete-first", "mixed")


def up_to(lineage: Lineage, step: int) -> Lineage:
    """The part of a lineage that the state of this step depends on."""
    return tuple(pair for pair in lineage if pair[0] < step)


# Each call would stack another pair of modes on torch, until Python's stack is too small for them.
enable_torchax = functools.cache(torchax.enable_globally)


class Training:
    """A model, its optimizer, and the lineage of what they hold."""

    def __init__(self) -> None:
        enable_torchax()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to("jax")
        self.trained = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.trained, lr=0.1, momentum=0.9)
        # Frozen for some steps at a time, so that saves take it over from earlier steps.
        base = torchax.default_env().to_xla(torch.zeros(BASE_ELEMENTS))
        self.model.base = torch.nn.Parameter(base, requires_grad=False)
        self.lineage: Lineage = ()
        self.add_host_leaves()

    def state_dict(self) -> dict[str, Any]:
        return {"lineage": [list(pair) for pair in self.lineage]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lineage = tuple((after, branch) for after, branch in state["lineage"])

    def attach_to(self, ckpt: TorchaxCheckpointer) -> int:
        return ckpt.attach(self.model, self.optimizer, stateful={"training": self})

    def train(self, step: int) -> None:
        """One step on a quadratic loss, whose gradient is the distance to the data."""
        branch = self.lineage[-1][1] if self.lineage else 0
        data = np.random.default_rng((step, branch))
        for parameter in self.trained:
            x = torch.from_numpy(data.standard_normal(tuple(parameter.shape)).astype(np.float32))
            parameter.grad = parameter.detach() - torchax.default_env().to_xla(x)
        self.optimizer.step()
        if step % BASE_STEPS == 0:
            x = torch.from_numpy(data.standard_normal(BASE_ELEMENTS).astype(np.float32))
            self.model.base.data = torchax.default_env().to_xla(x)
        self.change_host_leaves(step, branch)

    def add_host_leaves(self) -> None:
        """Adds buffers of torch on the CPU, which saves take over as long as they do not change."""
        for name, (size, _) in HOST_LEAVES.items():
            self.model.register_buffer(name, torch.from_numpy(np.zeros(size, np.float32)))
        self._host = [np.zeros(size, np.float32) for size, _ in HOST_LEAVES.values()]

    def change_host_leaves(self, step: int, branch: int) -> None:
        """Changes a few values in place, of the leaves that change in this step."""
        for number, (name, (size, every)) in enumerate(HOST_LEAVES.items()):
            if step % every == 0:
                data = np.random.default_rng((step, branch, number))
                where = data.integers(size, size=3)
                self.model.get_buffer(name).numpy()[where] += data.random(3, np.float32)

    def host_leaves(self) -> list[np.ndarray]:
        """The values of the leaves on the host, in arrays that nobody changes.

        As long as the values are the same, they are in the same arrays, of which there would
        otherwise be too many in memory.
        """
        now = [self.model.get_buffer(name).numpy() for name in HOST_LEAVES]
        self._host = [
            old if np.array_equal(old, new) else new.copy()
            for old, new in zip(self._host, now, strict=True)
        ]
        return self._host

    def buffers(self) -> list[Any]:
        moments = [self.optimizer.state[p].get("momentum_buffer") for p in self.trained]
        tensors = [self.model.base, *self.trained, *(m for m in moments if m is not None)]
        return [*self.host_leaves(), *(torchax_backend.buffer(tensor) for tensor in tensors)]

    def set_buffers(self, buffers: list[Any]) -> None:
        for name, array in zip(HOST_LEAVES, buffers, strict=False):
            self.model.get_buffer(name).numpy()[...] = array
        buffers = buffers[len(HOST_LEAVES) :]
        parameters = [self.model.base, *self.trained]
        for parameter, buffer in zip(parameters, buffers, strict=False):
            torchax_backend.set_buffer(parameter, buffer)
        self.optimizer.state.clear()  # before the first step there is none
        for parameter, buffer in zip(self.trained, buffers[len(parameters) :], strict=False):
            self.optimizer.state[parameter]["momentum_buffer"] = torchax_backend.wrap(buffer)

    def digest(self) -> str:
        content = b"".join(np.asarray(buffer).tobytes() for buffer in self.buffers())
        return hashlib.sha256(content).hexdigest()


# --- the program ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the program saves.

    Attributes:
      keep: the preservation policy.
      options: of the checkpointer.
      has_local: whether it has a local tier, beside its directory.
      has_two_processes: whether two processes train and save together.
      back, delete: how often it goes back or deletes a step, of all that it does.
    """

    keep: Any = dataclasses.field(default_factory=lambda: policies.LatestN(KEPT))
    options: CheckpointOptions = dataclasses.field(default_factory=CheckpointOptions)
    has_local: bool = False
    has_two_processes: bool = False
    back: float = 0.1
    delete: float = 0.1

    def places(self, directory: Path) -> list[Path]:
        """The directories of the tiers."""
        return [directory, *([directory.with_name("local")] if self.has_local else [])]

    def opened(self, directory: Path) -> TorchaxCheckpointer:
        if not self.has_local:
            return TorchaxCheckpointer(
                directory, preservation_policy=self.keep, options=self.options
            )
        every = policies.FixedIntervalPolicy
        return TorchaxCheckpointer(
            directory,
            save_decision_policy=every(4),
            preservation_policy=self.keep,
            local=LocalTier(self.places(directory)[1], save_decision_policy=every(1), keep=2),
            options=self.options,
        )


class Log:
    """Lines that are on the medium when ``__call__`` returns."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, what: str, **details: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **details}).encode() + b"\n")
        os.fsync(self._file)


def read_log(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The lines since an offset; one that was cut off by the kill is dropped."""
    content = path.read_bytes()[offset:] if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], offset + len(content)


PHASES = [
    "starting", "restoring", "training", "going back", "deleting", "claiming", "recovering",
    "writing", "linking", "committing", "setting aside", "settling", "pruning", "waiting", "idle",
]  # fmt: skip


class Phase:
    """Where the program is, in memory that outlives it.

    One byte for the training thread, one for that of the save, and whether a save has begun.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 3)
        self.clear()

    def clear(self) -> None:
        self._memory[:] = bytes([PHASES.index("starting"), PHASES.index("idle"), 0])

    def has_saved(self) -> bool:
        return bool(self._memory[2])

    def is_at(self, name: str) -> bool:
        return self.describe() == name

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
        for owner, function, name in [
            (RunDirectory, "claim", "claiming"),
            (RunDirectory, "recover", "recovering"),
            (array_writer, "write_arrays", "writing"),
            (links, "link_folder", "linking"),
            (RunDirectory, "commit", "committing"),
            (RunDirectory, "set_aside", "setting aside"),
            (RunDirectory, "settle", "settling"),
            (RunDirectory, "prune", "pruning"),
        ]:
            self.watch(owner, function, name)

    def say_saved(self) -> None:
        """Notes that a save has begun, for a program that saves on its main thread."""
        self._memory[2] = 1

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Notes that the program is in this phase while a function of the package runs."""
        call = getattr(owner, function)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return call(*args, **kwargs)

        setattr(owner, function, watched)


def reuses(attempt: int) -> bool:
    """Whether a program reuses what is unchanged; after some of them one writes all arrays."""
    return attempt % 4 != 0


def run(
    directory: Path,
    log: Callable[..., None],
    phase: Phase,
    attempt: int,
    seed: int,
    num_actions: int | None,
    weakening: str | None,
    settings: Settings = Settings(),
    on_durable: Callable[[], None] = lambda: None,
) -> None:
    """Resumes, and trains, saves, deletes and goes back at random, forever or so many times."""
    phase.watch_package()
    if weakening is not None:
        weaken(weakening, directory)
    choose = random.Random(seed)
    training = Training()
    options = dataclasses.replace(settings.options, reuse=reuses(attempt))
    ckpt = dataclasses.replace(settings, options=options).opened(directory)
    with phase("restoring"):
        step = training.attach_to(ckpt)
    log("resumed", step=step, lineage=training.lineage, digest=training.digest())
    saved: dict[str, Any] | None = None

    def wait() -> None:
        nonlocal saved
        with phase("waiting"):
            ckpt.wait_until_finished()
        if saved is not None:
            on_durable()
            log("durable", **saved)
            saved = None

    with phase("training"):
        for action in range(num_actions) if num_actions is not None else iter(int, 1):
            what = choose.random()
            is_rare = what < settings.back + settings.delete
            if is_rare:
                wait()  # pruning, too, has then ended
            others = ckpt.all_steps()[:-1] if is_rare else []
            if what < settings.back and others:
                step = choose.choice(others)
                branch = attempt * 1_000_000 + action
                log("back", step=step, branch=branch)
                with phase("going back"):
                    ckpt.restore(step)
                training.lineage = (*up_to(training.lineage, step), (step, branch))
            elif is_rare and len(others) > 1:
                doomed = choose.choice(ckpt.all_steps())
                log("delete", step=doomed)
                with phase("deleting"):
                    ckpt.delete(doomed)
            else:
                step += 1
                training.train(step)
                details = {
                    "step": step,
                    "lineage": training.lineage,
                    "digest": training.digest(),
                }
                metrics = {"loss": step * 7 % 10}
                if ckpt.save(step, metrics=metrics, force=choose.random() < 0.7):
                    saved = details
                if choose.random() < 0.5:
                    wait()
    wait()
    ckpt.close()


# --- weaker programs, to show that the oracle notices --------------------------------------------


def weaken(how: str, directory: Path) -> None:
    """Has the program write worse than it does."""
    write = array_writer.write_arrays

    def copied(self: RunDirectory, step: int, written: Any) -> Any:
        # Copied into place, file by file, as a script would.
        final = directory / str(step)
        shutil.rmtree(final, ignore_errors=True)
        for source in sorted(p for p in Path(written).rglob("*") if p.is_file()):
            target = final / source.relative_to(written)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
            time.sleep(0.01)
        return self.find(step)

    def delete_first(*args: Any, **kwargs: Any) -> Any:
        for child in directory.iterdir():
            if child.name.isdigit():
                shutil.rmtree(child)
        time.sleep(0.05)
        return write(*args, **kwargs)

    previous: dict[str, Any] = {}

    def mixed(path: Any, arrays: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # One array is still the one of the step before.
        name = min(arrays)
        stale = {name: previous.get(name, arrays[name])}
        previous.update(arrays)
        return write(path, {**arrays, **stale}, *args, **kwargs)

    if how == "copy":
        RunDirectory.commit = copied  # type: ignore[method-assign]
    else:
        how_to_write: dict[str, Any] = {"delete-first": delete_first, "mixed": mixed}
        array_writer.write_arrays = how_to_write[how]


# --- the oracle ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Verdict:
    """What the oracle found after a kill.

    Attributes:
      losses, wrong, leftovers: sentences; none if all is well.
      num_states: restored and compared.
      num_linked: the steps there that share files with another one.
      num_host_linked: the steps there that share files of leaves on the host with another one.
    """

    losses: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    leftovers: list[str] = dataclasses.field(default_factory=list)
    num_states: int = 0
    num_linked: int = 0
    num_host_linked: int = 0


class Oracle:
    """Knows from the log what must be there, and computes what it must hold.

    Args:
      directory: of the run.
      log_path: of the log that the program writes.
      settings: how the program saves.
      make: makes the objects of the program, untrained.
    """

    def __init__(
        self,
        directory: Path,
        log_path: Path,
        settings: Settings = Settings(),
        make: Callable[[], Training] = Training,
    ) -> None:
        self._settings = settings
        self._make = make
        self._directory = directory
        self._log_path = log_path
        self._offset = 0
        self._durable: list[Key] = []  # one branch, oldest first
        self._begun: set[int] = set()  # branches begun since the newest durable step
        self._replay = make()
        self._states: dict[Key, list[Any]] = {(0, ()): self._replay.buffers()}
        self._digests: dict[Key, str] = {(0, ()): self._replay.digest()}

    def expected(self, step: int, lineage: Lineage) -> str:
        """The digest of the state after a step, trained again if need be."""
        wanted = (step, up_to(lineage, step))
        known = step
        while (known, up_to(lineage, known)) not in self._states:
            known -= 1
        if known < step:
            self._replay.set_buffers(self._states[known, up_to(lineage, known)])
        for number in range(known + 1, step + 1):
            self._replay.lineage = up_to(lineage, number)
            self._replay.train(number)
            key = (number, self._replay.lineage)
            self._states[key] = self._replay.buffers()
            self._digests[key] = self._replay.digest()
        return self._digests[wanted]

    def inspect(self, is_finished: bool = False) -> Verdict:
        """Compares the log and the directory."""
        verdict = Verdict()
        lines, self._offset = read_log(self._log_path, self._offset)
        for line in lines:
            self._take_in(line, verdict)
        self._restore_all(verdict)
        verdict.num_host_linked = num_host_linked(self._directory)
        for place in self._settings.places(self._directory):
            names = os.listdir(place) if place.exists() else []
            for prefix in ("writing-", "deleting-", "incoming-", "lease"):
                found = [name for name in names if name.startswith(prefix)]
                # A tier is cleaned up before the first save to it; not each program saves to both.
                is_clean = is_finished and not self._settings.has_local
                if len(found) > (0 if is_clean else 2):
                    verdict.leftovers.append(f"leftovers: {found}")
        return verdict

    def _take_in(self, line: dict[str, Any], verdict: Verdict) -> None:
        if line["what"] == "back":
            self._begun.add(line["branch"])
            return
        if line["what"] == "delete":
            self._durable = [d for d in self._durable if d[0] != line["step"]]
            return
        step = line["step"]
        lineage: Lineage = tuple((after, branch) for after, branch in line["lineage"])
        if line["digest"] != self.expected(step, lineage):
            verdict.wrong.append(f"{line['what']} at step {step}: not the state of that step")
        if line["what"] == "resumed":
            self._require_newest(step, lineage, "the program resumed from", verdict)
        else:
            self._note_durable(step, lineage)

    def _note_durable(self, step: int, lineage: Lineage) -> None:
        ancestors = [d for d in self._durable if d[0] < step and up_to(lineage, d[0]) == d[1]]
        self._durable = [*ancestors, (step, up_to(lineage, step))]
        self._begun.clear()

    def _require_newest(self, step: int, lineage: Lineage, subject: str, verdict: Verdict) -> None:
        if not self._durable or any(branch in self._begun for _, branch in lineage):
            return
        durable_step, durable_lineage = self._durable[-1]
        if step < durable_step or up_to(lineage, durable_step) != durable_lineage:
            verdict.losses.append(
                f"{subject} step {step} of {lineage}, but step {durable_step} of "
                f"{durable_lineage} had been reported durable"
            )

    def _restore_all(self, verdict: Verdict) -> None:
        reader = self._settings.opened(self._directory)
        restored = self._make()
        tiers: list[TierName] = ["durable", "local"]
        del tiers[len(self._settings.places(self._directory)) :]
        steps = sorted((step, tier) for tier in tiers for step in reader.all_steps(tier))
        newest: Key = (0, ())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if steps and not _attempt(lambda: restored.attach_to(reader), "attach", verdict):
                steps = []
        for step, tier in steps:
            restore = functools.partial(reader.restore, step, tier=tier)
            if not _attempt(restore, f"step {step} of the {tier} tier", verdict):
                continue
            verdict.num_states += 1
            newest = (step, restored.lineage)
            if restored.digest() != self.expected(*newest):
                verdict.wrong.append(f"step {step} of {restored.lineage}: wrong state")
        self._require_newest(*newest, "the newest that can be restored is", verdict)
        if newest[0] and not verdict.losses:
            self._note_durable(*newest)  # what was there once must stay


def num_host_linked(directory: Path) -> int:
    """The number of steps that share files of leaves on the host with another step."""
    steps: collections.Counter[int] = collections.Counter()  # file -> in how many steps it is
    found = []
    for manifest in directory.glob("[0-9]*/manifest/data.json"):
        files = set()
        for name, database in json.loads(manifest.read_text()).get("unchanged", {}).items():
            if "model/table" in database["xxh3_128"]:
                (folder,) = manifest.parents[1].glob(f"state/ocdbt.process_{name}*")
                files |= {path.stat().st_ino for path in folder.rglob("d/*")}
        steps.update(files)
        found.append(files)
    return sum(any(steps[file] > 1 for file in files) for files in found)


def _attempt(call: Callable[[], Any], what: str, verdict: Verdict) -> bool:
    try:
        call()
    except Exception as error:  # whatever it is, it is a finding
        verdict.wrong.append(f"{what} is listed, but cannot be restored: {str(error)[:200]}")
        return False
    return True
