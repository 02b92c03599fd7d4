"""Made-up runs: writes the events that their programs would have recorded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import FOLDER, MAX_FILE_BYTES

BEGAN_SECS = 1_795_000_000.0


def write(directory: Path, runs: Sequence[Sequence[Event]]) -> None:
    """Writes the events of each program to files, as journals do."""
    (directory / FOLDER).mkdir(parents=True, exist_ok=True)
    count = 0
    for index, events in enumerate(runs):
        lines = [event.to_line() for event in events]
        lines.reverse()
        while lines:
            content = b""
            while lines and len(content) < MAX_FILE_BYTES:
                content += lines.pop()
            count += 1
            nsecs = int(BEGAN_SECS * 1e9) + count
            path = directory / FOLDER / f"{nsecs:019d}-{index:08x}.jsonl"
            path.write_bytes(content)


def run(
    *,
    first: int,
    last: int,
    at_secs: float,
    step_secs: float = 2.0,
    durable_secs: float = 40.0,
    every: int = 25,
    end: str = "closed",
    fails: Sequence[int] = (),
    kept: dict[int, int] | None = None,
    spread: float = 0.15,
    seed: int = 0,
) -> list[Event]:
    """Returns the events of a program that trains from ``first`` to ``last`` and keeps 3 steps.

    ``kept`` are the bytes of the steps there before, and then of those there after.
    """
    draw = random.Random(seed)
    events = []
    kept = {} if kept is None else kept
    if first:
        events.append(
            Event("restored", at_secs - 1, first, {"restore_secs": 21.5, "is_verified": True})
        )
    about = {"host": "tpu-worker-0", "pid": 4711, "version": "0.1.0"}
    keeps = [{"rule": "LatestN", "n": 3}]
    events.append(Event("started", at_secs, None, {**about, "keeps": keeps}))
    now, began_before = at_secs, None
    for step in range(first + every, last + 1, every):
        now = max(now, at_secs + (step - first) * step_secs * draw.uniform(0.98, 1.02))
        values: dict[str, float] = {"num_skipped": every - 1}
        if began_before is not None:
            values |= {"interval_secs": now - began_before, "interval_steps": every}
        began_before = now
        events.append(Event("saving", now, step, values))
        if step + every > last and end == "killed":
            break
        took = durable_secs * draw.lognormvariate(0, spread)
        now += took
        if step in fails:
            text = f"saving step {step} failed: OSError: [Errno 28] No space left on device."
            events.append(Event("failed", now, step, {"secs": took, "error": text}))
            continue
        cost = {"blocking_secs": draw.uniform(0.004, 0.006), "durable_secs": took}
        kept[step] = 1_490_000_000 + draw.randrange(1_000_000)
        sizes = {"num_bytes": kept[step], "total_bytes": sum(kept.values())}
        metrics = {"loss": 4 / (1 + step / 400) + draw.uniform(0, 0.1)}
        events.append(Event("durable", now, step, {**cost, **sizes, "metrics": metrics}))
        if len(kept) > 3:
            del kept[oldest := min(kept)]
            gone = {"steps": [oldest], "total_bytes": sum(kept.values())}
            events.append(Event("deleted", now + 0.5, None, gone))
    if end == "closed":
        events.append(Event("closed", events[-1].time_secs + 1, last, {"num_skipped": last}))
    return sorted(events, key=lambda event: event.time_secs)


def three_runs(directory: Path) -> None:
    """Writes a run of three programs: two are killed, one save fails, and the last one closes."""
    kept: dict[int, int] = {}
    began = (BEGAN_SECS, BEGAN_SECS + 2400, BEGAN_SECS + 4600)
    write(
        directory,
        [
            run(first=0, last=1010, at_secs=began[0], end="killed", fails=[400], kept=kept),
            run(first=975, last=1900, at_secs=began[1], end="killed", seed=1, kept=kept),
            run(first=1875, last=3000, at_secs=began[2], seed=2, kept=kept, spread=0.9),
        ],
    )
