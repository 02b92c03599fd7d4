"""The commands of ``torchax-ckpt``; the file of each is imported when the command is called."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Annotated, Any

import typer

from torchax_ckpt.cli.exit_codes import EPILOG, ends_well

# Command -> its function, whose parameters are the command's options.
COMMANDS = {
    "ls": "show.list_steps",
    "show": "show.show",
    "verify": "show.verify",
    "diff": "show.diff",
    "report": "report.report",
    "plan": "plan.plan",
    "follow": "follow.follow",
    "export": "convert.export",
    "import": "convert.import_",
    "prune": "prune.prune",
    "copy": "prune.copy",
}


class _Commands(typer.core.TyperGroup):
    """Imports a command when it is asked for, so that no command waits for what others need."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        file, _, function = COMMANDS[cmd_name].partition(".")
        module = importlib.import_module(f"torchax_ckpt.cli.{file}")
        single = typer.Typer(add_completion=False, **_STYLE)
        single.command(cmd_name, epilog=EPILOG)(ends_well(getattr(module, function)))
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
