"""Flips bits in steps that share files, for ``torture_flips.py``.

A run with ``CheckpointOptions(reuse=True)`` stores what does not change in two copies, which its
steps take in turn as hard links. A bit that is flipped in a file of one step is flipped in every
step that has the file. For each flip every step is read:

- a step that has the file detects the flip, or gives what was saved; all that have it do the same;
- a step that has not gives what was saved;
- ``verify`` of each step that detects it names the others;
- a start resumes from the newest step that is left, which has the other copy.
"""

from __future__ import annotations

import collections
import os
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from killed_run import BASE_ELEMENTS, Training

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError

CODECS: tuple[Any, ...] = (False, True, "zstd", "blosc-zstd")
STEPS = (1, 2, 3, 4)


def flip(path: Path, bit: int) -> None:
    """Inverts one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (octet,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([octet ^ (1 << bit % 8)]))


def octets(tensor: Any) -> bytes:
    """The bytes of a tensor on a device or on the host."""
    if torchax_backend.is_device_tensor(tensor):
        tensor = torchax_backend.buffer(tensor)
    return np.asarray(tensor).tobytes()


class SharingRun:
    """A run of four steps with frozen weights, of which every other step shares files.

    Args:
      directory: of the run.
      codec: how its arrays are compressed.
    """

    def __init__(self, directory: Path, codec: Any) -> None:
        self.directory = directory
        options = CheckpointOptions(reuse=True, compression=codec)
        keep = policies.PreserveAll()
        training = Training()
        base = np.random.default_rng(0).standard_normal(BASE_ELEMENTS).astype(np.float32)
        torchax_backend.set_buffer(training.model.base, jax.device_put(base))
        self._saved: dict[int, Any] = {}
        with TorchaxCheckpointer(directory, preservation_policy=keep, options=options) as ckpt:
            training.attach_to(ckpt)
            for step in STEPS:
                training.train(step)
                ckpt.save(step, force=True, metrics={"loss": step / 8})
                ckpt.wait_until_finished()
                self._saved[step] = [training.digest(), {"loss": step / 8}]
        inodes = [{path.stat().st_ino for path in self._files(step)} for step in STEPS]
        shared = {(a, b): inodes[a] & inodes[b] for a in range(4) for b in range(a)}
        assert {pair for pair, both in shared.items() if both} == {(2, 0), (3, 1)}, shared
        self._expected = {step: self._read(step) for step in STEPS}
        for step in STEPS:
            assert self._expected[step][:2] == self._saved[step], step

    def _files(self, step: int) -> list[Path]:
        found = (self.directory / str(step)).rglob("*")
        return sorted(path for path in found if path.is_file() and path.stat().st_size)

    def _opened(self) -> TorchaxCheckpointer:
        return TorchaxCheckpointer(self.directory, options=CheckpointOptions(read_only=True))

    def _read(self, step: int) -> list[Any]:
        """All that a step gives."""
        ckpt, training = self._opened(), Training()
        ckpt.attach(
            training.model, training.optimizer, stateful={"training": training}, resume=False
        )
        ckpt.restore(step)
        loaded = jax.tree.map(octets, ckpt.load(step)["model"])
        return [training.digest(), ckpt.metrics(step), training.lineage, loaded]

    def _outcome(self, step: int) -> str:
        try:
            found = self._read(step)
        except CheckpointError:
            return "detected"
        except Exception as error:
            return f"crashed: {type(error).__name__}"
        return "harmless" if found == self._expected[step] else "wrong"

    def torture(self, num_flips: int, source: random.Random) -> collections.Counter[str]:
        """Flips bits one at a time; every second in a file that steps share. Returns outcomes."""
        files = [path for step in STEPS for path in self._files(step)]
        source.shuffle(files)
        shared = [path for path in files if path.stat().st_nlink > 1]
        outcomes: collections.Counter[str] = collections.Counter()
        for turn in range(num_flips):
            among = shared if turn % 2 else files
            path = among[turn // 2 % len(among)]
            bit = source.randrange(8 * path.stat().st_size)
            flip(path, bit)
            outcome = self._judged(path.stat().st_ino)
            outcomes[outcome] += 1
            if outcome not in ("detected", "harmless"):
                print(f"{outcome}: bit {bit} of {path.relative_to(self.directory)}", flush=True)
            flip(path, bit)
        assert {step: self._read(step) for step in STEPS} == self._expected, "not put back together"
        return outcomes

    def _judged(self, inode: int) -> str:
        """What one flip in a file comes to, for all steps."""
        sharing = [step for step in STEPS if inode in {p.stat().st_ino for p in self._files(step)}]
        found = {step: self._outcome(step) for step in STEPS}
        for outcome in found.values():
            if outcome not in ("detected", "harmless"):
                return outcome
        if any(found[step] == "detected" for step in STEPS if step not in sharing):
            return "found in another step"
        outcomes = {found[step] for step in sharing}
        if outcomes == {"harmless"}:
            return "harmless"
        if len(outcomes) > 1:
            return "not found in each"
        if not all(self._names(step, sharing) for step in sharing):
            return "not named"
        return "detected" if self._resumes(sharing) else "wrong start"

    def _names(self, step: int, sharing: Sequence[int]) -> bool:
        """Whether ``verify`` of a step finds damage, and names the others that have it."""
        try:
            self._opened().verify(step)
        except CorruptCheckpointError as error:
            others = ", ".join(str(other) for other in sharing if other != step)
            return not others or f"damaged too: {others}." in str(error)
        return False

    def _resumes(self, damaged: Sequence[int]) -> bool:
        """Whether a start resumes from the newest other step, as it was saved."""
        training = Training()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                step = training.attach_to(self._opened())
            except CheckpointError:
                return False
        left = max(set(STEPS) - set(damaged))
        return step == left and training.digest() == self._expected[step][0]


def torture(root: Path, num_flips: int, seed: int) -> dict[str, collections.Counter[str]]:
    """Outcomes of as many flips in a run of each codec."""
    table = {}
    for codec in CODECS:
        name = f"shared, {codec}" if codec else "shared"
        run = SharingRun(root / name.replace(", ", "-"), codec)
        table[name] = run.torture(num_flips, random.Random(f"{seed}/{os.fspath(name)}"))
    return table
