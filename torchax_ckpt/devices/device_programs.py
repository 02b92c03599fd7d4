"""The registry of the programs that this package runs on devices, and those of several modules.

A function that returns a jitted program has the decorator ``device_program``, which registers it;
a test fails if one lacks it. Tests compile all registered programs for TPUs, without TPUs. The
jitted functions are named ``checkpoint_*``, so that profiles of a training show what a save runs.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from torchax_ckpt.devices.bitcast import from_bits, to_bits
from torchax_ckpt.runtime import jax_versions

_NO_MESH = Mesh(np.empty((), dtype=object), ())
# The most arguments of one program; its compile time grows faster than linearly with them.
MAX_ARGUMENTS = 128

P = ParamSpec("P")
K = TypeVar("K")


class Program:
    """A jitted function, called outside of the mesh that the program set with ``jax.set_mesh``.

    Within that mesh, JAX refuses arrays on other devices, such as single shards.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted

    def __call__(self, *arrays: Any) -> Any:
        """Runs the function."""
        with jax_versions.within_mesh(_NO_MESH):
            return self.jitted(*arrays)

    def lower(self, *arrays: Any) -> Any:
        """Lowers the function for these arrays, or abstract arrays, as ``jax.jit`` does."""
        with jax_versions.within_mesh(_NO_MESH):
            return self.jitted.lower(*arrays)


Runner = Callable[..., Any]
"""A program and its arguments -> its outputs, or abstract arrays that stand for them.

A save runs its programs with ``Program.__call__``; a prediction of its memory only compiles them.
"""

BUILDERS: dict[str, Callable[..., Program]] = {}
"""Name of each function that returns a program -> the function."""


def device_program(maxsize: int) -> Callable[[Callable[P, Any]], Callable[P, Program]]:
    """Registers a function that returns a jitted function; caches its last ``maxsize`` programs."""

    def register(build: Callable[P, Any]) -> Callable[P, Program]:
        BUILDERS[build.__name__] = build

        # Without the cache, JAX would compile the program of each new function object again.
        @functools.lru_cache(maxsize)
        @functools.wraps(build)
        def program(*args: P.args, **kwargs: P.kwargs) -> Program:
            return Program(build(*args, **kwargs))

        return program  # type: ignore[return-value]

    return register


@device_program(maxsize=256)
def copy_program(sharding: Sharding) -> Any:
    """Returns the program that copies arrays with this sharding."""

    def checkpoint_copy(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(map(jnp.copy, arrays))

    return jax.jit(checkpoint_copy, out_shardings=sharding)


@device_program(maxsize=1024)
def zeros_program(specs: tuple[tuple[tuple[int, ...], Any], ...], sharding: Sharding) -> Any:
    """Returns the program that creates arrays of these shapes and dtypes with all bits zero."""

    def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        # From bits, because the dtype float8_e8m0fnu has no value zero.
        bits = jax.eval_shape(to_bits, jax.ShapeDtypeStruct(shape, dtype))
        return from_bits(jnp.zeros(bits.shape, bits.dtype), dtype)

    def checkpoint_zeros() -> tuple[jax.Array, ...]:
        return tuple(zeros(*spec) for spec in specs)

    return jax.jit(checkpoint_zeros, out_shardings=sharding)


@device_program(maxsize=256)
def reshape_program(shape: tuple[int, ...], sharding: Sharding) -> Any:
    """Returns the program that changes the shape of an array on one device."""

    def checkpoint_reshape(array: jax.Array) -> tuple[jax.Array]:
        return (array.reshape(shape),)

    return jax.jit(checkpoint_reshape, out_shardings=sharding)


@device_program(maxsize=1024)
def slice_program(starts: tuple[int, ...], limits: tuple[int, ...], sharding: Sharding) -> Any:
    """Returns the program that cuts the part from ``starts`` to ``limits`` out of a shard."""

    def checkpoint_slice(array: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.slice(array, starts, limits),)

    return jax.jit(checkpoint_slice, out_shardings=sharding)


def copied(array: jax.Array) -> jax.Array:
    """Returns a copy of an array, which keeps its values if a later step donates the original."""
    (copy,) = copy_program(array.sharding)(array)
    return copy


def zeros_on(shape: tuple[int, ...], dtype: Any, device: jax.Device) -> jax.Array:
    """Returns an array on one device whose bits are all zero."""
    (zeros,) = zeros_program(((shape, dtype),), SingleDeviceSharding(device))()
    return zeros


def reshaped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of one device in the given shape; ``array`` itself if it has this shape."""
    if array.shape == shape:
        return array
    (other,) = reshape_program(shape, array.sharding)(array)
    return other


def sliced(array: jax.Array, within: tuple[slice, ...]) -> jax.Array:
    """Returns a part of an array of one device; ``within`` has one slice for each dim."""
    bounds = [dim.indices(n) for dim, n in zip(within, array.shape, strict=True)]
    starts, limits, _ = zip(*bounds, strict=True)
    (part,) = slice_program(starts, limits, array.sharding)(array)
    return part


def run_by_sharding(
    build: Callable[[Sharding], Program], arrays: Mapping[K, Any], run: Runner
) -> dict[K, Any]:
    """Runs the programs that ``build`` returns for the arrays' shardings; returns key -> output."""
    groups: dict[tuple[Sharding, bool], list[K]] = collections.defaultdict(list)
    for key, array in arrays.items():
        groups[array.sharding, array.dtype.kind == "c"].append(key)
    outputs: dict[K, Any] = {}
    for (sharding, is_complex), keys in groups.items():
        # The programs of a TPU need temporary memory for each complex array.
        for chunk in in_chunks(keys, 1 if is_complex else MAX_ARGUMENTS):
            results = run(build(sharding), *(arrays[key] for key in chunk))
            outputs.update(zip(chunk, results, strict=True))
    return outputs


def in_chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yields the items in lists of ``size``; the last list may be shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
