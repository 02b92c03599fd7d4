"""The digests of one stored array."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Digests:
    """The digests of one stored array, in C order of its blocks, which have the shape ``block``.

    ``values`` has 8 octets, little-endian, for each block. They suffice to detect damage, because
    each block is then compared with one digest only. ``long`` has 16 octets for each block, which
    decide whether an array equals a stored one; None for an array that is never compared so.
    """

    block: tuple[int, ...]
    values: bytes
    long: bytes | None = None
