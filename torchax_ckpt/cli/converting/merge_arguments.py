"""Defines the options of the command ``merge``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class Format(enum.StrEnum):
    """The formats that ``merge`` writes."""

    SAFETENSORS = "safetensors"
    HF = "hf"
    PEFT = "peft"
    RUN = "run"


class Dtype(enum.StrEnum):
    """The dtypes to which ``merge`` rounds averages."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def merge(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="A run's directory, or gs://bucket/prefix.")
    ],
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
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="safetensors, hf: files of at most this size: 5GB."),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Round floating-point averages to this dtype. Default: the weights'."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="hf, peft: take config.json and other text files from here, not from the step.",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Place of the weights in the steps: model/NAME, or state/params. Default: the one "
            "attached model.",
        ),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Upper bound for array data in memory, in bytes; default 256 MiB."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
