"""Captures and restores attached modules: parameters, persistent buffers, ties and extra state.

A module's node in the manifest is ``{"dict": [[fqn, leaf], ...], "ties": [[alias, fqn], ...],
"extra_state": [[path of the submodule, node], ...]}``. A tensor with several names is stored once,
under its first name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Sharding

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.sharding import Local, Placement, placement_of
from torchax_ckpt.errors import AttachError, UnsupportedLeafError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.state import pytree
from torchax_ckpt.state.component import (
    Captured,
    Combined,
    Form,
    add_read,
    encoded,
    fits,
    require_alive,
    restore_by_call,
)
from torchax_ckpt.state.leaf import Spec, Specs, arrays_of, describe
from torchax_ckpt.state.modules import ties
from torchax_ckpt.state.modules.meta_tensors import AbstractTensor, on_placement, rebuilt_buffers
from torchax_ckpt.state.modules.module_tensors import (
    Slot,
    registered,
    same_objects,
    slots,
)
from torchax_ckpt.state.plans import matching
from torchax_ckpt.state.plans.restoration import Change, Restoration, Values
from torchax_ckpt.state.stored_entries import EXTRA_STATE, StoredModule, extra_state_key

logger = logging.getLogger(__name__)

Rule = Callable[[str, jax.ShapeDtypeStruct], "Sharding | None"]
"""Maps a tensor's name and abstract value to a sharding; None keeps the present sharding."""
Init = Callable[[str, jax.ShapeDtypeStruct], Any]
"""Maps a tensor's name and abstract value (with its sharding) to its initial content."""

_MAX_LISTED = 5


