"""Defines the options of the command ``merge``."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from torchax_ckpt.cli.converting import shared_options
from torchax_ckpt.cli.converting.shared_options import (
    Config,
    Directory,
    Dtype,
    Json,
    MaxBytes,
    MaxShardSize,
)


class Format(enum.StrEnum):
    """The formats that ``merge`` writes."""

    SAFETENSORS = "safetensors"
    HF = "hf"
    PEFT = "peft"
    RUN = "run"


def merge(
    directory: Directory,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="A new folder, or a .safetensors file; for run, the directory of the new run.",
        ),
    ],
    steps: Annotated[
        str, typer.Option(metavar="N,N,...", help="The steps to average: 800,900,1000.")
    ],
    weights: Annotated[
        str | None,
        typer.Option(metavar="W,W,...", help="A weight for each step: 1,1,2. Default: all equal."),
    ] = None,
    format: Annotated[
        Format,
        typer.Option(
            help="safetensors; hf: a folder for transformers and vLLM; peft: a folder of adapters; "
            "run: step 0 of a new run."
        ),
    ] = Format.SAFETENSORS,
    max_shard_size: MaxShardSize = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Round floating-point averages to this dtype. Default: the weights'."),
    ] = None,
    config: Config = None,
    at: Annotated[str | None, shared_options.weights_at()] = None,
    max_bytes: MaxBytes = None,
    json: Json = False,
) -> int:
    """Averages the weights of several steps of a run, and writes the averages.

    Averages are computed in float32, or in the dtype of the weights if that is wider. Integers,
    bools, configs and tokenizers are those of the newest of the steps.
    """
    from torchax_ckpt.cli.convert import Exported
    from torchax_ckpt.cli.converting.merge import merge_steps

    wanted = Exported(
        format=format.value,
        max_shard_size=max_shard_size,
        dtype=None if dtype is None else dtype.value,
        config=config,
        at=at,
        max_bytes=max_bytes,
        command="merge",
    )
    return merge_steps(directory, out, steps, weights, wanted, as_json=json)
