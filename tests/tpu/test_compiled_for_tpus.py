"""The TPU's compiler on every program that this package jits.

The states are abstract arrays on the chips of a topology. This process is the topology's first
host: an array on all chips spans several hosts, an array on the chips of one host does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
import states
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from support.strategies import FP8, JAX_DTYPES
from support.tpu import Collective, Compiled, along, compiled, devices, mesh, one_host

from torchax_ckpt.devices import device_programs, move_shards
from torchax_ckpt.devices.device_sizes import padded_bytes, shard_bytes
from torchax_ckpt.snapshot import offload, stacking
from torchax_ckpt.snapshot.planner import plan_snapshot

pytestmark = pytest.mark.tpu

Leaves = dict[str, jax.ShapeDtypeStruct]
P = PartitionSpec

DTYPES = (
    *JAX_DTYPES,
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn", "uint4"),
)
FIRST = ("v5e:2x4", 1)
SAMPLE = [
    FIRST, ("v4:2x2x1", 1), ("v5p:2x2x2", 1), ("v6e:4x4", 1), ("v5e:16x16", 1), ("v5e:2x2", 2)
]  # fmt: skip
on_sample = pytest.mark.parametrize("topology", SAMPLE, ids=lambda t: f"{t[0]}x{t[1]}")

# The largest program of a save stacks 104 experts; the largest of a restore resharded on 256 chips.
MAX_SAVE_CODE_BYTES = 4 << 20
MAX_RESTORE_CODE_BYTES = 8 << 20
# What a program needs for each complex array, besides a multiple of the array's size.
COMPLEX_SCRATCH_BYTES = 128 << 10
# What many short vectors need on v5p, and what an offload of many scalars needs on every chip.
SMALL_SCRATCH_BYTES = 8 << 20


# --- states ---


def fsdp(shape: tuple[int, ...], over: Mesh) -> PartitionSpec:
    """The first dim that the mesh divides."""
    dim = next((i for i, length in enumerate(shape) if length % over.size == 0), None)
    return P() if dim is None else P(*[None] * dim, over.axis_names)


def tensor_parallel(shape: tuple[int, ...], over: Mesh) -> PartitionSpec:
    """The last dim, where the mesh divides it."""
    if shape and shape[-1] % over.size == 0:
        return P(*[None] * (len(shape) - 1), over.axis_names)
    return P()


def both(shape: tuple[int, ...], over: Mesh) -> PartitionSpec:
    """Rows over the first axis of the mesh, columns over the second, where they divide."""
    axes = zip(over.axis_names, shape, strict=False)
    return P(*[axis if length % over.shape[axis] == 0 else None for axis, length in axes])


def replicated(shape: tuple[int, ...], over: Mesh) -> PartitionSpec:
    return P()


LAYOUTS: dict[str, Callable[[tuple[int, ...], Mesh], PartitionSpec]] = {
    rule.__name__: rule for rule in (fsdp, tensor_parallel, both, replicated)
}


def training_state(name: str, layout: str, over: Mesh) -> Leaves:
    """A state of the benchmarks: its parameters and both moments of AdamW."""
    leaves = {}
    for fqn, shape in states.STATES[name]().items():
        sharding = NamedSharding(over, LAYOUTS[layout](shape, over))
        for part in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            leaves[f"{part}/{fqn}"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return leaves


def every_dtype(layout: str, over: Mesh) -> Leaves:
    """Three layers with leaves of every dtype and of several shapes."""
    leaves = {}
    for dtype, shape, i in itertools.product(DTYPES, [(), (48,), (16, 48), (8, 32, 32)], range(3)):
        sharding = NamedSharding(over, LAYOUTS[layout](shape, over))
        name = f"model/layers.{i}.{dtype}.{len(shape)}"
        leaves[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    return leaves


def grids(topology: tuple[str, int]) -> Iterator[Mesh]:
    """Two-dimensional meshes of all chips, and of the chips of the first host of the topology."""
    found = devices(*topology)
    yield mesh(found, x=2, y=len(found) // 2)
    if topology == FIRST:  # for many hosts, libtpu compiles for all chips or for one
        yield mesh(one_host(found), x=2, y=2)


# --- what a save runs ---


class Programs(dict[Any, Compiled]):
    """The programs that a save runs. Call it in place of running a program.

    What was compiled before is not compiled again: neither for another test, nor for another chip
    of one topology, since a program of one chip does not depend on which chip that is.
    """

    compiled: ClassVar[dict[Any, Compiled]] = {}

    def __call__(self, program: Any, *arrays: Any) -> Any:
        sharding = arrays[0].sharding
        kind = (program, sharding)
        if isinstance(sharding, SingleDeviceSharding):
            device: Any = next(iter(sharding.device_set))
            kind = (program.jitted.__wrapped__.__qualname__, id(device.client))
        key = (*kind, *((a.shape, a.dtype.name) for a in arrays))
        if key not in self.compiled:
            self.compiled[key] = compiled(program, *arrays)
        self[key] = self.compiled[key]
        return self[key].outputs


def bytes_of(array: Any) -> int:
    """The bytes of an abstract array with a layout on each of its devices."""
    shape = array.sharding.shard_shape(array.shape)
    return padded_bytes(tuple(shape), array.dtype, array.format.layout)


def _v5p_scratch(program: Compiled) -> int:
    device: Any = next(iter(program.arrays[0].sharding.device_set))
    return SMALL_SCRATCH_BYTES if device.device_kind == "TPU v5" else 0


def assert_saves_alone(program: Compiled) -> None:
    """Asserts that a program of a save involves one device only, and needs memory for its outputs.

    The memory of the outputs is the memory that the package reckons.
    """
    assert program.collectives == frozenset()
    if any(jnp.issubdtype(array.dtype, jnp.complexfloating) for array in program.arrays):
        scratch = 3 * program.output_bytes + program.num_arguments * COMPLEX_SCRATCH_BYTES
    else:
        scratch = _v5p_scratch(program)
    assert program.temporary_bytes <= scratch
    reckoned = sum(map(bytes_of, program.arrays))
    assert 0 <= program.output_bytes - reckoned <= program.table_bytes
    assert program.host_output_bytes == program.host_temporary_bytes == 0
    assert program.code_bytes <= MAX_SAVE_CODE_BYTES


def assert_offloaded(leaves: Leaves) -> None:
    """Asserts that offloading takes nothing of the devices but the compiler's tables of outputs."""
    programs = Programs()
    offload.pinned(leaves, programs)
    for program in programs.values():
        assert program.collectives == frozenset()
        assert {array.sharding.memory_kind for array in program.arrays} == {"pinned_host"}
        if any(jnp.issubdtype(array.dtype, jnp.complexfloating) for array in program.arrays):
            assert len(program.arrays) == 1
            scratch = 3 * program.host_output_bytes + COMPLEX_SCRATCH_BYTES
        else:
            scratch = SMALL_SCRATCH_BYTES
        assert program.temporary_bytes <= scratch
        assert program.output_bytes <= program.table_bytes
        assert program.host_output_bytes == sum(map(bytes_of, program.arrays))
        # Some programs of small arrays of many dtypes need it. It counts as pinned memory.
        assert program.host_temporary_bytes <= program.host_output_bytes
        assert program.code_bytes <= MAX_SAVE_CODE_BYTES


