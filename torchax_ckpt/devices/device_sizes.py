"""The bytes that arrays take in the memory of a device, including the padding of their layout.

A TPU stores an array in tiles, for example of 8 x 128 elements. An array whose dims are not
multiples of the tile takes more memory than its elements: float32[8, 32, 32] takes 131,072 bytes
in place of 32,768.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from torchax_ckpt.devices.device_programs import (
    MAX_ARGUMENTS,
    Program,
    Runner,
    in_chunks,
    zeros_program,
)
from torchax_ckpt.runtime.jax_versions import Tiles, tiles

_Spec = tuple[tuple[int, ...], Any]
"""The shape and the dtype of a shard."""

# A tiled array takes a multiple of these bytes. Seen in sizes that the TPU compiler reports.
_ALIGNMENT = 512
# The kinds of memory that belong to the host.
HOST_MEMORY = ("pinned_host", "unpinned_host")


def padded_bytes(shape: tuple[int, ...], dtype: Any, layout: Tiles | None) -> int:
    """Returns the bytes that one shard takes in memory.

    ``layout`` is that of ``array.format`` or ``compiled.output_formats``; None: a dense array.
    """
    if layout is None or not layout.tiling:
        return math.prod(shape) * np.dtype(dtype).itemsize
    tile = layout.tiling[0]
    dims = [shape[dim] for dim in layout.major_to_minor]
    dims = [1] * (len(tile) - len(dims)) + dims
    major, minor = dims[: -len(tile)], dims[-len(tile) :]
    count = math.prod(major) * math.prod(-(-d // t) * t for d, t in zip(minor, tile, strict=True))
    num_bits = layout.sub_byte_element_size_in_bits or np.dtype(dtype).itemsize * 8
    return -(-(count * num_bits // 8) // _ALIGNMENT) * _ALIGNMENT


class Compiled(NamedTuple):
    """Abstract outputs of a program, with their layouts, and the memory it needs while it runs."""

    outputs: Any
    temporary_bytes: int
    host_temporary_bytes: int


def compiled(program: Program, *arrays: Any) -> Compiled:
    """Compiles a program for arrays, perhaps abstract; JAX keeps it for later calls."""
    lowered = program.lower(*arrays)
    executable = lowered.compile()
    outputs = jax.tree.map(
        lambda out, form: jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=form),
        lowered.out_info,
        executable.output_formats,
    )
    memory = executable.memory_analysis()  # None if the backend has no such analysis
    if memory is None:
        return Compiled(outputs, 0, 0)
    return Compiled(outputs, memory.temp_size_in_bytes, memory.host_temp_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class Needed:
    """The memory that programs and their outputs need on devices of this process and its host.

    ``ordinary_bytes`` is the ordinary memory of the host to which outputs in pinned memory are then
    copied. Programs that differ only in the device count once in ``num_programs``.
    """

    devices: Mapping[jax.Device, int]
    pinned_bytes: int
    ordinary_bytes: int
    num_programs: int

    @property
    def host_bytes(self) -> int:
        """Bytes of the memory of the host."""
        return self.pinned_bytes + self.ordinary_bytes


def needed_by(compute: Callable[[Runner], object], ordinary_bytes: int = 0) -> Needed:
    """Returns what a computation needs; compiles its programs, which JAX keeps, but runs nothing.

    All outputs may exist at the same time, also those that later programs take as inputs. Programs
    run one after another, so only the largest temporary memory counts.
    """
    outputs: list[Any] = []
    programs = set()
    temporary: dict[jax.Device, int] = collections.defaultdict(int)
    host_temporary: dict[jax.Device, int] = collections.defaultdict(int)

    def compile_only(program: Program, *arrays: Any) -> Any:
        result = compiled(program, *arrays)
        outputs.extend(jax.tree.leaves(result.outputs))
        specs = tuple((array.shape, array.dtype.name) for array in arrays)
        programs.add((program.jitted.__wrapped__.__qualname__, specs))
        for device in arrays[0].sharding.addressable_devices:
            temporary[device] = max(temporary[device], result.temporary_bytes)
            host_temporary[device] = max(host_temporary[device], result.host_temporary_bytes)
        return result.outputs

    compute(compile_only)
    on_devices, pinned_bytes = _bytes_of(outputs)
    pinned_bytes += sum(host_temporary.values())
    devices = on_devices + collections.Counter(temporary)
    return Needed(devices, pinned_bytes, ordinary_bytes, len(programs))


def bytes_on_devices(arrays: Iterable[Any]) -> collections.Counter[jax.Device]:
    """Returns the bytes of arrays, perhaps abstract with layouts, on this process's devices."""
    return _bytes_of(arrays)[0]


