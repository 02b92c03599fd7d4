"""Owns what Lightning and its metrics ask of tensors, and torchax 0.0.13 does not answer.

With it ``self.log`` takes device scalars as they are, without waiting for the device, and callbacks
that print or copy what was logged work.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torchax
from torch.utils._mode_utils import no_dispatch
from torchax.tensor import Tensor


@functools.cache
def complete() -> None:
    """Adds it to torchax, once per process and for all that uses torchax there."""
    torchax.default_env().override_op_definition(_EMPTY, _empty)
    for name, method in (("__format__", _format), ("__deepcopy__", _deepcopy)):
        if name not in vars(Tensor):
            setattr(Tensor, name, method)


def memory_of(tensor: torch.Tensor) -> int:
    """What two tensors that live have in common if one was detached from the other."""
    if tensor.device.type == "jax":
        return id(tensor.jax())  # type: ignore[attr-defined]
    return tensor.data_ptr()


_EMPTY = torch.ops.aten.empty.memory_format


def _empty(*args: Any, **kwargs: Any) -> torch.Tensor:
    """An empty tensor on the device asked for.

    ``copy.deepcopy`` of a plain tensor asks for one on the CPU, which torchax puts on ``"jax"``.
    Metrics, ``self.log`` among them, copy their initial values.
    """
    device = kwargs.get("device")
    with no_dispatch(), torch._C.DisableTorchFunction():
        plain = _EMPTY(*args, **{**kwargs, "device": "cpu", "pin_memory": None})
    is_plain = device is not None and torch.device(device).type == "cpu"
    return plain if is_plain else torchax.default_env().to_xla(plain)


def _format(self: Tensor, spec: str) -> str:
    """As of any tensor: a scalar takes a format, ``f"{loss:.3f}"``."""
    return format(self.item(), spec) if spec and self.ndim == 0 else object.__format__(self, spec)


def _deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
    """A tensor of its own around the same array, which does not change."""
    if id(self) not in memo:
        copied: Any = Tensor(self.jax(), torchax.default_env(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
    return memo[id(self)]
