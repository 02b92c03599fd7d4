"""Digests: what was saved is what comes back, on any mesh, or the leaf that is not is named."""

from __future__ import annotations

import itertools
import math
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from support.compare import assert_trees_identical
from support.damage import damage
from support.jax_releases import enable_x64
from support.own_orbax import abstract
from support.strategies import NUMPY_DTYPES, random_bits
from support.training import P, fsdp_mesh, save_state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.errors import CorruptCheckpointError, SaveError
from torchax_ckpt.storage.arrays import (
    array_checks,
    assembly,
    block_digests,
    chunking,
    read_arrays,
    tensorstore_context,
)
from torchax_ckpt.storage.arrays.assembly import Wanted
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import seals
from torchax_ckpt.stored.stored_step import parse_manifest

NEVER = CheckpointOptions(verify="never")
PACE = read_arrays.pace_of(NEVER)


def put(host: np.ndarray, mesh: Mesh, spec: Any) -> jax.Array:
    return jax.device_put(host, NamedSharding(mesh, spec))


def state_on(mesh: Mesh, axes: tuple[str, ...]) -> dict[str, Any]:
    """Leaves on their own and leaves that are stacked, on a mesh."""
    generator = np.random.default_rng(0)
    axis = axes[0]
    # Large enough that storage keeps their bytes as they are, rather than in its index.
    return {
        "big": put(generator.standard_normal((64, 96)), mesh, P(*axes)),
        "columns": put(generator.standard_normal((40, 64)), mesh, P(None, axis)),
        "host": generator.integers(0, 2**62, (30, 40)),
        "layers": {
            str(i): {"w": put(generator.standard_normal((64, 8)), mesh, P(axis))} for i in range(5)
        },
        "replicated": put(generator.standard_normal(500), mesh, P()),
    }


def mesh_of(shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), axes)


MESHES = [((8,), ("x",)), ((4,), ("x",)), ((2, 4), ("x", "y")), ((1,), ("x",))]


