"""Loads the devices of a TPU topology from libtpu, the TPU's compiler, on a machine without TPUs.

The devices compile programs for the chips of the topology, but run none, and hold no arrays. The
memory of a chip is published: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e. libtpu
0.0.42 refuses programs that need more than ``usable_bytes``, in whole MiB.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from torchax_ckpt.errors import PlanError
from torchax_ckpt.policies import closed_forms

_TOPOLOGY = re.compile(r"(v\w+):([1-9][0-9]*(?:x[1-9][0-9]*){1,2})")
_PRODUCT = re.compile(r"(v\w+?)-([1-9][0-9]*)")
_EXAMPLES = '"v5e:16x16" (256 chips), "v6e:8x8" (64 chips) or "v5p:4x4x4" (64 chips)'


@dataclasses.dataclass(frozen=True)
class Chip:
    """A generation of TPU chips."""

    name: str  # as in the names of topologies: ``v5e``
    product_names: tuple[str, ...]  # how product names begin: ``v5litepod`` in ``v5litepod-16``
    named_cores_per_chip: int  # ``v5p-128`` counts cores, two for a chip; ``v5e-256`` counts chips
    num_dims: int  # of a topology
    hbm_bytes: int
    usable_bytes: int
    # The chip's configuration in libtpu. By default, libtpu describes each core of a v4 chip as a
    # device, but JAX on a v4 has one device per chip.
    config: str | None = None


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", ("v4",), 2, 3, 32 << 30, 31_484 << 20, config="megacore"),
        Chip("v5e", ("v5e", "v5litepod"), 1, 2, 16 << 30, 16_125 << 20),
        Chip("v5p", ("v5p",), 2, 3, 95 << 30, 98_040 << 20),
        Chip("v6e", ("v6e",), 1, 2, 32 << 30, 31_995 << 20),
    )
}
"""Name of each generation -> its chip."""


@functools.cache
def devices(
    topology: str, num_slices: int = 1, *, one_chip_per_host: bool = False
) -> tuple[jax.Device, ...]:
    """Returns the chips of a topology, slice by slice, as devices for which JAX can compile.

    This process is the first host of the topology: the devices of that host are addressable. Loads
    libtpu until the process ends, and reads the variables that JAX reads for it (TPU_LIBRARY_PATH).

    Args:
      topology: the generation of the chips and the lengths of the topology: ``v5e:16x16``.
      num_slices: the number of slices, each with this topology.
      one_chip_per_host: whether each host has one chip in place of four; the programs of a chip are
        the same then, but JAX compiles them for one chip in place of four.

    Raises:
      PlanError: libtpu is not installed or cannot be used, another program uses it, or it does not
        know the topology.
    """
    chip, lengths = parsed(topology)
    closed_forms.count("num_slices", num_slices, "give the number of slices of the run")
    _require_libtpu()
    options: dict[str, Any] = {}
    if chip.config is not None:
        options["chip_config_name"] = chip.config
    if num_slices > 1:
        options["num_slices"] = num_slices
    if one_chip_per_host or math.prod(lengths) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{chip.name}:{'x'.join(map(str, lengths))}"
    try:
        described = topologies.get_topology_desc(topology_name=name, platform="tpu", **options)
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        raise _refused(topology, error) from error
    return tuple(described.devices)


def mesh(devices: Sequence[jax.Device], axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of all the devices, in their order; PlanError if there are more or fewer."""
    for name, length in axes.items():
        closed_forms.count(f"axis {name!r} of the mesh", length, "give the length of the mesh axis")
    found = math.prod(axes.values())
    if not axes or found != len(devices):
        product = " x ".join(f"{name}={length}" for name, length in axes.items())
        raise PlanError(
            f"the mesh does not fit the topology: expected axes whose lengths multiply to "
            f"{len(devices)}, the number of chips, found {product or 'no axes'}"
            f"{f' = {found}' if len(axes) > 1 else ''}; change the axes, or give another topology"
        )
    return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))


def versions() -> str:
    """Returns a text with the versions of jax and of libtpu, and the libtpu that this jax wants."""
    wanted = [
        requirement.partition(";")[0].strip()
        for requirement in importlib.metadata.requires("jax") or ()
        if requirement.startswith("libtpu")
    ]
    wants = f", which wants {wanted[0]}" if wanted else ""
    return f"jax {jax.__version__}{wants}, and {_libtpu_version()}"


