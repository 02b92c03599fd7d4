"""Ties that a model declares: warns of those that its tensors lack, and makes them again.

``.to("jax")`` makes tied weights separate tensors. Models of ``transformers`` declare their ties in
``all_tied_weights_keys``, alias -> name; until version 5, ``_tied_weights_keys`` lists the aliases
of the input embeddings if ``config.tie_word_embeddings`` is set. The library is not imported.

Source: transformers 5.23, ``PreTrainedModel.get_expanded_tied_weights_keys``; 4.57,
``PreTrainedModel.tie_weights``.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.layout import names
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.state.modules.module_tensors import Slot
from torchax_ckpt.state.plans.restoration import Change
from torchax_ckpt.state.stored_entries import StoredModule

_MAX_LISTED = 3


# --- declared ties -----------------------------------------------------------------------------


def lost_ties(module: torch.nn.Module) -> dict[str, str]:
    """Returns alias -> name for all declared ties whose live tensors are separate tensors."""
    root, _ = torchax_backend.unwrap_jittable(module)
    declared: dict[str, str] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for alias, name in _declared_by(module).items():
            alias, name = (names.without_compile(f"{prefix}{n}") for n in (alias, name))
            declared[alias] = name
    live = _tensors(root) if declared else {}
    return {
        alias: name
        for alias, name in declared.items()
        if alias in live and name in live and live[alias] is not live[name]
    }


def warn_of_lost_ties(module: torch.nn.Module, key_path: tuple[str, ...]) -> None:
    """Warns once, on process 0, if tensors that the model declares as tied are separate."""
    lost = [f"{alias} (tied to {name})" for alias, name in lost_ties(module).items()]
    if not lost or jax.process_index() != 0:
        return
    more = f" and {len(lost) - _MAX_LISTED} more" if len(lost) > _MAX_LISTED else ""
    root, _ = torchax_backend.unwrap_jittable(module)
    user_messages.warn(
        f"{names.join(key_path)}: {type(root).__name__} declares tied weights that are separate "
        f"tensors: {', '.join(lost[:_MAX_LISTED])}{more}. They train apart and are stored apart. "
        "model.to('jax') unties weights: call model.tie_weights() after it, and build the "
        "optimizer after that."
    )


def _tensors(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = root.named_parameters(remove_duplicate=False)
    live = (*root.named_buffers(remove_duplicate=False), *parameters)
    return {names.without_compile(name): tensor for name, tensor in live}


def _declared_by(module: torch.nn.Module) -> Mapping[str, str]:
    """Returns the ties that one module declares for itself, by names below the module."""
    ties: Any = getattr(module, "all_tied_weights_keys", None)
    if isinstance(ties, Mapping):
        return ties
    aliases: Any = getattr(module, "_tied_weights_keys", None)
    is_on = getattr(getattr(module, "config", None), "tie_word_embeddings", False)
    if not (is_on and isinstance(aliases, (list, tuple))):
        return {}
    embedding = module.get_input_embeddings()  # type: ignore[operator]
    source = next((f"{p}.weight" for p, m in module.named_modules() if m is embedding), None)
    return {} if source is None else {alias: source for alias in aliases if alias != source}


# --- tying again -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Merged:
    """One tensor of a module as a warm start fills it."""

    slot: Slot  # with all names that it will have
    members: tuple[Slot, ...]  # the slots that it replaces, or itself

    @property
    def replaced(self) -> dict[str, str]:
        """First name of each tensor that the slot's tensor replaces -> its own first name."""
        (remaining,) = (s.fqn for s in self.members if s.tensors is self.slot.tensors)
        return {s.fqn: remaining for s in self.members if s.fqn != remaining}

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
    is_selected: Callable[[str], bool],
    known_lists: Sequence[Any],
) -> list[Merged]:
    """Returns a module's slots; separate tensors become one slot if a warm start ties them again.

    They stay separate if the source has several values, if their forms differ, if a name is not
    selected, if something besides the module and ``known_lists`` refers to a tensor that would be
    replaced, or in a JittableModule, because optimizer state may exist for each of its params.
    """
    root, overrides = torchax_backend.unwrap_jittable(module)
    lost = {} if overrides else lost_ties(module)
    pairs = [(a, n) for a, n in lost.items() if is_selected(a) and is_selected(n)]
    if not pairs:
        return separate(live)
    first = {n: slot.fqn for slot in live.values() for n in (slot.fqn, *slot.aliases)}
    sources = {fqn: stored.sources((fqn, *slot.aliases)) for fqn, slot in live.items()}
    replaced_by: dict[str, str] = {}

    def remaining(name: str) -> str:
        fqn = first[name]
        while fqn in replaced_by:
            fqn = replaced_by[fqn]
        return fqn

    # Again until nothing changes, because one tie may give a source to a name of the next.
    has_changed = True
    while has_changed:
        has_changed = False
        for alias, name in pairs:
            a, b = remaining(alias), remaining(name)
            values = {*sources[a], *sources[b]}
            if a == b or len(values) != 1 or not _are_alike(live[a], live[b]):
                continue
            if not sources[b]:
                a, b = b, a
            replaced_by[a] = b
            has_changed = True
    replaced = [live[fqn].tensor for fqn in replaced_by]
    if replaced and _are_referred_to(replaced, root, known_lists):
        return separate(live)
    groups: dict[str, list[Slot]] = {}
    for fqn, slot in live.items():
        groups.setdefault(remaining(fqn), []).append(slot)
    return [_joined(live[fqn], members) for fqn, members in groups.items()]


def tying(module: torch.nn.Module, chosen: Iterable[Merged]) -> Change:
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

    return Change(tie, untie)


def _joined(remaining: Slot, members: list[Slot]) -> Merged:
    if len(members) == 1:
        return Merged(remaining, (remaining,))
    fqn, *aliases = [name for slot in members for name in (slot.fqn, *slot.aliases)]
    slot = dataclasses.replace(remaining, fqn=fqn, aliases=tuple(aliases))
    return Merged(slot, tuple(members))


def _are_alike(a: Slot, b: Slot) -> bool:
    """Returns whether one tensor can stand for both."""

    def form(slot: Slot) -> Any:
        tensor = slot.tensor
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        traits = (is_parameter, tensor.requires_grad, slot.persistent, slot.is_on_cpu)
        return tuple(tensor.shape), tensor.dtype, traits

    return bool(form(a) == form(b))


def _are_referred_to(
    tensors: Sequence[torch.Tensor], root: torch.nn.Module, known_lists: Sequence[Any]
) -> bool:
    """Returns whether anything but the module and ``known_lists`` has one of these tensors."""
    # An optimizer or a dict of parameters would go on with a tensor that the module no longer has.
    # Only the garbage collector knows of them, and it does not see what gc.freeze put aside.
    # Python 3.12 begins with a few frozen objects; a program that freezes has frozen its modules.
    if gc.get_freeze_count() < len(sys.modules):
        gc.unfreeze()
    if gc.get_freeze_count():
        return True
    gc.collect()  # what was dropped in a cycle refers to nothing
    known = {id(registry) for m in root.modules() for registry in (m._parameters, m._buffers)}
    known |= {id(tensors), *map(id, known_lists)}
    return any(
        isinstance(holder, (dict, list, set)) and id(holder) not in known
        for holder in gc.get_referrers(*tensors)
    )