def assert_saved(leaves: Leaves, layout: Any = "auto") -> Programs:
    """Asserts the same of all programs that copy and stack these leaves; returns the programs."""
    plan = plan_snapshot(list(leaves), [*leaves.values()], layout).plan
    programs = Programs()
    stored = stacking.execute(plan, leaves, copy=True, run=programs)
    assert (
        stored.keys()
        == {*plan.stacks, *leaves}
        - {member for group in plan.stacks.values() for member in group}
        - plan.empty
    )
    for program in programs.values():
        assert_saves_alone(program)
    sizes = shard_bytes({n: a for n, a in leaves.items() if n not in plan.empty})
    for name, group in plan.stacks.items():
        stack = stored[name]
        if stack.sharding.is_fully_addressable:  # else each host stacks the shards of its devices
            members = sum(sizes[member] for member in group)
            # Vectors become rows, whose number is rounded up: to 2, 4 or a multiple of 8.
            assert bytes_of(stack) <= members * (2 if len(stack.shape) == 2 else 1), name
    return programs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["deep", "gpt2", "wide", "moe"])
def test_saving_a_training_state_needs_no_other_device_and_no_scratch(
    name: str, layout: str
) -> None:
    for over in grids(FIRST):
        leaves = training_state(name, layout, over)
        programs = assert_saved(leaves)
        plan = plan_snapshot(list(leaves), [*leaves.values()], "auto").plan
        needed = stacking.needed_to_execute(plan, leaves, copy=True).devices
        assert needed.keys() == set(one_host(devices(*FIRST)))
        # Each program counts as often as it runs, so that only the sum over equal ones is known.
        assert max(needed.values()) >= max(sum(map(bytes_of, p.arrays)) for p in programs.values())
    assert_offloaded(leaves)  # on one host


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_every_dtype_needs_no_other_device_and_no_scratch(layout: str) -> None:
    for over in grids(FIRST):
        assert_saved(every_dtype(layout, over))
        assert_offloaded(every_dtype(layout, over))


