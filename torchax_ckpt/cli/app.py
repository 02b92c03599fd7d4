"""The commands of ``torchax-ckpt`` and their arguments; each imports only what it needs itself."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from torchax_ckpt.cli import follow, plan
from torchax_ckpt.cli.exit_codes import EPILOG, ends_well

app = typer.Typer(
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
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
    """Inspects, verifies, compares and converts checkpoints of torchax_ckpt."""


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
    int | None, typer.Argument(metavar="STEP", min=0, help="Number of the step; default: newest.")
]
Filter = Annotated[
    str | None,
    typer.Option(metavar="GLOB", help="Only leaves whose name matches: 'model/*.weight'."),
]
Patterns = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Names of tensors or modules; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls", epilog=EPILOG)
@ends_well
def list_steps(
    directory: Directory,
    watch: Annotated[
        bool, typer.Option("--watch", help="List them again and again until Ctrl-C, at a terminal.")
    ] = False,
    json: Json = False,
) -> int:
    """Lists each step's age, size, metrics, the rules that keep it, and whether it is verified.

    The last line names the program that writes to the directory, if there is one.
    """
    from torchax_ckpt.cli import show

    return show.list_steps(directory, watch=watch, as_json=json)


@app.command("show", epilog=EPILOG)
@ends_well
def show(
    directory: RunOrStep,
    step: Step = None,
    filter: Filter = None,
    json: Json = False,
) -> int:
    """Lists a step's leaves: dtype, shape, size, sharding at the save, shared array if stacked."""
    from torchax_ckpt.cli import show

    return show.show(directory, step, filter, as_json=json)


@app.command("verify", epilog=EPILOG)
@ends_well
def verify(
    directory: RunOrStep,
    step: Step = None,
    all: Annotated[bool, typer.Option("--all", help="Verify every step.")] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Do not mark intact steps as verified.")
    ] = False,
    json: Json = False,
) -> int:
    """Reads a whole step and compares every byte with the digests of the save.

    Marks an intact step as verified, unless --read-only is given. No preservation rule deletes the
    newest step that is marked.
    """
    from torchax_ckpt.cli import show

    return show.verify(directory, step, verify_all=all, read_only=read_only, as_json=json)


@app.command("diff", epilog=EPILOG)
@ends_well
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A step, DIRECTORY/STEP; or a directory.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The step or directory to compare with A.")],
    filter: Filter = None,
    json: Json = False,
) -> int:
    """Compares every bit of two steps; if A or B is a run's directory, takes its newest step.

    Lists leaves (arrays) and plain values (hyperparameters, counters) that only one step has, plain
    values that differ, leaves that differ in kind, dtype or shape, and, for leaves with different
    elements, how many elements differ and by how much at most. Two NaNs are equal. Leaves that
    differ only in the bits of equal values (NaN payloads, signs of zero) are listed too.
    """
    from torchax_ckpt.cli import show

    return show.diff(a, b, filter, as_json=json)


@app.command("report", epilog=EPILOG)
@ends_well
def report(
    directory: Directory,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The page to write; replaces an older report.")
    ] = Path("report.html"),
    json: Json = False,
) -> int:
    """Writes one HTML page about a run: its events over time, save intervals, storage, steps.

    Reads the events that the run's programs have recorded in the directory; a program may still be
    running. The page contains no script and loads nothing from the network.
    """
    from torchax_ckpt.cli import report

    return report.report(directory, out, as_json=json)


app.command("plan", epilog=EPILOG)(ends_well(plan.plan))
app.command("follow", epilog=EPILOG)(ends_well(follow.follow))


@app.command("export", epilog=EPILOG)
@ends_well
def export(
    directory: Directory,
    step_and_out: Annotated[
        list[str],
        typer.Argument(
            metavar="[STEP] OUT",
            help="STEP: its number, best:loss, or best:accuracy:max; default: the newest. OUT: a "
            "file for pt; a directory for hf, peft and dcp; either for safetensors.",
        ),
    ],
    format: Annotated[
        Literal["safetensors", "hf", "peft", "pt", "dcp"] | None,
        typer.Option(
            help="hf: a folder for transformers and vLLM; peft: a folder of adapters; "
            "pt: for torch.load(weights_only=True); dcp: for torch.distributed.checkpoint. "
            "Default: pt if OUT ends in .pt, .pth or .bin, else safetensors."
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="safetensors, hf: files of at most this size: 5GB."),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="safetensors, hf, peft: cast floating-point weights to this dtype."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="hf, peft: take config.json and other text files from here, not from the step.",
        ),
    ] = None,
    optimizer: Annotated[
        bool,
        typer.Option("--optimizer", help="pt, dcp: write the attached optimizer too."),
    ] = False,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Annotated[
        list[str] | None,
        # Markdown outside of backticks would take two stars for emphasis, and drop them.
        typer.Option(
            metavar="OLD=NEW", help="Write other names: `'transformer.h.*=layers.*'`; repeatable."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Place of the weights in the step: model/NAME, state/params or optimizer. "
            "Default: the one attached model.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Writes the weights of a step to files for other programs; stores each tied weight once.

    Without --rename and --dtype, weights keep their names in torch and their dtypes. A directory of
    safetensors files has the file names and the index that Hugging Face uses. An export as pt or
    dcp of more than 256 MiB needs disk space for two copies while it runs.
    """
    from torchax_ckpt.cli import convert

    return convert.export(
        directory,
        step_and_out,
        format=format,
        dtype=dtype,
        max_shard_size=max_shard_size,
        config=config,
        with_optimizer=optimizer,
        at=at,
        include=include,
        exclude=exclude,
        rename=rename,
        as_json=json,
    )


@app.command("import", epilog=EPILOG)
@ends_well
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FROM",
            help="A .safetensors file; a directory of such files, or its index; a file of "
            "torch.save; or a directory of torch's DCP.",
        ),
    ],
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="The new run's directory.")],
    tie: Annotated[
        list[str] | None,
        typer.Option(metavar="ALIAS=NAME", help="A tied weight's other name; may be repeated."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="torch.save, DCP: keys of the weights, if not model."),
    ] = None,
    json: Json = False,
) -> int:
    """Writes weights of another program as step 0 of a new run, whose attach then restores step 0.

    The optimizer and all other attached objects start anew, because only weights are imported. The
    command holds the directory's lease while it writes.
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
            help="Keep the steps of this rule: 'LatestN(3)', 'EveryNSteps(1000)', "
            "'BestN(loss, min)'. May be repeated.",
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the steps; without it, only list them.")
    ] = False,
    json: Json = False,
) -> int:
    """Lists the steps that no given rule keeps; with --delete, deletes these steps.

    The newest step and the newest verified step are kept even if no rule keeps them. With --delete,
    the command takes the directory's lease and refuses a directory to which a training writes,
    because the training prunes its own steps.
    """
    from torchax_ckpt.cli import prune

    return prune.prune(directory, policy or [], delete=delete, as_json=json)


@app.command("copy", epilog=EPILOG)
@ends_well
def copy(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="A step, DIRECTORY/STEP; or all steps, DIRECTORY.")
    ],
    target: Annotated[str, typer.Argument(metavar="TO", help="A directory; created if necessary.")],
    json: Json = False,
) -> int:
    """Copies steps to another directory; reads and verifies each copy before it appears there.

    Holds the lease of the target directory during the copy.
    """
    from torchax_ckpt.cli import prune

    return prune.copy(source, target, as_json=json)
