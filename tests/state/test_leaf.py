"""Every kind of leaf, saved and loaded for real: same kind, dtype, shape, bits and sharding."""

from __future__ import annotations

import collections
import tempfile
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from jax.sharding import NamedSharding, SingleDeviceSharding
from support.compare import assert_trees_identical, bits
from support.jax_releases import enable_x64
from support.strategies import (
    JAX_DTYPES,
    KEY_IMPLS,
    NUMPY_DTYPES,
    SHAPES,
    TORCH_DTYPES,
    TORCHAX_DTYPES,
    fingerprint,
    make_leaf,
    trees,
)
from support.training import P, fsdp_mesh, save_state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.options import Codec


def save(directory: Path, state: Any, **options: Any) -> None:
    save_state(directory, state, step=3, options=CheckpointOptions(**options))


def load(directory: Path, abstract_state: Any = None) -> Any:
    return TorchaxCheckpointer(directory).load(3, abstract_state)


def every_leaf(kind: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """One leaf of every dtype in every shape; names sorted, as JAX sorts the keys of a dict."""
    leaves = {
        f"{dtype}{list(shape)}": make_leaf(kind, dtype, shape, seed)
        for seed, (dtype, shape) in enumerate((d, s) for d in dtypes for s in SHAPES)
    }
    return dict(sorted(leaves.items()))


def every_kind() -> dict[str, Any]:
    """All kinds of arrays, all dtypes, all shapes; device arrays uncommitted."""
    return {
        "jax": every_leaf("jax", JAX_DTYPES),
        "key": every_leaf("key", tuple(KEY_IMPLS)),
        "numpy": every_leaf("numpy", NUMPY_DTYPES),
        "scalar": {d: make_leaf("numpy_scalar", d, (), 7) for d in sorted(NUMPY_DTYPES)},
        "torch": every_leaf("torch", TORCH_DTYPES),
        "torchax": every_leaf("torchax", TORCHAX_DTYPES),
    }


def blank(leaf: Any) -> Any:
    """A leaf of the same kind, dtype, shape and placement, with other content."""
    if isinstance(leaf, torch.Tensor) and torchax_backend.is_device_tensor(leaf):
        return torchax_backend.wrap(jnp.zeros_like(torchax_backend.buffer(leaf)))
    if isinstance(leaf, torch.Tensor):
        with torchax_backend.native_torch():
            return torch.zeros_like(leaf)
    if isinstance(leaf, jax.Array):
        return jax.random.clone(leaf) if hasattr(leaf, "_impl") else jnp.zeros_like(leaf)
    return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else leaf


def test_every_dtype_of_every_kind_comes_back_as_it_was_saved(directory: Path) -> None:
    state = every_kind()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(3, state=state)
        ckpt.wait_until_finished()
        assert_trees_identical(ckpt.load(3), state)
        assert_trees_identical(ckpt.load(3, jax.tree.map(blank, state)), state)
    assert_trees_identical(load(directory), state)
    assert_trees_identical(load(directory, jax.tree.map(blank, state)), state)


@pytest.mark.parametrize("codec", get_args(Codec))
def test_compressed_arrays_come_back_as_they_were_saved(codec: Codec, directory: Path) -> None:
    state = every_kind()
    save(directory, state, compression=codec, max_host_bytes=1 << 20)
    assert_trees_identical(load(directory), state)


def test_64_bits_are_not_narrowed_where_jax_has_none(directory: Path) -> None:
    """Without x64 JAX has no int64: 2**40 would become 0."""
    with enable_x64():
        state = {"n": jnp.array([2**40]), "x": jnp.array([1 + 2**-50])}
        save(directory / "jax", state)
        assert_trees_identical(load(directory / "jax"), state)
    save(directory / "numpy", {"n": np.array([2**40])})
    one_device = SingleDeviceSharding(jax.devices()[0])
    for place, abstract in (
        ("jax", None),
        ("numpy", {"n": jax.ShapeDtypeStruct((1,), np.int64)}),
        ("numpy", {"n": jax.ShapeDtypeStruct((1,), np.int64, sharding=one_device)}),
    ):
        with pytest.raises((TypeError, ValueError), match="64") as caught:
            load(directory / place, abstract)
        assert "state/n" in str(caught.value)


def test_plain_values_and_empty_containers_come_back_as_they_were(directory: Path) -> None:
    state = {
        "bytes": b"\x00\xff",
        "containers": [[], (), {}, [[]], ((),), {"a": {}}, [{}, []]],
        "counter": collections.Counter({"a": 2**70}),
        "floats": [0.1, -0.0, float("inf"), -float("inf"), float("nan"), 5e-324, 2.0**60],
        "int keys": {0: {-1: "a", 2**80: "b"}, 1: [np.int16(3)]},
        "look alike": {"1": np.ones(2), 1: np.zeros(2), (1,): 2},
        "none": None,
        "numbers": [True, False, 0, 1, -(2**200), 1 + 2j],
        "odd names": {k: np.array([i]) for i, k in enumerate(["", ".", "..", "a/b", "%", "é\n"])},
        "ordered": collections.OrderedDict([("b", 1), ("a", np.ones(1))]),
        "sets": [{1, "a", (2, 3)}, frozenset({b"x"})],
        "strings": ["", "é 名前", "\ud800", 'quo"te', "\x00"],
    }
    save(directory, state)
    assert fingerprint(load(directory)) == fingerprint(state)


def test_a_single_value_or_no_array_can_be_the_whole_state(directory: Path) -> None:
    leaves = [make_leaf(kind, "float32", (2, 3), 1) for kind in ("jax", "torchax", "torch")]
    leaves += [make_leaf("numpy_scalar", "float32", (), 1), make_leaf("key", "rbg", (2,), 1)]
    plain = [{}, [], (), 0, "text", [None], {"a": []}, np.zeros((0, 2))]
    for number, state in enumerate([*leaves, *plain]):
        save(directory / str(number), state)
        assert fingerprint(load(directory / str(number))) == fingerprint(state)
        assert fingerprint(load(directory / str(number), blank(state))) == fingerprint(state)


@settings(max_examples=15)
@given(trees(max_leaves=16))
def test_any_tree_can_be_saved_and_loaded(tree: Any) -> None:
    if tree is None:
        tree = [tree]  # save(state=None) means what is attached
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory), tree)
        assert fingerprint(load(Path(directory))) == fingerprint(tree)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_weakly_typed_arrays_stay_weak(directory: Path, is_sharded: bool) -> None:
    """A float32 scalar times bfloat16 weights is bfloat16 only if the scalar is weak."""
    state = {"scale": jnp.asarray(2.0), "mask": jnp.full((8,), 1.0), "strong": jnp.ones(8)}
    if is_sharded:
        state = jax.device_put(state, NamedSharding(fsdp_mesh(), P()))
    save(directory, state)
    weak = {n: a.weak_type for n, a in state.items()}
    assert weak == {"scale": True, "mask": True, "strong": False}
    for loaded in (load(directory), load(directory, state)):
        assert {n: a.weak_type for n, a in loaded.items()} == weak


def test_loaded_host_leaves_can_be_written_and_share_nothing(directory: Path) -> None:
    save(directory, {k: make_leaf(k, "float32", (3,), 0) for k in ("numpy", "torch")})
    one, other = load(directory), load(directory)
    one["numpy"][:] = 0
    with torchax_backend.native_torch():
        one["torch"].zero_()
    again = load(directory)
    assert_trees_identical(other, again)
    assert bits(one["numpy"]) != bits(again["numpy"])
