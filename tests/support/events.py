"""The events of runs, as they were written."""

from __future__ import annotations

from pathlib import Path

from etils import epath

from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import read_events


def recorded(directory: Path) -> list[list[Event]]:
    """The events of each run, in their order."""
    return list(read_events(epath.Path(directory)).values())


def names(events: list[Event]) -> list[tuple[str, int | None]]:
    return [(event.name, event.step) for event in events]
