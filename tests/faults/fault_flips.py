"""Flips single bits of a run's steps, one at a time, and looks at what comes back.

A flip is *detected* if reading the step raises (or the step is no longer offered), *harmless* if
everything that comes back is what was saved: functional state and every attached object to the bit
(``live.py``), the metrics, what the commands ``ls`` and ``show`` say, and Orbax's own record.
Anything else is *wrong*. Runs of both layouts, compressed by each codec and not; every file of the
steps is hit.

Runs with ``reuse=True`` store what is frozen in two copies, which their four steps take in turn as
hard links; every second flip hits such a file. Then all steps that have the file detect the
flip or give what was saved, and ``verify`` of each that detects it names the others; other steps
give what was saved; and a start resumes from the newest step left, which has the other copy.

Weakened, the flips of the former runs are read by bare Orbax.
"""

from __future__ import annotations

import argparse
import itertools
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax
import numpy as np
import torchax
from live import BASE_BYTES, Live, command, sharding_of
from make_golden import functional_state
from orbax.checkpoint import v1 as ocp
from support.damage import flip_bit
from support.strategies import fingerprint

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError
from torchax_ckpt.options import Codec

if TYPE_CHECKING:
    from torture import Torture

WRONG = "flips that went wrong"
FINDINGS = (WRONG,)
WEAKENINGS = ("orbax",)
CODECS: tuple[Any, ...] = (False, *get_args(Codec))
METRICS = {"loss": 0.125, "note": "as written"}
SHARING_STEPS = (1, 2, 3, 4)
# Everything attached; and functional state, in place of modules and optimizers.
ATTACHED, FUNCTIONAL = OWN_STEPS = (7, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", choices=("own", "shared"), default=("own", "shared"))


def torture(torture: Torture) -> None:
    """Flips so many bits, as many in a run of each kind."""
    torchax.enable_globally()
    by_orbax = bool(torture.given.weakened)
    kinds = [
        *(("own", *kind) for kind in itertools.product(("auto", "flat"), CODECS)),
        *(("shared", "auto", codec) for codec in CODECS if not by_orbax),
    ]
    kinds = [kind for kind in kinds if kind[0] in torture.given.only]
    for whose, layout, codec in kinds:
        name = f"{whose}, {layout}, {codec or 'uncompressed'}"
        run = Run(torture.scratch / name.replace(", ", "-"), whose, layout, codec, by_orbax)
        source = random.Random(f"{torture.given.seed}/{name}")
        source.shuffle(files := run.files())
        shared = [path for path in files if path.stat().st_nlink > 1]
        for turn in range(torture.given.count // len(kinds)):
            among = shared if shared and turn % 2 else files
            path = among[turn // (1 + bool(shared)) % len(among)]
            bit = source.randrange(8 * path.stat().st_size)
            flip_bit(path, bit // 8, bit % 8)
            outcome = run.outcome(path)
            flip_bit(path, bit // 8, bit % 8)
            torture.count("flipped bits", part=outcome)
            torture.count(name, part=f"{outcome}: {name}")
            if outcome not in ("detected", "harmless"):
                where = f"{name}: bit {bit} of {path.relative_to(run.directory)}"
                torture.find({WRONG: [outcome]}, where)
        assert run.is_whole(), "not put back together"


class Run:
    """A run whose steps are read again and again."""

    def __init__(
        self, directory: Path, whose: str, layout: Any, codec: Any, by_orbax: bool
    ) -> None:
        self.directory = directory
        self._is_sharing = whose == "shared"
        self._steps = SHARING_STEPS if self._is_sharing else OWN_STEPS
        self._read = read_by_orbax if by_orbax else self._read_by_package
        self._base_bytes = BASE_BYTES if self._is_sharing else 64
        options = CheckpointOptions(reuse=self._is_sharing, compression=codec, layout=layout)
        keep, live = policies.PreserveAll(), Live(1, 1, self._base_bytes)
        saved = {}
        with TorchaxCheckpointer(directory, preservation_policy=keep, options=options) as ckpt:
            live.attach_to(ckpt, resume=False)
            for step in self._steps:
                state = functional_state() if step == FUNCTIONAL else None
                ckpt.save(step, state=state, metrics=METRICS, force=True)
                ckpt.wait_until_finished()
                saved[step] = live.fingerprint()
                live.train()
        self._files = {
            step: [p for p in sorted((directory / str(step)).rglob("*")) if p.is_file()]
            for step in self._steps
        }
        self._expected = {step: self._read(directory, step) for step in self._steps}
        self._expected_list = self._list()
        for step in (s for s in self._steps if s != FUNCTIONAL and not by_orbax):
            assert self._expected[step]["live"] == saved[step], "not what was saved"
        nodes = {step: {p.stat().st_ino for p in paths} for step, paths in self._files.items()}
        pairs = {(a, b) for a, b in itertools.combinations(self._steps, 2) if nodes[a] & nodes[b]}
        assert pairs == ({(1, 3), (2, 4)} if self._is_sharing else set()), pairs

    def is_whole(self) -> bool:
        return all(self._outcome(step) == "harmless" for step in self._steps)

    def files(self) -> list[Path]:
        """Every file that has a bit, as often as steps have it."""
        return [p for step in self._steps for p in self._files[step] if p.stat().st_size]

    def outcome(self, damaged: Path) -> str:
        """What damage in a file comes to, for all steps."""
        node = damaged.stat().st_ino
        sharing = [s for s in self._steps if node in {p.stat().st_ino for p in self._files[s]}]
        found = {step: self._outcome(step) for step in self._steps}
        for outcome in found.values():
            if outcome not in ("detected", "harmless"):
                return outcome
        if any(found[step] == "detected" for step in self._steps if step not in sharing):
            return "found in another step"
        outcomes = {found[step] for step in sharing}
        if outcomes == {"harmless"}:
            return "harmless" if self._list() == self._expected_list else "wrong"
        if len(outcomes) > 1:
            return "not found in each"
        if not self._is_sharing:
            return "detected"
        if not all(self._names(step, sharing) for step in sharing):
            return "not named"
        return "detected" if self._resumes(sharing) else "wrong start"

    def _outcome(self, step: int) -> str:
        try:
            found = self._read(self.directory, step)
        except CheckpointError:
            return "detected"
        except Exception as error:
            # Bare Orbax has no errors of its own; from this library any other error is a defect.
            is_bare = self._read is read_by_orbax
            return "detected" if is_bare else f"crashed: {type(error).__name__}"
        return "harmless" if found == self._expected[step] else "wrong"

    def _list(self) -> Any:
        """What the run says of its steps together; of a damaged one it may say less."""
        return self._opened().all_steps(), command("ls", self.directory)["steps"]

    def _opened(self) -> TorchaxCheckpointer:
        return TorchaxCheckpointer(self.directory, options=CheckpointOptions(read_only=True))

    def _read_by_package(self, directory: Path, step: int) -> dict[str, Any]:
        """Everything that this package gives of a step; raises where it says it is damaged."""
        ckpt, live = self._opened(), Live(5, 0, self._base_bytes)
        live.attach_to(ckpt, resume=False)
        ckpt.restore(step)
        loaded = ckpt.load(step)
        found = {
            "live": live.fingerprint(),
            "loaded": fingerprint(loaded),
            "shardings": jax.tree.map(sharding_of, {**loaded, "stateful": None}),
            "metrics": ckpt.metrics(step),
        }
        if not self._is_sharing:  # verify, which must find what is found, reads less than these
            listed = [s for s in command("ls", directory)["steps"] if s["step"] == step]
            found["listed"] = [s | {"kept_by": None} for s in listed]  # depends on other steps
            found["shown"] = command("show", directory, step)
            found["record"] = record(directory / str(step))
        return found

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
        live = Live(5, 0, self._base_bytes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                step = live.attach_to(self._opened())
            except CheckpointError:
                return False
        left = max(set(self._steps) - set(damaged))
        return step == left and live.fingerprint() == self._expected[step]["live"]


def record(path: Path) -> Any:
    """Orbax's own record of a step."""
    found = ocp.checkpointables_metadata(path)
    return [found.init_timestamp_nsecs, found.commit_timestamp_nsecs, found.custom_metadata]


def read_by_orbax(directory: Path, step: int) -> Any:
    """Everything that bare Orbax gives of a step."""
    path = directory / str(step)
    found = ocp.checkpointables_metadata(path).metadata["state"]
    abstract = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), found)
    wanted = {"state": abstract, "manifest": None, "summary": None}
    items = ocp.load_checkpointables(path, wanted)
    return [fingerprint({name: items[name] for name in wanted}), record(path)]