class ModuleComponent:
    """One attached module, or a JittableModule around it."""

    def __init__(
        self,
        module: torch.nn.Module,
        key_path: tuple[str, ...],
        rule: Rule | None = None,
        init: Init | None = None,
    ) -> None:
        self.module = module
        self.key_path = key_path
        self._rule = rule
        self._init = init
        self._combined = Combined(self._node)
        self._registered: list[Any] = []
        self._slots: list[Slot] = []
        self._persistent: list[Slot] = []
        self._tensors: list[torch.Tensor] = []
        self._ties: list[list[str]] = []
        self._names: dict[int, tuple[tuple[str, ...], ...]] = {}
        self._extra_state_modules: dict[str, torch.nn.Module] = {}
        self._specs: Specs | None = None
        self._form = Form(None, ())
        self._refresh()
        _require_supported(module, self._slots, key_path)

    def name(self, fqn: str) -> str:
        """Returns the leaf name of the module's tensor that torch calls ``fqn``."""
        return names.join((*self.key_path, fqn))

    def _user_name(self, fqn: str) -> str:
        """Returns the name without ``model/``, which is passed to ``shardings`` and ``init``."""
        return names.join((*self.key_path[1:], fqn)) if len(self.key_path) > 1 else fqn

    def parameter_names(self) -> Mapping[int, tuple[tuple[str, ...], ...]]:
        """Returns tensor id -> its key paths below ``model``; the same dict until these change."""
        # A dict made for each optimizer would take a tenth of the blocking time of a save.
        return self._names

    def placements(self) -> dict[int, Placement]:
        """Returns the id of each live tensor object -> its placement after a restore."""
        return {
            id(tensor): placement
            for slot in self.slots()
            for placement in [self._placement(slot)]
            for tensor in slot.tensors
        }

    def slots(self) -> list[Slot]:
        """Returns the module's tensors, which are listed again only if the module has changed."""
        self._refresh()
        return self._slots

    # --- saving ---

    def capture(self) -> Captured:
        """Returns the module's state now; raises UnsupportedLeafError if a tensor holds no data."""
        tensors = self._capture_tensors()
        require_alive(tensors)
        extra = [
            encoded(module.get_extra_state(), (*self.key_path, path, EXTRA_STATE))
            for path, module in self._extra_state_modules.items()
        ]
        return self._combined([tensors, *extra])

    def _capture_tensors(self) -> Captured:
        """Captures the tensors; builds a new node only if a name, type, shape or dtype changed."""
        self._refresh()
        if self._specs is not None:
            arrays = arrays_of(self._tensors, self.key_path[0])
            specs = Specs(self._tensors, arrays)
            if specs == self._specs:
                self._specs = specs
                return Captured(self._form, arrays)
        for slot in self._persistent:
            self._require_one_value(slot)
        named = {s.fqn: s.tensor for s in self._persistent}
        captured = encoded(named, self.key_path)
        self._specs = Specs(self._tensors, captured.arrays)
        self._form = Form(captured.form.node, captured.form.names)  # Parameters stay Parameters
        return Captured(self._form, captured.arrays)

    def _require_one_value(self, slot: Slot) -> None:
        # The last tensor is in the module itself. The others replace it in a JittableModule's
        # params, each under one of its names.
        if len({id(torchax_backend.buffer(t)) for t in slot.tensors[:-1]}) > 1:
            name = self.name(slot.fqn)
            raise UnsupportedLeafError(
                f"{name}: is tied to {', '.join(slot.aliases)}, but the JittableModule's params "
                "differ under these names; build the JittableModule with dedup_parameters=True",
                key_path=name,
            )

    def _refresh(self) -> None:
        live = registered(self.module)
        if same_objects(live, self._registered):
            return
        self._registered = live
        root, _ = torchax_backend.unwrap_jittable(self.module)
        self._extra_state_modules = matching.extra_state_modules(root)
        self._slots = list(slots(self.module).values())
        persistent = [s for s in self._slots if s.persistent]
        self._persistent = persistent
        self._tensors = [s.tensor for s in persistent]
        self._ties = [[alias, s.fqn] for s in persistent for alias in s.aliases]
        self._names = {
            id(tensor): tuple((*self.key_path[1:], n) for n in (slot.fqn, *slot.aliases))
            for slot in self._slots
            for tensor in slot.tensors
        }
        self._specs = None

    def _node(self, nodes: list[Node]) -> Node:
        tensors, *extra = nodes
        extra_state = zip(self._extra_state_modules, extra, strict=True)
        return {**tensors, "ties": self._ties, "extra_state": [list(pair) for pair in extra_state]}

    # --- restoring ---

    def prepare(self, node: Node, plan: Restoration) -> None:
        """Compares a module's node with the selected live tensors, and plans the restore."""
        stored = matching.stored_module(node, names.join(self.key_path), plan.findings)
        self.prepare_from(stored, plan)

    def prepare_from(
        self, stored: StoredModule, plan: Restoration, *, ties_again: bool = False
    ) -> None:
        """Prepares from any source; ``ties_again`` joins tensors that are declared as tied."""
        findings, selection = plan.findings, plan.selection
        live = {slot.fqn: slot for slot in self.slots()}
        self._match_wrapped(stored, selection)
        stored = stored.selected(selection, self.key_path[1:])
        supplied: set[str] = set()
        is_selected = functools.partial(self._is_selected, selection)
        with torchax_backend.native_torch():
            chosen = ties.separate(live)
            if ties_again:
                known_lists = (self._registered, self._tensors)
                chosen = ties.merged(self.module, live, stored, is_selected, known_lists)
            selected = [
                (merged.slot.fqn, fqns, merged)
                for merged in chosen
                if merged.slot.persistent
                and (fqns := [*filter(is_selected, (merged.slot.fqn, *merged.slot.aliases))])
            ]

            def fits_slot(merged: ties.Merged, node: Node, name: str) -> bool:
                return fits(self._expected(merged.slot), node, name, findings, stored.converts)

            for merged, node in matching.match_tensors(
                selected, stored, self.key_path, findings, fits_slot
            ):
                slot, leaf = merged.slot, node["array"]
                supplied.update(member.fqn for member in merged.members)
                add_read(plan.reads, node, self._placement(slot), self._expected(slot).dtype)
                plan.changes.append(
                    Change(_writer(slot, leaf), needs=(leaf,), release=merged.release)
                )
        if tied := [m for m in chosen if m.replaced and m.slot.fqn in supplied]:
            plan.calls.append(ties.tying(self.module, tied))
            for merged in tied:
                plan.tied_again |= merged.replaced
        findings.lacks_ties |= bool(findings.missing) and any(
            self.name(a) in findings.missing and self.name(b) not in findings.unexpected
            for alias, fqn in ties.lost_ties(self.module).items()
            for a, b in ((alias, fqn), (fqn, alias))
            if b in stored.tensors
        )
        self._prepare_extra_state(stored, plan)
        self._prepare_rest(plan, supplied)

    def _match_wrapped(self, stored: StoredModule, selection: Selection) -> None:
        """Lets the selection match names that differ by wrappers; process 0 logs it once."""
        theirs = [*stored.tensors, *stored.ties, *map(extra_state_key, stored.extra_state or ())]
        ours = [n for s in self._persistent for n in (s.fqn, *s.aliases)]
        ours += map(extra_state_key, self._extra_state_modules)
        matched = selection.match_wrapped(*map(self._selection_names, (theirs, ours)))
        if matched and jax.process_index() == 0:
            logger.info(
                "%s: %s with names of the model that differ by a wrapper, such as torch.compile's "
                "_orig_mod: %s with %s",
                names.join(self.key_path),
                counted(
                    len(matched),
                    "name of the checkpoint is matched",
                    "names of the checkpoint are matched",
                ),
                *next(iter(matched.items())),
            )

    def _selection_names(self, fqns: Iterable[str]) -> list[str]:
        return [names.join((*self.key_path[1:], fqn)) for fqn in fqns]

    def _is_selected(self, selection: Selection, fqn: str) -> bool:
        return selection.takes(*self._selection_names([fqn]))

    def _prepare_extra_state(self, stored: StoredModule, plan: Restoration) -> None:
        modules = {
            path: module
            for path, module in self._extra_state_modules.items()
            if self._is_selected(plan.selection, extra_state_key(path))
        }
        for path, node in (stored.extra_state or {}).items():
            pytree.check(node, names.join((*self.key_path, path, EXTRA_STATE)))
        for module, node, key_path in matching.match_extra_state(
            modules, stored, self.key_path, plan.findings
        ):
            where = names.join(key_path)
            live = encoded(module.get_extra_state(), key_path)
            take = module.set_extra_state
            restore_by_call(node, live, plan, where=where, owner=module, take=take)

    # --- tensors that no checkpoint supplies ---

    def prepare_fresh(self, plan: Restoration) -> None:
        """Plans a start without checkpoint: fill meta tensors, shard by the rule."""
        self._refresh()
        self._prepare_rest(plan, set())

    def _prepare_rest(self, plan: Restoration, supplied: set[str]) -> None:
        """Plans what happens to tensors not in ``supplied``: meta are filled, others resharded."""
        empty = [s for s in self._slots if s.is_meta and s.fqn not in supplied]
        known = {} if all(s.persistent for s in empty) else rebuilt_buffers(self.module)
        for slot in empty:
            value = known.get(slot.fqn)
            if value is None and self._init is not None:
                is_buffer = not isinstance(slot.tensor, torch.nn.Parameter)
                placement = self._placement(slot)
                abstract = AbstractTensor(self._expected(slot), placement, is_buffer=is_buffer)
                value = self._init(self._user_name(slot.fqn), abstract)
            if value is None:
                plan.unfilled.append(self.name(slot.fqn))
                continue
            expected, placement = self._expected(slot), self._placement(slot)
            array = on_placement(value, expected, placement, self.name(slot.fqn))
            plan.changes.append(Change(_calling(slot.fill, array)))
        for slot in self._slots if self._rule is not None else ():
            if slot.fqn not in supplied and torchax_backend.is_device_tensor(slot.tensor):
                placement = self._placement(slot)
                if isinstance(placement, Sharding):
                    plan.changes.append(Change(_calling(slot.reshard, placement)))

    # --- one slot ---

    def _expected(self, slot: Slot) -> Spec:
        spec = describe(slot.tensor, self.name(slot.fqn))
        if spec.kind == "torch" and slot.tensor.is_meta:
            # A meta tensor becomes a JAX array, whose dtype JAX narrows unless x64 is enabled.
            dtype = jax.dtypes.canonicalize_dtype(np.dtype(spec.dtype))
            return Spec("torchax", dtype.name, spec.shape)
        return spec

    def _placement(self, slot: Slot) -> Placement:
        if slot.is_on_cpu:
            return Local.HOST
        if self._rule is not None:
            expected = self._expected(slot)
            abstract = jax.ShapeDtypeStruct(expected.shape, expected.dtype)
            if (ruled := self._rule(self._user_name(slot.fqn), abstract)) is not None:
                return ruled
        if torchax_backend.is_device_tensor(slot.tensor):
            return placement_of(torchax_backend.buffer(slot.tensor))
        return Local.DEFAULT_DEVICE


