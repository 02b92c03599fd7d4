"""The options that several commands have, so that each name, type and help text stands once.

The functions make the options of the commands that write weights, ``export`` and ``follow``. Their
argument is the panel of ``--help`` that lists the option; None for the common panel.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer


class Dtype(enum.StrEnum):
    """The dtypes to which commands cast weights."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def max_shard_size(panel: str | None = None) -> Any:
    """Returns ``--max-shard-size``."""
    text = "safetensors, hf: files of at most this size: 5GB."
    return typer.Option(metavar="SIZE", help=text, rich_help_panel=panel)


def dtype(panel: str | None = None) -> Any:
    """Returns ``--dtype``, which casts."""
    text = "safetensors, hf, peft: cast floating-point weights to this dtype."
    return typer.Option(help=text, rich_help_panel=panel)


def config(panel: str | None = None) -> Any:
    """Returns ``--config``."""
    text = "hf, peft: take config.json and other text files from here, not from the step."
    return typer.Option(metavar="FOLDER", help=text, rich_help_panel=panel)


def patterns(panel: str | None = None) -> Any:
    """Returns ``--include`` or ``--exclude``."""
    text = "Names of tensors or modules; may be repeated."
    return typer.Option(metavar="PATTERN", help=text, rich_help_panel=panel)


def rename(panel: str | None = None) -> Any:
    """Returns ``--rename``."""
    # Markdown outside of backticks would take two stars for emphasis, and drop them.
    text = "Write other names: `'transformer.h.*=layers.*'`; repeatable."
    return typer.Option(metavar="OLD=NEW", help=text, rich_help_panel=panel)


def weights_at(panel: str | None = None) -> Any:
    """Returns ``--at`` of a command that takes weights only."""
    text = (
        "Place of the weights in a step: model/NAME, or state/params. Default: the one attached "
        "model."
    )
    return typer.Option(metavar="PLACE", help=text, rich_help_panel=panel)


Directory = Annotated[
    str, typer.Argument(metavar="DIRECTORY", help="A run's directory, or gs://bucket/prefix.")
]
MaxBytes = Annotated[
    int | None,
    typer.Option(min=1, help="Upper bound for array data in memory, in bytes; default 256 MiB."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MaxShardSize = Annotated[str | None, max_shard_size()]
Config = Annotated[Path | None, config()]
Patterns = Annotated[list[str] | None, patterns()]
