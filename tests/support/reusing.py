"""A run whose saves reuse frozen leaves, on one process or on several.

The values of a leaf follow from its version. Beside the directory of a run, a file keeps the
versions that each step has, so that another program can go on and compare.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from support.compare import bits
from support.damage import flip_bit
from support.linked import aside, by_orbax, data_file, databases, files
from support.stages import Moment, fail_at
from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    load_torch_state_dict,
    policies,
)
from torchax_ckpt import torchax_backend as backend
from torchax_ckpt.errors import CorruptCheckpointError, SaveError
from torchax_ckpt.runtime.stages import Stage
from torchax_ckpt.saving.reuse import known
from torchax_ckpt.snapshot import snapshotter
from torchax_ckpt.storage.writing import array_writer

# The leaves on the devices, and how each lies on a mesh of data x model. All but the head are
# without gradients, and each save comes with another head. The layers are stored as a stack.
SPECS: dict[str, tuple[Any, ...]] = {
    "whole": (None,), "rows": ("model",), "sharded": ("data", "model"),
    "layers.0": ("data",), "layers.1": ("data",), "layers.2": ("data",), "head": (None,),
}  # fmt: skip
HOST = "table"  # a tensor on the CPU
SHAPES = {"whole": (256, 512), "rows": (256, 512), "sharded": (256, 512), HOST: (1024, 256)}
SHAPES |= {**{f"layers.{i}": (128, 128) for i in range(3)}, "head": (16, 16)}
FROZEN = frozenset(SPECS) - {"head"}
ALL = ("model.whole", "model/rows", "model/sharded", "model/layers", "model.table")  # to reuse
NBYTES = {leaf: 4 * rows * columns for leaf, (rows, columns) in SHAPES.items()}
LARGE = {SHAPES["whole"], SHAPES["layers.0"], (3, *SHAPES["layers.0"])}  # of frozen leaves
QUARTER = -1  # the version 0, but for the second quarter of the rows


@functools.lru_cache(maxsize=64)
def value(leaf: str, version: int) -> np.ndarray:
    """What a leaf holds in a version, as float32."""
    seeds = zlib.crc32(leaf.encode()), max(version, 0)
    found = np.random.default_rng(seeds).random(SHAPES[leaf], np.float32)
    if version == QUARTER:
        found[len(found) // 4 : len(found) // 2] += 1
    found.flags.writeable = False
    return found


class Run:
    """A program with its checkpointer, the versions of its leaves, and those that its steps hold.

    ``is_proof``: the identity of an array proves its values, as on TPUs. ``settings`` are those of
    ``CheckpointOptions``; by default all leaves but the head are named in ``reuse``. Attributes:
      saved: step -> the versions that it holds.
      reused: for each leaf, "whole" in the durable and "local whole" in the local tier, a character
        for each save to the tier: "w" where it has written the leaf, "x" where it has failed, "a"
        where it reused what is kept aside, and else the number of steps back to
        the newest step that had the files. Under "looked": "1" for each save that copied or fetched
        frozen leaves, else "0".
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: Any = None,
        local: Path | None = None,
        keep_local: int = 9,
        durable: Any = range(1, 100, 2),
        frozen: bool = True,
        is_proof: bool = False,
        own: Any = None,
        own_bytes: int = 0,
        **settings: Any,
    ) -> None:
        self.directory, self.local = directory, local
        self.keep, self.keep_local, self.durable = keep, keep_local, durable
        self.is_frozen, self.num_devices, self.moving = frozen, 8, {"head"}
        self.own, self.own_bytes = own, own_bytes  # what each process has, and how much of it
        self.settings = {"reuse": [*ALL], **settings}
        self.reused = collections.defaultdict[str, str](str)
        self._patch = pytest.MonkeyPatch()
        self._seen = _note_shapes(self._patch)
        if is_proof:
            self._patch.setattr(known, "is_proof", lambda array: isinstance(array, jax.Array))
        self._damaged: set[int] = set()  # files
        self._ends = contextlib.ExitStack()
        self._record = directory.with_suffix(".saved")
        self.saved: dict[int, dict[str, int]] = {}
        if self._record.exists():
            read = json.loads(self._record.read_text())
            self.saved = {int(step): versions for step, versions in read.items()}
        numbers = (n for versions in self.saved.values() for n in versions.values())
        self._numbers = itertools.count(max(numbers, default=0) + 1)
        self.open()

    # --- the program ---

    def open(self) -> None:
        """Starts the program: it resumes from the newest step."""
        policy = policies.LatestN(self.keep) if isinstance(self.keep, int) else self.keep
        every, durable = policies.FixedIntervalPolicy(1), policies.SpecificStepsPolicy
        local = None
        if self.local is not None:
            local = LocalTier(self.local, save_decision_policy=every, keep=self.keep_local)
        self.ckpt = TorchaxCheckpointer(
            self.directory,
            save_decision_policy=every if local is None else durable(tuple(self.durable)),
            preservation_policy=policy or policies.PreserveAll(),
            local=local,
            options=CheckpointOptions(**self.settings),
        )
        devices = np.array(jax.devices()[: self.num_devices])
        self._mesh = Mesh(devices.reshape(-1, 2), ("data", "model"))
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.Module()
        for leaf in SPECS:
            self._put(leaf, 0, "parameter")
        with backend.native_torch():
            self.model.register_buffer(HOST, torch.from_numpy(value(HOST, 0).copy()))
        self._continue(self.ckpt.attach(self.model, stateful=self.own))

    def _continue(self, step: int) -> None:
        self.step = step
        self.versions = dict(self.saved[step]) if step else dict.fromkeys(SHAPES, 0)
        for leaf, version in self.versions.items():
            assert self._holds(leaf, version), (step, leaf)

    def _holds(self, leaf: str, version: int) -> bool:
        expected = value(leaf, version)
        if leaf == HOST:
            return bits(self.model.get_buffer(leaf))[-1] == expected.tobytes()
        shards = backend.buffer(self.model.get_parameter(leaf)).addressable_shards
        return all(np.asarray(s.data).tobytes() == expected[s.index].tobytes() for s in shards)

    def _put(self, leaf: str, version: int, how: str = "training") -> None:
        """Gives a leaf values: as training does, or by other data, or by another parameter."""
        if leaf == HOST:
            with backend.native_torch():
                self.model.get_buffer(leaf).numpy()[...] = value(leaf, version)
            return
        sharding = NamedSharding(self._mesh, PartitionSpec(*SPECS[leaf]))
        host = value(leaf, version)
        array = jax.make_array_from_callback(host.shape, sharding, lambda i: host[i].copy())
        folder, _, name = leaf.rpartition(".")
        if how == "training":
            backend.set_buffer(self.model.get_parameter(leaf), array)
        elif how == "data":
            self.model.get_parameter(leaf).data = backend.wrap(array)
        else:
            needs_grad = not (self.is_frozen and leaf in FROZEN)
            parameter = torch.nn.Parameter(backend.wrap(array), requires_grad=needs_grad)
            self.model.get_submodule(folder).register_parameter(name, parameter)

    # --- what it does ---

    def change(self, *leaves: str, how: str = "training") -> None:
        """Gives leaves values that they never had; the tensor on the CPU changes in place."""
        version = next(self._numbers)
        for leaf in leaves:
            self.versions[leaf] = version
            self._put(leaf, version, how)

    def renew(self, *leaves: str) -> None:
        """Replaces arrays by others with the same values."""
        for leaf in leaves:
            self._put(leaf, self.versions[leaf])

    def save(self, times: int = 1, *, changing: str = "", **metrics: float) -> None:
        """Saves steps; the leaf ``changing`` changes as soon as the call returns."""
        places = {"durable": self.directory}
        places |= {"local": self.local} if self.local else {}
        for _ in range(times):
            self.step += 1
            self.change(*sorted(self.moving))
            before = {tier: _known(place) for tier, place in places.items()}
            self._seen.clear()
            assert self.ckpt.save(self.step, metrics=metrics or None, force=self.local is None)
            versions = dict(self.versions)
            if changing:
                self.change(changing)
            try:
                self.ckpt.wait_until_finished()
            except SaveError:
                for tier, leaf in itertools.product(places, SHAPES):
                    self.reused[_key(tier, leaf)] += "x"
                raise
            finally:
                self.reused["looked"] += str(int(not LARGE.isdisjoint(self._seen)))
            self.saved[self.step] = versions
            if jax.process_index() == 0:
                self._record.write_text(json.dumps(self.saved))
            for tier, place in places.items():
                if tier == "local" or jax.process_index() == 0:
                    self._look(tier, place, before[tier])

    def _look(self, tier: str, place: Path, before: dict[int, int]) -> None:
        """Notes what the step just saved has of earlier ones; it may share nothing with the last.

        ``before`` has the newest step that had each file before the save, 0 for a file aside.
        """
        if self.step not in (steps := self.ckpt.all_steps(tier)):  # type: ignore[arg-type]
            return
        mine = files(place, self.step)
        for other in steps[-2:-1]:
            assert not mine & files(place, other), f"step {self.step} shares files with {other}"
        assert not mine & aside(place)
        stored = databases(place, self.step)
        for leaf in SHAPES:
            of_leaf = next((found for leaves, found in stored if f"model/{leaf}" in leaves), set())
            if not of_leaf or of_leaf.isdisjoint(before):
                char = "w"
            else:
                newest = {before[file] for file in of_leaf}  # of all or of none
                char = str(self.step - max(newest)) if any(newest) else "a"
            self.reused[_key(tier, leaf)] += char
        paths = (place / str(self.step) / "state").rglob("d/*")
        sizes = {path.stat().st_ino: path.stat().st_size for path in paths}
        new_bytes = sum(size for file, size in sizes.items() if file not in before)
        written = sum(NBYTES[leaf] for leaf in SHAPES if self.reused[_key(tier, leaf)][-1] == "w")
        written += self.own_bytes
        assert 0.8 * written < new_bytes < written + (64 << 10), (self.step, written, new_bytes)

    def fail(
        self, number: int = errno.ENOSPC, stage: Stage = "mark the step", when: Moment = "before"
    ) -> str:
        """Has the save of a step fail on this process; returns what the error says."""
        return self.failed(fail_at(stage, OSError(number, os.strerror(number)), when=when))

    def failed(self, stop: Callable[[], None] = lambda: None) -> str:
        """Saves a step, expects that this fails, and calls ``stop``; returns what the error says"""
        try:
            self.save()
        except SaveError as error:
            with contextlib.suppress(SaveError):  # of the other tier
                self.ckpt.wait_until_finished()
            return str(error)
        finally:
            stop()
        raise AssertionError(f"step {self.step} did not fail")

    def restart(self, *, devices: int = 0, frozen: bool | None = None, **settings: Any) -> None:
        """Ends the program, and starts it again, perhaps with other settings."""
        self.end()
        self.num_devices = devices or self.num_devices
        self.is_frozen = self.is_frozen if frozen is None else frozen
        self.settings |= settings
        self.open()

    def end(self) -> None:
        try:
            self.ckpt.close()
        except SaveError:  # of the newest save
            assert self.reused["whole"].endswith("x")

    def flip(self, step: int) -> None:
        """Flips a bit in what a step has of the frozen leaves."""
        path = data_file(self.directory, step)
        flip_bit(path, path.stat().st_size // 2)
        self._damaged.add(path.stat().st_ino)
        self._ends.enter_context(path.open())  # so that no other file gets its number

    def back(self, step: int) -> None:
        """Goes back to a step, from which the run goes on."""
        self.ckpt.restore(step)
        self._continue(step)

    # --- what its steps hold ---

    def check(
        self,
        *steps: int,
        tier: str = "durable",
        by_others: bool = False,
        on_other_devices: bool = True,
    ) -> None:
        """Asserts that steps, by default all, hold what was saved, or are known to be damaged.

        ``by_others``: Orbax alone reads them too; ``on_other_devices``: as in ``by_orbax``.
        """
        place = self.directory if tier == "durable" else self.local
        assert place is not None
        for step in steps or _steps(place):
            if self._damaged & files(place, step):
                with pytest.raises(CorruptCheckpointError, match="model/(whole|rows|sharded)"):
                    load_torch_state_dict(place, step)
                continue
            expected = {n: value(n, v).tobytes() for n, v in self.saved[step].items()}
            loaded = load_torch_state_dict(place, step)
            assert {n: bits(tensor)[-1] for n, tensor in loaded.items()} == expected, step
            if not by_others:
                continue
            for arrays in by_orbax(place, step, on_other_devices=on_other_devices):
                assert {n: arrays[f"model/{n}"].tobytes() for n in expected} == expected, step

    def check_each_alone(self, tier: str = "durable") -> None:
        """Ends the program; deletes the steps from the oldest on, and reads what is left."""
        self.end()
        place = self.directory if tier == "durable" else self.local
        assert place is not None
        shutil.rmtree(place / "unchanged", ignore_errors=True)
        for step in (steps := _steps(place)):
            is_last = step == steps[-1]
            self.check(step, tier=tier, by_others=is_last, on_other_devices=False)
            shutil.rmtree(place / str(step))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self.end()
        self._ends.close()


def _key(tier: str, leaf: str) -> str:
    return leaf if tier == "durable" else f"{tier} {leaf}"


def _known(place: Path) -> dict[int, int]:
    """The newest step that has each file of arrays, 0 for those that are kept aside."""
    known = dict.fromkeys(aside(place), 0)
    return known | {file: step for step in _steps(place) for file in files(place, step)}


def _steps(place: Path) -> list[int]:
    return sorted(int(path.name) for path in place.glob("[0-9]*") if path.name.isdecimal())


def _note_shapes(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the arrays that saves copy or fetch from the devices, a list that grows."""
    shapes: list[tuple[int, ...]] = []
    execute, start, to_compare = (
        snapshotter.execute,
        array_writer._start_fetch,
        array_writer.parts_to_compare,
    )

    def copied(plan: Any, leaves: Any, **settings: Any) -> Any:
        shapes.extend(leaf.shape for leaf in leaves.values())
        return execute(plan, leaves, **settings)

    def fetched(array: Any, *scratch: Any) -> Any:
        shapes.append(array.shape)
        return start(array, *scratch)

    def compared(array: Any) -> Any:
        shapes.append(array.shape)
        return to_compare(array)

    patch.setattr(snapshotter, "execute", copied)
    patch.setattr(array_writer, "_start_fetch", fetched)
    patch.setattr(array_writer, "parts_to_compare", compared)
    return shapes