def _bytes_of(arrays: Iterable[Any]) -> tuple[collections.Counter[jax.Device], int]:
    """Returns the bytes of arrays on each device of this process, and in the memory of its host."""
    by_sharding: dict[Sharding, int] = collections.defaultdict(int)
    for array in arrays:
        if not isinstance(array, (jax.Array, jax.ShapeDtypeStruct)):
            continue
        sharding: Any = array.sharding
        if isinstance(array, jax.Array):
            of_all = array.on_device_size_in_bytes()  # counts devices of other processes too
            by_sharding[sharding] += of_all // sharding.num_devices
        else:
            shape = sharding.shard_shape(array.shape)
            by_sharding[sharding] += padded_bytes(shape, array.dtype, tiles(array.format))
    devices: collections.Counter[jax.Device] = collections.Counter()
    host_bytes = 0
    for sharding, num_bytes in by_sharding.items():
        here = sharding.addressable_devices
        if sharding.memory_kind in HOST_MEMORY:
            host_bytes += num_bytes * len(here)
        else:
            devices.update(dict.fromkeys(here, num_bytes))
    return devices, host_bytes


def shard_bytes(targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
    """Returns the bytes that each leaf, given with its sharding, will take on each of its devices.

    For a TPU, compiles programs that return such arrays, because only their outputs have layouts.
    """
    specs: dict[str, tuple[str, _Spec]] = {}
    by_kind: dict[str, tuple[jax.Device, set[_Spec]]] = {}
    for name, target in targets.items():
        sharding: Any = target.sharding
        device = _device_of_kind(sharding)
        spec = (tuple(sharding.shard_shape(target.shape)), np.dtype(target.dtype))
        specs[name] = (device.device_kind, spec)
        by_kind.setdefault(device.device_kind, (device, set()))[1].add(spec)
    sizes = {
        kind: _sizes(device, tuple(sorted(of_kind, key=str)))
        for kind, (device, of_kind) in by_kind.items()
    }
    return {name: sizes[kind][spec] for name, (kind, spec) in specs.items()}


@functools.lru_cache(maxsize=1024)
def _device_of_kind(sharding: Any) -> jax.Device:
    """Returns a device of the kind on which the sharding lies; if possible, one of this process."""
    kind = next(iter(sharding.device_set)).device_kind
    devices = [*sharding.addressable_devices, *jax.local_devices(), *sharding.device_set]
    return next(device for device in devices if device.device_kind == kind)


@functools.lru_cache(maxsize=64)
def _sizes(device: jax.Device, specs: tuple[_Spec, ...]) -> dict[_Spec, int]:
    if device.platform != "tpu":  # arrays have no padding
        return {(shape, dtype): padded_bytes(shape, dtype, None) for shape, dtype in specs}
    sizes: dict[_Spec, int] = {}
    for some in in_chunks(specs, MAX_ARGUMENTS):
        program = zeros_program(tuple(some), SingleDeviceSharding(device))
        for spec, output in zip(some, compiled(program).outputs, strict=True):
            sizes[spec] = padded_bytes(spec[0], spec[1], tiles(output.format))
    return sizes