@on_sample
def test_saving_is_the_same_on_every_chip(topology: tuple[str, int]) -> None:
    for over in grids(topology):
        assert_saved(every_dtype("both", over))
        assert_offloaded(every_dtype("both", over))
        assert_saved(training_state("deep", "fsdp", over))


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 8, 48, 100, 128, 256]), max_size=3).map(tuple)


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            shapes, st.sampled_from(DTYPES), st.sampled_from(sorted(LAYOUTS)), st.integers(1, 4)
        ),
        max_size=8,
    ),
    st.sampled_from(["auto", "flat"]),
    st.booleans(),
)
def test_saving_any_tree_needs_no_other_device_and_no_scratch(
    drawn: list[tuple[tuple[int, ...], str, str, int]], layout: str, spans_hosts: bool
) -> None:
    over = [*grids(FIRST)][0 if spans_hosts else 1]
    leaves = {
        f"model/{i}.{k}": jax.ShapeDtypeStruct(
            shape, jnp.dtype(dtype), sharding=NamedSharding(over, LAYOUTS[rule](shape, over))
        )
        for i, (shape, dtype, rule, count) in enumerate(drawn)
        for k in range(count)
    }
    assert_saved(leaves, layout)
    assert_offloaded({name: leaf for name, leaf in leaves.items() if leaf.size})


def test_memory_for_an_offload_counts_the_tiles_of_the_host() -> None:
    """float32[8, 32, 32] takes four times its elements there too; no memory of the device."""
    (device, *_) = devices(*FIRST)
    leaf = jax.ShapeDtypeStruct((8, 32, 32), jnp.float32, sharding=SingleDeviceSharding(device))
    needed = offload.needed_to_offload({"leaf": leaf})
    assert needed.host_bytes == 131_072 + 32_768  # pinned and ordinary memory
    assert not any(needed.devices.values())


def test_a_shard_is_cut_in_place_of_a_replica() -> None:
    """Each replica stores a part of a shard, which it cuts out before it fetches the part."""
    (device, *_) = devices(*FIRST)
    sharding = SingleDeviceSharding(device)
    for dtype in DTYPES:
        program = device_programs.slice_program((8, 0), (16, 48), sharding)
        leaf = jax.ShapeDtypeStruct((32, 48), jnp.dtype(dtype), sharding=sharding)
        assert_saves_alone(compiled(program, leaf))


def test_what_is_reckoned_is_what_the_compiler_takes() -> None:
    """Each shape and dtype alone, so that no table of outputs blurs the size."""
    (device, *_) = devices(*FIRST)
    sharding = SingleDeviceSharding(device)
    for dtype, shape in itertools.product(
        DTYPES, [(), (1,), (48,), (300, 7), (8, 32, 32), (2, 3, 5, 7)]
    ):
        spec = (shape, jnp.dtype(dtype))
        program = compiled(device_programs.zeros_program((spec,), sharding))
        target = jax.ShapeDtypeStruct(*spec, sharding=sharding)
        reckoned = shard_bytes({"leaf": target})["leaf"]
        assert reckoned == program.output_bytes, spec
        assert reckoned >= math.prod(shape) * jnp.dtype(dtype).itemsize * (
            0.5 if "int4" in dtype or "float4" in dtype else 1
        )
    tiled = jax.ShapeDtypeStruct((8, 32, 32), jnp.float32, sharding=sharding)
    assert shard_bytes({"leaf": tiled}) == {"leaf": 131_072}  # four times its elements


# --- a save that would be wrong is found ---


@pytest.mark.parametrize("found", ["all-gather", "temporary_bytes"])
def test_a_collective_or_a_temporary_in_a_program_of_a_save_is_found(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = [*grids(FIRST)][1]

    def onto_all(sharding: Any) -> Any:
        return jax.jit(lambda *xs: jnp.stack(xs), out_shardings=NamedSharding(over, P()))

    def sorted_twice(sharding: Any) -> Any:
        return jax.jit(lambda *xs: jnp.sort(jnp.stack(xs), axis=0), out_shardings=sharding)

    is_gathered = found == "all-gather"
    monkeypatch.setattr(stacking, "stack_program", onto_all if is_gathered else sorted_twice)
    state = ("deep", "fsdp") if is_gathered else ("wide", "replicated")
    with pytest.raises(AssertionError, match=found):
        assert_saved(training_state(*state, over))


# --- what a restore runs ---


def restored(dtypes: Any, over: Mesh, spec: PartitionSpec) -> list[jax.ShapeDtypeStruct]:
    sharding = NamedSharding(over, spec)
    shape = (16 * over.size, 3 * over.size)  # a last dim that tiles do not divide
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(d), sharding=sharding) for d in dtypes]


