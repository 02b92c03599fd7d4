"""Seals JSON objects: a sealed object carries a digest of its own text, which reveals damage.

JSON knows neither NaN nor infinity. A sealed object has the strings ``NaN``, ``Infinity`` and
``-Infinity`` in their place, and its key ``nonfinite`` lists the paths of these strings. Objects
that older releases sealed have Python's bare ``NaN`` and ``Infinity``.

Source: xxh3 (https://xxhash.com), 64 bits, seed 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import xxhash
from etils import epath

_SEAL = "xxh3_64"
_NONFINITE = "nonfinite"
_FROM_NAME = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# The largest size of a JSON or index file that is read. A million leaves need half of this.
MAX_JSON_BYTES = 1 << 28
_SEAL_BYTES = len(f',"{_SEAL}":""') + 16


def read_sealed(folder: epath.Path, expected: str | None = None) -> dict[str, Any]:
    """Reads a step's sealed JSON; ValueError if damaged, or if its digest is not ``expected``."""
    raw = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    content = unseal(raw)
    if expected is not None and raw[_SEAL] != expected:
        raise ValueError(f"expected digest {expected!r:.40}, found {raw[_SEAL]!r:.40}")
    return content


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with the digest of its text; ValueError if it is too large to read."""
    content, text = _as_stored(content, _text)
    return {**content, _SEAL: of_octets(text)}


def encoded(content: Mapping[str, Any], texts: Texts | None = None) -> bytes:
    """Returns a sealed JSON object as it is stored; ``texts`` knows what was encoded before."""
    content, text = _as_stored(content, _text if texts is None else texts.of)
    separator = b"," if content else b""
    return b'%s%s"%s":"%s"}' % (text[:-1], separator, _SEAL.encode(), of_octets(text).encode())


def _as_stored(
    content: Mapping[str, Any], encode: Callable[[Mapping[str, Any]], str]
) -> tuple[Mapping[str, Any], bytes]:
    """Returns content without NaN and infinity, and its text; ValueError if that is too large."""
    try:
        text = encode(content)
    except ValueError:  # it has NaN or infinity; looking for them before would take time
        content = _with_names(content)
        text = encode(content)
    if len(text) + _SEAL_BYTES > MAX_JSON_BYTES:
        raise ValueError(
            f"the JSON of a step may have at most {MAX_JSON_BYTES >> 20} MiB, found "
            f"{len(text) / 2**20:.0f} MiB. Save less in the JSON's largest part, "
            f"{max(content, key=lambda key: len(_text(content[key])))!r}"
        )
    return content, text.encode()


def _with_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy with names in place of NaN and infinity, and the paths of these names."""
    result: dict[str, Any] = json.loads(json.dumps(content))
    paths: list[list[str | int]] = []
    unseen: list[tuple[list[str | int], Any]] = [([], result)]
    while unseen:  # no recursion, because metrics may nest as deeply as Python's JSON allows
        path, node = unseen.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, (dict, list)):
                unseen.append(([*path, key], value))
            elif isinstance(value, float) and not math.isfinite(value):
                node[key] = json.dumps(value)
                paths.append([*path, key])
    return {**result, _NONFINITE: paths}


def _without_names(content: dict[str, Any]) -> dict[str, Any]:
    """Undoes ``_with_names``, in place; ValueError if a path leads to no name."""
    try:
        for *path, key in content.pop(_NONFINITE, ()):
            node: Any = content
            for part in path:
                node = node[part]
            node[key] = _FROM_NAME[node[key]]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{_NONFINITE!r} names a place without a number: {error}") from error
    return content


class Texts:
    """The texts of parts of JSON objects that are the same objects in one save after another.

    The parts are the values in the objects under ``keys``, and must not change once encoded. The
    text of a manifest takes longer than its digests do.
    """

    def __init__(self, *keys: str) -> None:
        self._keys = keys
        self._known: dict[int, tuple[Any, str]] = {}  # identity -> part and its text

    def of(self, content: Mapping[str, Any]) -> str:
        """Returns the text of a JSON object; forgets the parts that it does not have."""
        used: dict[int, tuple[Any, str]] = {}

        def part(value: Any) -> str:
            known = self._known.get(id(value)) or (value, _text(value))
            used[id(value)] = known
            return known[1]

        texts = {
            key: _joined({k: part(v) for k, v in value.items()})
            if key in self._keys
            else _text(value)
            for key, value in content.items()
        }
        self._known = used
        return _joined(texts)


def seal_of(sealed: Mapping[str, Any]) -> str:
    """Returns the digest that a sealed JSON object carries."""
    return str(sealed[_SEAL])


def unseal(raw: Any) -> dict[str, Any]:
    """Returns the content of a sealed JSON object; ValueError if it is not what was sealed."""
    if not isinstance(raw, dict) or _SEAL not in raw:
        raise ValueError(f"expected a JSON object with a digest under {_SEAL!r}, found no digest")
    content = {key: value for key, value in raw.items() if key != _SEAL}
    found = of_octets(_text(content, allow_nan=True).encode())  # older releases wrote bare NaN
    if raw[_SEAL] != found:
        raise ValueError(f"expected digest {raw[_SEAL]!r:.40}, found {found}: the JSON was damaged")
    return _without_names(content)


def _text(content: Any, *, allow_nan: bool = False) -> str:
    # Python writes each JSON value in one way only, so what was read has the text that was sealed.
    return json.dumps(content, separators=(",", ":"), allow_nan=allow_nan)


def _joined(texts: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{json.dumps(key)}:{text}" for key, text in texts.items()) + "}"


def of_octets(content: bytes) -> str:
    """Returns the digest of a file's content, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(content)
