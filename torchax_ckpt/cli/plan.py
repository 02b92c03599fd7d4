"""The command ``plan``: checkpoint size, save interval and goodput, or what fits a TPU topology."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from torchax_ckpt import planning
from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import FOUND, OK, UsageError
from torchax_ckpt.cli.step_arguments import (
    chosen,
    existing,
    parsed_count,
    parsed_secs,
    parsed_size,
)
from torchax_ckpt.options import LocalTier
from torchax_ckpt.stored.stored_step import StoredStep
from torchax_ckpt.telemetry.journal import read_events

_CHIPS_PER_HOST = 4  # on most TPUs
_HOST_MTBF_SECS = 365 * 86_400.0
_TIMES, _CHIPS = "How often to save", "Before renting TPUs"
# The options that --topology does not use.
_FEW_PARAMS = 1000  # fewer are billions, whose letter was left out
_OF_INTERVALS = ("params", "chips", "mtbf", "restart", "blocking", "durable", "slowdown")


def _time(help: str, **more: Any) -> Any:
    return typer.Option(metavar="TIME", help=help, rich_help_panel=_TIMES, **more)


def plan(
    context: typer.Context,
    params: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of parameters, of 12 bytes each: 70B, 124e6."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY",
            help="A run: takes omitted values from its record, or the leaves from its newest step.",
        ),
    ] = None,
    slices: Annotated[int, typer.Option(min=1, help="Slices, each with the whole state.")] = 1,
    chips: Annotated[
        int | None,
        typer.Option(min=1, help="Chips of all slices.", show_default="4", rich_help_panel=_TIMES),
    ] = None,
    mtbf: Annotated[
        str | None,
        _time("Mean time between failures of the run.", show_default="a failure per host and year"),
    ] = None,
    restart: Annotated[
        str | None, _time("From a failure to the start of the restore.", show_default="5min")
    ] = None,
    blocking: Annotated[str | None, _time("A save blocks training for this time.")] = None,
    durable: Annotated[str | None, _time("From the snapshot to the commit.")] = None,
    slowdown: Annotated[
        float | None,
        typer.Option(
            help="0.05: steps take 5 % longer during a save.",
            show_default="0",
            rich_help_panel=_TIMES,
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="TOPOLOGY",
            help="Plan saves on these TPUs instead: v5e:16x16.",
            rich_help_panel=_CHIPS,
        ),
    ] = None,
    training: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of a chip for activations, gradients, code; default: none.",
            rich_help_panel=_CHIPS,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Computes checkpoint size, the best save interval and the expected goodput.

    Uses formulas; reads no checkpoint and runs no training. Takes the times of saves and restores
    from options or from the record of a run. Give times as 90 (seconds), 90s, 5min, 12h or 365d.

    With --topology, computes instead whether the state of a run fits on TPUs, and how saves take
    snapshots there. Compiles the programs of a save with libtpu, the TPU's compiler; needs no TPU.
    """
    if topology is not None:
        if given := [f"--{name}" for name in _OF_INTERVALS if context.params[name] is not None]:
            raise UsageError(
                f"plan: --topology: expected no {' and no '.join(given)}, found both; run the "
                "command twice: it plans either saves on TPUs, or intervals and goodput"
            )
        if run is None:
            raise UsageError(
                "plan: --topology: expected --run DIRECTORY too, found none; give the directory of "
                "a run that has saved the state, on any devices, CPUs included"
            )
        training_bytes = 0 if training is None else parsed_size(training, "plan: --training")
        return _plan_on_topology(run, topology, slices, training_bytes, as_json=json)
    if training is not None:
        raise UsageError(
            "plan: --training: expected --topology too, found none; give --topology v5e:16x16"
        )
    known = {} if run is None else _measured(run)
    if params is not None:
        count = parsed_count(params, "plan: --params")
        if count < _FEW_PARAMS:
            output.note(f"--params {params} is a model of {count} parameters; is {count}B meant?")
        num_bytes = planning.state_bytes(count).total_bytes
        if of_run := known.get("num_bytes"):
            output.note(
                f"the measured times are those of a checkpoint of {output.size(math.ceil(of_run))}"
            )
        known = {name: value for name, value in known.items() if not name.endswith("_bytes")}
    elif "num_bytes" in known:
        num_bytes = math.ceil(known["num_bytes"])
    else:
        raise UsageError(
            "plan: the size of a checkpoint is missing; give --params 70B, or --run DIRECTORY with "
            "the directory of a run that has saved"
        )
    # A measured run may have written less than a whole checkpoint with each save.
    new_bytes = known.get("new_bytes", num_bytes)
    chips = _CHIPS_PER_HOST if chips is None else chips
    chips_per_slice, rest = divmod(chips, slices)
    if rest:
        raise UsageError(
            f"plan: --chips: expected a multiple of the {slices} slices, found {chips}; give the "
            "chips of all slices together"
        )
    hosts_per_slice = math.ceil(chips_per_slice / _CHIPS_PER_HOST)
    num_hosts = hosts_per_slice * slices
    mtbf_secs = _HOST_MTBF_SECS / num_hosts if mtbf is None else parsed_secs(mtbf, "plan: --mtbf")
    restart_secs = parsed_secs("5min" if restart is None else restart, "plan: --restart")
    durable_secs = _option_secs("--durable", durable, known.get("durable_secs"))
    if not durable_secs:
        raise UsageError(
            "plan: --durable: expected a time above 0, found 0; give the time from the snapshot "
            "to the commit"
        )
    restore_secs = known.get("restore_secs", durable_secs)
    save = {
        "blocking_secs": _option_secs("--blocking", blocking, known.get("blocking_secs")),
        "durable_secs": durable_secs,
        "slowdown": slowdown or 0.0,
    }
    best = planning.best_interval(mtbf_secs=mtbf_secs, **save)
    result = {
        "checkpoint_bytes": num_bytes,
        "hosts": num_hosts,
        "hosts_per_slice": hosts_per_slice,
        # The ramdisk contains the preserved steps and the step that is being written.
        "ramdisk_bytes_per_host": planning.ramdisk_bytes_per_host(
            num_bytes, hosts_per_slice=hosts_per_slice, num_copies=LocalTier.keep + 1
        ),
        # Every slice has the whole state, and the hosts of all slices share the writing.
        "write_bytes_per_sec_and_host": new_bytes / num_hosts / durable_secs,
        "mtbf_secs": mtbf_secs,
        "restart_secs": restart_secs,
        **save,
        "restore_secs": restore_secs,
        "save_cost_secs": planning.save_cost_secs(**save),
        "best_interval_secs": best.interval_secs,
        "best_is_continuous": best.is_continuous,
        "expected_goodput": planning.expected_goodput(
            interval_secs=best.interval_secs,
            mtbf_secs=mtbf_secs,
            restart_secs=restart_secs + restore_secs,
            **save,
        ),
        "measured": sorted(known),
    }
    _print(result, as_json=json)
    return OK


