"""The generations of TPU chips: their memory, its bandwidth, and the names of their products.

Nothing here was measured with this library. Sources of the published figures, as of November 2026:

- memory and its bandwidth: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e;
- the link between a chip and its host (PCIe): Google's documentation gives no figure. The book "How
  to Scale Your Model", https://jax-ml.github.io/scaling-book/tpus, gives 16 GB/s each way for v4,
  32 GB/s for v6e, and about 15 GB/s for chips in general, which stands here for v5e and v5p.

``usable_bytes`` comes from the TPU compiler (libtpu 0.0.42): it refuses programs that need more. It
is the whole number of MiB below that limit.
"""

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
    hbm_bytes: int
    usable_bytes: int
    hbm_bytes_per_sec: float
    link_bytes_per_sec: float
    config: str | None = None


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            product_names=("v4",),
            named_cores_per_chip=2,
            num_dims=3,
            hbm_bytes=32 << 30,
            usable_bytes=31_484 << 20,
            hbm_bytes_per_sec=1200e9,
            link_bytes_per_sec=16e9,
            config="megacore",
        ),
        Chip(
            name="v5e",
            product_names=("v5e", "v5litepod"),
            named_cores_per_chip=1,
            num_dims=2,
            hbm_bytes=16 << 30,
            usable_bytes=16_125 << 20,
            hbm_bytes_per_sec=819e9,
            link_bytes_per_sec=15e9,
        ),
        Chip(
            name="v5p",
            product_names=("v5p",),
            named_cores_per_chip=2,
            num_dims=3,
            hbm_bytes=95 << 30,
            usable_bytes=98_040 << 20,
            hbm_bytes_per_sec=2765e9,
            link_bytes_per_sec=15e9,
        ),
        Chip(
            name="v6e",
            product_names=("v6e",),
            named_cores_per_chip=1,
            num_dims=2,
            hbm_bytes=32 << 30,
            usable_bytes=31_995 << 20,
            hbm_bytes_per_sec=1638e9,
            link_bytes_per_sec=32e9,
        ),
    )
}
"""Name of each generation -> its chip."""


def named(product: str) -> Chip | None:
    """Returns the chip whose products have names that begin so; None if there is none."""
    return next((chip for chip in CHIPS.values() if product in chip.product_names), None)
