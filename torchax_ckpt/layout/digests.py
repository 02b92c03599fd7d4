"""The digests of a stored array, as a manifest holds them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Digests:
    """The digests of one stored array, with one digest for each block of the array.

    Attributes:
      block: the shape of the blocks into which the array is divided.
      values: 8 octets, little-endian, for each block, in C order of the blocks.
      long: 16 octets for each block, in the same order: the digests that decide whether an array
        equals a stored one; None for an array that is not compared in this way.
    """

    block: tuple[int, ...]
    values: bytes
    long: bytes | None = None
