"""Damage that hypothesis draws: to the structure of a JSON document, and to bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

_NUMBERS = (0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324)
_TEXTS = (
    "", "..", "../../x", "/etc/passwd", "a/../../b", "\ud800", "\x00", "%", "*", "x" * 5000, "nan",
)  # fmt: skip
_JUNK = (
    b"[" * 3000, b'{"a":' * 1000, b"9" * 5000, b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b"\x00",
    b"NaN", b"1e999", b'"..":', b"../", b"(", b"}q\x00", b"\x80\x02.", b"cos\nsystem\n", b"R",
)  # fmt: skip
_DOUBLED = "\x01doubled\x01"

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.integers(),
    st.floats(),
    st.sampled_from(_TEXTS),
    st.text(max_size=8),
)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_change = st.tuples(
    st.sampled_from(("replace", "number", "text", "drop", "double", "deep", "move", "name")),
    st.integers(0, 1 << 16),
    st.integers(0, 1 << 16),
    _values,
)
_octets = st.tuples(
    st.sampled_from(("cut", "flip", "insert", "junk", "remove", "repeat")),
    st.integers(0, 1 << 24),
    st.integers(0, 255),
    st.binary(min_size=1, max_size=6),
)
Damage = tuple[list[Any], list[Any]]
damage: st.SearchStrategy[Damage] = st.one_of(
    st.tuples(st.lists(_change, min_size=1, max_size=4), st.just([])),
    st.tuples(st.lists(_change, min_size=1, max_size=4), st.just([])),
    st.tuples(st.lists(_change, max_size=1), st.lists(_octets, min_size=1, max_size=4)),
)
"""Changes of a document, and of the bytes that hold it; see ``changed`` and ``changed_bytes``."""


def changed(document: Any, changes: list[Any]) -> str:
    """The text of a document with some of its values and keys changed; a copy is."""
    document = {"": copy.deepcopy(document)}  # so that the whole has a place, too
    doubles: list[tuple[str, str]] = []
    for how, at, other, value in changes:
        everywhere = places(document)
        if not everywhere:
            break
        holder, key = everywhere[at % len(everywhere)]
        match how:
            case "number":
                holder[key] = _NUMBERS[other % len(_NUMBERS)]
            case "text":
                holder[key] = _TEXTS[other % len(_TEXTS)]
            case "drop" if holder is not document:
                del holder[key]
            case "double" if isinstance(holder, dict) and holder is not document:
                name = json.dumps(key)
                doubles.append((name, f"{json.dumps(value)}, {name}: {json.dumps(holder[key])}"))
                holder[key] = _DOUBLED
            case "deep":
                for _ in range((3, 40, 100, 400)[other % 4]):
                    holder[key] = [holder[key]] if other & 4 else {"a": holder[key]}
            case "move":
                from_holder, from_key = everywhere[other % len(everywhere)]
                holder[key] = copy.deepcopy(from_holder[from_key])
            case "name" if isinstance(holder, dict) and holder is not document:
                holder[_TEXTS[other % len(_TEXTS)]] = holder.pop(key)
            case _:
                holder[key] = copy.deepcopy(value)
    text = json.dumps(document[""]) if "" in document else ""
    for key, twice in doubles:
        text = text.replace(f"{key}: {json.dumps(_DOUBLED)}", f"{key}: {twice}", 1)
    return text


def changed_bytes(raw: bytes, changes: list[Any]) -> bytes:
    """The bytes with some of them changed."""
    data = bytearray(raw)
    for how, at, other, some in changes:
        at %= len(data) + 1
        match how:
            case "cut":
                del data[at:]
            case "flip" if at < len(data):
                data[at] ^= 1 << other % 8
            case "junk":
                data[at:at] = _JUNK[other % len(_JUNK)]
            case "remove":
                del data[at : at + 1 + other]
            case "repeat":
                data[at:at] = data[at : at + 1 + other]
            case _:
                data[at:at] = some
    return bytes(data)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in a document."""
    found: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        node = stack.pop()
        if isinstance(node, (dict, list)):
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                found.append((node, key))
                stack.append(node[key])
    return found
