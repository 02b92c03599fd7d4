"""What the components of a training state (modules, optimizers, ...) return to save and restore.

``capture()`` returns a component's present state as ``Captured``, without blocking the training.
``prepare(node, plan)`` compares a stored node with the live object, which it does not change, and
adds to the plan of the restore (``plans/restoration.py``).
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np

from torchax_ckpt.devices.sharding import Local, Placement, placement_of
from torchax_ckpt.errors import (
    UnsupportedLeafError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.leaf import Array, Spec, require_jax_dtype
from torchax_ckpt.state.plans.restoration import Restoration
from torchax_ckpt.state.pytree import Encoder, value_of

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


def add_read(
    reads: dict[str, LeafRead],
    node: Mapping[str, Any],
    placement: Placement,
    dtype: str | None = None,
) -> None:
    """Adds a leaf to the reads of a plan; UnsupportedLeafError if JAX would narrow its dtype."""
    spec = Spec.of_node(node)
    if placement is not Local.HOST:
        require_jax_dtype(dtype or spec.dtype, node["array"])
    changed = None if dtype == spec.dtype else dtype
    reads[node["array"]] = LeafRead(node["array"], spec, placement, changed)


def fits(
    expected: Spec,
    node: Mapping[str, Any],
    name: str,
    findings: Findings,
    converts: Callable[[str, str], bool] = operator.eq,
) -> bool:
    """Returns whether a stored leaf has the expected shape and dtype; if not, records that.

    ``converts`` says whether a stored dtype may be read as the expected one.
    """
    found = Spec.of_node(node)
    if found.shape == expected.shape and converts(found.dtype, expected.dtype):
        return True
    findings.mismatch(name, expected.content(), found.content())
    return False


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
        add_read(plan.reads, child, placement)
    back = put_back or take
    # Rebuilt, so that it shares no mutable data with what was captured.
    plan.add_call(
        node, where, owner, take, lambda: back(value_of(live.form.node, arrays)), value_of
    )
