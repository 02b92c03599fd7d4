"""Writes the golden checkpoints of the present format version.

    python tests/make_golden.py

Those that are there are left alone: later releases must read what lies here, and never write it
again.
"""

from __future__ import annotations

import os

from support import TESTS

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
import torch
import torchax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import golden

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.formats.importing import import_weights
from torchax_ckpt.formats.safetensors_io import open_safetensors
from torchax_ckpt.layout.manifest import VERSION
from torchax_ckpt.options import Codec
from torchax_ckpt.storage.directory import commit_record, run_identity

GOLDEN = TESTS / "golden"
STEP = 3
KINDS: dict[str, CheckpointOptions] = {
    "attached": CheckpointOptions(),
    "stacked": CheckpointOptions(),
    "flat": CheckpointOptions(layout="flat"),
    "compressed": CheckpointOptions(compression="zstd"),
}
METRICS = {"loss": 0.25, "note": "golden", "history": [1, None, True]}


def model() -> torch.nn.Module:
    """Three equal layers, a head and a buffer."""
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    module = torch.nn.Sequential(torch.nn.Embedding(16, 8), *layers, torch.nn.Linear(8, 16))
    module.register_buffer("scale", torch.ones(4))
    return module.to("jax")


class Tied(torch.nn.Module):
    """A head that is the embedding, a buffer by two names, and extra state at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.body = WithExtraState()
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.register_buffer("scale", torch.ones(4))

    def get_extra_state(self) -> Any:
        return {"epoch": 3, "seen": (1, None, "x")}

    def set_extra_state(self, state: Any) -> None:
        assert state == self.get_extra_state()


class WithExtraState(torch.nn.Linear):
    """A layer that counts."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.count = 5

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def tied() -> torch.nn.Module:
    """On torchax's device, tied."""
    module = Tied().to("jax")
    module.head.weight = module.embedding.weight
    module.register_buffer("alias", module.get_buffer("scale"))
    return module


def several() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two modules and their optimizers, by name."""
    modules: dict[str, Any] = {"generator": tied(), "critic": torch.nn.Linear(8, 1).to("jax")}
    return modules, {name: train(module)[0] for name, module in modules.items()}


def train(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """An AdamW and a scheduler after one step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    return optimizer, scheduler


def functional_state() -> dict[str, Any]:
    """Every storable dtype, kind and container."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    generator = np.random.default_rng(0)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    floats = generator.standard_normal((8, 4)).astype(np.float32)
    return {
        "layers": [{"w": jax.device_put(floats + i, sharding)} for i in range(3)],
        "dtypes": {
            name: jax.device_put(floats.astype(name), sharding)
            for name in (
                "bfloat16",
                "float16",
                "float8_e4m3fn",
                "float8_e5m2",
                "complex64",
                "int4",
                "int8",
                "int32",
                "uint8",
                "uint32",
                "bool",
            )
        },
        "wide": {"int64": np.array([2**62]), "float64": floats[0].astype(np.float64)},
        "torch": torchax_backend.from_numpy(np.arange(3, dtype=np.int64)),
        "torchax": torchax_backend.wrap(jax.device_put(floats)),
        "key": jax.random.key(7),
        "empty": np.zeros((0, 3), np.int32),
        "scalar": np.float64(0.5),
        "values": {
            "tuple": (1, 2.5, "x"),
            "none": None,
            "bytes": b"\x00\xff",
            "big": 2**80,
            "complex": 1 + 2j,
            "nan": float("nan"),
            "a/b*%": True,
        },
    }


def fingerprint(value: Any) -> Any:
    """Types, shapes, dtypes and digests of a tree, as JSON."""
    if isinstance(value, dict):
        return {"dict": [[repr(key), fingerprint(child)] for key, child in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [fingerprint(child) for child in value]}
    if isinstance(value, (torch.Tensor, jax.Array, np.ndarray, np.generic)):
        host = value
        if isinstance(value, jax.Array):
            is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
            host = jax.random.key_data(value) if is_key else value
        elif isinstance(value, torch.Tensor):
            host = torchax_backend.to_numpy(value)
        host = np.asarray(host)
        kind = "jax" if isinstance(value, jax.Array) else type(value).__name__
        digest = hashlib.sha256(host.tobytes()).hexdigest()
        return [kind, str(host.dtype), list(host.shape), digest]
    return repr(value)


def write_group(directory: Path) -> None:
    """Modules and optimizers by name, with ties and extra state."""
    torch.manual_seed(0)
    modules, optimizers = several()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(modules, optimizers)
        ckpt.save(STEP, metrics=METRICS, force=True)


def write_abandoning(directory: Path) -> None:
    """Functional state whose dtype gives way to others, in a step that abandons a newer one."""
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach()
        state = {"weak": jax.numpy.asarray(2.5)}
        for step in (STEP - 1, STEP + 1):
            ckpt.save(step, state=state, force=True)
            ckpt.wait_until_finished()
        ckpt.restore(STEP - 1)
        ckpt.save(STEP, state=state, metrics=METRICS, force=True)


def write_imported(directory: Path) -> None:
    """Weights from files of somebody else's, one of them tied."""
    weights = {"embedding.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "imported.safetensors"
        safetensors.numpy.save_file(weights, source)
        ties = {"head.weight": "embedding.weight"}
        import_weights(open_safetensors(source), str(directory), step=STEP, ties=ties)


def write_blosc(directory: Path, codec: Codec) -> None:
    """Arrays large enough for Blosc to compress them, beside those of the other steps."""
    draw = np.random.default_rng(1)
    weights = draw.standard_normal((64, 64), dtype=np.float32)
    state = functional_state() | {"weights": weights, "bfloat16": jax.numpy.bfloat16(weights)}
    with TorchaxCheckpointer(directory, options=CheckpointOptions(compression=codec)) as ckpt:
        ckpt.save(STEP, state=state, metrics=METRICS, force=True)


def write_linked(directory: Path) -> None:
    """A step that has taken a frozen parameter over from a step that is not there any more."""
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 4).to("jax")
    base = torch.arange(1 << 19, dtype=torch.float32).reshape(1024, 512) % 13
    module.base = torch.nn.Parameter(base.to("jax"), requires_grad=False)
    options = CheckpointOptions(reuse=True, compression="zstd")
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.attach(module)
        for step in range(1, STEP + 1):
            with torch.no_grad():
                module.weight.add_(1)
            ckpt.save(step, metrics=METRICS, force=True)


