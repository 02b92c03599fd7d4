"""Damage to the structure of a JSON document and to bytes, as a source of chance has it."""

from __future__ import annotations

import copy
import json
import random
import re
import string
from typing import Any

from torchax_ckpt.layout.manifest import KINDS, STORABLE_DTYPES
from torchax_ckpt.storage.medium import seals

_SEAL = "xxh3_64"
_TAGS = (
    "dict", "OrderedDict", "Counter", "tuple", "set", "frozenset", "namedtuple", "pytree", "float",
    "int", "complex", "bytes", "scalar", "array", "ties", "class", "group", "zebra",
)  # fmt: skip
_TEXTS = (
    "", "0x", "..", "../../x", "/etc/passwd", "a/../../b", "\ud800", "\x00", "%", "*", "nan",
    "é" * 40, "x" * 5000, "params", "lr",
)  # fmt: skip
_EXTREMES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308,
    5e-324, float("nan"), float("inf"), *_TEXTS, [], {}, [[]], [{}], {"": None}, [1, 2, 3],
)  # fmt: skip
_JUNK = (
    b"[", b"{", b'"', b",", b"(", b"R", b"\x00", b"\\ud800", b"1e999", b"NaN", b'"..":', b"../",
    b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b"}q\x00", b"\x80\x02.", b"cos\nsystem\n", b"9" * 50,
    b"9" * 5000, b"[" * 3000, b'{"a":' * 1000,
)  # fmt: skip


class Form:
    """How the JSON in a file is found, and put back: a file that is one document."""

    def load(self, raw: bytes) -> Any:
        """The document; raises ValueError where there is none."""
        return json.loads(raw)

    def dump(self, text: str, raw: bytes) -> bytes:
        """The file of the real one's form that holds this text of a document."""
        return text.encode("utf-8", "surrogatepass")


def damaged(source: random.Random, raw: bytes, form: Form) -> bytes:
    """One input from a real file."""
    if source.random() < 0.2:
        return damaged_bytes(source, raw)
    try:
        document = form.load(raw)
        seal = document.pop(_SEAL, None) if isinstance(document, dict) else None
        if source.random() < 0.05 and isinstance(document, dict):
            document["document"] = {"state": _grown(source, ["state/w"])}
        else:
            document = _damaged_document(source, document)
        if seal is not None and isinstance(document, dict) and source.random() < 0.9:
            document = seals.seal(document)
        text = json.dumps(document)
        if source.random() < 0.1 and (keys := list(re.finditer(r'"[^"]*": ', text))):
            key = source.choice(keys)  # twice, of which the latter counts
            doubled = f"{key[0]}{json.dumps(source.choice(_EXTREMES))}, "
            text = text[: key.start()] + doubled + text[key.start() :]
        made = form.dump(text, raw)
        return damaged_bytes(source, made) if source.random() < 0.1 else made
    except (ValueError, RecursionError):  # no JSON, or deeper than Python writes
        return damaged_bytes(source, raw)


def damaged_bytes(source: random.Random, raw: bytes) -> bytes:
    """The bytes with some of them changed."""
    data = bytearray(raw)
    for _ in range(source.choice([1, 1, 2, 5, 20])):
        at = source.randrange(len(data) + 1)
        match source.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << source.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at : at + source.randrange(1, 64)]
            case 3:
                data[at:at] = data[at : at + source.randrange(1, 256)]
            case 4:
                data[at:at] = source.randbytes(source.randrange(1, 7))
            case _:
                data[at:at] = source.choice(_JUNK)
    return bytes(data)


def _damaged_document(source: random.Random, document: Any) -> Any:
    """The document with some of its nodes changed, in place."""
    whole = {"": document}  # so that it has a place, too
    found = _places(document)
    names = sorted({c[k] for c, k in found if k == "array" and isinstance(c[k], str)})
    for _ in range(source.choice([1, 1, 1, 2, 3, 8])):
        everywhere = _places(whole)
        (container, key), (other, other_key) = source.choices(everywhere, k=2)
        match source.randrange(8):
            case 0:
                container[key] = copy.deepcopy(source.choice(_EXTREMES))
            case 1:
                container[key] = _grown(source, names)
            case 2 if container is not whole:
                del container[key]
            case 3:
                container[key] = copy.deepcopy(other[other_key])
            case 4:
                values = copy.deepcopy(other[other_key]), copy.deepcopy(container[key])
                container[key], other[other_key] = values
            case 5 if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case 5 if container is not whole:
                container[source.choice((*_TAGS, *_TEXTS))] = container.pop(key)
            case 6 if isinstance(container[key], list):
                source.shuffle(container[key])
            case 6:
                container[key] = [container[key]]
            case _:
                container[key] = _random_value(source)
    return whole[""]


def _random_value(source: random.Random) -> Any:
    match source.randrange(4):
        case 0:
            return source.randrange(-(1 << 70), 1 << 70) >> source.randrange(70)
        case 1:
            return source.uniform(-1, 1) * 10 ** source.randrange(-300, 300)
        case 2:
            letters = string.printable + "é\udcff\u2028"
            return "".join(source.choices(letters, k=source.randrange(8)))
        case _:
            return {str(i): source.choice(_EXTREMES) for i in range(source.randrange(3))}


def _grown(source: random.Random, names: list[str], depth: int = 0) -> Any:
    """A document of the manifest's grammar, or nearly."""
    if depth > 5 or source.random() < 0.3:
        return copy.deepcopy(source.choice(_EXTREMES))  # it is changed in place later
    children = [_grown(source, names, depth + 1) for _ in range(source.randrange(4))]
    match source.randrange(7):
        case 0:
            return children
        case 1:
            return {
                "array": source.choice([*names, "model/new", "stateful/box/new"]),
                "kind": source.choice(sorted(KINDS)),
                "dtype": source.choice(sorted(STORABLE_DTYPES)),
                "shape": [source.choice([0, 1, 2, 3, 16, 2**20, 2**40])] * source.randrange(4),
                **source.choice([{}, {"impl": "threefry2x32"}, {"impl": "zebra"}, {"weak": True}]),
            }
        case 2:
            keys = [*names, 1, "a", {"tuple": [1]}]
            return {source.choice(_TAGS): [[source.choice(keys), c] for c in children]}
        case 3:
            return {source.choice(_TAGS): children}
        case 4:
            return {source.choice(_TAGS): copy.deepcopy(source.choice(_EXTREMES))}
        case 5:
            node: Any = children
            for _ in range(source.choice([10, 90, 130, 400])):
                node = [node] if source.random() < 0.9 else {"tuple": [node]}
            return node
        case _:
            return {source.choice(_TAGS): c for c in children}


def _places(document: Any) -> list[tuple[Any, Any]]:
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
