"""Owns reading what torch pickles as metadata, without unpickling it.

A pickle is a program; run by Python, it can do anything. Here its instructions only build plain
records: what would be a class or a function is its name, and what would be an object is the name
with its arguments. Instructions that torch's metadata does not need are refused.
"""

from __future__ import annotations

import dataclasses
import pickletools
from typing import Any

from torchax_ckpt.errors import CorruptCheckpointError


@dataclasses.dataclass(frozen=True)
class Name:
    """A global, ``torch.bfloat16``; nothing is imported."""

    name: str


@dataclasses.dataclass(eq=False)
class Record:
    """What would be an object: what would make it, of what, and the state it would be given."""

    name: str
    args: Any
    state: Any = None


class Pairs(list[tuple[Any, Any]]):
    """What would be a dict, ordered or not; its keys need not be hashable."""


@dataclasses.dataclass(frozen=True)
class Persistent:
    """A reference to what is kept outside of the pickle."""

    reference: Any


_MARK = object()
_MAX_DIMS = 64  # numpy's
# With how many arguments they are made empty: a defaultdict of what makes its values.
_DICTS = {"collections.OrderedDict": 0, "collections.defaultdict": 1}
_MAX_NAME_CHARS = 1000  # Python's own are far shorter; what is longer is no global
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    {
        "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
        "BINUNICODE8",
    }
)  # fmt: skip
_CONTAINERS = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": Pairs}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_records(pickled: bytes, path: str) -> Any:
    """What a pickle describes, as records, names, pairs, tuples, lists and plain values.

    Args:
      pickled: its bytes.
      path: of its file, for messages.

    Raises:
      CorruptCheckpointError: it is none, or needs more than metadata does.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                (result,) = machine.stack
                return result
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{path}: expected metadata as torch writes it: {error!s:.200}", path=path
        ) from error
    raise CorruptCheckpointError(f"{path}: ends in the middle of its metadata", path=path)


def text_of(value: Any) -> str:
    """A text.

    Raises:
      ValueError: it is something else. Whatever else a pickle holds may have parts in common, so
        many that to show, compare or hash it never ends.
    """
    if type(value) is not str:
        raise ValueError(f"expected a text, found a {type(value).__name__}")
    return value


def ints_of(size: Any) -> tuple[int, ...]:
    """``torch.Size``, or a tuple of as many numbers as arrays have dims.

    Raises:
      ValueError: it is something else.
    """
    values = size.args[0] if isinstance(size, Record) else size
    if (
        not isinstance(values, tuple)
        or len(values) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 63 for n in values)
    ):
        raise ValueError("expected a size")
    return values


def dtype_of(name: Any) -> str:
    """``torch.bfloat16`` -> ``bfloat16``.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(name, Name):
        raise ValueError("expected a dtype")
    return name.name.removeprefix("torch.")


class _Machine:
    """The stack and the memo that the instructions work on."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carries out one instruction."""
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            stack.append(argument)
        elif name in _CONTAINERS:
            stack.append(_CONTAINERS[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            members = [stack.pop() for _ in range(_TUPLES[name])]
            stack.append(tuple(reversed(members)))
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        else:
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "APPEND" | "APPENDS":
                members = self._since_mark() if name == "APPENDS" else [stack.pop()]
                if not isinstance(stack[-1], Record):  # a deque, say: what is in it is of no use
                    stack[-1].extend(members)
            case "SETITEM" | "SETITEMS":
                flat = self._since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                if isinstance(stack[-1], Pairs):
                    stack[-1].extend(zip(flat[::2], flat[1::2], strict=True))
                elif not isinstance(stack[-1], Record):  # some class of dict
                    raise ValueError("items of what is no dict")
            case "GLOBAL":
                stack.append(_name(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                last = stack.pop()
                stack.append(_name(stack.pop(), last))
            case "REDUCE" | "NEWOBJ":
                args, made = stack.pop(), stack.pop().name
                stack.append(Pairs() if _DICTS.get(made) == len(args) else Record(made, args))
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], Record):
                    stack[-1].state = state
                elif not isinstance(stack[-1], Pairs):  # state_dict's _metadata, of no use here
                    raise ValueError("a state for what is no object")
            case "BINPERSID":
                stack.append(Persistent(stack.pop()))
            case _:
                raise ValueError(f"instruction {name} is not expected there")

    def _since_mark(self) -> list[Any]:
        members: list[Any] = []
        while (last := self.stack.pop()) is not _MARK:
            members.append(last)
        return members[::-1]


def _name(module: Any, last: Any) -> Name:
    # Whatever else is on the stack may be as large as two to the length of the pickle, when shown.
    if not (type(module) is type(last) is str) or len(module) + len(last) > _MAX_NAME_CHARS:
        raise ValueError("a global whose name is none")
    return Name(f"{module}.{last}")