def _measured(directory: str) -> dict[str, float]:
    """Returns the medians of the sizes and times of a run's recorded saves and restores."""
    events = [e for of_run in read_events(existing(directory).path).values() for e in of_run]
    medians = {}
    for name in ("num_bytes", "new_bytes", "blocking_secs", "durable_secs", "restore_secs"):
        durable = (e.values for e in events if e.values.get("tier") != "local")
        if numbers := [values[name] for values in durable if name in values]:
            medians[name] = float(statistics.median(numbers))
    if "durable_secs" not in medians:
        raise UsageError(
            f"plan: --run: {directory}: no durable save is recorded in this directory; give a "
            "directory to which a run has saved, or give --params, --blocking and --durable"
        )
    return medians


def _option_secs(option: str, text: str | None, known_secs: float | None) -> float:
    """Returns the seconds of an option; if it was omitted, the measured seconds."""
    if text is not None:
        return parsed_secs(text, f"plan: {option}")
    if known_secs is None:
        raise UsageError(
            f"plan: {option} is missing; give {option} TIME, for example 90s, or --run DIRECTORY "
            "to take the times that a run has recorded"
        )
    return known_secs


def _print(result: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.print_json(result)
        return
    size, secs, measured = output.size, output.duration, result["measured"]

    def source(key: str) -> str:
        return " (measured)" if key in measured else ""

    continuous = ", which is to save continuously" if result["best_is_continuous"] else ""
    table = output.table(
        ("plan", ""),
        [
            ("one checkpoint", size(result["checkpoint_bytes"]) + source("num_bytes")),
            ("hosts", f"{result['hosts']:,}, {result['hosts_per_slice']:,} in each slice"),
            (
                f"ramdisk of each host, keep={LocalTier.keep}",
                size(result["ramdisk_bytes_per_host"]),
            ),
            ("each host writes", f"{size(result['write_bytes_per_sec_and_host'])}/s"),
            ("time between failures", secs(result["mtbf_secs"])),
            (
                "restart, then restore",
                f"{secs(result['restart_secs'])} + {secs(result['restore_secs'])}"
                + source("restore_secs"),
            ),
            ("a save blocks", secs(result["blocking_secs"]) + source("blocking_secs")),
            ("a save is durable after", secs(result["durable_secs"]) + source("durable_secs")),
            ("a save costs, with slower steps", secs(result["save_cost_secs"])),
            ("best interval", secs(result["best_interval_secs"]) + continuous),
            ("expected goodput", f"{result['expected_goodput']:.2%}"),
        ],
    )
    output.console().print(table)


# --- --topology ----------------------------------------------------------------------------------

# The kinds of leaves that are on devices in a training.
_ON_DEVICES = ("torchax", "jax", "key")


def _plan_on_topology(
    directory: str, topology: str, slices: int, training_bytes: int, *, as_json: bool
) -> int:
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
        rows = _topology_rows(committed.step, planned)
        output.console().print(output.table((topology, "", "source"), rows))
    if planned.fits:
        return OK
    output.note(
        f"the state does not fit on {topology}: it and the training need "
        f"{-planned.free_bytes} bytes more than the {planned.usable_bytes} usable bytes of a "
        f"chip; {planned.advice}"
    )
    return FOUND


def _topology_rows(step: int, planned: planning.TopologyPlan) -> list[tuple[str, str, str]]:
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
        on_host = f"at most {size(planned.offload_host_bytes or 0)}"
        rows.append(("its memory of a host", on_host, "compiled"))
    secs = output.duration(planned.compile_secs or 0)
    programs = f"{planned.num_programs}, compiled in {secs}"
    return [*rows, ("programs of a save", programs, "compiled")]
