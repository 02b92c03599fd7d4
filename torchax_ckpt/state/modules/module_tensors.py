"""Lists the tensors and ties of a module, and its submodules that have extra state."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from jax.sharding import Sharding

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.move_shards import move
from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.layout import names


@dataclasses.dataclass(frozen=True)
class Slot:
    """One tensor of a module, with its names and the live objects that represent the tensor."""

    fqn: str  # the first name in torch, without torch.compile's parts
    aliases: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]  # newest first; several only in a JittableModule
    persistent: bool  # in the state dict

    @property
    def tensor(self) -> torch.Tensor:
        """The newest live tensor."""
        return self.tensors[0]

    @property
    def is_on_cpu(self) -> bool:
        """True if the tensor is a plain torch tensor on the CPU that holds data."""
        return not torchax_backend.is_device_tensor(self.tensor) and not self.tensor.is_meta

    @property
    def is_meta(self) -> bool:
        """True if the tensor is on the meta device, where it holds no data yet."""
        return not torchax_backend.is_device_tensor(self.tensor) and self.tensor.is_meta

    def fill(self, array: Any) -> None:
        """Sets the values of all live objects of this tensor to those of an array."""
        for tensor in self.tensors:
            if torchax_backend.is_device_tensor(tensor):
                torchax_backend.set_buffer(tensor, array)
            elif tensor.is_meta:
                torchax_backend.fill_meta(tensor, array)
            else:
                torchax_backend.copy_into(tensor, array)

    def reshard(self, sharding: Sharding) -> None:
        """Moves the device buffers of all live objects of this tensor to the given sharding."""
        for tensor in self.tensors:
            torchax_backend.set_buffer(tensor, move(torchax_backend.buffer(tensor), sharding))

    def release(self) -> None:
        """Deletes the tensor's device buffers; the tensor has no data until ``fill`` is called."""
        for tensor in self.tensors:
            torchax_backend.release(tensor)


def slots(module: torch.nn.Module) -> dict[str, Slot]:
    """Returns first name -> slot, for all tensors of a module, parameters first."""
    root, overrides = torchax_backend.unwrap_jittable(module)
    # A JittableModule leaves out the parts of a name that torch.compile adds, or some of them.
    newer: dict[str, list[torch.Tensor]] = {}
    for fqn, tensor in overrides.items():
        newer.setdefault(names.without_compile(fqn), []).append(tensor)
    found: dict[int, tuple[torch.Tensor, list[str], list[str]]] = {}
    for fqn, tensor, persistent in _named_tensors(root):
        _, saved, unsaved = found.setdefault(id(tensor), (tensor, [], []))
        (saved if persistent else unsaved).append(fqn)
    result: dict[str, Slot] = {}
    for tensor, saved, unsaved in found.values():
        # A buffer may be persistent under one name and not under another.
        fqn, *aliases = dict.fromkeys(saved or unsaved)
        live = [t for n in dict.fromkeys((*saved, *unsaved)) for t in newer.get(n, ())]
        if fqn in result:
            raise UnsupportedLeafError(f"{fqn}: two tensors have this name without _orig_mod")
        tensors = tuple({id(t): t for t in (*live, tensor)}.values())
        result[fqn] = Slot(fqn, tuple(aliases), tensors, bool(saved))
    return result


def _named_tensors(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for fqn, parameter in root.named_parameters(remove_duplicate=False):
        yield names.without_compile(fqn), parameter, True
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key, value in module._buffers.items():
            if value is not None:
                fqn = names.without_compile(f"{prefix}.{key}" if prefix else key)
                yield fqn, value, key not in module._non_persistent_buffers_set


def registered(module: torch.nn.Module) -> list[Any]:
    """Returns all that a module tree registers, in a fixed order; names depend on nothing else."""
    # torch's named_parameters would be slower, because it builds every name.
    root, overrides = torchax_backend.unwrap_jittable(module)
    found: list[Any] = [*overrides, *overrides.values()]
    stack = [root]
    while stack:
        current = stack.pop()
        for registry in (current._parameters, current._buffers, current._modules):
            if registry:
                found += registry
                found += registry.values()
        if current._buffers:
            found += current._non_persistent_buffers_set
        if current._modules:
            stack += [child for child in current._modules.values() if child is not None]
    return found


def same_objects(a: list[Any], b: list[Any]) -> bool:
    """Returns whether two lists have identical objects (or equal strings) in the same order."""
    return len(a) == len(b) and (
        all(map(operator.is_, a, b))
        or all(x is y or (type(x) is str and x == y) for x, y in zip(a, b, strict=True))
    )