def write_together(directory: Path) -> None:
    """A step of two processes: sharded over them, with random state and a loader of each."""
    expect_together("processes", golden.write(directory, STEP))


def write_apart(directory: Path) -> None:
    """A step in the local tiers of two processes, each of which has a part of it."""
    expect_together("hosts", golden.write(directory / "durable", STEP, directory))


def expect_together(kind: str, told: list[Any]) -> None:
    """Notes what each process had when it saved."""
    known = GOLDEN / f"v{VERSION}" / TOGETHER
    expected = json.loads(known.read_text()) if known.exists() else {}
    known.write_text(json.dumps({**expected, kind: told}, indent=1) + "\n")


# What the processes had that have written a step together; kind -> what each of them says.
TOGETHER = "expected_of_processes.json"
# Written after the others, of the same version; name -> what writes it.
LATER: dict[str, Callable[[Path], None]] = {
    "group": write_group,
    "abandoning": write_abandoning,
    "imported": write_imported,
    "processes": write_together,
    "blosc-lz4": functools.partial(write_blosc, codec="blosc-lz4"),
    "blosc-zstd": functools.partial(write_blosc, codec="blosc-zstd"),
    "linked": write_linked,
}
# In each of them a file that names the run, and in the folders of the hosts the step.
APART = "hosts"
PLACES = ("durable", "0", "1")


def write_first(directory: Path, kind: str) -> None:
    """What each version has from its beginning."""
    with TorchaxCheckpointer(directory, options=KINDS[kind]) as ckpt:
        if kind == "attached":
            torch.manual_seed(0)
            module = model()
            optimizer, scheduler = train(module)
            ckpt.attach(module, optimizer, lr_scheduler=scheduler)
            ckpt.save(STEP, metrics=METRICS, force=True)
        else:
            ckpt.save(STEP, state=functional_state(), metrics=METRICS, force=True)


def main() -> None:
    torchax.enable_globally()
    root = GOLDEN / f"v{VERSION}"
    known = root / "expected.json"
    expected = json.loads(known.read_text()) if known.exists() else {}
    first = {kind: functools.partial(write_first, kind=kind) for kind in KINDS}
    writers: dict[str, Callable[[Path], None]] = {**first, **LATER}
    for kind, write in writers.items():
        if (root / kind).exists():
            continue
        write(root / kind)
        expected[kind] = fingerprint(TorchaxCheckpointer(root / kind).load(STEP))
        tidy(root / kind, str(STEP))
    known.write_text(json.dumps(expected, indent=1))
    if not (root / APART).exists():
        write_apart(root / APART)
        for place in PLACES:
            tidy(root / APART / place, str(STEP), run_identity.NAME)


def tidy(directory: Path, *kept: str) -> None:
    """Removes all but these, and what Orbax has noted of this machine."""
    for leftover in directory.iterdir():
        if leftover.name not in kept:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    # Orbax writes there where it was saved, for people only.
    for mark in directory.glob(f"*/{commit_record.MARK}"):
        mark.write_text("\n".join(["committed", *mark.read_text().splitlines()[1:]]) + "\n")


if __name__ == "__main__":
    main()
