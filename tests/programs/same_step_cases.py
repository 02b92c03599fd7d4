"""Writes steps of many kinds with fixed seeds, to compare what two versions of the package write.

    PYTHONPATH=TREE python same_step_cases.py FOLDER [CASE...]

Each case is a function of this file, and writes a run in a folder of its name. The package is that
of TREE, the rest is that of this file's tree. ``python -m tests.support.same_step`` compares.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a test imports the names of the cases
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[1:1] = [str(TESTS / "programs"), str(TESTS), str(TESTS / "faults")]
    from support.jax_releases import xla_flags

    os.environ |= {"XLA_FLAGS": xla_flags(8), "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
import processes_program
import torch
import torchax
from processes_program import INDEX
from support.described import AdapterConfig, Described, Tokenizer
from support.models import Box, Plain, Tuned
from support.processes import run_processes
from support.training import adamw, fsdp_mesh, fsdp_rule, mlp, place, train_step

from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    policies,
    torchax_backend,
)

KEEP_ALL = {"preservation_policy": policies.PreserveAll()}


def two_tiers(directory: Path, *durable: int, keep: int = 9) -> dict[str, Any]:
    """Returns settings that save the steps ``durable`` durably, and the others locally."""
    every = policies.FixedIntervalPolicy(1)
    local = LocalTier(directory, save_decision_policy=every, keep=keep)
    return {"local": local, "save_decision_policy": policies.SpecificStepsPolicy(durable)}


def seed() -> None:
    """Seeds every generator whose state is saved."""
    torch.manual_seed(0)
    torchax.default_env().manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def trained(directory: str | Path, **settings: Any) -> None:
    """Trains a sharded model with AdamW, and saves the steps that are due, by default both."""
    settings.setdefault("save_decision_policy", policies.FixedIntervalPolicy(1))
    model = mlp()
    place(model, fsdp_rule(fsdp_mesh()))
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with TorchaxCheckpointer(directory, **KEEP_ALL, **settings) as ckpt:
        stateful = {"box": Box({"n": 2**70, "list": [1, None, (2.5, "text")]})}
        ckpt.attach(model, optimizer, lr_scheduler=schedule, stateful=stateful)
        for step in (1, 2):
            train_step(model, optimizer, step)
            schedule.step()
            ckpt.save(step)
            ckpt.wait_until_finished()


def stacked(directory: Path) -> None:
    """Layers that are stored as stacks, tied weights and a buffer."""
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(Plain().to("jax"))
        ckpt.save(1, force=True)


def training(directory: Path) -> None:
    trained(directory)


def flat(directory: Path) -> None:
    trained(directory, options=CheckpointOptions(layout="flat"))


def compressed(directory: Path) -> None:
    for codec in ("zstd", "blosc-lz4", "blosc-zstd"):
        seed()
        trained(directory / codec, options=CheckpointOptions(compression=codec))


def batches(directory: Path) -> None:
    trained(directory, options=CheckpointOptions(max_host_bytes=512, snapshot="copy"))


def local_tier(directory: Path) -> None:
    trained(directory / "durable", **two_tiers(directory / "local", 2))


def read_back(directory: Path) -> None:
    trained(directory, options=CheckpointOptions(read_back=True))


def functional(directory: Path) -> None:
    """A pytree of many types and dtypes, on devices and on the host."""
    sharded = jax.device_put(
        jnp.arange(4096, dtype=jnp.int32), fsdp_rule(fsdp_mesh())("", jnp.ones(8))
    )
    state = {
        "params": {f"layers.{i}": {"w": jnp.full((8, 8), i, jnp.bfloat16)} for i in range(3)},
        "sharded": sharded,
        "key": jax.random.key(3),
        "empty": jnp.zeros((0, 3)),
        "host": {"large": np.arange(5000, dtype=np.float64), "scalar": np.int64(2**40)},
        "tensor": torchax_backend.from_numpy(np.arange(3.0)),
        "others": [1, 2.5, None, "text", float("inf"), 2**80, b"bytes", (True, 1j)],
        "small": jnp.asarray([1, -2, 3], jnp.int4),
        "complex": jnp.asarray([1 + 2j], jnp.complex64),
    }
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=state, force=True)


def metrics(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        found = {"loss": jnp.float32(0.25), "nan": float("nan"), "infinite": -np.inf, "n": [1, "a"]}
        ckpt.save(1, state={"w": jnp.ones(4)}, metrics=found, force=True)


def assets(directory: Path) -> None:
    model = Described().to("jax")
    model.peft_config = {"default": AdapterConfig(r=8)}  # type: ignore[assignment]
    tokenizer = Tokenizer({"tokenizer.json": "{}", "x/y.jinja": "{{ x }}"})
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, tokenizer=tokenizer)
        ckpt.save(1, force=True)


def tuned(directory: str | Path, reuse: Any, **settings: Any) -> None:
    """Saves four steps of a model that is mostly frozen and whose other parameters change."""
    settings.setdefault("save_decision_policy", policies.FixedIntervalPolicy(1))
    model = Tuned().to("jax")
    place(model, fsdp_rule(fsdp_mesh()))
    options = CheckpointOptions(reuse=reuse)
    with TorchaxCheckpointer(directory, options=options, **{**KEEP_ALL, **settings}) as ckpt:
        ckpt.attach(model, rng=False)
        for step in range(1, 5):
            with torch.no_grad():
                model.head.weight.add_(step)
                model.head.bias.add_(step)
            ckpt.save(step)
            ckpt.wait_until_finished()


def frozen(directory: Path) -> None:
    tuned(directory, "auto")


def frozen_latest(directory: Path) -> None:
    """The only step that is kept, so that the newest step lends its files to the next."""
    tuned(directory, True, preservation_policy=policies.LatestN(1))


def frozen_local(directory: Path) -> None:
    tuned(directory / "durable", "auto", **two_tiers(directory / "local", 1, 4, keep=1))


def not_reused(directory: Path) -> None:
    tuned(directory, False)


def went_back(directory: Path) -> None:
    """Steps that the run abandons when it goes back to an older one."""
    with TorchaxCheckpointer(directory, **KEEP_ALL) as ckpt:
        ckpt.attach(rng=False)
        for step in (1, 2, 3):
            ckpt.save(step, state={"w": jnp.full(4, step)}, force=True)
        ckpt.wait_until_finished()
        ckpt.restore(1, strict=False)
        ckpt.save(2, state={"w": jnp.full(4, 20)}, force=True)


def in_bucket(directory: Path) -> None:
    """Writes to an emulated bucket, whose objects become files."""
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is imported
    from gcs_server import BUCKET, FaultyServer

    with contextlib.closing(FaultyServer()) as server:
        os.environ |= server.environment()
        trained(f"gs://{BUCKET}/trained")
        seed()
        tuned(f"gs://{BUCKET}/tuned", "auto")
        for name in server.store.names():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(server.store.get_file(BUCKET, name))


def two_processes(directory: Path) -> None:
    """Two processes, which also have local tiers; see ``on_one_of_two``."""
    program = """
        import pathlib, sys, same_step_cases
        same_step_cases.on_one_of_two(pathlib.Path(sys.argv[4]))
    """
    env = {"PYTHONPATH": os.pathsep.join(sys.path[1:])}  # TREE comes before this file's tree
    run_processes(program, 2, directory, env=env, fresh=True)


def on_one_of_two(directory: Path) -> None:
    """Trains two models on two processes that differ in random state and in their loaders."""
    training = processes_program.Training()
    settings = two_tiers(directory / f"local{INDEX}", 2)
    with TorchaxCheckpointer(directory / "trained", **settings, **KEEP_ALL) as ckpt:
        training.attach(ckpt)
        for step in (1, 2, 3):
            training.step()
            ckpt.save(step)
            ckpt.wait_until_finished()
    with torch.device("meta"):
        model = Tuned()
    with TorchaxCheckpointer(directory / "tuned", **KEEP_ALL) as ckpt:
        ckpt.attach(model, shardings=processes_program.rule, init=processes_program.init, rng=False)
        for step in range(1, 5):
            for parameter in model.head.parameters():
                torchax_backend.set_buffer(parameter, torchax_backend.buffer(parameter) + step)
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()


CASES: tuple[Callable[[Path], None], ...] = (
    *(stacked, training, flat, compressed, batches, local_tier, read_back, functional, metrics),
    *(assets, frozen, frozen_latest, frozen_local, not_reused, went_back, two_processes, in_bucket),
)


def main(folder: Path, *names: str) -> None:
    """Writes all cases, or those named."""
    torchax.enable_globally()
    for case in CASES:
        if case.__name__ in (names or [case.__name__]):
            seed()
            case(folder.resolve() / case.__name__)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
