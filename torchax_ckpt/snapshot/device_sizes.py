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
from jax.experimental.layout import Layout
from jax.sharding import Sharding, SingleDeviceSharding

from torchax_ckpt.snapshot.device_programs import (
    MAX_ARGUMENTS,
    Program,
    Run,
    in_chunks,
    zeros_program,
)

_Spec = tuple[tuple[int, ...], Any]
"""The shape and the dtype of a shard."""

# A tiled array takes a multiple of these bytes. Seen in sizes that the TPU compiler reports.
_ALIGNMENT = 512
# The kinds of memory that belong to the host.
HOST_MEMORY = ("pinned_host", "unpinned_host")


def padded_bytes(shape: tuple[int, ...], dtype: Any, layout: Layout | None) -> int:
    """Returns the bytes that one shard takes in memory.

    ``layout`` is from ``array.format.layout`` or ``compiled.output_formats``; None: a dense array.
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
    """What is known of a compiled program before it runs.

    ``outputs`` are abstract arrays with their layouts. The temporary bytes are those that each
    device needs while the program runs, in its own memory and in the memory of the host.
    """

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
    """The memory that programs need, and the number of different programs.

    Attributes:
      devices: device of this process -> bytes of outputs and temporary memory, if it needs any.
      pinned_bytes: bytes of outputs and temporary memory that are in the memory of the host.
      ordinary_bytes: bytes of ordinary memory of the host that the outputs are copied to.
      num_programs: programs that differ only in the device count once.
    """

    devices: Mapping[jax.Device, int]
    pinned_bytes: int
    ordinary_bytes: int
    num_programs: int

    @property
    def host_bytes(self) -> int:
        """Bytes of the memory of the host."""
        return self.pinned_bytes + self.ordinary_bytes


def needed_by(compute: Callable[[Run], object], ordinary_bytes: int = 0) -> Needed:
    """Returns what a computation needs; compiles its programs, which JAX keeps, but runs nothing.

    The computation runs its programs through the function that it gets, on abstract arrays. The
    outputs of all programs count, also those of which later programs make other outputs, because
    they may exist at the same time. The programs run one after another, so the temporary memory of
    the program that needs the most counts, not the sum.
    """
    outputs: list[Any] = []
    programs = set()
    temporary: dict[jax.Device, int] = collections.defaultdict(int)
    host_temporary: dict[jax.Device, int] = collections.defaultdict(int)

    def compile_only(program: Program, *arrays: Any) -> Any:
        found = compiled(program, *arrays)
        outputs.extend(jax.tree.leaves(found.outputs))
        specs = tuple((array.shape, array.dtype.name) for array in arrays)
        programs.add((program.jitted.__wrapped__.__qualname__, specs))
        for device in arrays[0].sharding.addressable_devices:
            temporary[device] = max(temporary[device], found.temporary_bytes)
            host_temporary[device] = max(host_temporary[device], found.host_temporary_bytes)
        return found.outputs

    compute(compile_only)
    by_sharding = _bytes_by_sharding(outputs)
    pinned_bytes = sum(
        num_bytes * len(sharding.addressable_devices)
        for sharding, num_bytes in by_sharding.items()
        if sharding.memory_kind in HOST_MEMORY
    ) + sum(host_temporary.values())
    devices = _on_devices(by_sharding) + collections.Counter(temporary)
    return Needed(devices, pinned_bytes, ordinary_bytes, len(programs))


def bytes_on_devices(arrays: Iterable[Any]) -> collections.Counter[jax.Device]:
    """Returns the bytes of arrays, perhaps abstract with layouts, on this process's devices."""
    return _on_devices(_bytes_by_sharding(arrays))


def _bytes_by_sharding(arrays: Iterable[Any]) -> dict[Sharding, int]:
    """Returns sharding -> the bytes that the arrays with this sharding take for each device."""
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
            by_sharding[sharding] += padded_bytes(shape, array.dtype, array.format.layout)
    return by_sharding


def _on_devices(by_sharding: Mapping[Sharding, int]) -> collections.Counter[jax.Device]:
    found: collections.Counter[jax.Device] = collections.Counter()
    for sharding, num_bytes in by_sharding.items():
        if sharding.memory_kind not in HOST_MEMORY:
            for device in sharding.addressable_devices:
                found[device] += num_bytes
    return found


def shard_bytes(targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
    """Returns the bytes that each leaf, given with its sharding, will take on each of its devices.

    For a TPU, compiles programs that return such arrays, because JAX shows layouts only there.
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
            sizes[spec] = padded_bytes(spec[0], spec[1], output.format.layout)
    return sizes
