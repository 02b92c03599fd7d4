"""Shards come bit for bit to the devices that need them, whatever moves them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from support.strategies import JAX_DTYPES, random_bits
from support.training import P

from torchax_ckpt.devices import move_shards
from torchax_ckpt.devices.bitcast import from_bits, to_bits
from torchax_ckpt.devices.sharding import replicas

DTYPES = [
    *JAX_DTYPES,
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn", "uint4"),
]
# Those that XLA converts, sums would change, or bits of another shape stand for.
SOME = ["float32", "bfloat16", "float8_e5m2", "float8_e8m0fnu", "complex64", "bool", "int4"]
SIZES = {"replica": 2, "fsdp": 2, "tp": 2}
# The CPU devices of JAX 0.6 have one kind, and it has another name.
DEVICE = jax.devices()[0]
KINDS = {memory.kind for memory in DEVICE.addressable_memories()}
MEMORY_KINDS = [DEVICE.default_memory().kind, *(KINDS & {"pinned_host"})]


def mesh_of(*axes: str) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape([SIZES[axis] for axis in axes]), axes)


def targets_of(
    values: Mapping[str, np.ndarray], sharding: NamedSharding
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        for name, value in values.items()
    }


def assert_on(sharding: NamedSharding, array: Any, value: np.ndarray) -> None:
    assert (array.shape, array.dtype, array.sharding) == (value.shape, value.dtype, sharding)
    assert len(array.addressable_shards) == len(sharding.device_set)
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes(), shard


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("replica", "fsdp", "tp"), P()),
        (("tp", "fsdp", "replica"), P("tp", "fsdp")),
        (("fsdp", "replica", "tp"), P(("fsdp", "tp"))),
    ],
    ids=str,
)
def test_shards_of_one_replica_come_to_all(axes: tuple[str, ...], spec: Any) -> None:
    values = {dtype: random_bits(dtype, (8, 4), seed=1) for dtype in SOME}
    assert_come_to_all(values, NamedSharding(mesh_of(*axes), spec))


@pytest.mark.slow
@pytest.mark.parametrize("memory_kind", MEMORY_KINDS)
def test_scalars_and_empty_arrays_and_all_dtypes_come_to_all(memory_kind: str) -> None:
    values = {"scalar": np.array(-0.0, np.float32), "empty": np.zeros((0, 4), np.float32)}
    if memory_kind != "pinned_host":
        values |= {dtype: random_bits(dtype, (4,), seed=1) for dtype in DTYPES}
    mesh = mesh_of("replica", "fsdp", "tp")
    assert_come_to_all(values, NamedSharding(mesh, P(), memory_kind=memory_kind))


def assert_come_to_all(values: Mapping[str, np.ndarray], final: NamedSharding) -> None:
    source = replicas(final)[0]
    leaves: dict[str, Any] = {n: jax.device_put(value, source) for n, value in values.items()}
    move_shards.sum_over_replicas(leaves, targets_of(values, final))
    for name, value in values.items():
        assert_on(final, leaves[name], value)


def test_shards_go_from_row_to_row_and_others_stay() -> None:
    grid = Mesh(np.array(jax.devices()).reshape(4, 2), ("row", "column"))
    rounds = (((0, 1), (1, 0), (2, 3)), ((3, 2),), ((1, 2),))
    target = NamedSharding(grid, P(("row", "column")))
    values = [random_bits(dtype, (8, 4), seed=1) for dtype in DTYPES]
    slots = [
        move_shards.slots(jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=target), grid)
        for v in values
    ]
    assert [slot.shape for slot in slots] == [(8, 4)] * len(values)
    given = [jax.device_put(v, slot.sharding) for v, slot in zip(values, slots, strict=True)]
    program = move_shards.permute_program(grid, rounds)
    for value, moved in zip(values, program(*given), strict=True):
        # Rows 0 and 1 swap; 3 has what 2 had; 2 ends with what 1 has by then.
        assert_on(target, moved, value.reshape(4, 2, 4)[[1, 0, 0, 2]].reshape(8, 4))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (P("fsdp"), P(None, "fsdp")),
        (P(), P("fsdp")),
        (P(("replica", "fsdp")), P("tp")),
        (P("replica", "tp"), P(("fsdp", "tp"))),
    ],
    ids=str,
)
def test_leaves_change_their_sharding(source: Any, target: Any) -> None:
    mesh = mesh_of("replica", "fsdp", "tp")
    values = {dtype: random_bits(dtype, (8, 16), seed=1) for dtype in SOME}
    assert_moved(values, NamedSharding(mesh, source), NamedSharding(mesh, target))


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS)
def test_leaves_change_their_sharding_on_any_mesh_and_memory(memory_kind: str) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"))  # of Explicit axes
    values = {dtype: random_bits(dtype, (8, 4), seed=1) for dtype in ("bfloat16", "float32")}
    before, after = (NamedSharding(mesh, s, memory_kind=memory_kind) for s in (P("a"), P("b", "a")))
    assert_moved(values, before, after)


def assert_moved(
    values: Mapping[str, np.ndarray], before: NamedSharding, after: NamedSharding
) -> None:
    leaves: dict[str, Any] = {n: jax.device_put(value, before) for n, value in values.items()}
    move_shards.reshard(leaves, targets_of(values, after))
    for name, value in values.items():
        assert_on(after, leaves[name], value)


def test_leaves_on_meshes_of_another_order_of_devices_move_together() -> None:
    devices = np.array(jax.devices())
    meshes = {"a": Mesh(devices, ("fsdp",)), "b": Mesh(devices[::-1], ("fsdp",))}
    value = random_bits("float32", (8, 4), seed=1)
    leaves: dict[str, Any] = {
        n: jax.device_put(value, NamedSharding(mesh, P("fsdp"))) for n, mesh in meshes.items()
    }
    onto = {n: NamedSharding(mesh, P()) for n, mesh in meshes.items()}
    targets = {n: targets_of({n: value}, onto[n])[n] for n in meshes}
    move_shards.reshard(leaves, targets)
    for name in meshes:
        assert_on(onto[name], leaves[name], value)


def test_a_program_moves_no_more_leaves_and_bytes_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharding = NamedSharding(mesh_of("replica", "fsdp", "tp"), P("fsdp"))
    lengths = [2, 2, 2, 2, 64, 2, 64, 64]
    targets = {
        f"{i}": jax.ShapeDtypeStruct((length,), jnp.float32, sharding=sharding)
        for i, length in enumerate(lengths)
    }
    monkeypatch.setattr(move_shards, "_CHUNK", 3)
    monkeypatch.setattr(move_shards, "_CHUNK_BYTES", 136)  # of a device, which has half of a leaf
    chunks = ["".join(chunk) for chunk in move_shards._chunks(targets)]
    assert chunks == ["012", "345", "6", "7"]


def test_leaves_whose_bits_become_bytes_move_alone() -> None:
    sharding = NamedSharding(mesh_of("replica", "fsdp", "tp"), P("fsdp"))
    alone = ["bool", "int8", "int4", "uint4", "float4_e2m1fn"]
    alone += [dtype for dtype in DTYPES if dtype.startswith("float8")]
    together = ["float32", "uint8", "bfloat16", "int16", "complex64", "float64"]
    mixed = [name for pair in itertools.zip_longest(alone, together) for name in pair if name]
    targets = {n: jax.ShapeDtypeStruct((8,), jnp.dtype(n), sharding=sharding) for n in mixed}
    chunks = [list(chunk) for chunk in move_shards._chunks(targets)]
    assert chunks == [*([name] for name in alone), together]


def test_bits_of_every_dtype_come_back() -> None:
    arrays = {dtype: jnp.asarray(random_bits(dtype, (512, 512), seed=1)) for dtype in DTYPES}
    again = jax.jit(lambda given: {d: from_bits(to_bits(array), d) for d, array in given.items()})
    for dtype, back in again(arrays).items():
        assert back.dtype == arrays[dtype].dtype
        assert np.asarray(back).tobytes() == np.asarray(arrays[dtype]).tobytes(), dtype
