"""Compiles programs for TPUs, with the compiler of libtpu, on a machine without TPUs."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from torchax_ckpt.devices import device_sizes
from torchax_ckpt.planning import topology

Groups = frozenset[frozenset[int]]
"""Groups of devices, by their positions in the mesh, that exchange data with each other."""

# The form of a collective in compiled text, whether it is one instruction or begins one.
_COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|all-to-all|ragged-all-to-all|collective-permute|"
    r"collective-broadcast|reduce-scatter|send|recv)(?:-start)?\((.*)"
)
_DIMS = r"\[([\d,]+)\]"


def devices(name: str, num_slices: int = 1) -> tuple[jax.Device, ...]:
    """Returns the devices of a topology, such as "v5e:2x4", of each of ``num_slices`` slices."""
    return topology.devices(name, num_slices)


def mesh(found: Any, **axes: int) -> Mesh:
    """Returns a mesh of the first devices with these axes and lengths."""
    return topology.mesh(found[: math.prod(axes.values())], axes)


def one_host(found: Any) -> Any:
    """Returns the devices of the first host."""
    return [device for device in found if device.process_index == 0]


@dataclasses.dataclass(frozen=True)
class Collective:
    """An instruction such as "all-reduce"; ``pairs`` are the senders and receivers of a permute.

    ``groups`` are None for ``send`` and ``recv``, which go over the network between slices.
    """

    name: str
    groups: Groups | None = None
    pairs: frozenset[tuple[int, int]] = frozenset()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program that was compiled for a TPU, with sizes in bytes on each device.

    ``outputs`` are abstract arrays with layouts; ``output_bytes`` includes the compiler's table of
    several outputs.
    """

    outputs: Any
    output_bytes: int
    temporary_bytes: int
    host_output_bytes: int
    host_temporary_bytes: int
    code_bytes: int
    collectives: frozenset[Collective]
    num_arguments: int

    @property
    def arrays(self) -> list[Any]:
        """The outputs, one after the other."""
        return jax.tree.leaves(self.outputs)

    @property
    def table_bytes(self) -> int:
        """The most that the compiler's table of outputs may take; one output needs no table."""
        return 0 if len(self.arrays) == 1 else -(-8 * len(self.arrays) // 512) * 512


def compiled(program: Any, *arguments: Any) -> Compiled:
    """Compiles a program for the devices of its arguments or outputs."""
    known = device_sizes.compiled(program, *arguments)
    found = program.lower(*arguments).compile()  # JAX has kept the program
    memory = found.memory_analysis()
    return Compiled(
        known.outputs,
        memory.output_size_in_bytes,
        known.temporary_bytes,
        memory.host_output_size_in_bytes,
        memory.host_temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        collectives_in(found.as_text()),
        len(arguments),
    )


def collectives_in(text: str) -> frozenset[Collective]:
    """Returns the collectives in the text of a compiled program."""
    return frozenset(
        _collective(match[1], match[2])
        for match in map(_COLLECTIVE.search, text.splitlines())
        if match
    )


def _collective(name: str, rest: str) -> Collective:
    if name in ("send", "recv"):
        return Collective(name)
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", rest):
        found = frozenset((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
        return Collective(name, pairs=found)
    return Collective(name, _groups(rest))


def _groups(rest: str) -> Groups:
    """Returns the groups of a collective; the compiler writes them in one of three forms."""
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", rest):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return frozenset(frozenset(map(int, group.split(","))) for group in groups)
    if iota := re.search(rf"replica_groups={_DIMS}<={_DIMS}(?:T\(([\d,]+)\))?", rest):
        shape, dims, order = iota.groups()
        return _rows(_iota(dims, order).reshape(_ints(shape)))
    on_mesh = re.search(
        rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({_DIMS}(?:T\(([\d,]+)\))?\))? \{{(.*?)\}}",
        rest,
    )
    assert on_mesh, f"unknown form of groups: {rest}"
    axes, dims, order, over = on_mesh.groups()
    lengths = {name: int(length) for name, length in re.findall(r"'(\w+)'=(\d+)", axes)}
    ids = np.arange(math.prod(lengths.values())) if dims is None else _iota(dims, order)
    moved = [i for i, name in enumerate(lengths) if f"'{name}'" in over]
    kept = [i for i in range(len(lengths)) if i not in moved]
    size = math.prod([*lengths.values()][i] for i in moved)
    return _rows(ids.reshape([*lengths.values()]).transpose(kept + moved).reshape(-1, size))


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _iota(dims: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return (ids if order is None else ids.transpose(_ints(order))).ravel()


def _rows(ids: np.ndarray) -> Groups:
    return frozenset(frozenset(int(i) for i in row) for row in ids)


def along(over: Mesh, *axes: str) -> Groups:
    """Returns the groups of devices that differ in their position along these axes only."""
    ids = np.arange(over.size).reshape(over.devices.shape)
    moved = [over.axis_names.index(axis) for axis in axes]
    kept = [i for i in range(ids.ndim) if i not in moved]
    return _rows(ids.transpose(kept + moved).reshape(-1, math.prod(over.shape[a] for a in axes)))
