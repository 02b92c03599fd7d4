"""Defines the options of the command ``plan``, which has two forms: with and without --topology."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_SIZE, _CLUSTER, _TIMES, _LOCAL = "The state", "The cluster", "The bucket", "Ramdisks (two tiers)"
_CHIPS = "Before renting TPUs: --topology, with --slices"
_FOR_CHIPS = {"--topology", "--run", "--fsdp", "--tp", "--training", "--host-memory"}
_FOR_BOTH = {"--slices", "--json"}


def _plan_option(panel: str, text: str | None = None, metavar: str | None = None) -> Any:
    """Returns an option of the command ``plan``, which the help shows in ``panel``."""
    return typer.Option(metavar=metavar, rich_help_panel=panel, help=text)


def plan(
    context: typer.Context,
    params: Annotated[
        str | None, _plan_option(_SIZE, "Number of parameters: 70B, 124e6.", "N")
    ] = None,
    size: Annotated[
        str | None, _plan_option(_SIZE, "Size of a checkpoint, instead of --params: 840GB.", "SIZE")
    ] = None,
    optimizer: Annotated[str, _plan_option(_SIZE, "adamw, sgd, muon, ...")] = "adamw",
    param_bytes: Annotated[
        float, _plan_option(_SIZE, "Bytes of one weight, master copy included.")
    ] = 4,
    moment_bytes: Annotated[
        float | None,
        _plan_option(_SIZE, "Bytes of one optimizer value; default: those of a weight."),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(metavar="DIRECTORY", help="Take omitted values from a run's record."),
    ] = None,
    chips: Annotated[int, _plan_option(_CLUSTER, "Chips of all slices together.")] = 4,
    chips_per_host: Annotated[int, _plan_option(_CLUSTER)] = 4,
    slices: Annotated[int, _plan_option(_CLUSTER)] = 1,
    mtbf: Annotated[
        str | None, _plan_option(_CLUSTER, "Mean time between failures of the run.", "TIME")
    ] = None,
    host_mtbf: Annotated[
        str, _plan_option(_CLUSTER, "Mean time between failures of one host, if no --mtbf.", "TIME")
    ] = "365d",
    process_fraction: Annotated[
        float, _plan_option(_CLUSTER, "Share of the failures after which all ramdisks are intact.")
    ] = 0.0,
    cluster_fraction: Annotated[
        float, _plan_option(_CLUSTER, "Share of the failures that stop hosts of several slices.")
    ] = 0.0,
    restart: Annotated[
        str, _plan_option(_CLUSTER, "From a failure to the start of the restore.", "TIME")
    ] = "5min",
    blocking: Annotated[
        str | None, _plan_option(_TIMES, "A save blocks the training for this time.", "TIME")
    ] = None,
    durable: Annotated[
        str | None, _plan_option(_TIMES, "From the snapshot to the commit.", "TIME")
    ] = None,
    restore: Annotated[
        str | None, _plan_option(_TIMES, "Duration of a restore; default: --durable.", "TIME")
    ] = None,
    slowdown: Annotated[
        float, _plan_option(_TIMES, "0.05: steps are 5 % slower during a save.")
    ] = 0.0,
    local_durable: Annotated[
        str | None, _plan_option(_LOCAL, "From snapshot to commit; adds a two-tier policy.", "TIME")
    ] = None,
    local_blocking: Annotated[str, _plan_option(_LOCAL, metavar="TIME")] = "1s",
    local_restore: Annotated[str, _plan_option(_LOCAL, metavar="TIME")] = "20s",
    topology: Annotated[
        str | None, _plan_option(_CHIPS, "Plan saves on these TPUs: v5e:16x16.", "TOPOLOGY")
    ] = None,
    run: Annotated[
        str | None, _plan_option(_CHIPS, "Run whose newest step has the leaves.", "DIRECTORY")
    ] = None,
    fsdp: Annotated[
        int | None, _plan_option(_CHIPS, "Chips that shard a leaf's first dim; default: all.")
    ] = None,
    tp: Annotated[int | None, _plan_option(_CHIPS, "Chips that shard a matrix's last dim.")] = None,
    training: Annotated[
        str | None,
        _plan_option(_CHIPS, "Memory of a chip for activations, ...; default: none.", "SIZE"),
    ] = None,
    host_memory: Annotated[
        str | None, _plan_option(_CHIPS, "Memory that a host has free; default: enough.", "SIZE")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Computes checkpoint size, the best save interval and the expected goodput.

    Computes the best interval with formulas, and simulates some 10,000 failures for each policy;
    reads no checkpoint and runs no training. Give times as 90 (seconds), 90s, 5min, 12h or 365d.

    With --topology, computes instead whether the state of a run fits on TPUs, and how saves take
    it from them: compiles what a save runs with libtpu, the TPU's compiler, and needs no TPU.
    """
    sources = {
        p.opts[0]: context.get_parameter_source(p.name or "") for p in context.command.params
    }
    given = [option for option, source in sources.items() if source and source.name != "DEFAULT"]
    if _FOR_CHIPS.intersection(given):
        from torchax_ckpt.cli import plan_topology

        return plan_topology.plan(
            plan_topology.Asked(
                topology=topology,
                run=run,
                fsdp=fsdp,
                tp=tp,
                slices=slices,
                training=training,
                host_memory=host_memory,
                others=[option for option in given if option not in _FOR_CHIPS | _FOR_BOTH],
            ),
            as_json=json,
        )

    from torchax_ckpt.cli import plan

    asked = plan.Asked(
        params=params,
        size=size,
        optimizer=optimizer,
        param_bytes=param_bytes,
        moment_bytes=moment_bytes,
        measured=measured,
        chips=chips,
        chips_per_host=chips_per_host,
        slices=slices,
        mtbf=mtbf,
        host_mtbf=host_mtbf,
        process_fraction=process_fraction,
        cluster_fraction=cluster_fraction,
        restart=restart,
        restore=restore,
        blocking=blocking,
        durable=durable,
        slowdown=slowdown,
        local_blocking=local_blocking,
        local_durable=local_durable,
        local_restore=local_restore,
    )
    return plan.plan(asked, as_json=json)
