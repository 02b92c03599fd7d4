"""Defines the options of the command ``watch``."""

from __future__ import annotations

from typing import Annotated

import typer

from torchax_ckpt.cli.converting.shared_options import Directory


def watch(
    directory: Directory,
    once: Annotated[
        bool, typer.Option("--once", help="Print the view once, as to a pipe or a file.")
    ] = False,
    poll: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="From one look at the run to the next, such as 500ms, 30s or 1min; default: 2s, "
            "or 10s for a bucket.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, once.")] = False,
) -> int:
    """Follows a run in the terminal until Ctrl-C: its program, its saves, the room on the disk.

    Reads the events that the run's programs record in the directory, and the list of its steps.
    """
    from torchax_ckpt.cli.watching import watching

    return watching.watch(directory, poll, once=once or json, as_json=json)
