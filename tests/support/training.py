"""Small models, meshes and training steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import torchax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torchax import interop

from torchax_ckpt import RestoreReport, TorchaxCheckpointer, torchax_backend

P = PartitionSpec


def fsdp_mesh(num_devices: int = 8, axis: str = "fsdp") -> Mesh:
    """Returns a one-axis mesh over the first devices, with the Auto axes that torchax needs."""
    return Mesh(np.array(jax.devices()[:num_devices]), (axis,))


def fsdp_rule(mesh: Mesh) -> Any:
    """Returns a sharding rule: shards the first divisible dim over the last axis, or replicates."""
    axis = mesh.axis_names[-1]

    def rule(name: str, abstract: Any) -> NamedSharding:
        size = mesh.shape[axis]
        for dim, length in enumerate(abstract.shape):
            if length and length % size == 0:
                return NamedSharding(mesh, P(*[None] * dim, axis))
        return NamedSharding(mesh, P())

    return rule


@contextlib.contextmanager
def before_enabling() -> Iterator[None]:
    """Disables torchax within the context, as before a program enables it.

    Meta modules must be built there.
    """
    torchax.disable_globally()
    try:
        yield
    finally:
        torchax.enable_globally()


def mlp(width: int = 16, bias: bool = True) -> torch.nn.Module:
    """Returns a small classifier on torchax's default device."""
    return torch.nn.Sequential(
        torch.nn.Linear(8, width, bias=bias), torch.nn.Tanh(), torch.nn.Linear(width, 4, bias=bias)
    ).to("jax")


def adamw(model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def on_cpu(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of plain torch, as programs have them that made it without torchax."""
    with torchax_backend.native_torch():
        return torch.tensor(value, dtype=dtype)


def place(model: torch.nn.Module, rule: Any) -> None:
    """Moves parameters and buffers to the shardings of a rule."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        array = torchax_backend.buffer(tensor)
        torchax_backend.set_buffer(tensor, jax.device_put(array, rule(name, tensor)))


def train_and_save(
    directory: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int = 2,
    **settings: Any,
) -> None:
    """Trains for some steps and saves them with a checkpointer of these settings."""
    with TorchaxCheckpointer(directory, **settings) as ckpt:
        ckpt.attach(model, optimizer)
        for step in ckpt.steps(num_steps):
            train_step(model, optimizer, step)


def save(directory: Path, *attached: Any, step: int = 1, **more: Any) -> None:
    """Saves objects as they are, whatever the directory has."""
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(*attached, resume=False, **more)
        assert ckpt.save(step, force=True)


def save_state(directory: Path | str, state: Any, step: int = 1, **settings: Any) -> None:
    """Saves a functional state with a checkpointer of these settings."""
    with TorchaxCheckpointer(directory, **settings) as ckpt:
        assert ckpt.save(step, state=state, force=True)


def resume(directory: Path, *attached: Any, **more: Any) -> int:
    """Restores the newest step into objects; returns the step."""
    with TorchaxCheckpointer(directory) as ckpt:
        return ckpt.attach(*attached, **more)


def restore(
    directory: Path,
    *attached: Any,
    step: int | None = None,
    strict: bool = True,
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
    rename: dict[str, str] | None = None,
    **more: Any,
) -> RestoreReport:
    """Restores what is asked for of a step into objects that are not resumed before."""
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(*attached, resume=False, **more)
        return ckpt.restore(step, strict=strict, include=include, exclude=exclude, rename=rename)


_grads: dict[int, Any] = {}


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    """Trains one step on data of this seed: jitted value_and_grad, eager torch.optim."""

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, params, (x,))
        return torch.nn.functional.cross_entropy(out, y)

    if id(model) not in _grads:
        _grads[id(model)] = (interop.jax_jit(interop.jax_value_and_grad(loss)), model)
    data = np.random.default_rng(seed)
    env = torchax.default_env()
    x = env.to_xla(torch.from_numpy(data.standard_normal((8, 8)).astype(np.float32)))
    y = env.to_xla(torch.from_numpy(data.integers(0, 4, 8).astype(np.int32)).long())
    value, grads = _grads[id(model)][0](dict(model.named_parameters()), x, y)
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name]
    optimizer.step()
    return value
