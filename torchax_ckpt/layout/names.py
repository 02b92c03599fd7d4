"""Owns the names of leaves: from a key path to the one string a leaf is known by, everywhere.

A key path is a tuple of keys, the component first: ``("model", "encoder.0.weight")``. Its name
joins the escaped keys with ``/``: ``model/encoder.0.weight``. Escaping is percent-encoding of
the few characters that would make a name ambiguous or unusable as a storage key; torch's
ordinary parameter names pass unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# "/" separates keys, "%" starts an escape, "*" stands for a layer index in stacked names,
# control characters and lone surrogates are not valid in storage keys.
_UNSAFE = re.compile(r"[%/*\x00-\x1f\x7f\ud800-\udfff]")
# A key of no characters; "%" alone is never produced by an escape.
_EMPTY = "%"
# What no name holds; "%" and "/" are part of names.
_FOREIGN = re.compile(r"[*\x00-\x1f\x7f\ud800-\udfff]")
_SEPARATOR = "/"

# The component of what processes other than the first have for themselves.
PROCESSES = "processes"


def escape(key: str) -> str:
    """The key with ambiguous characters percent-encoded; inverse of ``unescape``."""
    if not key:
        return _EMPTY
    return _UNSAFE.sub(
        lambda m: "".join(f"%{b:02X}" for b in m[0].encode("utf-8", "surrogatepass")), key
    )


def unescape(part: str) -> str:
    """The key that ``escape`` turned into this part."""
    if part == _EMPTY:
        return ""
    return re.sub(
        r"(?:%[0-9A-F]{2})+",
        lambda m: bytes.fromhex(m[0].replace("%", "")).decode("utf-8", "surrogatepass"),
        part,
    )


def join(key_path: Iterable[object]) -> str:
    """The name of the leaf at this key path; every key is escaped."""
    return _SEPARATOR.join(escape(str(key)) for key in key_path)


def split(name: str) -> tuple[str, ...]:
    """The key path of a name, as strings; inverse of ``join``."""
    return tuple(unescape(part) for part in name.split(_SEPARATOR))


def is_name(text: str) -> bool:
    """Whether a text could be a leaf's name: not empty, and nothing in it that is escaped."""
    return bool(text) and not _FOREIGN.search(text)


def of_process(index: int, name: str) -> str:
    """The name under which the leaf of another process than the first is stored."""
    return _SEPARATOR.join((PROCESSES, str(index), name))


def without_process(name: str) -> str:
    """The name that a leaf has on the process that it belongs to."""
    component, rest = component_and_rest(name)
    return rest.partition(_SEPARATOR)[2] if component == PROCESSES else name


def component_and_rest(name: str) -> tuple[str, str]:
    """The first, unescaped part of a name and the still escaped rest ("" if there is none)."""
    component, _, rest = name.partition(_SEPARATOR)
    return component, rest
