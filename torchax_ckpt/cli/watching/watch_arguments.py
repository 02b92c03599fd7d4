"""Defines the options of the command ``watch``."""

from __future__ import annotations

from typing import Annotated

import typer


def watch(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="A run's directory, or gs://bucket/prefix.")
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Print the view once, as to a pipe or a file.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECS",
            min=0.1,
            help="Seconds between two looks; default: 2, or 10 for a bucket.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, once.")] = False,
) -> int:
    """Follows a run in the terminal until Ctrl-C: its program, its saves, the room on the disk.

    Reads the events that the run's programs record in the directory, and the list of its steps.
    """
    from torchax_ckpt.cli.watching import watching

    return watching.watch(directory, every, once=once or json, as_json=json)
