"""Values for tensors on the meta device that no checkpoint supplies.

``init`` gives them, except for non-persistent buffers that follow from a module's settings, such as
the frequencies of a rotary embedding. Those are computed anew, as transformers does: a model's
``_init_weights`` sets the buffers of its modules, or a module made from a config alone is made
again, never from guessed arguments. A value counts only if it does not depend on chance.

Source: ``PreTrainedModel._init_weights`` of transformers 5.23.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Sharding

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.move_shards import put
from torchax_ckpt.devices.sharding import Placement
from torchax_ckpt.errors import UninitializedLeafError
from torchax_ckpt.layout import names
from torchax_ckpt.state.leaf import Spec

logger = logging.getLogger(__name__)

_SETTER, _CONFIG = "_init_weights", "config"


# --- values of init ----------------------------------------------------------------------------


class AbstractTensor(jax.ShapeDtypeStruct):
    """The abstract value of a tensor, as ``init`` gets it."""

    __slots__ = ("is_buffer",)

    def __init__(self, expected: Spec, placement: Placement, *, is_buffer: bool) -> None:
        sharding = placement if isinstance(placement, Sharding) else None
        super().__init__(expected.shape, np.dtype(expected.dtype), sharding=sharding)
        # Zeros may be a fair start for a parameter, but not for a rotary embedding's frequencies.
        self.is_buffer = is_buffer


def on_placement(value: Any, expected: Spec, placement: Placement, name: str) -> jax.Array:
    """Returns a value of ``init`` on its placement; UninitializedLeafError if it does not fit."""
    if isinstance(value, torch.Tensor):
        on_device = torchax_backend.is_device_tensor(value)
        with torchax_backend.native_torch():
            value = torchax_backend.buffer(value) if on_device else torchax_backend.to_numpy(value)
    elif not isinstance(value, jax.Array):
        value = np.asarray(value)
    if not isinstance(value, jax.Array):
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    found = Spec("jax", value.dtype.name, tuple(value.shape))
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise UninitializedLeafError(
            f"{name}: init returned {found.content()}, expected {expected.content()}; return an "
            "array of the expected dtype and shape",
            key_path=name,
        )
    return put({"": value}, {"": placement})[""]


# --- buffers computed anew ---------------------------------------------------------------------


def rebuilt_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns name -> CPU tensor for the meta buffers computed anew; keeps torch's random state."""
    root, _ = torchax_backend.unwrap_jittable(model)
    found: dict[str, torch.Tensor] = {}
    setters: dict[str, Callable[[Any], Any] | None] = {}
    for path, module in root.named_modules():
        above = setters.get(path.rpartition(".")[0]) if path else None
        setter = getattr(module, _SETTER, None)
        # The innermost model around a module knows how to set the module's buffers.
        setters[path] = setter if callable(setter) else above
        buffers = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set and buffer.is_meta
        }
        has_parameters = any(p is not None for p in module._parameters.values())
        if not buffers or has_parameters:
            continue
        with torchax_backend.native_torch(), torch.random.fork_rng(devices=[]):
            values = _set_in_copy(module, buffers, setters[path])
            if not values and not any(True for _ in module.parameters()):  # else it may be large
                values = _made_again(module, buffers)
        for name, value in values.items():
            found[names.without_compile(f"{path}.{name}" if path else name)] = value
    return found


def _set_in_copy(
    module: torch.nn.Module,
    buffers: Mapping[str, torch.Tensor],
    setter: Callable[[Any], Any] | None,
) -> dict[str, torch.Tensor]:
    """Returns the buffers that a setter sets in a copy of a module; {} unless it sets all."""
    # Two copies begin with other contents, and one draws random numbers after the other. What is
    # equal in both afterwards was set, and not by chance.
    results = []
    for fill in (0, 1):
        probe = copy.copy(module)
        probe.__dict__["_modules"] = {}
        probe.__dict__["_buffers"] = {
            name: torch.full(buffer.shape, fill, dtype=buffer.dtype)
            for name, buffer in buffers.items()
        }
        try:
            if setter is not None:
                setter(probe)
        except Exception as error:  # any: it is the model's own function
            logger.debug("%s: %s failed: %r", type(module).__name__, _SETTER, error)
            return {}
        results.append(dict(probe._buffers))
    return _if_equal(buffers, *results)


def _made_again(
    module: torch.nn.Module, buffers: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the buffers of two new modules of the same config, if both are equal; else {}."""
    config = getattr(module, _CONFIG, None)
    try:
        arguments = inspect.signature(type(module)).parameters.keys() - {"device"}
        if config is None or arguments != {_CONFIG}:
            return {}
        results = []
        for _ in range(2):
            made: Any = type(module)(config)
            results.append({name: made._buffers.get(name) for name in buffers})
    except Exception as error:  # any: it is the model's own class
        logger.debug("%s: cannot be made again: %r", type(module).__name__, error)
        return {}
    return _if_equal(buffers, *results)


def _if_equal(
    buffers: Mapping[str, torch.Tensor],
    first: Mapping[str, torch.Tensor | None],
    second: Mapping[str, torch.Tensor | None],
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, buffer in buffers.items():
        a, b = first.get(name), second.get(name)
        if a is None or b is None or a.is_meta or a.shape != buffer.shape or not _same_bits(a, b):
            return {}
        # As a move of the model to this dtype would convert it.
        found[name] = a.to(buffer.dtype)
    return found


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torchax_backend.to_numpy(a).tobytes() == (
        torchax_backend.to_numpy(b).tobytes()
    )
