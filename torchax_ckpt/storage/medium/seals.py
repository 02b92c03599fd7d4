"""Seals JSON objects: a sealed object carries a digest of its own text, which reveals damage.

Source: xxh3 (https://xxhash.com), 64 bits, seed 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash
from etils import epath

_SEAL = "xxh3_64"
# The largest size of a JSON or index file that is read. A million leaves need half of this.
MAX_JSON_BYTES = 1 << 28


def read_sealed(folder: epath.Path, expected: str | None = None) -> dict[str, Any]:
    """Reads the content of a sealed JSON object in an item of a step.

    Raises OSError if it cannot be read, and ValueError if the content is not what was sealed, or
    has another digest than ``expected``.
    """
    raw = json.loads((folder / "data.json").read_text())
    content = unseal(raw)
    if expected is not None and raw[_SEAL] != expected:
        raise ValueError(f"expected digest {expected!r:.40}, found {raw[_SEAL]!r:.40}")
    return content


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a JSON object with one more key, the digest of its text.

    Raises ValueError if the result is too large to be read again.
    """
    text = _text(dict(content))
    # In the file a space follows each comma and each colon.
    nbytes = len(text) + text.count(b",") + text.count(b":")
    if nbytes > MAX_JSON_BYTES:
        raise ValueError(
            f"the JSON of a step may have at most {MAX_JSON_BYTES >> 20} MiB, found "
            f"{nbytes / 2**20:.0f} MiB. Save less in the JSON's largest part, "
            f"{max(content, key=lambda key: len(_text(content[key])))!r}"
        )
    return {**content, _SEAL: xxhash.xxh3_64_hexdigest(text)}


def encoded(content: Mapping[str, Any]) -> bytes:
    """Returns a sealed JSON object as it is stored."""
    return json.dumps(seal(content)).encode()


def seal_of(sealed: Mapping[str, Any]) -> str:
    """Returns the digest that a sealed JSON object carries."""
    return str(sealed[_SEAL])


def unseal(raw: Any) -> dict[str, Any]:
    """Returns the content of a sealed JSON object; ValueError if it is not what was sealed."""
    if not isinstance(raw, dict) or _SEAL not in raw:
        raise ValueError(f"expected a JSON object with a digest under {_SEAL!r}, found no digest")
    content = {key: value for key, value in raw.items() if key != _SEAL}
    found = xxhash.xxh3_64_hexdigest(_text(content))
    if raw[_SEAL] != found:
        raise ValueError(f"expected digest {raw[_SEAL]!r:.40}, found {found}: the JSON was damaged")
    return content


def _text(content: Any) -> bytes:
    # Python writes each JSON value in one way only, so the text need not be stored.
    return json.dumps(content, separators=(",", ":")).encode()


def of_octets(content: bytes) -> str:
    """Returns the digest of a file's content, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(content)
