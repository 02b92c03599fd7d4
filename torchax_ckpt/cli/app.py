"""The commands of ``torchax-ckpt``; the file of each is imported when the command is called."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Annotated, Any

import typer

from torchax_ckpt.cli.exit_codes import EPILOG, with_exit_code

# Command -> its function, whose parameters are the command's options, and what it does.
COMMANDS = {
    "ls": ("show.list_steps", "Lists the steps of a run."),
    "show": ("show.show", "Lists the leaves of a step."),
    "verify": ("show.verify", "Compares every byte of a step with the digests of the save."),
    "diff": ("show.diff", "Compares every bit of two steps."),
    "report": ("report.report", "Writes one HTML page about a run."),
    "plan": ("plan.plan", "Computes checkpoint size, save interval and goodput."),
    "follow": ("follow.follow", "Publishes the steps of a run as folders while it trains."),
    "export": ("convert.export", "Writes the weights of a step to files for other programs."),
    "import": ("convert.import_", "Writes weights of another program as step 0 of a new run."),
    "prune": ("prune.prune", "Lists or deletes the steps that no given rule keeps."),
    "mirror": ("mirror.mirror", "Copies the newest step of a run to a mirror, again and again."),
    "fetch": ("mirror.fetch", "Fetches the newest step of a mirror into a run's directory."),
    "copy": ("prune.copy", "Copies steps to another directory, and verifies each copy."),
}


class _Commands(typer.core.TyperGroup):
    """Lists all commands, and imports one when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: typer.core.TyperCommand(name, help=t[1]) for name, t in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, left = super().resolve_command(ctx, args)
        return name, _imported(name) if name and listed else None, left


def _imported(name: str) -> Any:
    file, _, function = COMMANDS[name][0].partition(".")
    module = importlib.import_module(f"torchax_ckpt.cli.{file}")
    single = typer.Typer(add_completion=False, **_STYLE)
    single.command(name)(with_exit_code(getattr(module, function)))
    return typer.main.get_command(single)


_STYLE: dict[str, Any] = {
    "rich_markup_mode": "markdown",  # joins the lines of a paragraph
    "pretty_exceptions_enable": False,
}
app = typer.Typer(cls=_Commands, epilog=EPILOG, no_args_is_help=True, **_STYLE)


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
