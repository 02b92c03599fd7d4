"""The measured training states, sharded over all devices: modules with AdamW, or plain pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt import torchax_backend


def deep() -> dict[str, tuple[int, ...]]:
    """64 narrow layers: 768 parameters, 3,072 leaves with AdamW, 41 MB."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(64):
        for name in ("q", "k", "v", "o"):
            shapes[f"layers.{i}.attention.{name}.weight"] = (64, 64)
        for name, shape in (("up", (192, 64)), ("gate", (192, 64)), ("down", (64, 192))):
            shapes[f"layers.{i}.mlp.{name}.weight"] = shape
        for name in ("attention.norm.weight", "attention.norm.bias", "mlp.norm.weight",
                     "mlp.norm.bias", "mlp.down.bias"):  # fmt: skip
            shapes[f"layers.{i}.{name}"] = (64,)
    return shapes


def gpt2(d: int = 768, num_layers: int = 12) -> dict[str, tuple[int, ...]]:
    """GPT-2 124M: 148 parameters, 592 leaves with AdamW, 1.5 GB."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (50257, d), "wpe.weight": (1024, d)}
    for i in range(num_layers):
        for name, shape in (
            ("ln_1.weight", (d,)), ("ln_1.bias", (d,)),
            ("attn.c_attn.weight", (d, 3 * d)), ("attn.c_attn.bias", (3 * d,)),
            ("attn.c_proj.weight", (d, d)), ("attn.c_proj.bias", (d,)),
            ("ln_2.weight", (d,)), ("ln_2.bias", (d,)),
            ("mlp.c_fc.weight", (d, 4 * d)), ("mlp.c_fc.bias", (4 * d,)),
            ("mlp.c_proj.weight", (4 * d, d)), ("mlp.c_proj.bias", (d,)),
        ):  # fmt: skip
            shapes[f"h.{i}.{name}"] = shape
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (d,)
    return shapes


def gpt2_xl() -> dict[str, tuple[int, ...]]:
    """GPT-2 1.5B, for an accelerator: 580 parameters, 2,320 leaves with AdamW, 18.7 GB."""
    return gpt2(d=1600, num_layers=48)


def wide() -> dict[str, tuple[int, ...]]:
    """64 matrices of 4 MiB: 256 leaves with AdamW, 0.8 GB."""
    return {f"layers.{i}.weight": (1024, 1024) for i in range(64)}


def broad() -> dict[str, tuple[int, ...]]:
    """32 matrices of 4 MiB: 128 leaves with AdamW, 0.4 GB."""
    return {f"layers.{i}.weight": (1024, 1024) for i in range(32)}


def middle() -> dict[str, tuple[int, ...]]:
    """27 layers of 4 matrices of 1.2 MB: 432 leaves with AdamW, 0.4 GB."""
    return {f"layers.{i}.{name}.weight": (512, 600) for i in range(27) for name in "qkvo"}


def large() -> dict[str, tuple[int, ...]]:
    """54 matrices of 4 MiB: 216 leaves with AdamW, 0.7 GB."""
    return {f"layers.{i}.weight": (1024, 1024) for i in range(54)}


def tiny() -> dict[str, tuple[int, ...]]:
    """Two matrices, to test the programs: 8 leaves with AdamW, 2 KB."""
    return {f"layers.{i}.weight": (8, 8) for i in range(2)}


def moe() -> dict[str, tuple[int, ...]]:
    """8 layers x 104 experts x 3 matrices of 32 x 32: 9,984 leaves with AdamW, 31 MB."""
    return {
        f"layers.{i}.experts.{e}.{w}": (32, 32)
        for i in range(8)
        for e in range(104)
        for w in ("w1", "w2", "w3")
    }


STATES: dict[str, Callable[[], dict[str, tuple[int, ...]]]] = {
    "deep": deep,
    "gpt2": gpt2,
    "gpt2_xl": gpt2_xl,
    "wide": wide,
    "broad": broad,
    "moe": moe,
    "middle": middle,
    "large": large,
    "tiny": tiny,
}


class Node(torch.nn.Module):
    """A module tree with parameters under dotted names."""

    def put(self, path: list[str], parameter: torch.nn.Parameter) -> None:
        """Registers the parameter, and adds the modules above it."""
        if len(path) == 1:
            self.register_parameter(path[0], parameter)
            return
        if path[0] not in self._modules:
            self.add_module(path[0], Node())
        child = self._modules[path[0]]
        assert isinstance(child, Node)
        child.put(path[1:], parameter)


def mesh() -> Mesh:
    """Returns a mesh of all devices on one axis."""
    return Mesh(np.array(jax.devices()), ("fsdp",))


def sharding(shape: tuple[int, ...], over: Mesh) -> NamedSharding:
    """Returns a sharding of the first divisible dim, or a replicated one."""
    size = over.shape["fsdp"]
    for dim, length in enumerate(shape):
        if length % size == 0:
            return NamedSharding(over, PartitionSpec(*[None] * dim, "fsdp"))
    return NamedSharding(over, PartitionSpec())


def build(name: str, seed: int = 0) -> tuple[Node, torch.optim.Optimizer]:
    """Returns a module with random values, and an AdamW whose state is that after one step."""
    shapes, over = STATES[name](), mesh()
    random = np.random.default_rng(seed)
    env = torchax.default_env()

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        host = random.standard_normal(shape, dtype=np.float32)
        return torchax.tensor.Tensor(jax.device_put(host, sharding(shape, over)), env)

    module = Node()
    for fqn, shape in shapes.items():
        module.put(fqn.split("."), torch.nn.Parameter(tensor(shape)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for parameter in module.parameters():
        with torchax_backend.native_torch():
            step = torch.tensor(1.0)
        shape = tuple(parameter.shape)
        optimizer.state[parameter] = {
            "step": step, "exp_avg": tensor(shape), "exp_avg_sq": tensor(shape)
        }  # fmt: skip
    return module, optimizer


def arrays_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state as users of bare Orbax flatten it: JAX arrays and numpy scalars by name."""
    flat: dict[str, Any] = {}
    for fqn, parameter in module.named_parameters():
        flat[f"model.{fqn}"] = torchax_backend.buffer(parameter)
        for key, value in optimizer.state[parameter].items():
            is_array = torchax_backend.is_device_tensor(value)
            with torchax_backend.native_torch():
                flat[f"optimizer.{fqn}.{key}"] = (
                    torchax_backend.buffer(value) if is_array else torchax_backend.to_numpy(value)
                )
    return flat


