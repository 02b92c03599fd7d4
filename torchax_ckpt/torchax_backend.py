"""Wraps internals of torchax, which no other module of this package uses.

A torchax tensor is a ``torch.Tensor`` around a JAX array. A program that only loads steps needs the
public parts of torchax alone, and no ``check_internals``.

Source: torchax 0.0.13, ``tensor.py``, ``view.py`` and ``interop.py``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
import torchax

from torchax_ckpt import plain_torch
from torchax_ckpt.errors import BackendError

_lacking: list[str] = []


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"torchax.{module}"), name)
    except (ImportError, AttributeError):
        _lacking.append(f"torchax.{module} has no {name}")  # check_internals raises it
        return type(name, (), {})  # no object is an instance of it


JittableModule, call_jax = _find("interop", "JittableModule"), _find("interop", "call_jax")
Environment, RuntimeProperty = _find("tensor", "Environment"), _find("tensor", "RuntimeProperty")
Tensor, View = _find("tensor", "Tensor"), _find("view", "View")

_STORABLE = {
    torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
    torch.complex128, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip
native_torch, numpy_dtype = plain_torch.native_torch, plain_torch.numpy_dtype
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@functools.cache
def check_internals() -> None:
    """Checks, once, that torchax has what this module uses; BackendError if not. Starts JAX."""
    try:
        assert not _lacking, _lacking[0]
        env = Environment()  # a new one, because the default one reads torch's seed when created
        before, after = jax.device_put([np.zeros(2, np.float32), np.ones(2, np.float32)])
        tensor = Tensor(before, env)
        assert tensor.jax() is before, "Tensor.jax() does not return the buffer"
        tensor._elem = after
        assert tensor.jax() is after, "assigning Tensor._elem does not replace the buffer"
        assert isinstance(env._property.content, RuntimeProperty), "no RuntimeProperty"
        assert env.prng_key is env._property.content.prng, "prng_key is stored elsewhere"
        RuntimeProperty.override(env._property.content, prng=env.prng_key)
        wrapped = JittableModule(torch.nn.Identity())
        for name in ("params", "buffers", "_model", "_extra_dumped_weights"):
            getattr(wrapped, name)
        for name in ("jax", "update"):
            getattr(View, name)
    except (AssertionError, AttributeError, TypeError) as error:
        raise BackendError(
            f"torchax {torchax.__version__} does not work as torchax_ckpt expects: {error}. "
            "Install a release that was tried: pip install 'torchax>=0.0.12,<=0.0.13'."
        ) from error


# --- tensors on devices ------------------------------------------------------------------------


def is_device_tensor(value: object) -> bool:
    """Returns whether the value is a torch tensor around a JAX array."""
    return isinstance(value, (Tensor, View))


def buffer(tensor: Any) -> jax.Array:
    """Returns the JAX array of a torchax tensor; for a view, an array of the viewed values."""
    return tensor.jax()


def buffers(tensors: Sequence[Any]) -> list[jax.Array | None]:
    """Returns the JAX array of each tensor, or None for a tensor that is not torchax's."""
    return [
        tensor._elem  # found by type, which is twice as fast as isinstance
        if (kind := type(tensor)) is Tensor
        else tensor.jax()
        if kind is not torch.Tensor and is_device_tensor(tensor)
        else None
        for tensor in tensors
    ]


def set_buffer(tensor: Any, array: jax.Array) -> None:
    """Replaces the array of a torchax tensor; for a view, changes the tensor that it views."""
    # torchax does not check that shape and dtype stay the same; the callers do.
    if isinstance(tensor, View):
        tensor.update(array)
    else:
        tensor._elem = array


def release(tensor: object) -> None:
    """Frees the memory of a torchax tensor's array; does nothing for views and other objects."""
    if isinstance(tensor, Tensor) and not tensor._elem.is_deleted():
        tensor._elem.delete()


def jitted(function: Any) -> Any:
    """Returns the function of JAX arrays behind one of ``jax_jit``; other functions as they are."""
    if isinstance(function, functools.partial) and function.func is call_jax:
        return function.args[0]
    return function


