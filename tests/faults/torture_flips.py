"""Flips single bits of a checkpoint, one at a time, and looks at what comes back.

    python tests/faults/torture_flips.py --flips 2000

A flip is *detected* if reading the step raises (or the step is no longer offered), *harmless* if
everything that comes back is what was saved: functional state and every attached object to the bit
(a sharded module with a tie and extra state, its optimizer, a scheduler, a loader, random state),
the metrics, and what there is to say of the step: its time, versions, leaves and their shardings,
and Orbax's own record. Anything else is *wrong*. Checkpoints of both layouts, compressed by each
codec and not; every file of the steps is hit. A third of the flips hit runs whose steps share files
(``flips_shared.py``). With ``--reader orbax`` the flips of the former are read by bare Orbax, which
shows that wrong ones are found.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import collections
import itertools
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import flips_shared
import jax
import numpy as np
import torch
import torchax
from flips_shared import flip
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.cli import show
from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.options import Codec
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep

# Everything attached; functional state, in place of modules and optimizers.
ATTACHED, FUNCTIONAL = STEPS = (7, 8)
KINDS: list[tuple[Any, Any]] = [*itertools.product(("auto", "flat"), (False, *get_args(Codec)))]
METRICS = {"loss": 0.125, "note": "as written"}
Read = Callable[[Path], Any]


def state() -> dict[str, Any]:
    """Sharded, replicated, stacked and host leaves, and values that stand in the manifest."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    generator = np.random.default_rng(0)

    def array(*shape: int, spec: PartitionSpec, dtype: str = "float32") -> jax.Array:
        host = generator.standard_normal(shape).astype(dtype)
        return jax.device_put(host, NamedSharding(mesh, spec))

    layers = {
        str(i): {"w": array(16, 8, spec=PartitionSpec("fsdp")), "b": array(8, spec=PartitionSpec())}
        for i in range(6)
    }
    return {
        "layers": layers,
        "embedding": array(64, 32, spec=PartitionSpec(None, "fsdp"), dtype="bfloat16"),
        "host": generator.integers(0, 2**62, 33),
        "step": np.array(5, np.int64),
        "settings": {"lr": 3e-4, "name": "adamw", "betas": (0.9, 0.999), "none": None},
    }


def fingerprint(value: Any) -> Any:
    """Structure, types and bytes of a tree."""
    if isinstance(value, dict):
        return {key: fingerprint(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [fingerprint(child) for child in value])
    if isinstance(value, torch.Tensor):
        is_on_device = torchax_backend.is_device_tensor(value)
        return (
            "torch",
            fingerprint(torchax_backend.buffer(value) if is_on_device else value.numpy()),
        )
    if isinstance(value, jax.Array):
        host = np.asarray(value)
        return ("jax", str(value.sharding), str(host.dtype), host.shape, host.tobytes())
    if isinstance(value, np.ndarray):
        return ("numpy", str(value.dtype), value.shape, value.tobytes())
    return repr(value)


class Body(torch.nn.Module):
    """Equal layers, a tied head, a buffer, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.register_buffer("scale", torch.ones(4))
        self.extra: Any = {"epoch": 0}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Live:
    """The objects of a run, in a state that depends on a seed; restoring must change all of it."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        env = torchax.default_env()
        env.manual_seed(seed)
        self.module = Body().to("jax")
        self.module.head.weight = self.module.embedding.weight
        self.module.extra = {"epoch": seed, "seen": torch.full((3,), seed)}
        mesh = Mesh(np.array(jax.devices()), ("fsdp",))
        rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        for parameter in self.module.parameters():
            torchax_backend.set_buffer(
                parameter, jax.device_put(torchax_backend.buffer(parameter), rows)
            )
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1 / (seed + 1))
        self.optimizer.step()
        for parameter in self.module.parameters():  # as they come back, whatever torch makes them
            for moment in filter(
                torchax_backend.is_device_tensor, self.optimizer.state[parameter].values()
            ):
                torchax_backend.set_buffer(
                    moment, jax.device_put(torchax_backend.buffer(moment), rows)
                )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.loader = StatefulDataLoader(list(range(40)), 4, shuffle=True)
        batches = iter(self.loader)
        for _ in range(seed):
            next(batches)
            self.scheduler.step()

    def attach(self, ckpt: TorchaxCheckpointer, *, resume: bool) -> None:
        ckpt.attach(
            self.module,
            self.optimizer,
            lr_scheduler=self.scheduler,
            dataloader=self.loader,
            resume=resume,
        )

    def fingerprint(self) -> Any:
        """All of it, and the random state of the process."""
        scheduler = {k: v for k, v in vars(self.scheduler).items() if k != "optimizer"}
        with torchax_backend.native_torch():
            torch_random = torch.get_rng_state()
        return fingerprint(
            {
                "module": dict(self.module.named_parameters(remove_duplicate=False)),
                "buffers": dict(self.module.named_buffers()),
                "extra": self.module.extra,
                "is_tied": self.module.head.weight is self.module.embedding.weight,
                "groups": [
                    {k: v for k, v in group.items() if k != "params"}
                    for group in self.optimizer.param_groups
                ],
                "moments": [self.optimizer.state[p] for p in self.module.parameters()],
                "scheduler": {k: v for k, v in scheduler.items() if not callable(v)},
                "loader": self.loader.state_dict(),
                "random": [
                    random.getstate(),
                    np.random.get_state(legacy=False),
                    torch_random,
                    torchax_backend.prng_key(),
                ],
            }
        )


