"""Hides the differences between the releases of JAX that this package runs with.

Each part names the release that brought the newer form. Remove a part once this package supports no
older release.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import jax.extend.core
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

# In jax.extend.core since 0.10; before, in jax.core, from which 0.10 removes it.
opaque_trace_state: Any = (
    getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
)


def within_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which the program's mesh is ``mesh``."""
    if hasattr(jax, "set_mesh"):  # since 0.7.1; before, use_mesh
        return jax.set_mesh(mesh)
    return jax.sharding.use_mesh(mesh)  # type: ignore[attr-defined]


def program_mesh() -> Any:
    """Returns the mesh that the program set; an empty one, or None, if it set none."""
    if hasattr(jax.sharding, "get_mesh"):  # since 0.8.1
        return jax.sharding.get_mesh()
    # The public get_abstract_mesh does not say which devices the mesh has.
    from jax._src import mesh as private

    return private.get_concrete_mesh()


def itemsize_bits(dtype: Any) -> int:
    """Returns the bits of an element, fewer than 8 for dtypes that JAX packs, such as int4."""
    if hasattr(jax.dtypes, "itemsize_bits"):  # since 0.8.1
        return int(jax.dtypes.itemsize_bits(dtype))
    dtype = np.dtype(dtype)
    if dtype.itemsize == 1:
        for info in (ml_dtypes.iinfo, ml_dtypes.finfo):
            with contextlib.suppress(ValueError):  # the dtype is of another kind
                return int(info(dtype).bits)
    return dtype.itemsize * 8


class Tiles(NamedTuple):
    """How a device lays out an array; JAX's ``Layout``, which has these names since 0.8."""

    major_to_minor: tuple[int, ...]
    tiling: tuple[tuple[int, ...], ...]
    sub_byte_element_size_in_bits: int


def tiles(format: Any) -> Tiles | None:
    """Returns the layout of ``array.format`` or of an output's format; None if it is not known."""
    # Until 0.6, a format has a device_local_layout.
    layout = format.layout if hasattr(format, "layout") else format.device_local_layout
    if layout is None:
        return None
    names = Tiles._fields
    return Tiles(*(getattr(layout, n if hasattr(layout, n) else f"_{n}") for n in names))