class Training:
    """A module with AdamW, all of whose arrays a jitted step replaces.

    Attributes:
      module: the module; None if the state is a pytree.
      optimizer: its optimizer; None if the state is a pytree.
      donates: whether the step donates the state.
    """

    module: Node | None
    optimizer: torch.optim.Optimizer | None

    def __init__(self, name: str, *, donates: bool, seed: int) -> None:
        self.module, self.optimizer = module, optimizer = build(name, seed)
        self.donates = donates
        state = optimizer.state
        self._tensors = [*module.parameters()]
        self._tensors += [state[p][k] for p in self._tensors for k in ("exp_avg", "exp_avg_sq")]
        self._step = jax.jit(
            lambda xs: [x * 0.999 for x in xs], donate_argnums=0 if donates else ()
        )

    def arrays(self) -> Any:
        """Returns what a peer saves: a pytree of arrays and numpy scalars."""
        assert self.module is not None
        assert self.optimizer is not None
        return arrays_of(self.module, self.optimizer)

    def update(self) -> Any:
        """Begins a step, and returns its arrays, which the devices may still compute."""
        arrays = self._step([torchax_backend.buffer(t) for t in self._tensors])
        for tensor, array in zip(self._tensors, arrays, strict=True):
            torchax_backend.set_buffer(tensor, array)
        return arrays


class FunctionalTraining(Training):
    """A pytree of parameters, moments and a count, which a jitted step with a batch donates."""

    def __init__(self, name: str, seed: int) -> None:
        self.module = self.optimizer = None
        self.donates = True
        arrays = arrays_of(*build(name, seed))
        params = {n: a for n, a in arrays.items() if n.startswith("model.")}
        moments = {n: a for n, a in arrays.items() if n.endswith(("exp_avg", "exp_avg_sq"))}
        count = jax.device_put(jnp.ones(()), sharding((), mesh()))
        self._state = {"params": params, "opt_state": {"count": count, "moments": moments}}
        self._random = np.random.default_rng(seed)
        self._step = jax.jit(
            lambda state, batch: jax.tree.map(lambda x: x * 0.999 + batch.mean() * 1e-3, state),
            donate_argnums=0,
            out_shardings=jax.tree.map(lambda x: x.sharding, self._state),
        )

    def arrays(self) -> Any:
        return self._state

    def update(self) -> Any:
        batch = self._random.standard_normal((32, 1024), np.float32)
        self._state = self._step(self._state, batch)
        return self._state


def training(name: str, seed: int = 0) -> Training:
    """Returns the state of a name of STATES, trained as the suffix of the name says.

    Without a suffix, the step donates nothing. "-donated" is a module whose step donates all
    arrays, "-functional" a pytree whose step does.
    """
    state, _, way = name.partition("-")
    if way == "functional":
        return FunctionalTraining(state, seed)
    if way not in ("", "donated"):
        raise ValueError(f"{name}: expected {state}, {state}-donated or {state}-functional")
    return Training(state, donates=way == "donated", seed=seed)
