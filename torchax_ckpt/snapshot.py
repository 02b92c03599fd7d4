"""Owns the moment: what a save holds on to while training goes on.

JAX arrays cannot change, but a jitted step may donate them, and then they are gone. A snapshot
therefore holds copies on the devices, enqueued before anything that follows; the training thread
does not wait for them.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

# Arguments of one jitted copy: compiling grows faster than linearly with their number.
_CHUNK = 64


def take(leaves: Mapping[str, jax.Array | np.ndarray]) -> dict[str, jax.Array | np.ndarray]:
    """Copies of all device arrays, on their shardings; host arrays as they are."""
    result: dict[str, jax.Array | np.ndarray] = dict(leaves)
    by_sharding: dict[Sharding, dict[str, jax.Array]] = collections.defaultdict(dict)
    for name, array in leaves.items():
        if isinstance(array, jax.Array):
            by_sharding[array.sharding][name] = array
    for sharding, members in by_sharding.items():
        for chunk in _chunks(members, _CHUNK):
            copies = _copy_onto(sharding)(*(members[name] for name in chunk))
            result.update(zip(chunk, copies, strict=True))
    return result


@functools.lru_cache(maxsize=256)
def _copy_onto(sharding: Sharding) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.jit(
        lambda *arrays: tuple(jnp.copy(array) for array in arrays), out_shardings=sharding
    )


def _chunks(items: Iterable[str], size: int) -> Iterable[list[str]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