def by_torchax_ckpt(directory: Path) -> Any:
    """Everything that this library gives of the steps; raises where it says that one is damaged."""
    run = RunDirectory(directory, read_only=True)
    found: dict[str, Any] = {"shown": show.steps_of(run)}
    for step in STEPS:
        ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True))
        live = Live(seed=3)
        live.attach(ckpt, resume=False)
        ckpt.restore(step)
        committed = run.find(step)
        stored = StoredStep(committed)
        found[str(step)] = {
            "steps": ckpt.all_steps(),
            "live": live.fingerprint(),
            "loaded": fingerprint(ckpt.load(step)),
            "metrics": ckpt.metrics(step),
            "commit time": committed.commit_timestamp_nsecs,
            "versions": dict(stored.manifest.versions),
            "leaves": dict(stored.leaves),
            "shardings": dict(stored.shardings),
            "record": _orbax_record(directory / str(step)),
        }
    return found


def by_orbax(directory: Path) -> Any:
    """Everything that bare Orbax gives of the steps."""
    return [_one_by_orbax(directory / str(step)) for step in STEPS]


def _one_by_orbax(path: Path) -> Any:
    found = ocp.checkpointables_metadata(path).metadata["state"]
    context = ocp.Context()
    abstract = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), found)
    with context:
        items = ocp.load_checkpointables(
            path, {"state": abstract, "manifest": None, "summary": None}
        )
    names = ("state", "manifest", "summary")
    return [fingerprint({name: items[name] for name in names}), _orbax_record(path)]


def _orbax_record(path: Path) -> Any:
    found = ocp.checkpointables_metadata(path)
    return [found.init_timestamp_nsecs, found.commit_timestamp_nsecs, found.custom_metadata]


def checkpoints(root: Path) -> Iterator[tuple[str, Path]]:
    """One checkpoint for each layout and codec."""
    for layout, codec in KINDS:
        name = f"{layout}, {codec}" if codec else layout
        directory = root / name.replace(", ", "-")
        options = CheckpointOptions(layout=layout, compression=codec)
        with TorchaxCheckpointer(directory, options=options) as ckpt:
            Live(seed=1).attach(ckpt, resume=False)
            ckpt.save(ATTACHED, metrics=METRICS, force=True)
            ckpt.save(FUNCTIONAL, state=state(), metrics=METRICS, force=True)
        yield name, directory


def outcome(read: Read, directory: Path, expected: Any) -> str:
    """What reading a damaged checkpoint comes to."""
    try:
        found = read(directory)
    except CheckpointError:
        return "detected"
    except Exception as error:
        # Bare Orbax has no errors of its own; from this library any other error is a defect.
        return "detected" if read is by_orbax else f"crashed: {type(error).__name__}"
    return "harmless" if found == expected else "wrong"


def torture(read: Read, root: Path, flips: int, seed: int) -> dict[str, collections.Counter[str]]:
    """Outcomes of so many flips in each checkpoint; every file gets its share of them."""
    generator = random.Random(seed)
    table: dict[str, collections.Counter[str]] = {}
    for name, directory in checkpoints(root):
        table[name] = collections.Counter()
        expected = read(directory)
        if read is by_torchax_ckpt:
            restored, was = expected[str(ATTACHED)]["live"], Live(seed=1).fingerprint()
            differing = [part for part in was if restored[part] != was[part]]
            assert not differing, f"{differing}: what comes back undamaged is not what was saved"
        every = [p for step in STEPS for p in (directory / str(step)).rglob("*")]
        files = [p for p in every if p.is_file() and p.stat().st_size]
        generator.shuffle(files)
        for turn in range(flips):
            path = files[turn % len(files)]
            bit = generator.randrange(8 * path.stat().st_size)
            flip(path, bit)
            result = outcome(read, directory, expected)
            table[name][result] += 1
            if result not in ("detected", "harmless") and read is by_torchax_ckpt:
                print(f"{result}: bit {bit} of {path.relative_to(directory)}", flush=True)
            flip(path, bit)
        assert read(directory) == expected, "the checkpoint was not put back together"
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=("torchax_ckpt", "orbax"), default="torchax_ckpt")
    parser.add_argument(
        "--only", choices=("own", "shared"), help="runs whose steps have files of their own, or not"
    )
    args = parser.parse_args()
    torchax.enable_globally()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    read = by_torchax_ckpt if args.reader == "torchax_ckpt" else by_orbax
    with tempfile.TemporaryDirectory() as root:
        has_own = args.only != "shared"
        has_shared = args.only != "own" and read is by_torchax_ckpt
        num_kinds = has_own * len(KINDS) + has_shared * len(flips_shared.CODECS)
        table: dict[str, collections.Counter[str]] = {}
        if has_own:
            table |= torture(read, Path(root), args.flips // num_kinds, args.seed)
        if has_shared:
            table |= flips_shared.torture(Path(root), args.flips // num_kinds, args.seed)
    kinds = ["detected", "harmless", *sorted({k for c in table.values() for k in c})]
    kinds = list(dict.fromkeys([*kinds, "wrong"]))
    print(f"{'checkpoint':20}" + "".join(f"{kind:>12}" for kind in kinds))
    for name, counts in table.items():
        print(f"{name:20}" + "".join(f"{counts[kind]:12}" for kind in kinds))
    bad = sum(n for c in table.values() for kind, n in c.items() if kind not in kinds[:2])
    print(f"{bad} flips went wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
