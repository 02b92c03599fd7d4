"""Devices and hosts with as much memory as a test says, and programs that run out of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from torchax_ckpt.devices.device_memory import DeviceMemory
from torchax_ckpt.snapshot import offload
from torchax_ckpt.snapshot.snapshotter import Snapshot, Snapshotter

# The modes of a snapshot that offloads, if the devices can; CPU devices of jaxlib 0.7 cannot.
OFFLOAD: list[Any] = ["offload"] if offload.is_supported([jnp.zeros(1)]) else []


def limited(device_bytes: int, host_bytes: int = 0) -> DeviceMemory:
    """Memory of devices of which nothing is in use, and of a host."""
    stats = {"bytes_limit": device_bytes, "bytes_in_use": 0}
    return DeviceMemory(lambda device: stats, lambda: host_bytes)


def exhausted(*_: Any, **__: Any) -> Any:
    """Stands for a program that runs out of memory."""
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")


def donated(snapshotter: Snapshotter, state: dict[str, jax.Array]) -> Snapshot:
    """Takes a snapshot, then deletes the arrays as a step that donates does."""
    snapshot = snapshotter.take([f"state/{name}" for name in state], list(state.values()))
    for array in state.values():
        array.delete()
    return snapshot
