"""Non-persistent buffers on the meta device: rebuilt by the module, or refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from support.training import before_enabling, fsdp_mesh, fsdp_rule

from torchax_ckpt import TorchaxCheckpointer, torchax_backend, warm_start
from torchax_ckpt.errors import UninitializedLeafError
from torchax_ckpt.state.modules.meta_tensors import rebuilt_buffers

CONFIG = SimpleNamespace(dim=8, base=10.0)


class Rotary(torch.nn.Module):
    """Frequencies that follow from a config, as in transformers."""

    freq: torch.Tensor

    def __init__(self, config: Any, device: Any = None) -> None:
        super().__init__()
        self.config = config
        powers = torch.arange(0, config.dim, 2, device=device) / config.dim
        self.register_buffer("freq", 1.0 / config.base**powers, persistent=False)


class Model(torch.nn.Module):
    """A model whose ``_init_weights`` sets the buffer of another kind of module."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.inner = inner

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, Mask):
            module.mask.copy_(torch.ones(module.size, module.size).tril())
        elif isinstance(module, Noise):
            module.noise.copy_(torch.randn(4))
        elif isinstance(module, torch.nn.Linear):
            raise AssertionError("a random initializer of parameters was called")


class Mask(torch.nn.Module):
    """A buffer that follows from an argument, which nobody can know afterwards."""

    mask: torch.Tensor

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mask", torch.ones(size, size).tril().to(dtype), persistent=False)


class OwnParameter(Mask):
    """A mask beside a parameter, which ``_init_weights`` would set too."""

    def __init__(self) -> None:
        super().__init__(3)
        self.scale = torch.nn.Parameter(torch.ones(2))


class Noise(torch.nn.Module):
    noise: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(4), persistent=False)


class Guessed(Rotary):
    """A module whose second argument has a default, which need not be what it was made with."""

    def __init__(self, config: Any, scale: float = 1.0) -> None:
        super().__init__(config)
        self.freq *= scale


class WithLayer(Rotary):
    """A module with parameters, which may be too large to make a second time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 2)


def made(build: Any) -> tuple[Any, dict[str, bytes]]:
    """A model on meta, and the bytes of the buffers that it would have elsewhere."""
    with before_enabling():
        expected = {name: b.numpy().tobytes() for name, b in Model(build()).named_buffers()}
        with torch.device("meta"):
            return Model(build()), expected


def found(model: torch.nn.Module) -> dict[str, bytes]:
    values = rebuilt_buffers(model)
    with torchax_backend.native_torch():
        return {name: value.numpy().tobytes() for name, value in values.items()}


def test_buffers_are_rebuilt_to_the_bit() -> None:
    other = SimpleNamespace(dim=4, base=2.0)
    builds: list[Any] = [
        *(lambda dtype=dtype: Mask(3, dtype) for dtype in (torch.float32, torch.int64, torch.bool)),
        lambda: Mask(3).half(),
        lambda: Rotary(CONFIG),
        lambda: Rotary(CONFIG).half(),
        lambda: torch.nn.ModuleList([Rotary(CONFIG), Rotary(other)]),
        lambda: Model(Mask(4)),
    ]
    for build in builds:
        model, expected = made(build)
        with torchax_backend.native_torch():
            before = torch.random.get_rng_state().numpy().tobytes()
        assert found(model) == expected != {}
        with torchax_backend.native_torch():
            assert torch.random.get_rng_state().numpy().tobytes() == before


@pytest.mark.parametrize(
    "build", [Noise, lambda: Guessed(CONFIG, scale=2.0), lambda: WithLayer(CONFIG), OwnParameter]
)
def test_what_is_not_sure_is_refused_by_name(build: Any, directory: Path) -> None:
    model, _ = made(build)
    assert found(model) == {}
    name = next(name for name, _ in model.named_buffers())

    def init(name: str, abstract: Any) -> Any:
        return None if abstract.is_buffer else np.zeros(abstract.shape, abstract.dtype)

    said = pytest.raises(UninitializedLeafError, match=rf"model/{name}")
    with TorchaxCheckpointer(directory) as ckpt, said:
        ckpt.attach(model, init=init)


def test_a_resumed_model_keeps_its_positions(directory: Path) -> None:
    """At a first start, at a resume and at a warm start, whatever ``init`` answers."""
    rule, asked = fsdp_rule(fsdp_mesh()), []

    def zeros(name: str, abstract: Any) -> Any:
        asked.append((name, abstract.is_buffer))
        return np.zeros(abstract.shape, abstract.dtype)

    def build() -> Any:
        return torch.nn.ModuleList([Rotary(SimpleNamespace(dim=16, base=10.0)), Mask(8)])

    for step in range(2):
        model, expected = made(build)
        with TorchaxCheckpointer(directory) as ckpt:
            assert ckpt.attach(model, shardings=rule, init=zeros) == step
            ckpt.save(step + 1, force=True)
        arrays = {name: buffer.jax() for name, buffer in model.named_buffers()}
        assert {name: np.asarray(array).tobytes() for name, array in arrays.items()} == expected
        assert all(
            array.sharding.is_equivalent_to(rule(name, array), array.ndim)
            for name, array in arrays.items()
        )
    assert asked == [("layer.weight", False), ("layer.bias", False)]
    model, expected = made(build)
    warm_start(model, directory)
    assert {n: np.asarray(b.jax()).tobytes() for n, b in model.named_buffers()} == expected
    assert all(isinstance(p.jax(), jax.Array) for p in model.parameters())
