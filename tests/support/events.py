"""The events that runs have recorded in a directory."""

from __future__ import annotations

from pathlib import Path

from etils import epath

from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import read_events


def recorded(directory: Path) -> list[list[Event]]:
    """Returns the events of each program, both in order of time."""
    return list(read_events(epath.Path(directory)).values())


def names(events: list[Event]) -> list[tuple[str, int | None]]:
    return [(event.name, event.step) for event in events]