@pytest.mark.parametrize(
    ("saved_on", "small_blocks"), [(MESHES[0], False), (MESHES[2], True), (MESHES[3], True)]
)
def test_every_mesh_reads_and_checks_what_any_other_saved(
    directory: Path, saved_on: Any, small_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_blocks:
        monkeypatch.setattr(chunking, "MAX_BYTES", 1100)
    save_state(directory, state_on(mesh_of(*saved_on), saved_on[1]))
    checked: list[int] = []
    compare = block_digests.mismatches

    def counted(host: np.ndarray, *rest: Any) -> Any:
        checked.append(host.nbytes)
        return compare(host, *rest)

    monkeypatch.setattr(block_digests, "mismatches", counted)
    for shape, axes in MESHES:
        expected = state_on(mesh_of(shape, axes), axes)
        checked.clear()
        found = TorchaxCheckpointer(directory).load(1, abstract(expected))
        assert_trees_identical(found, expected)
        # Every byte was compared, and none twice.
        assert sum(checked) == sum(leaf.nbytes for leaf in jax.tree.leaves(expected))


@pytest.mark.parametrize(
    ("leaf", "named", "read_on"),
    [
        *(("big", "state/big", mesh) for mesh in MESHES),
        *(("layers", "state/layers/3/w", mesh) for mesh in MESHES[1:3]),
        ("host", "state/host", MESHES[0]),
    ],
)
def test_a_flipped_bit_is_noticed_on_every_mesh_and_the_leaf_named(
    directory: Path, leaf: str, named: str, read_on: Any
) -> None:
    state = state_on(fsdp_mesh(8, "x"), ("x",))
    save_state(directory, state)
    values = {"big": state["big"], "host": state["host"], "layers": state["layers"]["3"]["w"]}
    # A shard's own bytes: in the stack they stand between those of its neighbours.
    array = values[leaf]
    shard = array.addressable_shards[2].data if isinstance(array, jax.Array) else array
    damage(directory / "1" / "state", np.asarray(shard).tobytes(), at=5)
    wanted = abstract(state_on(mesh_of(*read_on), read_on[1]))
    with pytest.raises(CorruptCheckpointError, match="not those that were saved") as caught:
        TorchaxCheckpointer(directory).load(1, wanted)
    assert caught.value.key_path == named
    assert named in str(caught.value)
    assert caught.value.step == 1
    found = TorchaxCheckpointer(directory, options=NEVER).load(1, wanted)  # unless told not to look
    with pytest.raises(AssertionError):
        assert_trees_identical(found, state_on(mesh_of(*read_on), read_on[1]))


def test_a_missing_part_of_an_array_is_not_read_as_zeros(directory: Path) -> None:
    state = state_on(fsdp_mesh(8, "x"), ("x",))
    save_state(directory, state)
    step = RunDirectory(directory).candidates(1)[-1]
    context = tensorstore_context.reading_context()
    store = read_arrays.ts.KvStore.open(read_arrays._kvstore(step), context=context).result()
    key = next(key for key in store.list().result() if key.endswith(b"big/1.0"))
    store.delete_range(read_arrays.ts.KvStore.KeyRange(key, key + b"\0")).result()
    with pytest.raises(CorruptCheckpointError, match="state/big"):
        TorchaxCheckpointer(directory, options=NEVER).load(1, abstract(state))


class HostMemory:
    """What is alive of the host arrays that a restore makes, on a host whose devices are slow.

    A buffer that goes to a device stays until somebody waits for the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = self.peak = 0
        put, make, ready = jax.device_put, jax.make_array_from_callback, jax.block_until_ready
        moving: dict[int, Any] = {}

        def slow_put(hosts: Any, *args: Any, **named: Any) -> Any:
            arrays = put(hosts, *args, **named)
            if not isinstance(hosts, list):
                return arrays
            moving.update({id(array): host for array, host in zip(arrays, hosts, strict=True)})
            return arrays

        def slow_make(shape: Any, sharding: Any, callback: Any, **named: Any) -> jax.Array:
            parts: list[np.ndarray] = []

            def part(index: Any) -> np.ndarray:
                parts.append(callback(index))
                return parts[-1]

            array = make(shape, sharding, part, **named)
            moving[id(array)] = parts
            return array

        def wait(arrays: Any) -> Any:
            for array in jax.tree.leaves(arrays):
                moving.pop(id(array), None)
            return ready(arrays)

        for module in (assembly, read_arrays):
            monkeypatch.setattr(module, "empty", self._empty)
        monkeypatch.setattr(jax, "device_put", slow_put)
        monkeypatch.setattr(jax, "make_array_from_callback", slow_make)
        monkeypatch.setattr(jax, "block_until_ready", wait)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        nbytes = math.prod(shape) * dtype.itemsize
        octets = np.empty(nbytes + 128, np.uint8)
        weakref.finalize(octets, self._count, -nbytes)
        self._count(nbytes)
        # Aligned so badly that a CPU device copies it, as others do.
        skipped = -octets.ctypes.data % 64 + dtype.itemsize
        return octets[skipped : skipped + nbytes].view(dtype).reshape(shape)

    def _count(self, nbytes: int) -> None:
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)


ROWS, COLUMNS = P("x"), P(None, "x")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["flat", "auto"])
@pytest.mark.parametrize("saved_as", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_memory_on_the_way_is_bounded(
    directory: Path, layout: Any, saved_as: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state_as(spec: Any) -> dict[str, Any]:
        generator = np.random.default_rng(0)
        mesh = fsdp_mesh(8, "x")
        return {
            f"part {letter}": {
                str(j): put(generator.standard_normal((32, 32)).astype("f4"), mesh, spec)
                for j in range(3)
            }
            for letter in "abcdef"
        }

    save_state(directory, state_as(saved_as), options=CheckpointOptions(layout=layout))
    one = 3 * 4096 if layout == "auto" else 4096  # an array
    for expected, bound in itertools.product(map(state_as, (ROWS, COLUMNS, P())), (3 * one, 1000)):
        with monkeypatch.context() as patch:
            host = HostMemory(patch)
            options = CheckpointOptions(max_host_bytes=bound)
            found = TorchaxCheckpointer(directory, options=options).load(1, abstract(expected))
        assert_trees_identical(found, expected)
        # An array that is larger than the bound still has to pass, and pieces to it.
        assert host.peak <= max(bound, one + 1536)
        assert host.peak > min(bound, one) / 2


@given(
    st.sampled_from(NUMPY_DTYPES),
    st.lists(st.integers(1, 6), max_size=3),
    st.booleans(),
    st.integers(1, 64),
    st.integers(0, 2**32),
)
def test_any_single_flipped_bit_changes_exactly_one_block(
    dtype: str, dims: list[int], is_stack: bool, max_bytes: int, seed: int
) -> None:
    host = random_bits(dtype, tuple(dims), seed)
    is_stack = is_stack and host.ndim > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "MAX_BYTES", max_bytes)
        taken = block_digests.take(host, {(0,) * host.ndim: host}, is_stack=is_stack)
    start = (0,) * host.ndim
    assert block_digests.fit(taken, host.shape)
    assert block_digests.mismatches(host, start, taken, host.shape) == []
    octets = bytearray(host.tobytes())
    bit = seed % (8 * len(octets))
    octets[bit // 8] ^= 1 << bit % 8
    changed = np.frombuffer(bytes(octets), host.dtype).reshape(host.shape)
    place = np.unravel_index(bit // 8 // host.itemsize, host.shape) if host.ndim else ()
    cell = tuple(int(p) // b for p, b in zip(place, taken.block, strict=True))
    assert block_digests.mismatches(changed, start, taken, host.shape) == [cell]


# Shape, how it lies on eight devices (None: on the host), and the blocks it should be cut into
# where 4096 bytes are the most.
CUTS: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...]]] = {
    "rows": ((512, 32), None, (32, 32)),
    "sharded rows": ((512, 128), P("x"), (8, 128)),
    "sharded columns": ((32, 1024), P(None, "x"), (32, 32)),
    "replicated": ((512, 32), P(), (32, 32)),
    # Cut further, these would fall to single elements, rows or pairs of them.
    "prime": ((1033,), None, (1033,)),
    "prime rows, replicated": ((1033, 17), P(), (1033, 17)),
    "prime rows, sharded columns": ((1033, 32), P(None, "x"), (1033, 1)),
    "twice a prime": ((2 * 1033, 2), None, (1033, 2)),
}


@pytest.mark.parametrize("case", CUTS)
def test_blocks_are_the_chunks_that_storage_holds_and_never_tiny(
    directory: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise chunks would be read whole to compare a part of them.
    monkeypatch.setattr(chunking, "MAX_BYTES", 4096)
    shape, spec, expected = CUTS[case]
    host = random_bits("float32", shape, 0)
    array: Any = host if spec is None else put(host, fsdp_mesh(8, "x"), spec)
    save_state(directory, {"w": array})
    step = RunDirectory(directory).candidates(1)[-1]
    want = Wanted(shape, "float32", {}, None)
    chunk = read_arrays.chunk_of(read_arrays.opened(step, {"state/w": want}, PACE)["state/w"])
    assert chunk == parse_manifest(step).digests["state/w"].block == expected
    found = TorchaxCheckpointer(directory).load(1, abstract({"w": array}))
    assert np.array_equal(np.asarray(found["w"]).view("u4"), host.view("u4"))


def test_a_large_array_of_prime_length_can_be_read_again(directory: Path) -> None:
    state = {"w": np.arange(chunking.MAX_BYTES + 15, dtype=np.uint8)}  # a prime number
    save_state(directory, state)
    assert_trees_identical(TorchaxCheckpointer(directory).load(1), state)


def test_what_is_unreadable_is_not_committed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": np.ones((4, 4)), "x": put(np.ones(64), fsdp_mesh(8, "x"), P("x"))}
    with TorchaxCheckpointer(directory) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(array_checks, "MAX_CHUNKS", 7)
            ckpt.save(1, state=state)
            with pytest.raises(SaveError, match="at most 7 chunks, found 8") as caught:
                ckpt.wait_until_finished()
            assert caught.value.key_path == "state/x"
        with monkeypatch.context() as patch:
            patch.setattr(seals, "MAX_JSON_BYTES", 500)
            ckpt.save(2, state=state)
            with pytest.raises(SaveError, match="'digests'|'document'"):
                ckpt.wait_until_finished()
        assert ckpt.all_steps() == []
        ckpt.save(3, state=state, force=True)
    assert_trees_identical(TorchaxCheckpointer(directory).load(3, abstract(state)), state)


@pytest.mark.parametrize("place", [np.asarray, jax.device_put])
def test_booleans_that_storage_would_not_give_back_are_refused(place: Any, directory: Path) -> None:
    odd = place(np.array([0, 1, 2], np.uint8).view(np.bool_))
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"mask": odd}, force=True)
        with pytest.raises(SaveError, match=r"state/mask: expected booleans"):
            ckpt.wait_until_finished()
        ckpt.save(2, state={"mask": odd != 0}, force=True)
        ckpt.wait_until_finished()
        assert ckpt.load(2)["mask"].tolist() == [False, True, True]


def test_a_failed_digest_fails_the_save(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        with monkeypatch.context() as broken:
            broken.setattr(
                block_digests, "take", Mock(side_effect=RuntimeError("no digests today"))
            )
            ckpt.save(1, state={"x": jnp.ones((64, 64))}, force=True)
            with pytest.raises(SaveError, match="no digests today"):
                ckpt.wait_until_finished()
        ckpt.save(2, state={"x": jnp.ones((64, 64))}, force=True)
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["2", "events"]


@pytest.mark.parametrize(
    ("spec", "max_host_bytes"), [(P("x"), None), (P(), 1 << 20), (P(None, "x"), None)]
)
def test_what_has_a_digest_leaves_the_devices_once(
    spec: Any, max_host_bytes: int | None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = put(np.ones((64, 32), np.float32), mesh_of((4,), ("x",)), spec)
    fetched: dict[int, jax.Array] = {}
    fetch = type(array).copy_to_host_async

    def counted(self: jax.Array) -> None:
        if self.dtype == array.dtype:  # and not the random key
            fetched[id(self)] = self
        fetch(self)

    monkeypatch.setattr(type(array), "copy_to_host_async", counted)
    options = CheckpointOptions(max_host_bytes=max_host_bytes)
    save_state(directory, {"w": array}, options=options)
    assert sum(part.nbytes for part in fetched.values()) == array.nbytes


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e5m2", "float32", "complex128"])
def test_a_cpu_device_takes_it_over(dtype: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 3), (7,), (3, 1 << 20), ((16 << 20) + 1,)]
    for shape in shapes:
        array = assembly.empty(shape, np.dtype(dtype))
        assert (array.shape, array.dtype.name) == (shape, dtype)
        array[...] = 1
        if array.size > 1:
            with enable_x64():
                moved = jax.device_put(array, jax.devices()[3])
            assert moved.dtype == array.dtype
            assert moved.unsafe_buffer_pointer() == array.ctypes.data


def test_what_no_memory_can_hold_is_said_as_numpy_says_it() -> None:
    with pytest.raises(MemoryError, match=r"float64\[17592186044416\]"):
        assembly.empty((1 << 44,), np.dtype("float64"))
