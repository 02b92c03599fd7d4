"""The contract between the parts of a training state and the code that saves or restores them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core.primitives import convert_element_type_p

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import (
    CheckpointError,
    MismatchError,
    UninitializedLeafError,
    UnsupportedLeafError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.snapshot.sharding import Local, Placement, placement_of
from torchax_ckpt.state.leaf import Array, Spec, require_jax_dtype
from torchax_ckpt.state.pytree import Encoder, decode

_MAX_LISTED = 20


@dataclasses.dataclass
class Findings:
    """Differences between a checkpoint and what is attached, by leaf name.

    Attributes:
      missing: attached, but not in the checkpoint.
      unexpected: in the checkpoint, but not attached.
      mismatched: on both sides but different: name -> "expected ..., found ...".
      left_out: optimizer state in the checkpoint whose parameters are not selected. This is what
        the caller has asked for, so it is no difference.
    """

    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def mismatch(self, name: str, expected: object, found: object) -> None:
        """Records that the attached program has ``expected`` and the checkpoint ``found``."""
        self.mismatched[name] = f"expected {expected}, found {found}"

    def error(self, step: int | None, path: str) -> MismatchError:
        """All differences in one error, each with its name; without a step, of files."""
        source = path if step is None else f"The checkpoint at step {step} in {path}"
        lines = [f"{source} does not fit what is attached; nothing was changed."]
        lines += _section("missing from the checkpoint", self.missing)
        lines += _section("in the checkpoint, but not attached", self.unexpected)
        lines += _section(
            "different (expected: attached, found: in the checkpoint)",
            [f"{name}: {text}" for name, text in self.mismatched.items()],
        )
        lines.append(
            "Attach the program that wrote it; or restore(strict=False) to take what matches, or "
            "leave out or rename what differs (exclude=, rename=); or use another directory. For "
            "load, give an abstract_state that fits."
        )
        return MismatchError(
            "\n".join(lines),
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=self.mismatched,
            step=step,
            path=path,
        )


def _section(title: str, entries: Iterable[str]) -> list[str]:
    entries = list(entries)
    if not entries:
        return []
    listed = [f"    {entry}" for entry in entries[:_MAX_LISTED]]
    if len(entries) > _MAX_LISTED:
        listed.append(f"    ... and {len(entries) - _MAX_LISTED} more")
    return [f"  {title}:", *listed]


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """What stays the same from save to save: the node, and the names of its leaves in order.

    Components give the same object as long as nothing changed, so that whatever is derived from
    it can be kept: it is compared by identity.
    """

    node: Node
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Captured:
    """A component at one moment.

    Attributes:
      form: its node and the names of its leaves.
      arrays: the leaves, in the form's order: device arrays by reference, host arrays copied.
    """

    form: Form
    arrays: Sequence[Array]

    def by_name(self) -> dict[str, Array]:
        """Name -> array."""
        return dict(zip(self.form.names, self.arrays, strict=True))


def encoded(value: Any, key_path: tuple[object, ...]) -> Captured:
    """Any value, encoded anew.

    Raises:
      UnsupportedLeafError: part of it cannot be stored.
    """
    encoder = Encoder()
    node = encoder.encode(value, key_path)
    return Captured(Form(node, tuple(encoder.leaves)), list(encoder.leaves.values()))


def require_alive(captured: Captured) -> None:
    """Raises UnsupportedLeafError, by name, if a leaf holds no data (any more)."""
    for name, array in zip(captured.form.names, captured.arrays, strict=True):
        if not isinstance(array, jax.Array):
            continue
        if isinstance(array, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{name}: is a JAX tracer, left behind by a jitted function. Put the arrays that "
                "the function returned into the tensors, and save outside of it.",
                key_path=name,
            )
        if array.is_deleted():
            raise UnsupportedLeafError(
                f"{name}: its buffer was donated to a jitted step and is gone. Save the state that "
                "the step returned: save(step, state=...).",
                key_path=name,
            )


class Combined:
    """Several captured parts as one, with one form as long as the parts' forms are the same."""

    def __init__(self, build: Callable[[list[Node]], Node]) -> None:
        self._build = build
        self._parts: list[Form] = []
        self._form: Form | None = None

    def __call__(self, parts: Sequence[Captured]) -> Captured:
        """The parts' node, as ``build`` makes it from theirs, with all their leaves."""
        forms = [part.form for part in parts]
        if self._form is None or forms != self._parts:
            node = self._build([form.node for form in forms])
            self._form = Form(node, tuple(name for form in forms for name in form.names))
            self._parts = forms
        return Captured(self._form, [array for part in parts for array in part.arrays])


Values = Mapping[str, Any]
"""Name -> array as read: on its placement (a numpy array on the host)."""


@dataclasses.dataclass(frozen=True)
class Read:
    """A leaf to read.

    Attributes:
      name: its name in the checkpoint.
      spec: what it is there.
      placement: where it is wanted.
      dtype: as which it is wanted, if not as it is: only where the caller has asked for that.
    """

    name: str
    spec: Spec
    placement: Placement
    dtype: str | None = None


@dataclasses.dataclass
class Write:
    """One change to live objects, made when everything has been read.

    ``do`` may run user code and fail; then ``undo`` of it and of all writes before it runs.
    Writes that cannot fail have no undo and come last.

    Attributes:
      do: makes the change.
      undo: takes it back.
      needs: names of the leaves that ``do`` takes.
      release: deletes the device buffers that the change replaces.
    """

    do: Callable[[Values], None]
    undo: Callable[[], None] | None = None
    needs: tuple[str, ...] = ()
    release: Callable[[], None] | None = None