def _libtpu_version() -> str:
    installed = importlib.util.find_spec("libtpu")
    folders = [] if installed is None else installed.submodule_search_locations or []
    path = os.environ.get("TPU_LIBRARY_PATH", "")  # the installed package sets it to its own file
    if os.path.isfile(path) and os.path.dirname(path) not in folders:
        return f"the libtpu at TPU_LIBRARY_PATH, {path}"
    try:
        return f"libtpu {importlib.metadata.version('libtpu')}"
    except importlib.metadata.PackageNotFoundError:
        return "a libtpu of unknown version"


def parsed(topology: str) -> tuple[Chip, tuple[int, ...]]:
    """Returns the generation of chips and the lengths that a name states, or raises PlanError."""
    match = _TOPOLOGY.fullmatch(topology)
    chip = CHIPS.get(match[1]) if match else None
    if match is None or chip is None:
        raise _unknown(topology)
    lengths = tuple(map(int, match[2].split("x")))
    if len(lengths) != chip.num_dims:
        raise _unknown(topology, f", and for {chip.name} {chip.num_dims} lengths")
    return chip, lengths


def _unknown(topology: str, also: str = "") -> PlanError:
    text = f"unknown TPU topology: expected a name such as {_EXAMPLES}{also}, found {topology!r}; "
    match = _PRODUCT.fullmatch(topology)
    product = match[1] if match else None
    chip = next((chip for chip in CHIPS.values() if product in chip.product_names), None)
    if match is not None and chip is not None:
        count = int(match[2])
        chips = max(1, count // chip.named_cores_per_chip)
        lengths = "x".join(map(str, _usual_lengths(chips, chip.num_dims)))
        unit = "cores" if chip.named_cores_per_chip > 1 else "chips"
        return PlanError(
            f"{text}{topology} is the name of a product and counts {unit}: it has {chips} "
            f"chip{'s' if chips > 1 else ''}; give {chip.name}:{lengths}, or the topology with "
            "which you rent it"
        )
    return PlanError(
        f"{text}the name is the generation ({', '.join(CHIPS)}) and the lengths of the topology. "
        "The names of products are others: v4-N and v5p-N count cores, two on each chip, so "
        "v5p-128 has 64 chips and is v5p:4x4x4; v5e-N (v5litepod-N) and v6e-N count chips, so "
        "v5e-256 is v5e:16x16"
    )


def _usual_lengths(num_chips: int, num_dims: int) -> tuple[int, ...]:
    """Returns lengths that multiply to ``num_chips`` and are as equal as possible, least first."""
    lengths: list[int] = []
    for dims in range(num_dims, 0, -1):
        root = round(num_chips ** (1 / dims))
        length = next(n for n in range(root, 0, -1) if num_chips % n == 0)
        lengths.append(length)
        num_chips //= length
    lengths.sort()
    # The smallest three-dimensional topology is written with its length 1 at the end.
    return tuple(lengths[lengths.count(1) :] + [1] * lengths.count(1))


def _require_libtpu() -> None:
    path = os.environ.get("TPU_LIBRARY_PATH")
    if path is not None and os.path.isfile(path):
        return
    if importlib.util.find_spec("libtpu") is None:
        found = "" if path is None else f" (TPU_LIBRARY_PATH names no file: {path})"
        raise PlanError(
            "libtpu is not installed: to plan for a TPU topology, expected libtpu, which contains "
            f"the TPU's compiler and needs no TPU, found none{found}; run: "
            "pip install 'torchax-ckpt[tpu-check]'"
        )


def _refused(topology: str, error: Exception) -> PlanError:
    message = " ".join(str(error).split())
    if "lockfile" in message:
        return PlanError(
            "libtpu is in use: another program on this machine, such as a training on TPUs or "
            "another plan, has loaded libtpu, and only one program at a time may; wait until it "
            "has ended, plan on another machine, or, if no program uses TPUs here, set the "
            f"environment variable ALLOW_MULTIPLE_LIBTPU_LOAD=1. libtpu says: {message}"
        )
    if message.startswith(("INVALID_ARGUMENT", "NOT_FOUND")):
        return PlanError(
            f"unknown TPU topology: libtpu does not know {topology!r}; expected a topology that "
            f"exists, such as {_EXAMPLES}. libtpu says: {message}"
        )
    return unusable(error)


def unusable(error: Exception) -> PlanError:
    """Returns the error for a libtpu that does not load or does not compile for this JAX."""
    return PlanError(
        f"libtpu cannot be used: expected the libtpu of the installed jax, found {versions()}; "
        "run: pip install --upgrade 'torchax-ckpt[tpu-check]', and unset TPU_LIBRARY_PATH if it "
        f"is set. libtpu says: {' '.join(str(error).split())}"
    )
