"""Forecasts, from abstract arrays, how a save will take its snapshot and what it needs for that.

The forecast runs the same code as a save, on abstract arrays with shardings over devices that may
exist only for the compiler. It makes no arrays.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.options import Layout
from torchax_ckpt.snapshot.device_memory import _HEADROOM, DeviceMemory, Stats
from torchax_ckpt.snapshot.snapshotter import Snapshotter, Way
from torchax_ckpt.snapshot.stacking import AnyArray, _execute


@dataclasses.dataclass(frozen=True)
class Forecast:
    """How a save will take its snapshot.

    Attributes:
      way: how ``snapshot="auto"`` takes snapshots of a program that donates its state.
      copy_bytes: the bytes that copies and stacks take on the device of this process where they
        take the most; None if the compiler refuses them, because they exceed a device.
      wanted_bytes: the free bytes that "auto" wants on that device to make copies; None likewise.
      num_programs: how many programs copy and stack the arrays; programs that differ only in the
        device count once.
      compile_secs: seconds that compiling them took here.
    """

    way: Way
    copy_bytes: int | None
    wanted_bytes: int | None
    num_programs: int
    compile_secs: float


def forecast(
    names: Sequence[str], arrays: Sequence[AnyArray], *, layout: Layout, stats: Stats
) -> Forecast:
    """Returns the forecast for a save of these leaves.

    Args:
      names: the names of the leaves.
      arrays: the leaves: abstract arrays with shardings.
      layout: which leaves are stacked (``CheckpointOptions.layout``).
      stats: device -> the memory statistics that it will have before a save, as
        ``device.memory_stats`` returns them.
    """
    snapshotter = Snapshotter("auto", layout, DeviceMemory(stats))
    snapshotter.donated()
    began = time.perf_counter()
    # This compiles all programs of a save, to ask for their memory.
    way, _ = snapshotter._way(names, arrays)  # type: ignore[arg-type]  # it only asks for specs
    compile_secs = time.perf_counter() - began
    planned = snapshotter._planner.planned(names, arrays)
    needed = planned.bytes_on_devices(arrays, copy=True)
    copy_bytes = None if needed is None else max(needed.values(), default=0)
    return Forecast(
        way=way,
        copy_bytes=copy_bytes,
        wanted_bytes=None if copy_bytes is None else math.ceil(copy_bytes * _HEADROOM),
        num_programs=_num_programs(planned.plan, dict(zip(names, arrays, strict=True))),
        compile_secs=compile_secs,
    )


def _num_programs(plan: Plan, leaves: Mapping[str, AnyArray]) -> int:
    """Returns the number of programs that copy and stack the leaves."""
    found = set()

    def note(program: Any, *arrays: Any) -> Any:
        outputs = jax.eval_shape(program, *arrays)
        specs = tuple((array.shape, array.dtype.name) for array in arrays)
        found.add((program.__wrapped__.__qualname__, specs))
        return outputs

    _execute(plan, leaves, True, note)
    return len(found)