@dataclasses.dataclass
class Restoration:
    """What restoring takes: leaves to read, then writes in order.

    Attributes:
      reads: leaf name -> what to read.
      checks: look at what was read, and raise before anything is changed.
      calls: writes that run user code (``load_state_dict``).
      writes: in-place writes of buffers and hyperparameters, which cannot fail.
      unfilled: names of meta tensors that neither the checkpoint nor ``init`` fills.
    """

    reads: dict[str, Read] = dataclasses.field(default_factory=dict)
    checks: list[Write] = dataclasses.field(default_factory=list)
    calls: list[Write] = dataclasses.field(default_factory=list)
    writes: list[Write] = dataclasses.field(default_factory=list)
    unfilled: list[str] = dataclasses.field(default_factory=list)

    def read(self, node: Mapping[str, Any], placement: Placement, dtype: str | None = None) -> None:
        """Asks for the leaf of an array node, as it is or as another dtype.

        Raises:
          UnsupportedLeafError: it goes to devices, and JAX would narrow its dtype there.
        """
        spec = Spec.of_node(node)
        if placement is not Local.HOST:
            require_jax_dtype(dtype or spec.dtype, node["array"])
        changed = None if dtype == spec.dtype else dtype
        self.reads[node["array"]] = Read(node["array"], spec, placement, changed)

    def extend(self, others: Iterable[Restoration]) -> None:
        """Appends what others need, in order."""
        for other in others:
            self.reads.update(other.reads)
            self.checks.extend(other.checks)
            self.calls.extend(other.calls)
            self.writes.extend(other.writes)
            self.unfilled.extend(other.unfilled)

    def require_filled(self) -> None:
        """Raises UninitializedLeafError if a meta tensor would stay empty."""
        if not self.unfilled:
            return
        listed = ", ".join(self.unfilled[:10]) + (", ..." if len(self.unfilled) > 10 else "")
        raise UninitializedLeafError(
            f"{len(self.unfilled)} tensors are on the meta device and nothing fills them: "
            f"{listed}. Pass init=, a callable from name and abstract leaf to an array.",
            key_path=self.unfilled[0],
        )

    def apply(self, values: Values, agree: Callable[[], None] = lambda: None) -> None:
        """Makes all changes, or none: if a call fails, it and those before it are undone.

        ``agree`` is called once nothing can fail here any more; what it raises undoes all.
        """
        self.apply_calls(values, agree)
        self.apply_writes(self.writes, values)

    @staticmethod
    @torchax_backend.native_torch()
    def apply_writes(writes: Iterable[Write], values: Values) -> None:
        """Makes changes that cannot fail."""
        for write in writes:
            write.do(values)

    def apply_calls(self, values: Values, agree: Callable[[], None] = lambda: None) -> None:
        """Makes the changes that run user code, or none of them; ``agree`` as for ``apply``."""
        for check in self.checks:
            check.do(values)
        done: list[Write] = []
        try:
            for call in self.calls:
                done.append(call)
                call.do(values)
            agree()
        except BaseException:
            for call in reversed(done):
                if call.undo is not None:
                    try:
                        call.undo()
                    except Exception:
                        # What refuses any state cannot be helped; the others still can.
                        logger.exception("undoing a failed restore failed")
            raise


class Component(Protocol):
    """A part of the training state: a module, an optimizer, the random state, ..."""

    def capture(self) -> Captured:
        """The part as it is now. Runs on the training thread, so it must not wait."""
        ...

    def prepare(self, node: Node, findings: Findings, selection: Selection) -> Restoration:
        """Compares the node with what is live and says what to do. Changes nothing.

        The selection is over the model's tensors; what does not go by their names ignores it.
        """
        ...


def restore_by_call(
    node: Node,
    live: Captured,
    restoration: Restoration,
    *,
    where: str,
    owner: object,
    take: Callable[[Any], Any],
) -> Write:
    """The call that hands a decoded node to user code; asks for the leaves it needs.

    It is undone by giving ``owner`` its attributes back, since it may have taken some of a state it
    then refused, and handing over what is live now. A leaf goes where the live leaf of its name is,
    or else where arrays of its kind go. Whatever the user's code raises comes out as a
    MismatchError that names ``where``.
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
        restoration.read(child, placement)

    def call(values: Values) -> None:
        state = decode(node, lambda n: revive(n, values[n["array"]]))
        try:
            take(state)
        except CheckpointError:
            raise
        except Exception as error:
            why = f"refused the stored state: {type(error).__name__}: {error}"
            raise MismatchError(f"{where}: {why}", mismatched={where: why}) from error

    attributes = dict(getattr(owner, "__dict__", {}))

    def undo() -> None:
        if hasattr(owner, "__dict__"):
            owner.__dict__.clear()
            owner.__dict__.update(attributes)
        take(thaw(live))

    needs = tuple(child["array"] for child in array_nodes(node))
    return Write(call, undo, needs=needs)


def thaw(captured: Captured) -> Any:
    """A captured value again, sharing nothing that can change with the object it came from."""
    arrays = captured.by_name()
    return decode(captured.form.node, lambda n: revive(n, arrays[n["array"]]))


def revive(node: Mapping[str, Any], value: Any) -> Any:
    """The leaf as it was: a torchax or CPU tensor, a JAX or numpy array, a scalar, a random key."""
    match node["kind"]:
        case "torchax":
            return torchax_backend.wrap(value)
        case "torch":
            return torchax_backend.from_numpy(value)
        case "key":
            return jax.random.wrap_key_data(value, impl=node["impl"])
        case "numpy_scalar":
            return value[()]
        case "jax" if node.get("weak"):
            return weakly_typed(value)
        case _:
            return value


def weakly_typed(array: jax.Array) -> jax.Array:
    """The array with JAX's weak type, which lets the dtype of what it meets win."""
    return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)
