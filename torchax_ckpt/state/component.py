"""What the components of a training state (modules, optimizers, ...) return to save and restore.

``capture()`` returns a component's present state as ``Captured``, without blocking the training.
``prepare(node, plan)`` compares a stored node with the live object, which it does not change, and
adds to the plan of the restore, a ``Restoration``: differences, leaves to read, changes to make.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.sharding import Local, Placement, placement_of
from torchax_ckpt.errors import (
    UninitializedLeafError,
    UnsupportedLeafError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.runtime.undoing import undone_on_failure
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.state.findings import Findings, refused
from torchax_ckpt.state.leaf import Array, Spec, require_jax_dtype
from torchax_ckpt.state.pytree import Encoder, Values, leaf_names, value_of

# To ask ten thousand leaves would take a tenth of the blocking time of a save.
_MAX_ASKED = 100


# --- saving ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The node of a component and its leaf names, in order; while unchanged, the same object."""

    node: Node
    names: tuple[str, ...]
    # (type, type that it comes back as) -> name of such a value
    changed: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Captured:
    """The state of a component at one moment; device arrays by reference, host arrays copied."""

    form: Form
    arrays: Sequence[Array]  # in the order of form.names

    def by_name(self) -> dict[str, Array]:
        """Returns leaf name -> array."""
        return dict(zip(self.form.names, self.arrays, strict=True))


def encoded(value: Any, key_path: tuple[object, ...]) -> Captured:
    """Captures any Python value, with a new ``Form`` object at each call."""
    encoder = Encoder()
    return captured_by(encoder, encoder.encode(value, key_path))


def captured_by(encoder: Encoder, node: Node) -> Captured:
    """Returns what an encoder has captured, with its node."""
    form = Form(node, tuple(encoder.leaves), encoder.changed)
    return Captured(form, list(encoder.leaves.values()))


def require_alive(captured: Captured) -> None:
    """Raises UnsupportedLeafError, which names the leaf, if a leaf is a tracer or was donated.

    Of many leaves, some are asked whether they were donated; reading the others later would fail.
    """
    some: Sequence[Any] = captured.arrays[:: 1 + len(captured.arrays) // _MAX_ASKED]
    if not (
        any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, captured.arrays)))
        or any(type(array) is not np.ndarray and array.is_deleted() for array in some)
    ):
        return
    for name, array in zip(captured.form.names, captured.arrays, strict=True):
        if not isinstance(array, jax.Array):
            continue
        if isinstance(array, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{name}: is a JAX tracer, left behind by a jitted function. Put the arrays that "
                "the function returned into the tensors, and save outside of the function.",
                key_path=name,
            )
        if array.is_deleted():
            raise UnsupportedLeafError(
                f"{name}: its buffer was donated to a jitted step and is gone. Save the state that "
                "the step returned: save(step, state=...).",
                key_path=name,
            )


class Combined:
    """Combines captured parts into one; its form changes only if the form of a part does."""

    def __init__(self, build: Callable[[list[Node]], Node]) -> None:
        self._build = build
        self._parts: list[Form] = []
        self._form: Form | None = None

    def __call__(self, parts: Sequence[Captured]) -> Captured:
        """Returns the combined node with the leaves of all parts, in the order of the parts."""
        forms = [part.form for part in parts]
        if self._form is None or forms != self._parts:
            node = self._build([form.node for form in forms])
            leaves = tuple(name for form in forms for name in form.names)
            if len(set(leaves)) < len(leaves):
                name = next(name for name in leaves if leaves.count(name) > 1)
                raise UnsupportedLeafError(f"{name}: two leaves have this name", key_path=name)
            changed = {kinds: name for form in forms for kinds, name in form.changed.items()}
            self._form, self._parts = Form(node, leaves, changed), forms
        return Captured(self._form, list(chain.from_iterable(part.arrays for part in parts)))


class SameForm:
    """Gives a captured value the ``Form`` object of the value before, if the two are equal."""

    def __init__(self) -> None:
        self._text = ""
        self._form = Form(None, ())

    def __call__(self, captured: Captured) -> Captured:
        """Returns the captured value, with the earlier form if its node is the same."""
        # Compared as text, because 1 == 1.0 and 0.0 == -0.0, which are different nodes.
        text = json.dumps(captured.form.node)
        if text != self._text:
            self._text, self._form = text, captured.form
        return Captured(self._form, captured.arrays)


# --- restoring ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LeafRead:
    """A leaf to read from a checkpoint."""

    name: str
    spec: Spec
    placement: Placement  # where the array that is read goes
    dtype: str | None = None  # converts to it; None keeps the stored dtype


