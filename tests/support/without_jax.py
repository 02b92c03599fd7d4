"""Lets imports of JAX, torchax and Orbax fail from here on, as where they are not installed."""

import sys

assert not {"jax", "orbax", "torchax"} & sys.modules.keys()
sys.modules |= dict.fromkeys(("jax", "orbax", "torchax"))  # type: ignore[arg-type]
