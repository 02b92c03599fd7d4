"""The command ``follow``, which publishes the steps of a run as folders while the run goes on."""

from __future__ import annotations

import signal
from typing import Annotated, Any

import typer

from torchax_ckpt.cli import output
from torchax_ckpt.cli.convert import At, CastTo, MaxShardSize
from torchax_ckpt.cli.exit_codes import INTERRUPTED, OK, TERMINATED, UsageError
from torchax_ckpt.cli.step_arguments import (
    existing,
    folder_path,
    parsed_size,
    path_of,
    require_no_step,
)
from torchax_ckpt.errors import DirectoryError, OutOfMemoryError
from torchax_ckpt.publishing.folder_form import FolderForm, Format
from torchax_ckpt.publishing.follower import Follower
from torchax_ckpt.publishing.published_folders import Published
from torchax_ckpt.storage.medium import medium


def follow(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's directory, also gs:// or s3://.")
    ],
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="A folder, also gs:// or s3://: new, empty, or one that follow has written.",
        ),
    ],
    format: Annotated[
        Format,
        typer.Option(help="hf: for transformers and vLLM; peft: adapters."),
    ] = "hf",
    every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Publish the multiples of N, or the first steps after them; default: 1.",
        ),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC", help="Publish each new best step: loss, loss:min or loss:max."
        ),
    ] = None,
    keep: Annotated[int, typer.Option(metavar="N", help="How many folders to keep.")] = 3,
    max_shard_size: MaxShardSize = None,
    dtype: CastTo = None,
    at: At = None,
    once: Annotated[
        bool, typer.Option("--once", help="Publish the step that is due, if any, and end.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per folder.")] = False,
) -> int:
    """Watches a run, and publishes its steps as folders, each of which appears at once.

    OUT/latest names the newest folder, for example step-1000. Runs until Ctrl-C or SIGTERM, on any
    host that can read the run's directory. Only reads there: the training is never disturbed. After
    a restart, or if it was killed, it goes on where it was.
    """

    def show(new: Published | None) -> None:
        if json:
            values = (None, None, None) if new is None else (new.step, str(new.path), new.metrics)
            content = dict(zip(("step", "folder", "metrics"), values, strict=True))
            output.print_json(content, indent=None)
        else:
            text = "no step is due" if new is None else f"step {new.step}: published as {new.path}"
            output.print_line(text)

    require_no_step(out)
    path, folder = path_of(run), folder_path(out)
    if once or not medium.of(path).is_missing(path):
        existing(run)  # raises for a typing mistake, and with --once for a run that has not begun
    else:
        output.note(f"{run}: does not exist yet; waiting for it")
    try:
        num_bytes = None
        if max_shard_size is not None:
            num_bytes = parsed_size(max_shard_size, "follow: --max-shard-size")
        form = FolderForm(format=format, dtype=dtype, max_shard_bytes=num_bytes, at=at)
        follower = Follower(path, folder, form, every=every, best=best, keep=keep)
    except (ValueError, TypeError) as error:
        text = str(error).replace("max_shard_bytes", "--max-shard-size")
        raise UsageError(f"follow: {text}") from error
    received: list[int] = []

    def end(number: int, frame: Any) -> None:
        """Ends the command when nothing is half done; a second signal has its usual effect."""
        received.append(number)
        follower.aborted.set()
        follower.stopped.set()
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with follower:
            new = follower.publish_due()  # an error ends the command: its arguments may be wrong
            if new is not None or (once and not received):
                show(new)
            for later in () if once else follower.follow(DirectoryError, OutOfMemoryError):
                show(later)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in received:
        return INTERRUPTED
    return TERMINATED if once and new is None and received else OK