@dataclasses.dataclass
class Change:
    """A change to live objects; only one that runs user code may fail, and has an ``undo``."""

    do: Callable[[Values], None]
    undo: Callable[[], None] | None = None
    needs: tuple[str, ...] = ()  # names of the leaves that ``do`` uses
    release: Callable[[], None] | None = None  # deletes the device buffers that ``do`` replaces


@dataclasses.dataclass
class Restoration:
    """The plan of a restore: the leaves to read, then the changes to live objects, in order.

    Nothing is changed before ``apply``, so that a plan which differs can be dropped.
    """

    selection: Selection = dataclasses.field(default_factory=Selection)  # what is restored
    findings: Findings = dataclasses.field(default_factory=Findings)  # what differs
    reads: dict[str, LeafRead] = dataclasses.field(default_factory=dict)
    # checks examine values that were read, before any change
    checks: list[Change] = dataclasses.field(default_factory=list)
    calls: list[Change] = dataclasses.field(default_factory=list)  # run user code, may fail
    changes: list[Change] = dataclasses.field(default_factory=list)  # buffers, cannot fail
    unfilled: list[str] = dataclasses.field(default_factory=list)  # meta tensors without a value
    # name of a tensor -> name of the tensor that one of the calls puts in its place
    tied_again: dict[str, str] = dataclasses.field(default_factory=dict)

    def add_read(
        self, node: Mapping[str, Any], placement: Placement, dtype: str | None = None
    ) -> None:
        """Adds a leaf to the reads; UnsupportedLeafError if JAX would narrow its dtype."""
        spec = Spec.of_node(node)
        if placement is not Local.HOST:
            require_jax_dtype(dtype or spec.dtype, node["array"])
        changed = None if dtype == spec.dtype else dtype
        self.reads[node["array"]] = LeafRead(node["array"], spec, placement, changed)

    def require_filled(self, call: str = "attach") -> None:
        """Raises UninitializedLeafError if a meta tensor would remain without data."""
        if not self.unfilled:
            return
        one = "tensor is on the meta device and nothing fills it"
        many = "tensors are on the meta device and nothing fills them"
        listed = ", ".join(self.unfilled[:10]) + (", ..." if len(self.unfilled) > 10 else "")
        raise UninitializedLeafError(
            f"{counted(len(self.unfilled), one, many)}: {listed}. Pass {call}(init=f); "
            "f(name, leaf) returns an array with the shape, dtype and sharding of leaf, a "
            "jax.ShapeDtypeStruct.",
            key_path=self.unfilled[0],
        )

    def apply(self, values: Values, agree: Callable[[], None] = lambda: None) -> None:
        """Makes all changes or none; see ``apply_calls``."""
        self.apply_calls(values, agree)
        self.apply_changes(self.changes, values)

    @staticmethod
    @torchax_backend.native_torch()
    @stage("change the objects")
    def apply_changes(changes: Iterable[Change], values: Values) -> None:
        """Makes the given changes, which cannot fail and have no undo."""
        for change in changes:
            change.do(values)

    def apply_calls(self, values: Values, agree: Callable[[], None] = lambda: None) -> None:
        """Makes the changes in ``calls``; undoes all if one fails, or ``agree`` then raises."""
        for check in self.checks:
            check.do(values)
        with undone_on_failure() as undos:
            for call in self.calls:
                if call.undo is not None:
                    undos.append(call.undo)
                call.do(values)
            agree()


def restore_by_call(
    node: Node,
    live: Captured,
    plan: Restoration,
    *,
    where: str,
    owner: object,
    take: Callable[[Any], Any],
    put_back: Callable[[Any], Any] | None = None,
) -> None:
    """Adds a call that passes the value of ``node`` to ``take``, the user's code, which may refuse.

    The undo passes the state ``live`` to ``put_back`` (default: ``take``). Device arrays go to the
    placement of the live leaf of the same name and shape, else to the default device.
    """
    arrays = live.by_name()
    for child in array_nodes(node):
        spec = Spec.of_node(child)
        counterpart = arrays.get(names.without_process(child["array"]))
        if not spec.on_device:
            placement: Placement = Local.HOST
        elif isinstance(counterpart, jax.Array) and counterpart.shape == spec.shape:
            placement = placement_of(counterpart)
        else:
            placement = Local.DEFAULT_DEVICE
        plan.add_read(child, placement)

    def call(values: Values) -> None:
        state = value_of(node, values)
        with refused(where):
            take(state)

    attributes = dict(getattr(owner, "__dict__", {}))

    def undo() -> None:
        if hasattr(owner, "__dict__"):  # take may have set some attributes before it failed
            owner.__dict__.clear()
            owner.__dict__.update(attributes)
        # Rebuilt, so that it shares no mutable data with what was captured.
        (put_back or take)(value_of(live.form.node, arrays))

    plan.calls.append(Change(call, undo, needs=leaf_names(node)))
