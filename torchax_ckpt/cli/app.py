"""Owns the commands and their arguments. What they do is imported when they run."""

from __future__ import annotations

import enum
import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from torchax_ckpt.cli.exit_codes import EPILOG, ends_well

app = typer.Typer(
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # which joins the lines of a paragraph
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"torchax-ckpt {importlib.metadata.version('torchax-ckpt')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Looks at the checkpoints of torchax_ckpt, checks, compares and converts them."""


Directory = Annotated[
    str, typer.Argument(metavar="DIRECTORY", help="A run's directory, or gs://bucket/prefix.")
]
RunOrStep = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY", help="A run's directory, or gs://bucket/prefix; or DIRECTORY/STEP."
    ),
]
Step = Annotated[
    int | None, typer.Argument(metavar="STEP", min=0, help="Completed steps; default: newest.")
]
MaxBytes = Annotated[
    int | None, typer.Option(min=1, help="Bound on array data in memory; default 256 MiB.")
]
Filter = Annotated[
    str | None,
    typer.Option(metavar="GLOB", help="Only leaves whose name matches: 'model/*.weight'."),
]
At = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Where the weights are, if not in the one attached model: model/NAME, state/params; "
        "or optimizer.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@app.command("ls", epilog=EPILOG)
@ends_well
def list_steps(directory: Directory, json: Json = False) -> int:
    """Lists the steps: age, size on storage, metrics, and whether they were read back whole."""
    from torchax_ckpt.cli import show

    return show.list_steps(directory, as_json=json)


@app.command("show", epilog=EPILOG)
@ends_well
def show(
    directory: RunOrStep,
    step: Step = None,
    filter: Filter = None,
    json: Json = False,
) -> int:
    """Shows what a step holds: every leaf with shape, dtype, sharding, stack and size."""
    from torchax_ckpt.cli import show

    return show.show(directory, step, filter, as_json=json)


@app.command("verify", epilog=EPILOG)
@ends_well
def verify(
    directory: RunOrStep,
    step: Step = None,
    all: Annotated[bool, typer.Option("--all", help="Every step of the directory.")] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Do not mark steps as verified.")
    ] = False,
    max_bytes: MaxBytes = None,
    json: Json = False,
) -> int:
    """Reads steps whole and compares every byte with what was saved.

    A step that is as it was saved is marked as verified: no keep rule deletes the newest of them.
    """
    from torchax_ckpt.cli import show

    return show.verify(
        directory, step, verify_all=all, read_only=read_only, max_bytes=max_bytes, as_json=json
    )


@app.command("diff", epilog=EPILOG)
@ends_well
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A step, DIRECTORY/STEP; or a directory.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    filter: Filter = None,
    max_bytes: MaxBytes = None,
    json: Json = False,
) -> int:
    """Compares two steps to the bit; a directory stands for its newest step.

    Says which leaves and values are on one side only, which differ in kind, dtype or shape, and of
    the others how many elements differ and by how much. Two NaNs are equal; where they, or 0.0 and
    -0.0, have other bits, that is said too.
    """
    from torchax_ckpt.cli import diff

    return diff.diff(a, b, filter, max_bytes=max_bytes, as_json=json)


@app.command("report", epilog=EPILOG)
@ends_well
def report(
    directory: Directory,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The page; an older report is replaced.")
    ] = Path("report.html"),
    json: Json = False,
) -> int:
    """Writes one HTML page about a run: what happened when, intervals, storage, steps.

    From the events that programs record in the directory, after the run or while it trains. The
    page holds no script and needs nothing from elsewhere.
    """
    from torchax_ckpt.cli.report import command

    return command.report(directory, out, as_json=json)


_SIZE, _CLUSTER, _TIMES, _LOCAL = "The state", "The cluster", "The bucket", "Ramdisks (two tiers)"


