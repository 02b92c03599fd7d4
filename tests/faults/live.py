"""One of everything that can be attached, all of it to the bit, and what commands say of a run."""

from __future__ import annotations

import contextlib
import io
import json
import random
from typing import Any

import jax
import numpy as np
import torch
import torchax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.models import Plain
from support.strategies import fingerprint
from torchdata.stateful_dataloader import StatefulDataLoader
from typer.main import get_command

from torchax_ckpt import torchax_backend
from torchax_ckpt.cli.app import app
from torchax_ckpt.errors import CheckpointError

COMMANDS = get_command(app)
BASE_BYTES = 1_200_000  # fewer would not be shared with other steps


class Model(Plain):
    """Equal layers, a tied head, a buffer, extra state, and a frozen parameter of some size."""

    def __init__(self, base_bytes: int) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.randn(base_bytes // 4), requires_grad=False)
        self.extra: Any = {"epoch": 1}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = {**state, "epoch": state["epoch"]}


class Box:
    """A stateful object that takes any state with the key ``seen``."""

    def __init__(self, seed: int) -> None:
        with torchax_backend.native_torch():
            count = torch.tensor(2**40 + seed)
        self.state: Any = {
            "seen": seed,
            "loss": [0.5, float("nan"), (1, 2)],
            "count": count,
            "table": np.arange(6, dtype=np.int8),
            "empty": np.zeros((0, 3), np.float32),
            "keys": {1: "int", "1": "str", (2, None): b"raw", np.int8(3): {4, "5"}},
            "key": jax.random.key(seed),
        }

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if isinstance(state, dict) and "seen" not in state:
            raise KeyError("seen")
        self.state = state


class Live:
    """The objects of a run, in a state that depends on a seed; restoring must change all of it."""

    def __init__(
        self, seed: int, num_steps: int, base_bytes: int = 64, has_loader: bool = True
    ) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        torchax.default_env().manual_seed(seed)
        self.module = Model(base_bytes).to("jax")
        self.module.head.weight = self.module.embed.weight
        self.module.extra = {"epoch": seed, "seen": torch.full((3,), seed)}
        mesh = Mesh(np.array(jax.devices()), ("fsdp",))
        self._rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        self._place(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1 / (seed + 1))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.box = Box(seed)
        self.attachments: dict[str, Any] = {
            "lr_scheduler": self.scheduler,
            "stateful": {"box": self.box},
        }
        self._batches = None
        if has_loader:
            self.loader = StatefulDataLoader(list(range(40)), 4, shuffle=True)
            self.attachments["dataloader"] = self.loader
            self._batches = iter(self.loader)
        for _ in range(num_steps):
            self.train()

    def train(self) -> None:
        """Changes everything but the frozen parameter."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        for parameter in trained:  # as they come back, whatever torch makes them
            self._place([parameter, *self.optimizer.state[parameter].values()])
        self.scheduler.step()
        if self._batches is not None:
            next(self._batches)

    def _place(self, tensors: Any) -> None:
        for tensor in filter(torchax_backend.is_device_tensor, tensors):
            array = jax.device_put(torchax_backend.buffer(tensor), self._rows)
            torchax_backend.set_buffer(tensor, array)

    def attach_to(self, ckpt: Any, **settings: Any) -> int:
        step: int = ckpt.attach(self.module, self.optimizer, **self.attachments, **settings)
        return step

    def fingerprint(self) -> Any:
        """All of it, and the random state of the process."""
        module, optimizer = self.module, self.optimizer
        tensors = module.state_dict(keep_vars=True)
        arrays = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        scheduler = {k: v for k, v in vars(self.scheduler).items() if k != "optimizer"}
        with torchax_backend.native_torch():
            torch_random = torch.get_rng_state()
        return fingerprint(
            {
                "arrays": arrays,
                "shardings": {n: sharding_of(t) for n, t in arrays.items()},
                "extra": module.extra,
                "is_tied": module.head.weight is module.embed.weight,
                "groups": [
                    {k: v for k, v in group.items() if k != "params"}
                    for group in optimizer.param_groups
                ],
                "moments": [optimizer.state.get(p) for p in module.parameters()],
                "scheduler": {k: v for k, v in scheduler.items() if not callable(v)},
                "box": self.box.state,
                "loader": None if self._batches is None else self.loader.state_dict(),
                "random": [
                    repr(random.getstate()),
                    np.random.get_state(legacy=False),
                    torch_random,
                    torchax_backend.prng_key(),
                ],
            }
        )


def sharding_of(value: Any) -> str:
    """The sharding of an array or tensor, "" if it is on the host."""
    if torchax_backend.is_device_tensor(value):
        value = torchax_backend.buffer(value)
    return str(value.sharding) if isinstance(value, jax.Array) else ""


def command(*args: Any) -> Any:
    """What a command says; raises where it says that a step is damaged."""
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        code = COMMANDS.main([*map(str, args), "--json"], standalone_mode=False)
    if code:
        raise CheckpointError(errors.getvalue())
    return json.loads(said.getvalue())
