"""The digests of a published folder, by which publications and readers know what has changed.

    digests.json: {"files": {FILE: {"rest": DIGEST, "tensors": {NAME:
                       [the offset of its first byte in the file, dtype, shape, DIGEST]}}}}

``rest`` is of the bytes of a file that are in no tensor: the header of safetensors, or all bytes of
another file. So files with equal entries have the same bytes. Digests are xxh3 with 128 bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from etils import epath

from torchax_ckpt.formats import safetensors_io
from torchax_ckpt.storage.medium import seals

FILE = "digests.json"


def write(folder: Path) -> dict[str, Any]:
    """Writes the digests of the files in a folder, and returns them by the files' names."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix != ".safetensors":
            found[name] = {"rest": xxhash.xxh3_128_hexdigest(path.read_bytes()), "tensors": {}}
            continue
        tensors, length = safetensors_io.tensors_in(path)
        content = np.memmap(path, np.uint8, "r")
        found[name] = {
            "rest": of(content[:length]),
            "tensors": {
                name: [begin, t.dtype, list(t.shape), of(content[begin : begin + t.nbytes])]
                for name, t in tensors.items()
                for begin in [t.parts[0].offset]
            },
        }
    (folder / FILE).write_bytes(seals.encoded({"files": found}))
    return found


def read(folder: epath.Path) -> dict[str, Any]:
    """Returns what ``write`` returned; FileNotFoundError, or ValueError if it is damaged."""
    return dict(seals.unseal(json.loads((folder / FILE).read_bytes()))["files"])


def of(array: np.ndarray) -> str:
    """Returns the digest of an array's bytes, in hexadecimal."""
    octets: Any = array.reshape(-1).view(np.uint8)
    return xxhash.xxh3_128_hexdigest(octets)
