"""The commands ``mirror`` and ``fetch``, which copy a run's newest step to a mirror and back."""

from __future__ import annotations

import signal
from typing import Annotated, Any

import typer

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import INTERRUPTED, OK, TERMINATED, UsageError
from torchax_ckpt.cli.step_arguments import Directory, as_usage_error, existing, run_to_write
from torchax_ckpt.errors import MirrorError
from torchax_ckpt.options import Mirror
from torchax_ckpt.runtime.background import Flag
from torchax_ckpt.runtime.preemption import Preemption
from torchax_ckpt.saving.mirroring import resuming
from torchax_ckpt.saving.mirroring.mirror_directory import mirror_settings
from torchax_ckpt.saving.mirroring.mirroring import Mirroring
from torchax_ckpt.storage.directory import lineage
from torchax_ckpt.storage.directory.run_directory import RunDirectory

# From one look at the run to the next.
_POLL_SECS = 2.0

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The mirror: a path, gs://, s3://, az:// or sftp://.")
]


def mirror(
    directory: Directory,
    url: Url,
    once: Annotated[
        bool, typer.Option("--once", help="Copy the newest step if it is not there, and end.")
    ] = False,
) -> int:
    """Copies the newest step of a run to a mirror, again and again until Ctrl-C or SIGTERM.

    Only reads the run, and so cannot keep a step that the training deletes while it is copied: then
    copies the next one. TorchaxCheckpointer(directory, mirror=URL) can. Holds the mirror's lease. A
    copy that fails is tried again, except with --once.
    """
    run = existing(directory)
    mirroring = _opened(run, url)
    stopped = Flag()

    def end(number: int, frame: Any) -> None:
        stopped.set()
        mirroring.drop()
        if once:  # the step is not there, which a program that calls this must learn
            raise SystemExit(TERMINATED if number == signal.SIGTERM else INTERRUPTED)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        mirroring.mirror.claim()
        _require_continued(run, mirroring.mirror.directory)
        if once:
            _copy_newest(mirroring)
        mirroring.is_joined = not once
        while not (once or stopped.is_set):
            mirroring.wake()
            stopped.wait(_POLL_SECS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        mirroring.close()
    return OK


def _require_continued(run: RunDirectory, mirror: RunDirectory) -> None:
    if lineage.compared(run.branch(), mirror.branch()) != "here":
        raise MirrorError(
            f"{mirror.path}: the mirror has steps that {run.path} does not continue; nothing was "
            "copied. Fetch them: torchax-ckpt fetch URL RUN; or give another mirror",
            path=mirror.path,
        )


def _copy_newest(mirroring: Mirroring) -> None:
    newest = mirroring.choose()
    if newest is None or not mirroring.copy(newest):
        output.print_line("there is nothing to copy")


def fetch(
    url: Url, directory: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory.")]
) -> int:
    """Fetches the newest sound step of a mirror into a run's directory, and compares its digests.

    Does nothing if the run has this step or continues it. Goes on with an interrupted fetch. Holds
    the lease of the run's directory.
    """
    target = run_to_write(directory)
    _checked(url, target)
    source = existing(url)
    try:
        target.claim()
        here = target.branch()
        # Without ``recover``, because the fetch goes on with what another one has left.
        resuming.join(here, source, target, "error")
    finally:
        target.release()
    known = {step.key for step in here.steps}
    new = [step.step for step in target.steps() if step.key not in known]
    if not (known or new):
        raise UsageError(f"{url}: the mirror has no steps")
    text = f"fetched step {new[-1]} into" if new else "there is nothing to fetch for"
    output.print_line(f"{text} {target.path}")
    return OK


def _checked(url: str, run: RunDirectory) -> Mirror | None:
    with as_usage_error():
        return mirror_settings(url, [run.path], read_only=False)


def _opened(run: RunDirectory, url: str) -> Mirroring:
    def tell(name: str, step: int | None, **values: Any) -> None:
        if name == "mirrored":  # the log has the failures
            output.print_line(f"step {step}: copied in {values['mirror_secs']:.1f} s")

    return Mirroring(_checked(url, run), run.path, run.branch, tell, Preemption(None))
