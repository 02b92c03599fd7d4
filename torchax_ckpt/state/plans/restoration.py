"""The plan of a restore: what differs, the leaves to read, the changes to make, all or none."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchax_ckpt.errors import UninitializedLeafError
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.plain_torch import native_torch
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.state.findings import Findings, refused

logger = logging.getLogger(__name__)

Values = Mapping[str, Any]
"""Leaf name -> the value that was read, in its place on a device or on the host."""


@dataclasses.dataclass
class Change:
    """A change to live objects; one that runs user code may fail, and has an ``undo``."""

    do: Callable[[Values], object]
    undo: Callable[[], object] | None = None
    needs: tuple[str, ...] = ()  # names of the leaves that ``do`` uses
    release: Callable[[], None] | None = None  # deletes the device buffers that ``do`` replaces


@dataclasses.dataclass
class Restoration:
    """The plan of a restore: the leaves to read, then the changes to live objects, in order.

    Nothing is changed before ``apply``, so that a plan which differs can be dropped.
    """

    selection: Selection = dataclasses.field(default_factory=Selection)  # what is restored
    findings: Findings = dataclasses.field(default_factory=Findings)  # what differs
    # leaf name -> where and as what it is read: a ``LeafRead``; in plain torch, what places it
    reads: dict[str, Any] = dataclasses.field(default_factory=dict)
    # may fail, because they run user code or examine what was read
    calls: list[Change] = dataclasses.field(default_factory=list)
    changes: list[Change] = dataclasses.field(default_factory=list)  # buffers, cannot fail
    unfilled: list[str] = dataclasses.field(default_factory=list)  # meta tensors without a value
    # name of a tensor -> name of the tensor that one of the calls puts in its place
    tied_again: dict[str, str] = dataclasses.field(default_factory=dict)

    def add_call(
        self,
        node: Node,
        where: str,
        owner: object,
        take: Callable[[Any], object],
        put_back: Callable[[], object],
        value_of: Callable[[Node, Values], Any],
    ) -> None:
        """Adds a call that passes the value of ``node`` to ``take``, the user's code.

        It may refuse the value, or set some attributes of ``owner`` before it fails. The undo
        restores the attributes, then calls ``put_back``.
        """
        attributes = dict(getattr(owner, "__dict__", {}))

        def call(values: Values) -> None:
            state = value_of(node, values)
            with refused(where):
                take(state)

        def undo() -> None:
            if hasattr(owner, "__dict__"):
                owner.__dict__.clear()
                owner.__dict__.update(attributes)
            put_back()

        self.calls.append(Change(call, undo, needs=leaf_names(node)))

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
    @native_torch()
    @stage("change the objects")
    def apply_changes(changes: Iterable[Change], values: Values) -> None:
        """Makes the given changes, which cannot fail and have no undo."""
        for change in changes:
            change.do(values)

    def apply_calls(self, values: Values, agree: Callable[[], None] = lambda: None) -> None:
        """Makes the changes in ``calls``; undoes all if one fails, or ``agree`` then raises."""
        with _undone_on_failure() as undos:
            for call in self.calls:
                if call.undo is not None:
                    undos.append(call.undo)
                call.do(values)
            agree()


def leaf_names(node: Node) -> tuple[str, ...]:
    """Returns the names of the leaves below a node."""
    return tuple(leaf["array"] for leaf in array_nodes(node))


@contextlib.contextmanager
def _undone_on_failure() -> Iterator[list[Callable[[], object]]]:
    """Yields a list to add undos to; if the block fails, calls them, the last one first."""
    undos: list[Callable[[], object]] = []
    try:
        yield undos
    except BaseException:
        for undo in reversed(undos):
            try:
                undo()
            except Exception:
                # One object that refuses its old state must not stop the other undos.
                logger.exception("a restore failed, and undoing one of its calls failed")
        raise