def _writer(slot: Slot, leaf: str) -> Callable[[Values], None]:
    return lambda values: slot.fill(values[leaf])


def _calling(method: Callable[[Any], None], argument: Any) -> Callable[[Values], None]:
    return lambda _: method(argument)


def _require_supported(
    module: torch.nn.Module, slots: Sequence[Slot], key_path: tuple[str, ...]
) -> None:
    """Raises AttachError or UnsupportedLeafError unless the module can be saved and trained."""
    where = names.join(key_path)
    root, _ = torchax_backend.unwrap_jittable(module)
    with torchax_backend.native_torch():  # through torchax, attributes take longer to read
        whys = {slot.fqn: torchax_backend.why_unsupported(slot.tensor) for slot in slots}
    for fqn, why in whys.items():
        if why:
            name = names.join((*key_path, fqn))
            raise UnsupportedLeafError(f"{name}: {why}", key_path=name)
    parameters = [s for s in slots if isinstance(s.tensor, torch.nn.Parameter)]
    if parameters and all(s.is_on_cpu for s in parameters):
        is_prepared = getattr(root, "_is_accelerate_prepared", False)
        by = "accelerate's prepare moves models there: call Accelerator(device_placement=False). "
        raise AttachError(
            f"{where}: all parameters of {type(root).__name__} are on the CPU. {by * is_prepared}"
            "Move the model first: torchax.enable_globally(); model.to('jax'). Build the optimizer "
            "after that.",
            key_path=where,
        )
    if on_cpu := [names.join((*key_path, s.fqn)) for s in parameters if s.is_on_cpu]:
        more = f" and {len(on_cpu) - _MAX_LISTED} more" if len(on_cpu) > _MAX_LISTED else ""
        raise AttachError(
            f"{where}: {len(on_cpu)} of {len(parameters)} parameters of {type(root).__name__} "
            f"{'is' if len(on_cpu) == 1 else 'are'} on the CPU, the others are not: "
            f"{', '.join(on_cpu[:_MAX_LISTED])}{more}. Move the whole model after its last part "
            "was added: model.to('jax'). Build the optimizer after that. Make a tensor that is to "
            "stay on the CPU a buffer.",
            key_path=on_cpu[0],
        )
    known = {n for s in slots for n in (s.fqn, *s.aliases)}
    paths = [path for path, _ in root.named_modules(remove_duplicate=False)]
    known |= {extra_state_key(names.without_compile(path)) for path in paths}
    stored = map(names.without_compile, root.state_dict(keep_vars=True))
    if unknown := [k for k in stored if k not in known]:
        name = names.join((*key_path, unknown[0]))
        raise UnsupportedLeafError(
            f"{name}: is in state_dict() but is neither a parameter nor a buffer (a hook or an "
            "overridden _save_to_state_dict adds it). Return it from get_extra_state()",
            key_path=name,
        )
