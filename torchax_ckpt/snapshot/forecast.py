"""Forecasts, from abstract arrays, how a save will take its snapshot and what it needs for that.

The forecast runs the same code as a save, on abstract arrays with shardings over devices that may
exist only for the compiler. It makes no arrays.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax

from torchax_ckpt.options import Layout
from torchax_ckpt.snapshot.device_memory import HEADROOM, DeviceMemory, Stats
from torchax_ckpt.snapshot.offload import pinned
from torchax_ckpt.snapshot.planner import Planned
from torchax_ckpt.snapshot.snapshotter import Snapshotter, Way
from torchax_ckpt.snapshot.stacking import AnyArray, execute_with


@dataclasses.dataclass(frozen=True)
class Forecast:
    """How a save will take its snapshot.

    Attributes:
      way: how ``snapshot="auto"`` takes snapshots of a program that donates its state.
      copy_bytes: the bytes that copies and stacks of all arrays take on the device of this process
        where they take the most; None if the compiler refuses them, because they exceed a device.
      wanted_bytes: the free bytes that "auto" wants on that device to make these copies; None
        likewise.
      part_bytes: the bytes that a snapshot in this way takes on that device: ``copy_bytes`` for a
        copy, those of the arrays that are not offloaded for an offload, 0 for a transfer.
      offloaded_bytes: the memory of the host for the arrays of this process that are offloaded.
      num_programs: how many programs the snapshot runs; programs that differ only in the device
        count once. For a transfer, the programs that stack the arrays afterwards.
      compile_secs: seconds that compiling them took here.
    """

    way: Way
    copy_bytes: int | None
    wanted_bytes: int | None
    part_bytes: int
    offloaded_bytes: int
    num_programs: int
    compile_secs: float


def forecast(
    names: Sequence[str],
    arrays: Sequence[jax.ShapeDtypeStruct],
    *,
    layout: Layout,
    stats: Stats,
    host_bytes: int | None,
) -> Forecast:
    """Returns the forecast for a save of these leaves.

    Args:
      names: the names of the leaves.
      arrays: the leaves, with shardings.
      layout: which leaves are stacked (``CheckpointOptions.layout``).
      stats: device -> the memory statistics that it will have before a save, as
        ``device.memory_stats`` returns them.
      host_bytes: the memory of the host that is available to this process; None if it suffices.
    """
    snapshotter = Snapshotter("auto", layout, DeviceMemory(stats, lambda: host_bytes))
    began = time.perf_counter()
    way, planned, copied = snapshotter.chosen(names, arrays)  # compiles all programs
    compile_secs = time.perf_counter() - began
    needed = planned.bytes_on_devices(arrays, copy=True)
    copy_bytes = None if needed is None else max(needed.values(), default=0)
    part_bytes, offloaded_bytes = (copy_bytes or 0) if way == "copy" else 0, 0
    if way == "offload":
        divided = planned.bytes_if_divided(arrays, copied)
        assert divided is not None, "chosen because it fits"
        part_bytes, offloaded_bytes = max(divided.devices.values(), default=0), divided.host_bytes
    return Forecast(
        way=way,
        copy_bytes=copy_bytes,
        wanted_bytes=None if copy_bytes is None else math.ceil(copy_bytes * HEADROOM),
        part_bytes=part_bytes,
        offloaded_bytes=offloaded_bytes,
        num_programs=_num_programs(way, planned, arrays, copied),
        compile_secs=compile_secs,
    )


def _num_programs(
    way: Way, planned: Planned, arrays: Sequence[AnyArray], copied: frozenset[str]
) -> int:
    """Returns the number of programs that copy, stack and offload the leaves."""
    found = set()

    def note(program: Any, *arrays: Any) -> Any:
        outputs = jax.eval_shape(program.jitted, *arrays)
        specs = tuple((array.shape, array.dtype.name) for array in arrays)
        found.add((program.jitted.__wrapped__.__qualname__, specs))
        return outputs

    plan, leaves = planned.plan, dict(zip(planned.names, arrays, strict=True))
    if way == "offload":
        plan, leaves, others = planned.divided(arrays, copied)
        pinned(others, note)
    execute_with(plan, leaves, way != "transfer", note)
    return len(found)
