"""The command ``report``, which reads a run's directory and writes an HTML page about the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from etils import epath

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import OK, UsageError
from torchax_ckpt.cli.report.page import MARK, page, quantiles
from torchax_ckpt.cli.show import steps_of, writer_of
from torchax_ckpt.cli.step_arguments import existing
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.medium import fsync, location, permissions
from torchax_ckpt.telemetry.journal import read_events
from torchax_ckpt.telemetry.timeline import RecordedRun, runs_of


def report(directory: str, out: Path, *, as_json: bool) -> int:
    """Runs ``torchax-ckpt report``, which writes the file ``out``; returns the exit code."""
    _require_ours(out)
    run = existing(directory)
    now_secs = time.time()
    steps, num_bytes = steps_of(run)
    writer = writer_of(run)
    runs = runs_of(read_events(run.path), is_running=writer is not None and writer[1])
    _write(out, page(str(run.path), now_secs, runs, steps, num_bytes))
    if as_json:
        output.print_json(
            {"directory": str(run.path), "page": str(out), "runs": [_as_json(r) for r in runs]}
        )
    else:
        saves = sum(len(r.saves) for r in runs)
        output.print_line(f"{out}: {len(runs)} programs, {saves} saves, {len(steps)} steps")
    return OK


def _as_json(run: RecordedRun) -> dict[str, Any]:
    outcomes = [save.outcome for save in run.saves]
    names = ("blocking_secs", "durable_secs", "interval_secs", "num_bytes", "new_bytes")
    found = {name: quantiles(run.saves, name) for name in names}
    return {
        "began": output.moment(int(run.began_secs * 1e9)),
        "last_event": output.moment(int(run.ended_secs * 1e9)),
        "host": run.host,
        "closed": run.ended,
        "running": run.is_running,
        "first_step": run.first_step,
        "last_step": run.last_step,
        "steps_done_again": run.lost_steps,
        "num_durable": outcomes.count("durable"),
        "num_failed": outcomes.count("failed"),
        "num_cut_off": outcomes.count("cut off"),
        **{n: None if value is None else vars(value) for n, value in found.items()},
    }


def _require_ours(out: Path) -> None:
    """Raises if ``out`` is a directory, a URL or a file that is not an earlier report."""
    if out.is_dir() or location.is_url(out):
        raise UsageError(
            f"report: {out}: expected the name of a local file, found a directory or a URL"
        )
    if out.exists():
        with open(out, "rb") as file:
            if MARK.encode() not in file.read(100):
                raise DirectoryError(
                    f"report: {out} exists already and is not a report; nothing was written: give "
                    "another name as OUT",
                    path=out,
                )


def _write(out: Path, content: str) -> None:
    """Writes the page under a temporary name first, so that no browser loads half a page."""
    permissions.make_folder(epath.Path(out.parent))
    with fsync.swapped_in(out) as partial:
        partial.write_text(content, encoding="utf-8", errors="replace")