def in_programs(leaves: list[jax.ShapeDtypeStruct]) -> Iterator[list[jax.ShapeDtypeStruct]]:
    """Yields the leaves that one program moves."""
    for chunk in move_shards._chunks({str(i): leaf for i, leaf in enumerate(leaves)}):
        yield [*chunk.values()]


def assert_sized(program: Compiled) -> None:
    reckoned = sum(map(bytes_of, program.arrays))
    assert 0 <= program.output_bytes - reckoned <= program.table_bytes
    assert program.code_bytes <= MAX_RESTORE_CODE_BYTES


def assert_collectives(
    program: Compiled, name: str, topology: tuple[str, int], **where: Any
) -> None:
    """Asserts that the program runs this collective only, and only over this groups or pairs."""
    if topology[1] > 1 and program.collectives != {Collective(name, **where)}:
        # The slices exchange data over the network between their hosts.
        assert {c.name for c in program.collectives} == {"send", "recv"}
    else:
        assert program.collectives == {Collective(name, **where)}


@on_sample
def test_a_sum_over_replicas_is_an_all_reduce_over_them(topology: tuple[str, int]) -> None:
    found = devices(*topology)
    over = mesh(found, replica=2, fsdp=len(found) // 2)
    leaves = restored(DTYPES, over, P("fsdp"))
    grid = move_shards.replica_grid(NamedSharding(over, P("fsdp")))
    for chunk in in_programs(leaves):
        slots = [move_shards.slots(leaf, grid) for leaf in chunk]
        program = compiled(move_shards.sum_program(grid), *slots)
        assert_sized(program)
        assert_collectives(program, "all-reduce", topology, groups=along(grid, "row"))


@on_sample
def test_permutes_send_from_host_to_host_only(topology: tuple[str, int]) -> None:
    found = devices(*topology)
    grid = mesh(found, row=2, column=len(found) // 2)
    columns = grid.shape["column"]
    pairs = frozenset((c, columns + c) for c in range(columns))
    for chunk in in_programs(restored(DTYPES, grid, P(("row", "column")))):
        slots = [move_shards.slots(leaf, grid) for leaf in chunk]
        program = compiled(move_shards.permute_program(grid, (((0, 1),),)), *slots)
        assert_sized(program)
        assert_collectives(program, "collective-permute", topology, pairs=pairs)


RESHARDINGS = {
    "gather": (P("fsdp"), P(), {"all-gather"}),
    "exchange": (P("fsdp"), P(None, "fsdp"), {"all-to-all"}),
    "cut": (P(), P("fsdp"), set()),
    "cut further": (P("fsdp"), P("fsdp", "replica"), set()),
}


@on_sample
@pytest.mark.parametrize("kind", RESHARDINGS)
def test_a_resharding_stays_on_the_axis_that_changes(kind: str, topology: tuple[str, int]) -> None:
    found = devices(*topology)
    over = mesh(found, replica=2, fsdp=len(found) // 2)
    source, target, expected = RESHARDINGS[kind]
    groups = along(over, "fsdp")
    if topology[1] > 1:  # the compiler numbers the devices of one slice alone
        groups = frozenset([frozenset(range(over.shape["fsdp"]))])
    for chunk in in_programs(restored(["float32", "bfloat16", "bool", *FP8], over, source)):
        program = move_shards.reshard_program(
            tuple(NamedSharding(over, source) for _ in chunk),
            tuple(NamedSharding(over, target) for _ in chunk),
        )
        found_program = compiled(program, *chunk)
        assert_sized(found_program)
        assert {c.name for c in found_program.collectives} == expected
        assert {c.groups for c in found_program.collectives} <= {groups}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shard_is_reshaped_and_created_on_its_device_alone(dtype: str) -> None:
    (device, *_) = devices(*FIRST)
    sharding = SingleDeviceSharding(device)
    scalar = jax.ShapeDtypeStruct((), jnp.dtype(dtype), sharding=sharding)
    assert_saves_alone(compiled(device_programs.reshape_program((1,), sharding), scalar))
    specs = (((), scalar.dtype), ((16, 48), scalar.dtype))
    assert_saves_alone(compiled(device_programs.zeros_program(specs, sharding)))


def test_every_program_is_compiled_here() -> None:
    """Whoever adds a program adds a test of it above, and its name here."""
    assert set(device_programs.BUILDERS) == {
        "concatenate_program", "copy_program", "offload_program", "permute_program",
        "reshape_program", "reshard_program", "slice_program", "stack_program", "sum_program",
        "zeros_program",
    }  # fmt: skip
