"""Adds tensor operations to torchax 0.0.13 that Lightning and its metrics need.

With these patches ``self.log`` accepts device scalars without waiting for the device, and callbacks
can print or copy logged values.
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
    """Patches torchax for the whole process; only the first call has an effect."""
    torchax.default_env().override_op_definition(_EMPTY, _empty)
    for name, method in (("__format__", _format), ("__deepcopy__", _deepcopy)):
        if name not in vars(Tensor):
            setattr(Tensor, name, method)


def memory_of(tensor: torch.Tensor) -> int:
    """Returns an identifier of a tensor's memory.

    Two live tensors have the same identifier if one was detached from the other.
    """
    if tensor.device.type == "jax":
        return id(tensor.jax())  # type: ignore[attr-defined]
    return tensor.data_ptr()


_EMPTY = torch.ops.aten.empty.memory_format


def _empty(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns an uninitialized tensor on the requested device, as ``torch.empty`` does in torch.

    Without this patch, a program that requests a tensor on the CPU gets a tensor on ``"jax"``.
    Metrics, including those of ``self.log``, deep-copy their initial values, and ``copy.deepcopy``
    of a CPU tensor requests a new tensor on the CPU.
    """
    device = kwargs.get("device")
    with no_dispatch(), torch._C.DisableTorchFunction():
        plain = _EMPTY(*args, **{**kwargs, "device": "cpu", "pin_memory": None})
    is_plain = device is not None and torch.device(device).type == "cpu"
    return plain if is_plain else torchax.default_env().to_xla(plain)


def _format(self: Tensor, spec: str) -> str:
    """Formats a 0-d tensor as torch does, for example in ``f"{loss:.3f}"``."""
    return format(self.item(), spec) if spec and self.ndim == 0 else object.__format__(self, spec)


def _deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
    """Returns a new tensor that shares the JAX array of ``self``, because arrays are immutable."""
    if id(self) not in memo:
        copied: Any = Tensor(self.jax(), torchax.default_env(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
    return memo[id(self)]