@app.command("plan", epilog=EPILOG)
@ends_well
def plan(
    params: Annotated[
        str | None,
        typer.Option(metavar="N", rich_help_panel=_SIZE, help="Parameters: 70B, 124e6."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", rich_help_panel=_SIZE, help="Of one checkpoint: 840GB."),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(rich_help_panel=_SIZE, help="adamw, sgd, muon, ...")
    ] = "adamw",
    param_bytes: Annotated[
        float, typer.Option(rich_help_panel=_SIZE, help="Of a weight, master copy included.")
    ] = 4,
    moment_bytes: Annotated[
        float | None,
        typer.Option(rich_help_panel=_SIZE, help="Of an optimizer's value; default: a weight's."),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY", help="Take what is not said from what a run has recorded."
        ),
    ] = None,
    chips: Annotated[int, typer.Option(rich_help_panel=_CLUSTER, help="Of all slices.")] = 4,
    chips_per_host: Annotated[int, typer.Option(rich_help_panel=_CLUSTER)] = 4,
    slices: Annotated[int, typer.Option(rich_help_panel=_CLUSTER)] = 1,
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="TIME", rich_help_panel=_CLUSTER, help="Between failures of the run."),
    ] = None,
    host_mtbf: Annotated[
        str,
        typer.Option(metavar="TIME", rich_help_panel=_CLUSTER, help="If not: of one host."),
    ] = "365d",
    process_fraction: Annotated[
        float, typer.Option(rich_help_panel=_CLUSTER, help="Failures that spare ramdisks.")
    ] = 0.0,
    cluster_fraction: Annotated[
        float, typer.Option(rich_help_panel=_CLUSTER, help="Failures of several slices.")
    ] = 0.0,
    restart: Annotated[
        str,
        typer.Option(
            metavar="TIME", rich_help_panel=_CLUSTER, help="Until the program runs again."
        ),
    ] = "5min",
    blocking: Annotated[
        str | None, typer.Option(metavar="TIME", rich_help_panel=_TIMES, help="By one save.")
    ] = None,
    durable: Annotated[
        str | None,
        typer.Option(metavar="TIME", rich_help_panel=_TIMES, help="From snapshot to commit."),
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(metavar="TIME", rich_help_panel=_TIMES, help="Default: as durable."),
    ] = None,
    slowdown: Annotated[
        float,
        typer.Option(rich_help_panel=_TIMES, help="0.05: steps are 5 % slower during a save."),
    ] = 0.0,
    local_durable: Annotated[
        str | None,
        typer.Option(metavar="TIME", rich_help_panel=_LOCAL, help="Until it is complete there."),
    ] = None,
    local_blocking: Annotated[str, typer.Option(metavar="TIME", rich_help_panel=_LOCAL)] = "1s",
    local_restore: Annotated[str, typer.Option(metavar="TIME", rich_help_panel=_LOCAL)] = "20s",
    json: Json = False,
) -> int:
    """Says what a run's checkpoints weigh, how often to save, and what goodput to expect.

    Nothing is read or run: it is arithmetic, and a simulation of some 10,000 failures for each
    policy. Times are 90, 90s, 5min, 12h or 365d.
    """
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


class Format(enum.StrEnum):
    """What ``export`` writes."""

    SAFETENSORS = "safetensors"
    PT = "pt"
    DCP = "dcp"


@app.command("export", epilog=EPILOG)
@ends_well
def export(
    directory: Directory,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="Completed steps.")],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A file; a directory of dcp, also of safetensors."),
    ],
    format: Annotated[
        Format | None,
        typer.Option(
            help="pt: what torch.load(weights_only=True) reads; dcp: torch.distributed.checkpoint. "
            "Default: pt where OUT ends in .pt, .pth or .bin, else safetensors."
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="safetensors: several files of at most this: 5GB."),
    ] = None,
    optimizer: Annotated[
        bool,
        typer.Option("--optimizer", help="pt, dcp: the optimizer too, beside the model."),
    ] = False,
    at: At = None,
    max_bytes: MaxBytes = None,
    json: Json = False,
) -> int:
    """Writes a step's weights for other programs, under torch's names, tied weights once.

    With a directory or several files, OUT looks as Hugging Face writes it. Memory is bounded,
    whatever the model's size: of pt and dcp, what exceeds it takes the room of the export on the
    disk once more meanwhile. Dtypes stay.
    """
    from torchax_ckpt.cli import convert

    return convert.export(
        directory,
        step,
        out,
        format=None if format is None else format.value,
        max_shard_size=max_shard_size,
        with_optimizer=optimizer,
        at=at,
        max_bytes=max_bytes,
        as_json=json,
    )


@app.command("import", epilog=EPILOG)
@ends_well
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FROM",
            help="A .safetensors file; a directory of them, or its index; a file of torch.save's; "
            "or a directory of torch's DCP.",
        ),
    ],
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="Of the new run.")],
    tie: Annotated[
        list[str] | None,
        typer.Option(metavar="ALIAS=NAME", help="A tied weight's other name; may be repeated."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="torch.save, DCP: where the weights are, if not model."),
    ] = None,
    json: Json = False,
) -> int:
    """Makes step 0 of a new run from other programs' weights; attach then goes on from it.

    Optimizers and whatever else is attached start anew. Takes the directory's lease meanwhile.
    """
    from torchax_ckpt.cli import convert

    return convert.import_(source, directory, tie or [], at, as_json=json)


@app.command("prune", epilog=EPILOG)
@ends_well
def prune(
    directory: Directory,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Keep what this keeps: 'LatestN(3)', 'EveryNSteps(1000)', 'BestN(loss, min)'. "
            "May be given several times.",
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete; without it, only say what would go.")
    ] = False,
    json: Json = False,
) -> int:
    """Deletes the steps that no rule keeps; without --delete it only says which.

    The newest step and the newest verified one are always kept. Takes the directory's lease: a
    training that runs prunes by itself, and is not disturbed.
    """
    from torchax_ckpt.cli import prune

    return prune.prune(directory, policy or [], delete=delete, as_json=json)


@app.command("copy", epilog=EPILOG)
@ends_well
def copy(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="A step, DIRECTORY/STEP; or a directory: all.")
    ],
    target: Annotated[str, typer.Argument(metavar="TO", help="A directory; made if need be.")],
    max_bytes: MaxBytes = None,
    json: Json = False,
) -> int:
    """Copies steps to another directory; a copy appears once it was read back and compared.

    Takes the lease of the directory it copies to.
    """
    from torchax_ckpt.cli import prune

    return prune.copy(source, target, max_bytes=max_bytes, as_json=json)
