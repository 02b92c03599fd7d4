"""Compiles a training step for a TPU topology, and adds up what a chip needs for step and saves."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.device_memory import is_exhausted
from torchax_ckpt.devices.device_sizes import shard_bytes
from torchax_ckpt.errors import PlanError
from torchax_ckpt.layout import names
from torchax_ckpt.planning import topology, topology_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a training step and the snapshot of a save take on a chip of a topology, in bytes.

    All sizes are the compiler's; nothing is measured. ``str`` of a plan is a table for people.

    Attributes:
      topology, num_chips: the topology's name; the chips on which the step runs.
      versions: the versions of jax and libtpu.
      argument_bytes: the arguments of the step.
      donated_bytes: the part of ``argument_bytes`` whose memory the step reuses for its outputs.
      step_bytes: memory while the step runs, with the arrays of the state that are no arguments.
      state_bytes: the state that is saved.
      snapshot: how ``snapshot="auto"`` takes snapshots if the step donates the state.
      copy_bytes: what a snapshot by copy takes until the save ends; 0 for other snapshots.
      offload_host_bytes: memory of the first host for an offloaded state of all its chips.
      usable_bytes: the memory of the chip that programs can use.
    """

    topology: str
    num_chips: int
    versions: str
    argument_bytes: int
    donated_bytes: int
    step_bytes: int
    state_bytes: int
    snapshot: str
    copy_bytes: int
    offload_host_bytes: int
    usable_bytes: int

    def __str__(self) -> str:
        state = f"{self.state_bytes:,} bytes of state"
        total_bytes = self.step_bytes + self.copy_bytes
        if self.snapshot == "copy":
            taken = f"{self.copy_bytes:,} bytes for copies of {state}"
        elif self.snapshot == "offload":
            taken = f"{self.offload_host_bytes:,} bytes of the host for copies of {state}"
        else:
            taken = f"none; training waits until {state} are on the host"
        rows = {
            "compiled": f"with {self.versions}; nothing was measured",
            "chips": f"{self.num_chips} of {self.topology}; all sizes are of one chip",
            "donated": f"{self.donated_bytes:,} of {self.argument_bytes:,} bytes of arguments",
            "the step": f"{self.step_bytes:,} bytes while it runs",
            "a snapshot": taken,
            "together": f"{total_bytes:,} of {self.usable_bytes:,} bytes that programs can use",
            'snapshot="auto"': f"takes snapshots by {self.snapshot}",
        }
        width = max(map(len, rows)) + 2
        return "\n".join(f"{name + ':':<{width}}{text}" for name, text in rows.items())


def step_on_topology(
    topology_name: str,
    step: Callable[..., Any],
    *arguments: Any,
    state: Any,
    host_memory_bytes: int | None = None,
) -> StepPlan:
    """Plans a training step and its saves on a TPU topology; needs libtpu, but no TPU.

    Abstract arrays, ``jax.ShapeDtypeStruct(shape, dtype, sharding=...)``, stand for all arrays. The
    shardings are over ``torchax_ckpt.planning.topology.devices(topology_name)``.

    Args:
      topology_name: the generation of the chips and the lengths of the topology: ``v5e:2x4``.
      step: a function that ``jax.jit`` or ``torchax.interop.jax_jit`` returned.
      *arguments: what the step takes: pytrees of abstract arrays.
      state: what the program saves, a pytree of abstract arrays. One with the shape, dtype and
        sharding of an argument is taken to be that argument.
      host_memory_bytes: the memory that a host has for a save; None assumes that it suffices.

    Raises:
      PlanError: libtpu is missing or cannot be used, the topology is unknown, an argument is no
        abstract array or cannot be sharded as it says, or the step exceeds the memory of a chip.
    """
    chip, _ = topology.parsed(topology_name)
    program = torchax_backend.jitted(step)
    if not hasattr(program, "lower"):
        raise PlanError(
            "step: expected a jitted function, as jax.jit and torchax.interop.jax_jit return it, "
            f"found {step!r}; jit it"
        )
    taken: collections.Counter[Any] = collections.Counter()
    for index, argument in enumerate(arguments):
        taken.update(map(_spec, _abstract(f"argument {index} of the step", argument).values()))
    leaves = _abstract("state", state)
    if not leaves:
        raise PlanError(
            "state: expected at least one abstract array, found none; give what the program saves"
        )
    try:
        compiled = program.lower(*arguments).compile()
        sizes = shard_bytes(leaves)
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise topology.unusable(error) from error
        raise PlanError(
            f"the step exceeds the memory of a chip of {topology_name}: expected at most "
            f"{chip.usable_bytes} bytes; shard it over more chips, or make the batch smaller. The "
            f"compiler says: {' '.join(str(error).split())}"
        ) from error
    others_bytes = 0
    for name, leaf in leaves.items():
        taken[_spec(leaf)] -= 1
        others_bytes += sizes[name] if taken[_spec(leaf)] < 0 else 0
    memory = compiled.memory_analysis()
    step_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
        + others_bytes
    )
    state_bytes = sum(sizes.values())
    forecast = topology_plan.snapshot_forecast(
        leaves, chip, state_bytes=state_bytes, peak_bytes=step_bytes, host_bytes=host_memory_bytes
    )
    return StepPlan(
        topology=topology_name,
        num_chips=len({d for leaf in leaves.values() for d in leaf.sharding.device_set}),
        versions=topology.versions(),
        argument_bytes=memory.argument_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        step_bytes=step_bytes,
        state_bytes=state_bytes,
        snapshot=forecast["snapshot"],
        copy_bytes=forecast["copy_bytes"] if forecast["snapshot"] == "copy" else 0,
        offload_host_bytes=forecast["offload_host_bytes"],
        usable_bytes=chip.usable_bytes,
    )


def _spec(leaf: Any) -> tuple[Any, ...]:
    return leaf.shape, leaf.dtype, leaf.sharding


def _abstract(what: str, tree: Any) -> dict[str, Any]:
    """Returns the arrays of a pytree by the names that a save gives them; leaves out numbers."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not hasattr(leaf, "shape"):
            continue
        where = what + jax.tree_util.keystr(path)
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(sharding, Sharding):
            raise PlanError(
                f"{where}: expected an abstract array with a sharding over the chips of the "
                f"topology, found {type(leaf).__name__}; give "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
            )
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise PlanError(
                f"{where}: expected a shape that the sharding divides, found {list(leaf.shape)}; "
                f"change the shape or the sharding. JAX says: {' '.join(str(error).split())}"
            ) from error
        keys = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
        leaves[names.join(("state", *keys))] = leaf
    return leaves
