"""What differs between the releases of JAX that tests run with; imports no JAX by itself."""

from __future__ import annotations

import importlib.metadata
from typing import Any


def xla_flags(devices: int | None) -> str:
    """Returns the flags for that many devices; on a busy machine, their threads may meet late."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    release = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    if release >= (0, 8):  # an older one ends the process, because it does not know the flag
        flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    return flags


def enable_x64() -> Any:
    """Returns a context in which JAX has 64 bits."""
    import jax

    if hasattr(jax, "enable_x64"):  # since 0.8
        return jax.enable_x64(True)
    import jax.experimental

    return getattr(jax.experimental, "enable_x64")()  # noqa: B009 - mypy knows a newer JAX


def set_mesh(mesh: Any) -> Any:
    """Returns a context in which the program's mesh is ``mesh``."""
    import jax
    import jax.sharding

    if hasattr(jax, "set_mesh"):  # since 0.7.1
        return jax.set_mesh(mesh)
    return getattr(jax.sharding, "use_mesh")(mesh)  # noqa: B009 - mypy knows a newer JAX
