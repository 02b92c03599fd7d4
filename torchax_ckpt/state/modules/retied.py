"""Ties again what a model declares as tied, and what ``.to("jax")`` made separate tensors.

A warm start does this for the weights of which the source has only one value.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.state.component import Write
from torchax_ckpt.state.modules.declared_ties import lost_ties
from torchax_ckpt.state.modules.module_tensors import Slot
from torchax_ckpt.state.stored_entries import StoredModule


@dataclasses.dataclass(frozen=True)
class Merged:
    """One tensor of a module as a warm start fills it.

    Attributes:
      slot: the tensor, with all names that it will have.
      members: the slots of the separate tensors that it replaces; the slot itself if it replaces
        none.
    """

    slot: Slot
    members: tuple[Slot, ...]

    @property
    def dropped(self) -> dict[str, str]:
        """A dict from first name of each tensor that the slot's tensor replaces to its own name."""
        (kept,) = (s.fqn for s in self.members if s.tensors is self.slot.tensors)
        return {s.fqn: kept for s in self.members if s.fqn != kept}

    def release(self) -> None:
        """Deletes the device buffers of all members."""
        for slot in self.members:
            slot.release()


def separate(live: Mapping[str, Slot]) -> list[Merged]:
    """Returns the slots as they are."""
    return [Merged(slot, (slot,)) for slot in live.values()]


def merged(
    module: torch.nn.Module,
    live: Mapping[str, Slot],
    stored: StoredModule,
    takes: Callable[[str], bool],
    own: Sequence[Any],
) -> list[Merged]:
    """Returns a module's slots; those that a warm start ties again are one slot.

    Separate tensors become one slot if the module declares them as tied, and the source has a value
    for only one of them, or ties them itself. They stay separate if their shapes, dtypes or
    ``requires_grad`` differ, if ``takes`` is false for a name, or if anything else holds the tensor
    that would be replaced, such as an optimizer, a JittableModule or a dict of parameters. In a
    JittableModule they stay separate too: optimizer state may exist for each of its params.
    ``own`` are the lists of the caller that hold tensors of the module.
    """
    root, overrides = torchax_backend.unwrap_jittable(module)
    lost = {} if overrides else lost_ties(module)
    pairs = [(a, n) for a, n in lost.items() if takes(a) and takes(n)]
    if not pairs:
        return separate(live)
    first = {n: slot.fqn for slot in live.values() for n in (slot.fqn, *slot.aliases)}
    sources = {fqn: stored.sources((fqn, *slot.aliases)) for fqn, slot in live.items()}
    kept_by: dict[str, str] = {}

    def kept(name: str) -> str:
        fqn = first[name]
        while fqn in kept_by:
            fqn = kept_by[fqn]
        return fqn

    # Again until nothing changes, because one tie may give a source to a name of the next.
    has_changed = True
    while has_changed:
        has_changed = False
        for alias, name in pairs:
            a, b = kept(alias), kept(name)
            values = {*sources[a], *sources[b]}
            if a == b or len(values) != 1 or not _are_alike(live[a], live[b]):
                continue
            if not sources[b]:
                a, b = b, a
            kept_by[a] = b
            has_changed = True
    dropped = [live[fqn].tensor for fqn in kept_by]
    if dropped and _is_held(dropped, root, own):
        return separate(live)
    groups: dict[str, list[Slot]] = {}
    for fqn, slot in live.items():
        groups.setdefault(kept(fqn), []).append(slot)
    return [_joined(live[fqn], members) for fqn, members in groups.items()]


def tying(module: torch.nn.Module, chosen: Iterable[Merged]) -> Write:
    """Returns the write that gives each merged slot one tensor, under all of its names."""
    new: dict[int, torch.Tensor] = {}
    for one in chosen:
        for slot in one.members:
            if slot.tensors is not one.slot.tensors:
                new[id(slot.tensor)] = one.slot.tensor
    root, _ = torchax_backend.unwrap_jittable(module)
    changed: list[tuple[dict[str, Any], str, Any]] = []

    def tie(_: Mapping[str, Any]) -> None:
        for submodule in root.modules():
            registries: tuple[Any, ...] = (submodule._parameters, submodule._buffers)
            for registry in registries:
                changed.extend((registry, k, v) for k, v in registry.items() if id(v) in new)
        for registry, key, old in changed:
            registry[key] = new[id(old)]

    def untie() -> None:
        for registry, key, old in changed:
            registry[key] = old

    return Write(tie, untie)


def _joined(kept: Slot, members: list[Slot]) -> Merged:
    if len(members) == 1:
        return Merged(kept, (kept,))
    names = [name for slot in members for name in (slot.fqn, *slot.aliases)]
    slot = dataclasses.replace(kept, fqn=names[0], aliases=tuple(names[1:]))
    return Merged(slot, tuple(members))


def _are_alike(a: Slot, b: Slot) -> bool:
    """Returns whether one tensor can stand for both."""

    def form(slot: Slot) -> Any:
        tensor = slot.tensor
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        traits = (is_parameter, tensor.requires_grad, slot.persistent, slot.is_on_cpu)
        return tuple(tensor.shape), tensor.dtype, traits

    return bool(form(a) == form(b))


def _is_held(tensors: Sequence[torch.Tensor], root: torch.nn.Module, own: Sequence[Any]) -> bool:
    """Returns whether anything but the module holds one of these tensors.

    An optimizer, a JittableModule or a dict of parameters that holds a tensor would go on with one
    that the module no longer has. Nothing in a parameter leads to them, and a warm start is given
    only the model, so the garbage collector is asked. It does not see what ``gc.freeze`` put aside;
    then every tensor counts as held. ``own`` are lists of the caller that hold tensors.
    """
    # Python 3.12 begins with a few frozen objects; a program that freezes has frozen its modules.
    if gc.get_freeze_count() < len(sys.modules):
        gc.unfreeze()
    if gc.get_freeze_count():
        return True
    gc.collect()  # what was dropped in a cycle holds nothing
    known = {id(registry) for m in root.modules() for registry in (m._parameters, m._buffers)}
    known |= {id(tensors), *map(id, own)}
    return any(
        isinstance(holder, (dict, list, set)) and id(holder) not in known
        for holder in gc.get_referrers(*tensors)
    )
