"""Parses the pickles in which torch stores metadata, without running any code from them.

A pickle is a program: unpickling runs it, and it can call any function. This parser does not run
the program, but builds plain records from the pickle's instructions. Instead of a class or a
function, the result contains its name; instead of an object, the result contains the name of the
object's constructor and the arguments. If a pickle has an instruction that torch's metadata does
not need, the parser raises CorruptCheckpointError.
"""

from __future__ import annotations

import dataclasses
import pickletools
from typing import Any

from torchax_ckpt.errors import CorruptCheckpointError


@dataclasses.dataclass(frozen=True)
class Name:
    """The name of a global to which a pickle refers, such as ``torch.bfloat16``.

    The parser does not import the global.
    """

    name: str


@dataclasses.dataclass(eq=False)
class Record:
    """The description of an object that unpickling would build.

    Attributes:
      name: name of its constructor.
      args: arguments of the constructor.
      state: the state that unpickling would set after construction.
    """

    name: str
    args: Any
    state: Any = None


class Pairs(list[tuple[Any, Any]]):
    """The (key, value) pairs of a dict, OrderedDict or defaultdict. Keys may be unhashable."""


@dataclasses.dataclass(frozen=True)
class Persistent:
    """A reference to an object that is stored outside the pickle, such as a tensor's storage."""

    reference: Any


_MARK = object()
_MAX_DIMS = 64  # numpy's
# Class of dict -> number of constructor arguments of an empty one. A defaultdict's is its factory.
_DICTS = {"collections.OrderedDict": 0, "collections.defaultdict": 1}
_MAX_NAME_CHARS = 1000  # real names of globals are far shorter
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
    """Parses a pickle into Record, Name, Pairs, Persistent, tuples, lists, strings and numbers.

    Args:
      pickled: the bytes of the pickle.
      path: path of its file, for error messages.

    Raises:
      CorruptCheckpointError: the bytes are not a pickle, or use an instruction that metadata does
        not need.
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
            f"{path}: cannot read torch's metadata in this file: {error!s:.200}. Copy the file "
            "again, or save it again with torch",
            path=path,
        ) from error
    raise CorruptCheckpointError(
        f"{path}: expected torch's complete metadata in this file, found metadata that is cut off. "
        "Copy the file again",
        path=path,
    )


def text_of(value: Any) -> str:
    """Returns ``value``, which must be a string.

    Raises:
      ValueError: the value is not a string. The message contains only the type of the value,
        because objects in a pickle can share so many parts that printing, comparing or hashing one
        of them would never end.
    """
    if type(value) is not str:
        raise ValueError(f"expected a string, found a {type(value).__name__}")
    return value


def ints_of(size: Any) -> tuple[int, ...]:
    """Returns the integers of a ``torch.Size`` or of a tuple.

    Raises:
      ValueError: the value is neither a size nor a tuple, has more members than an array can have
        dims, or has a member that is not an integer from 0 to 2**63 - 1.
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
    """Returns a dtype's name without its module, such as ``bfloat16`` for ``torch.bfloat16``.

    Raises:
      ValueError: the value is not the name of a global.
    """
    if not isinstance(name, Name):
        raise ValueError("expected a dtype")
    return name.name.removeprefix("torch.")


class _Machine:
    """Interprets a pickle's instructions on a stack and a memo, without running any code."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Executes one instruction.

        Raises:
          ValueError: the instruction is not allowed, or does not fit the stack.
        """
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
            stack.append(tuple(self._pop_to_mark()))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        else:
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        """Interprets an instruction that fills a list, dict or record, or creates an object."""
        stack = self.stack
        match name:
            case "APPEND" | "APPENDS":
                members = self._pop_to_mark() if name == "APPENDS" else [stack.pop()]
                # No caller needs the members of a record, for example of a deque.
                if not isinstance(stack[-1], Record):
                    stack[-1].extend(members)
            case "SETITEM" | "SETITEMS":
                flat = self._pop_to_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                if isinstance(stack[-1], Pairs):
                    stack[-1].extend(zip(flat[::2], flat[1::2], strict=True))
                elif not isinstance(stack[-1], Record):  # Records are objects of subclasses of dict
                    raise ValueError(
                        f"the pickle instruction {name} in torch's metadata: expected a dict to "
                        "which it adds items, found a value of another type"
                    )
            case "GLOBAL":
                stack.append(_name(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                last = stack.pop()
                stack.append(_name(stack.pop(), last))
            case "REDUCE" | "NEWOBJ":
                args, callee = stack.pop(), stack.pop().name
                stack.append(Pairs() if _DICTS.get(callee) == len(args) else Record(callee, args))
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], Record):
                    stack[-1].state = state
                elif not isinstance(stack[-1], Pairs):  # no caller needs a state dict's _metadata
                    raise ValueError(
                        "the pickle instruction BUILD in torch's metadata: expected an object "
                        "whose state it sets, found a value of another type"
                    )
            case "BINPERSID":
                stack.append(Persistent(stack.pop()))
            case _:
                raise ValueError(
                    "expected only those pickle instructions with which torch writes metadata, "
                    f"found the pickle instruction {name}"
                )

    def _pop_to_mark(self) -> list[Any]:
        """Removes the newest mark and all values above it; returns these values, oldest first."""
        members: list[Any] = []
        while (last := self.stack.pop()) is not _MARK:
            members.append(last)
        return members[::-1]


def _name(module: Any, last: Any) -> Name:
    # The message omits the values. Values on the stack can share parts, so that the text of one can
    # be exponentially larger than the pickle.
    if not (type(module) is type(last) is str) or len(module) + len(last) > _MAX_NAME_CHARS:
        raise ValueError(
            "expected the name of a global (a class or function) in torch's metadata, as two "
            f"strings of together at most {_MAX_NAME_CHARS} characters, found a value of another "
            "type or a longer name"
        )
    return Name(f"{module}.{last}")
