"""The generations of TPU chips, and what the names of their products mean."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A generation of TPU chips.

    Attributes:
      name: the name of the generation in the names of topologies: ``v5e``.
      product_names: how the names of products begin: ``v5litepod`` in ``v5litepod-16``.
      named_cores_per_chip: how many units of the number in a product's name one chip has. A v5p
        chip has two cores, and ``v5p-128`` counts cores; ``v5e-256`` counts chips.
      num_dims: the number of dims of a topology.
      config: the name of the chip's configuration in libtpu; None for libtpu's default. By
        default, libtpu describes each core of a v4 chip as a device, but JAX on a v4 has one
        device per chip.
    """

    name: str
    product_names: tuple[str, ...]
    named_cores_per_chip: int
    num_dims: int
    config: str | None = None


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            product_names=("v4",),
            named_cores_per_chip=2,
            num_dims=3,
            config="megacore",
        ),
        Chip(
            name="v5e",
            product_names=("v5e", "v5litepod"),
            named_cores_per_chip=1,
            num_dims=2,
        ),
        Chip(
            name="v5p",
            product_names=("v5p",),
            named_cores_per_chip=2,
            num_dims=3,
        ),
        Chip(
            name="v6e",
            product_names=("v6e",),
            named_cores_per_chip=1,
            num_dims=2,
        ),
    )
}
"""Name of each generation -> its chip."""


def named(product: str) -> Chip | None:
    """Returns the chip whose products have names that begin so; None if there is none."""
    return next((chip for chip in CHIPS.values() if product in chip.product_names), None)
