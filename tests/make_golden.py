"""Writes the golden checkpoints of the present format version.

    python tests/make_golden.py

Run once per format version, with the release that introduces it; later releases must read what
lies here, and never write it again.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import torchax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt import torchax_backend as backend
from torchax_ckpt.layout.manifest import VERSION
from torchax_ckpt.storage import commits

GOLDEN = Path(__file__).parent / "golden"
STEP = 3
KINDS: dict[str, CheckpointOptions] = {
    "attached": CheckpointOptions(),
    "stacked": CheckpointOptions(layout="stacked"),
    "flat": CheckpointOptions(layout="flat"),
    "compressed": CheckpointOptions(compression=True),
}
METRICS = {"loss": 0.25, "note": "golden", "history": [1, None, True]}


def model() -> torch.nn.Module:
    """Three equal layers, a tied head and a buffer."""
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    module = torch.nn.Sequential(torch.nn.Embedding(16, 8), *layers, torch.nn.Linear(8, 16))
    module.register_buffer("scale", torch.ones(4))
    return module.to("jax")


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
        "torch": backend.from_numpy(np.arange(3, dtype=np.int64)),
        "torchax": backend.wrap(jax.device_put(floats)),
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
            host = backend.to_numpy(value)
        host = np.asarray(host)
        kind = "jax" if isinstance(value, jax.Array) else type(value).__name__
        digest = hashlib.sha256(host.tobytes()).hexdigest()
        return [kind, str(host.dtype), list(host.shape), digest]
    return repr(value)


def main() -> None:
    torchax.enable_globally()
    root = GOLDEN / f"v{VERSION}"
    if root.exists():
        sys.exit(f"{root} is there already; golden checkpoints are written once")
    expected = {}
    for kind, options in KINDS.items():
        with TorchaxCheckpointer(root / kind, options=options) as ckpt:
            if kind == "attached":
                torch.manual_seed(0)
                module = model()
                optimizer, scheduler = train(module)
                ckpt.attach(module, optimizer, lr_scheduler=scheduler)
                ckpt.save(STEP, metrics=METRICS, force=True)
            else:
                ckpt.save(STEP, state=functional_state(), metrics=METRICS, force=True)
            ckpt.wait_until_finished()
            expected[kind] = fingerprint(ckpt.load(STEP))
        for leftover in (root / kind).iterdir():
            if leftover.name != str(STEP):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        # Orbax writes there where it was saved, for people only.
        (root / kind / str(STEP) / commits.MARK).write_text("committed")
    (root / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main()
