"""The assets of a step: small text files that say what the saved model is, such as its config.

A step stores all its assets as one sealed JSON object, ``{"files": {name: text}}``. The name of an
asset is a relative path, so that a program can write the asset below a folder of its choice.
"""

from __future__ import annotations

import dataclasses
import json
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

from torchax_ckpt.storage.medium import seals

MAX_BYTES = 64_000_000
"""The largest total size of a step's assets, in bytes of UTF-8."""
SUFFIXES = (".json", ".txt", ".jinja")
"""What the names of assets end in: text that no program executes."""

_PART = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9_.%-]{0,199}")
_FILES = "files"


@dataclasses.dataclass(frozen=True)
class Assets:
    """The encoded assets of a step, made once and written by each save."""

    content: bytes  # the JSON text that a step stores
    seal: str  # its digest, which the step's manifest repeats

    @classmethod
    def of(cls, files: Mapping[str, str]) -> Assets:
        """Encodes assets; raises ValueError as ``parsed`` does."""
        content = seals.seal({_FILES: parsed({_FILES: dict(files)})})
        text = json.dumps(content, separators=(",", ":"))
        return cls(text.encode(), seals.seal_of(content))


def parsed(content: Any) -> dict[str, str]:
    """Returns name -> text of assets in JSON from any source; ValueError if they are refused."""
    files = content.get(_FILES) if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise ValueError("expected a JSON object with the texts of files, found another form")
    for name in files:
        if why := why_refused(name):
            raise ValueError(f"{name!r:.100} {why}")
    total = sum(len(text.encode("utf-8", "surrogatepass")) for text in files.values())
    if total > MAX_BYTES:
        raise ValueError(f"expected assets of at most {MAX_BYTES} bytes, found {total} bytes")
    return files


def why_refused(name: str) -> str | None:
    """Returns why no asset can have this name, such as one that leads out of a folder, or None."""
    if len(name) > 1000 or not all(_PART.fullmatch(part) for part in name.split("/")):
        return "is not a relative path of letters, digits, '_', '-', '%' and '.'"
    if not name.endswith(SUFFIXES):
        return f"does not end in {', '.join(SUFFIXES)}"
    return None


def part_of(key: str) -> str:
    """Returns a user's key, such as the name of an adapter, as one part of an asset's name."""
    quoted = urllib.parse.quote(key, safe="", errors="surrogatepass").replace("~", "%7E") or "%"
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
