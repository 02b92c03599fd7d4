"""Comparisons of states by structure, types, dtypes, shardings and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from torchax_ckpt import torchax_backend


def bits(value: Any) -> tuple[Any, ...]:
    """Returns the kind, dtype, shape and bytes of an array or tensor, without its sharding."""
    if isinstance(value, torch.Tensor):
        if torchax_backend.is_device_tensor(value):
            return ("torchax", *bits(torchax_backend.buffer(value))[1:])
        with torchax_backend.native_torch():
            return ("torch", *bits(torchax_backend.to_numpy(value))[1:])
    if isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl = str(jax.random.key_impl(value))
            return ("key", impl, *bits(jax.random.key_data(value))[1:])
        return ("jax", *bits(np.asarray(value))[1:])
    kind = "numpy_scalar" if isinstance(value, np.generic) else "numpy"
    array = np.asarray(value)
    return (kind, array.dtype.name, array.shape, array.tobytes())


def assert_trees_identical(found: Any, expected: Any, *, shardings: bool = True) -> None:
    """Asserts the same structure, types, dtypes, shapes, bytes and (optionally) shardings."""
    _compare(found, expected, shardings, "tree")


def _compare(found: Any, expected: Any, shardings: bool, where: str) -> None:
    if isinstance(expected, (torch.Tensor, jax.Array, np.ndarray, np.generic)):
        assert bits(found) == bits(expected), f"{where}: {found!r} is not {expected!r}"
        if shardings and (a := _jax(expected)) is not None:
            b = _jax(found)
            assert b is not None
            assert a.committed == b.committed, f"{where}: committed {b.committed}"
            assert not a.committed or b.sharding.is_equivalent_to(a.sharding, a.ndim), (
                f"{where}: {b.sharding} is not {a.sharding}"
            )
        return
    assert type(found) is type(expected), f"{where}: {type(found)} is not {type(expected)}"
    if isinstance(expected, Mapping):
        assert list(found.keys()) == list(expected.keys()), f"{where}: keys {list(found)}"
        for key in expected:
            _compare(found[key], expected[key], shardings, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{where}: length {len(found)}"
        for i, (f, e) in enumerate(zip(found, expected, strict=True)):
            _compare(f, e, shardings, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert np.float64(found).tobytes() == np.float64(expected).tobytes(), (
            f"{where}: {found!r} is not {expected!r}"
        )
    else:
        assert found == expected, f"{where}: {found!r} is not {expected!r}"


def _jax(value: Any) -> jax.Array | None:
    if isinstance(value, jax.Array):
        return value
    return torchax_backend.buffer(value) if torchax_backend.is_device_tensor(value) else None


def copied(value: Any) -> Any:
    """Returns a deep copy of a tree of tensors and plain values, for a later comparison."""
    if isinstance(value, torch.Tensor):
        if torchax_backend.is_device_tensor(value):
            return torchax_backend.wrap(torchax_backend.buffer(value))  # Arrays are immutable.
        with torchax_backend.native_torch():
            return torchax_backend.from_numpy(torchax_backend.to_numpy(value))
    if isinstance(value, Mapping):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return np.array(value) if isinstance(value, np.ndarray) else value


def training_state(*parts: Any) -> list[Any]:
    """Returns a copy of the state of modules and optimizers, which a restore must reproduce.

    A module's tensors are listed by name, an optimizer's state in the order of the parameters.
    """
    state: list[Any] = []
    for part in parts:
        if isinstance(part, torch.optim.Optimizer):
            groups = [{k: v for k, v in g.items() if k != "params"} for g in part.param_groups]
            moments = [dict(part.state[p]) for g in part.param_groups for p in g["params"]]
            state.append(copied({"groups": groups, "moments": moments}))
        else:
            state.append(copied(dict(part.state_dict())))
    return state


def entries(directory: Path) -> set[str]:
    """Returns the names in a run's directory, without the folder of events."""
    return {child.name for child in directory.iterdir()} - {"events"}


def folders(directory: Path) -> set[str]:
    """Returns the steps of any kind in a run's directory: neither the lease nor the events."""
    return {name for name in entries(directory) if (directory / name).is_dir()}