def wrap(array: jax.Array) -> torch.Tensor:
    """Returns a torchax tensor around ``array``."""
    return Tensor(array, torchax.default_env())


def fill_meta(tensor: torch.Tensor, array: jax.Array) -> None:
    """Turns a meta tensor, which stays the same object, into a torchax tensor around the array."""
    filled = wrap(array)
    if isinstance(tensor, torch.nn.Parameter):
        filled = torch.nn.Parameter(filled, requires_grad=tensor.requires_grad)
    filled.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, filled)


# --- tensors on the CPU ------------------------------------------------------------------------


def why_unsupported(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor cannot be stored, as the end of a sentence; None if it can be stored."""
    if is_device_tensor(tensor):
        return None
    if torch.nn.parameter.is_lazy(tensor):
        return "is lazy and has no shape yet; run the module once before attaching it"
    if type(tensor) not in _PLAIN_TENSORS:
        return f"is a {type(tensor).__name__}, a subclass of torch.Tensor with its own layout"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}); store its int_repr(), scale and zero point instead"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}; store a dense tensor, or its indices and values"
    if tensor.dtype not in _STORABLE:
        return f"has dtype {tensor.dtype}, which has no counterpart in storage"
    if tensor.device.type not in ("cpu", "meta"):
        return f"is on {tensor.device}; move it to 'jax' or to the CPU"
    return None


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Copies a CPU tensor bit for bit into numpy; call it in a ``with native_torch()`` block."""
    return np.array(plain_torch.array_of(tensor))


def scalars_to_numpy(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Copies 0-d CPU tensors into numpy arrays; call it in a ``with native_torch()`` block."""
    # All of one dtype at once: a thousand copies, of step counters for example, would take longer
    # than the rest of a snapshot.
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        copies: dict[int, np.ndarray] = {}
        for dtype in dtypes:
            members = [tensor for tensor in tensors if tensor.dtype is dtype]
            copies.update(zip(map(id, members), scalars_to_numpy(members), strict=True))
        return [copies[id(tensor)] for tensor in tensors]
    vector = to_numpy(torch.stack(list(tensors))) if tensors else np.empty(0)
    return [vector[i, ...] for i in range(len(tensors))]


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """Returns a CPU tensor with a bitwise copy of the array."""
    dtype = getattr(torch, array.dtype.name)
    if dtype not in _STORABLE:  # torch only has a name for int4
        raise TypeError(f"torch has no tensors of {dtype}")
    return plain_torch.tensor_of(np.array(array), dtype)


def copy_into(tensor: torch.Tensor, array: np.ndarray) -> None:
    """Overwrites a CPU tensor in place with an array of the same shape and dtype."""
    source = from_numpy(array)
    with native_torch():
        if any(
            n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            tensor.data = source  # expanded: elements share memory, so copy_ would fail
        else:
            tensor.detach().copy_(source)


# --- modules -----------------------------------------------------------------------------------


def unwrap_jittable(
    module: Any,
) -> tuple[torch.nn.Module, Mapping[str, torch.Tensor]]:
    """Returns the module in a JittableModule, and its newer params and buffers; else itself, {}."""
    # isinstance cannot detect a JittableModule, which reports the class of the wrapped module.
    if not issubclass(type(module), JittableModule):
        return module, {}
    return module._model, {**module.params, **module.buffers}


# --- random key --------------------------------------------------------------------------------


def prng_key() -> jax.Array:
    """Returns torchax's random key of this thread: typed, or uint32[2] after ``manual_seed``."""
    return torchax.default_env().prng_key


def set_prng_key(key: jax.Array) -> None:
    """Makes ``key`` the random key that torchax keeps for this thread."""
    settings = torchax.default_env()._property
    settings.content = RuntimeProperty.override(settings.content, prng=key)


def torchax_mesh(value: object) -> tuple[jax.sharding.Mesh, Any] | None:
    """Returns the JAX mesh and sharder (or None) of a torchax Mesh; None for other objects."""
    from torchax import mesh_util

    if isinstance(value, mesh_util.Mesh):
        return value.jax_mesh, value._sharder
    return None
