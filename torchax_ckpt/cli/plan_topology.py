"""The command ``plan --topology``, which plans saves on TPUs that are not there yet."""

from __future__ import annotations

import dataclasses

from torchax_ckpt import planning
from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import FOUND, OK
from torchax_ckpt.cli.step_arguments import chosen
from torchax_ckpt.stored.stored_step import StoredStep

# The kinds of leaves that are on devices in a training.
_ON_DEVICES = ("torchax", "jax", "key")


def plan(directory: str, topology: str, slices: int, training_bytes: int, *, as_json: bool) -> int:
    """Plans the leaves of a run or a step; returns FOUND if the state does not fit."""
    _, committed = chosen(directory)
    leaves = StoredStep(committed).leaves.values()
    planned = planning.on_topology(
        {leaf.name: leaf for leaf in leaves if leaf.kind in _ON_DEVICES},
        topology,
        num_slices=slices,
        training_bytes=training_bytes,
    )
    if as_json:
        output.print_json({"step": committed.step, **dataclasses.asdict(planned)})
    else:
        output.print_table((topology, "", "source"), _rows(committed.step, planned))
    if planned.fits:
        return OK
    output.note(
        f"the state does not fit on {topology}: it and the training need "
        f"{-planned.free_bytes} bytes more than the {planned.usable_bytes} usable bytes of a "
        f"chip; {planned.advice}"
    )
    return FOUND


def _rows(step: int, planned: planning.TopologyPlan) -> list[tuple[str, str, str]]:
    size = output.size
    mesh = " x ".join(f"{name}={length}" for name, length in planned.axes.items())
    chips = f"{planned.num_chips:,}, {planned.chips_per_host} on each host; {mesh}"
    state = f"{size(planned.state_bytes)} in {planned.num_leaves:,} leaves"
    rows = [
        ("chips", chips, "given"),
        (f"state of step {step}", state, "stored"),
        ("HBM of a chip", size(planned.hbm_bytes), "published"),
        ("of that, programs can use", size(planned.usable_bytes), "compiled"),
        ("state on a chip", size(planned.chip_bytes), "compiled"),
        ("state on a chip, without tiles", size(planned.chip_elements_bytes), "computed"),
        ("of that, in leaves that all chips hold", size(planned.replicated_bytes), "compiled"),
        ("training needs on a chip besides", size(planned.training_bytes), "given"),
    ]
    if not planned.fits:
        return rows
    rows.append(("free on a chip before a save", size(planned.free_bytes), "compiled"))
    copies = "more than a chip has"
    if planned.copy_bytes is not None and planned.wanted_bytes is not None:
        copies = f"{size(planned.copy_bytes)}, made if {size(planned.wanted_bytes)} are free"
    rows.append(("copies of a save on a chip", copies, "compiled"))
    rows.append(('snapshot="auto" takes', f"a snapshot by {planned.snapshot}", "computed"))
    if planned.snapshot == "offload":
        rows += [
            ("its copies on a chip", size(planned.part_bytes or 0), "compiled"),
            (
                "its memory of a host",
                f"at most {size(planned.offload_host_bytes or 0)}",
                "compiled",
            ),
        ]
    secs = output.duration(planned.compile_secs or 0)
    programs = f"{planned.num_programs}, compiled in {secs}"
    return [*rows, ("programs of a save", programs, "compiled")]
