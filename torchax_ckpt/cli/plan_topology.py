"""The command ``plan --topology``, which plans saves on TPUs that are not there yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_ckpt import planning
from torchax_ckpt.cli import output
from torchax_ckpt.cli.convert import parsed_size
from torchax_ckpt.cli.exit_codes import FOUND, OK, UsageError
from torchax_ckpt.cli.step_arguments import chosen
from torchax_ckpt.stored.stored_step import StoredStep

# The kinds of leaves that are on devices in a training.
_ON_DEVICES = ("torchax", "jax", "key")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The command-line options of ``plan --topology``, with sizes as the user typed them.

    Attributes:
      topology: the topology of one slice.
      run: directory of the run, or of a step, whose leaves are planned.
      fsdp, tp: lengths of the mesh axes; None for the default.
      slices: number of slices.
      training: memory that training needs on a chip besides the state; None for none.
      host_memory: memory that a host has available for a save; None if it suffices.
      others: options that were given, but belong to the other form of ``plan``.
    """

    topology: str | None
    run: str | None
    fsdp: int | None
    tp: int | None
    slices: int
    training: str | None
    host_memory: str | None
    others: Sequence[str]


def plan(asked: Asked, *, as_json: bool) -> int:
    """Runs ``torchax-ckpt plan --topology``; returns the exit code.

    The exit code is FOUND if the state does not fit.

    Raises:
      UsageError: options are missing or do not go together.
    """
    if asked.topology is None:
        raise UsageError(
            "plan: --run, --fsdp, --tp, --training and --host-memory: expected --topology too, "
            "found none; give --topology v5e:16x16"
        )
    if asked.run is None:
        raise UsageError(
            "plan: --topology: expected --run DIRECTORY too, found none; give the directory of a "
            "run that has saved the state, on any devices, CPUs included"
        )
    if asked.others:
        raise UsageError(
            f"plan: --topology: expected no {' and no '.join(asked.others)}, found both; run the "
            "command twice: it plans either saves on TPUs, or intervals and goodput"
        )
    _, committed = chosen(asked.run)
    leaves = [leaf for leaf in StoredStep(committed).leaves.values() if leaf.kind in _ON_DEVICES]
    from torchax_ckpt.planning import topology

    training_bytes, host_memory_bytes = 0, None
    if asked.training is not None:
        training_bytes = parsed_size(asked.training, "--training")
    if asked.host_memory is not None:
        host_memory_bytes = parsed_size(asked.host_memory, "--host-memory")
    planned = planning.on_topology(
        {leaf.name: leaf for leaf in leaves},
        asked.topology,
        num_slices=asked.slices,
        axes=topology.axes_for(asked.topology, asked.slices, fsdp=asked.fsdp, tp=asked.tp),
        training_bytes=training_bytes,
        host_memory_bytes=host_memory_bytes,
    )
    result = {"step": committed.step, **dataclasses.asdict(planned)}
    output.print_json(result) if as_json else _print(result)
    if planned.fits:
        return OK
    output.note(
        f"the state does not fit on {asked.topology}: it and the training need "
        f"{-planned.free_bytes} bytes more than the {planned.usable_bytes} usable bytes of a "
        f"chip; {planned.advice}"
    )
    return FOUND


def _print(result: Mapping[str, Any]) -> None:
    size = output.size
    mesh = " x ".join(f"{name}={length}" for name, length in result["axes"].items())
    rows = [
        ("chips",
         f"{result['num_chips']:,}, {result['chips_per_host']} on each host; {mesh}", "given"),
        (f"state of step {result['step']}",
         f"{size(result['state_bytes'])} in {result['num_leaves']:,} leaves", "stored"),
        ("HBM of a chip", size(result["hbm_bytes"]), "published"),
        ("of that, programs can use", size(result["usable_bytes"]), "compiled"),
        ("state on a chip", size(result["chip_bytes"]), "compiled"),
        ("state on a chip, without tiles", size(result["chip_elements_bytes"]), "computed"),
        ("of that, in leaves that all chips hold", size(result["replicated_bytes"]), "compiled"),
        ("training needs on a chip besides", size(result["training_bytes"]), "given"),
    ]  # fmt: skip
    if result["fits"]:
        rows += _rows_of_a_save(result)
    output.print_table((result["topology"], "", "source"), rows)


def _rows_of_a_save(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the rows about saves of a state that fits."""
    size = output.size
    rows = [("free on a chip before a save", size(result["free_bytes"]), "compiled")]
    if result["host_memory_bytes"] is not None:
        rows.append(("available on a host", size(result["host_memory_bytes"]), "given"))
    if result["copy_bytes"] is None:
        rows.append(("copies of a save on a chip", "more than a chip has", "compiled"))
    else:
        rows += [
            ("copies of a save on a chip",
             f"{size(result['copy_bytes'])}, made if {size(result['wanted_bytes'])} are free",
             "compiled"),
            ("making copies on the chip takes", _secs(result["copy_secs"]), "estimated"),
        ]  # fmt: skip
    rows.append(('snapshot="auto" takes', f"a snapshot by {result['snapshot']}", "computed"))
    if result["snapshot"] == "offload":
        rows += [
            ("its copies on a chip", size(result["part_bytes"]), "compiled"),
            ("its memory of a host", f"at most {size(result['offload_host_bytes'])}", "compiled"),
        ]
    return [
        *rows,
        ("programs of a save",
         f"{result['num_programs']}, compiled in {_secs(result['compile_secs'])}", "compiled"),
        ("a host fetches", size(result["host_bytes"]), "estimated"),
        ("fetching takes", _secs(result["transfer_secs"]), "estimated"),
    ]  # fmt: skip


def _secs(secs: float) -> str:
    """Formats a time, of which microseconds are of no interest."""
    return output.duration(secs) if secs >= 1e-3 else "< 1 ms"
