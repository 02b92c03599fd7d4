"""Sizes of training states, against published anchors and against torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchax_ckpt import planning
from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning.closed_forms import MOMENTS


def test_a_parameter_under_adamw_takes_twelve_bytes() -> None:
    size = planning.state_bytes(70_000_000_000)
    assert (size.parameters_bytes, size.optimizer_bytes) == (280_000_000_000, 560_000_000_000)
    assert size.total_bytes == 12 * 70_000_000_000
    assert planning.module_state_bytes(torch.nn.Linear(8, 2).to("jax")).total_bytes == 12 * 18
    settings: list[tuple[dict[str, Any], int]] = [
        ({"optimizer": "sgd"}, 4),
        ({"param_bytes": 2}, 6),
        ({"param_bytes": 6, "moment_bytes": 4}, 14),
        ({"optimizer": 0.5}, 6),
    ]
    for setting, per_param in settings:
        assert planning.state_bytes(1000, **setting).total_bytes == 1000 * per_param


def test_the_ramdisk_of_70b_parameters_on_32_hosts() -> None:
    size = 840_000_000_000
    assert planning.ramdisk_bytes_per_host(size, hosts_per_slice=32) == 60_375_000_000
    kept = planning.ramdisk_bytes_per_host(size, hosts_per_slice=32, num_copies=3)
    assert kept == 90_562_500_000
    assert planning.ramdisk_bytes_per_host(1, hosts_per_slice=3) == 1  # whole bytes, rounded up


@pytest.fixture
def native_torch() -> Any:
    """Torch as it is without torchax: the tensors here need no device."""
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch(), torch._C.DisableTorchFunction():
        yield


@pytest.mark.parametrize("kind", sorted(MOMENTS.keys() - {"none"}))
@pytest.mark.usefixtures("native_torch")
def test_moments_are_those_that_torch_keeps(kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    name, _, momentum = kind.partition("_")
    kinds = {name.lower(): found for name, found in vars(torch.optim).items()}
    optimizer = kinds[name]([weight], **({"momentum": 0.9} if momentum else {}))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [v for v in optimizer.state[weight].values() if torch.is_tensor(v) and v.numel() > 1]
    module = torch.nn.Module()
    module.register_parameter("weight", weight)
    size = planning.module_state_bytes(module, optimizer=kind)
    assert size.optimizer_bytes == sum(v.numel() * v.element_size() for v in state)
    assert size.parameters_bytes == weight.numel() * weight.element_size()


class Mixed(torch.nn.Module):
    """A tied weight, a frozen one, another dtype, and buffers, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 8)
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
        self.narrow = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(100), persistent=False)

    def get_extra_state(self) -> Any:
        return {"epoch": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.usefixtures("native_torch")
def test_a_module_is_measured_as_it_is_stored() -> None:
    size = planning.module_state_bytes(Mixed())
    assert size.parameters_bytes == 80 * 4 + 5 * 4 + 6 * 2
    assert size.optimizer_bytes == 2 * (80 * 4 + 6 * 2)
    assert size.buffers_bytes == 3 * 8
    assert size.total_bytes == sum((352, 664, 24))
    wide = planning.module_state_bytes(Mixed(), moment_bytes=4)
    assert wide.optimizer_bytes == 2 * (80 * 4 + 6 * 4)


@pytest.mark.parametrize(
    ("call", "settings", "message"),
    [
        (planning.state_bytes, {"num_params": 7e10}, "num_params: .* found 70000000000.0"),
        (planning.state_bytes, {"num_params": 1, "param_bytes": 0}, "param_bytes: .* float32"),
        (planning.state_bytes, {"num_params": 1, "optimizer": "adamx"}, "adamw.*found 'adamx'"),
        (planning.state_bytes, {"num_params": 1, "optimizer": -2}, "optimizer: .* found -2"),
        (planning.module_state_bytes, {"module": 70}, "torch.nn.Module, found int; .*state_bytes"),
        (
            planning.ramdisk_bytes_per_host,
            {"total_bytes": 1, "hosts_per_slice": 0},
            "hosts_per_slice: .* found 0; each slice",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    call: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        call(**settings)
