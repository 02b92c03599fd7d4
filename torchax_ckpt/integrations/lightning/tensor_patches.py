"""Patches of torchax 0.0.13: tensor operations that Lightning and its metrics use.

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
    """Applies the patches once per process, for every user of torchax in the process."""
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
    """Returns an empty tensor on the requested device.

    torchax would create a tensor that is requested for the CPU on ``"jax"`` instead.
    ``copy.deepcopy`` of a plain tensor requests a tensor for the CPU, and metrics, including those
    of ``self.log``, deep-copy their initial values.
    """
    device = kwargs.get("device")
    with no_dispatch(), torch._C.DisableTorchFunction():
        plain = _EMPTY(*args, **{**kwargs, "device": "cpu", "pin_memory": None})
    is_plain = device is not None and torch.device(device).type == "cpu"
    return plain if is_plain else torchax.default_env().to_xla(plain)


def _format(self: Tensor, spec: str) -> str:
    """Formats a scalar as torch does, as in ``f"{loss:.3f}"``."""
    return format(self.item(), spec) if spec and self.ndim == 0 else object.__format__(self, spec)


def _deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
    """Returns a new tensor around the same array, which is immutable."""
    if id(self) not in memo:
        copied: Any = Tensor(self.jax(), torchax.default_env(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
    return memo[id(self)]
