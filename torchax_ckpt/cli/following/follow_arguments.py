"""The arguments of ``torchax-ckpt follow``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from torchax_ckpt.cli.converting import shared_options
from torchax_ckpt.cli.converting.shared_options import Dtype, MaxBytes

_RULE, _FOLDER = "Which steps", "What a folder contains"


def _option(panel: str, text: str, metavar: str | None = None, *names: str) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel)


def follow(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's directory, or gs://bucket/prefix.")
    ],
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="A folder on this host: new, empty, or one that follow has written.",
        ),
    ],
    every: Annotated[
        int | None,
        _option(
            _RULE, "The newest step, once it is N past the last published one; default: 1.", "N"
        ),
    ] = None,
    best: Annotated[
        str | None,
        _option(_RULE, "Each new best step: loss, or accuracy:max.", "METRIC"),
    ] = None,
    keep: Annotated[int, _option(_RULE, "How many folders to keep.", "N")] = 3,
    grace: Annotated[
        str,
        _option(
            _RULE,
            "How long a folder stays that is no longer kept, such as 90s, 10min or 1h.",
            "TIME",
        ),
    ] = "10min",
    poll: Annotated[
        str, _option(_RULE, "From one look at the run to the next, such as 500ms or 1min.", "TIME")
    ] = "10s",
    once: Annotated[
        bool, _option(_RULE, "Publish the step that is due, if any, and end.", None, "--once")
    ] = False,
    format: Annotated[
        Literal["hf", "peft", "safetensors"],
        _option(_FOLDER, "hf: for transformers and vLLM; peft: adapters."),
    ] = "hf",
    max_shard_size: Annotated[str | None, shared_options.max_shard_size(_FOLDER)] = None,
    dtype: Annotated[Dtype | None, shared_options.dtype(_FOLDER)] = None,
    config: Annotated[Path | None, shared_options.config(_FOLDER)] = None,
    include: Annotated[list[str] | None, shared_options.patterns(_FOLDER)] = None,
    exclude: Annotated[list[str] | None, shared_options.patterns(_FOLDER)] = None,
    rename: Annotated[list[str] | None, shared_options.rename(_FOLDER)] = None,
    at: Annotated[str | None, shared_options.weights_at(_FOLDER)] = None,
    max_bytes: MaxBytes = None,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per folder.")] = False,
) -> int:
    """Watches a run, and publishes its steps as folders, each of which appears at once.

    OUT/latest names the newest folder, for example step-1000. Runs until Ctrl-C or SIGTERM, on any
    host that can read the run's directory. Only reads there: the training is never disturbed. After
    a restart, or if it was killed, it goes on where it was.
    """
    from torchax_ckpt.cli.convert import Exported
    from torchax_ckpt.cli.following import follow

    wanted = Exported(
        format=format,
        max_shard_size=max_shard_size,
        dtype=None if dtype is None else dtype.value,
        config=config,
        at=at,
        include=include or (),
        exclude=exclude or (),
        rename=rename or (),
        max_bytes=max_bytes,
        command="follow",
    )
    asked = follow.Asked(run, out, every, best, keep, grace, poll, is_once=once, as_json=json)
    return follow.follow(asked, wanted.form())
