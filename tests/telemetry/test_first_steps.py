"""What a save wrote and what it linked, as events, statistics and the storage chart say it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from support.events import recorded

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.telemetry.events import Event, bounded
from torchax_ckpt.telemetry.first_steps import FirstSteps
from torchax_ckpt.telemetry.journal import read_events
from torchax_ckpt.telemetry.timeline import bytes_over_time, runs_of

BASE_BYTES = 1 << 20


def state(step: int) -> dict[str, Any]:
    base = np.random.default_rng(0).random((BASE_BYTES // 4,), np.float32)
    return {"base": jax.device_put(base), "x": jax.device_put(np.float32(step))}


def save(directory: Path, steps: range, **settings: Any) -> tuple[list[Event], Any]:
    """Saves steps; returns the events of durable saves, and the statistics."""
    told: list[Event] = []
    options = CheckpointOptions(reuse=True)
    with TorchaxCheckpointer(directory, options=options, on_event=told.append, **settings) as ckpt:
        for step in steps:
            ckpt.save(step, state=state(step), force=True)
            ckpt.wait_until_finished()
    return [event for event in told if event.name == "durable"], ckpt.stats()


def files(directory: Path) -> dict[int, int]:
    """Each file of the steps of a run once, with its size."""
    steps = (path for path in directory.iterdir() if path.name.isdecimal())
    found = [p.stat() for step in steps for p in step.rglob("*") if p.is_file()]
    return {status.st_ino: status.st_size for status in found}


def test_events_and_stats_say_what_was_written_and_what_was_linked(directory: Path) -> None:
    durable, stats = save(directory, range(1, 9), preservation_policy=policies.PreserveAll())
    for event in durable:
        values = event.values
        assert values["new_bytes"] + values["linked_bytes"] == values["num_bytes"]
    linked = [event.values["linked_bytes"] for event in durable]
    assert linked[:4] == [0, 0, 0, 0]
    assert min(linked[4:]) > BASE_BYTES
    assert [event.values.get("linked") for event in durable[:4]] == [None] * 4
    expected = [[[3 + step % 2, linked[step]]] for step in (4, 5, 6, 7)]
    assert [event.values["linked"] for event in durable[4:]] == expected
    assert stats.linked_bytes.p90 == max(linked)
    assert 0 < min(event.numbers["new_bytes"] for event in durable) <= stats.new_bytes.p50
    chart = bytes_over_time(runs_of(read_events(directory), is_running=False))
    assert [nbytes for _, nbytes in chart[1:]] == list(
        itertools.accumulate(event.values["new_bytes"] for event in durable)
    )
    assert chart[-1][1] == sum(files(directory).values())
    (written,) = recorded(directory)
    assert [e.values for e in written if e.name == "durable"] == [e.values for e in durable]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_storage_chart_counts_a_linked_byte_once(keep: int, directory: Path) -> None:
    """Whatever is deleted meanwhile; the source of a link may be deleted with the next event."""
    save(directory, range(1, 8), preservation_policy=policies.LatestN(keep))
    curve = bytes_over_time(runs_of(read_events(directory), is_running=False))
    assert curve[-1][1] == sum(files(directory).values())
    # Never more than two copies once the first ones are deleted, plus one that is being replaced.
    assert max(nbytes for _, nbytes in curve[-6:]) < 2.5 * BASE_BYTES


# --- without a run ---


class Steps:
    """Steps with one database of unchanged arrays each, written or linked as a save does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.first_steps = FirstSteps(epath.Path(directory))

    def database(self, step: int) -> Path:
        return self.directory / str(step) / "state" / "ocdbt.process_unchanged0"

    def add(self, step: int, source: int | None = None) -> dict[int, int]:
        folder = self.database(step)
        folder.mkdir(parents=True)
        if source is None:
            (folder / "data").write_bytes(b"12345")
        else:
            os.link(self.database(source) / "data", folder / "data")
        (self.directory / str(step) / "state" / "other").write_bytes(b"123")
        return self.first_steps.linked(step, epath.Path(self.directory / str(step)))

    def restart(self) -> None:
        self.first_steps = FirstSteps(epath.Path(self.directory))


def test_the_step_that_wrote_a_file_is_known_when_it_is_deleted(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    assert steps.add(1) == steps.add(2) == {}
    assert steps.add(3, source=1) == {1: 5}
    shutil.rmtree(tmp_path / "1")
    assert steps.add(5, source=3) == {1: 5}
    (tmp_path / "unchanged").mkdir()
    os.link(steps.database(5) / "data", tmp_path / "unchanged" / "data")
    for step in ("3", "5"):
        shutil.rmtree(tmp_path / step)
    (steps.database(6)).mkdir(parents=True)
    os.link(tmp_path / "unchanged" / "data", steps.database(6) / "data")
    assert steps.first_steps.linked(6, epath.Path(tmp_path / "6")) == {1: 5}


def test_after_a_restart_the_newest_step_that_has_a_file_is_named(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.add(1)
    steps.add(2)
    steps.add(3, source=1)
    steps.restart()
    assert steps.add(4, source=2) == {2: 5}
    assert steps.add(5, source=3) == {3: 5}
    assert steps.add(6, source=4) == {2: 5}
    steps.restart()
    os.link(steps.database(6) / "data", tmp_path / "kept")
    for step in range(1, 7):
        shutil.rmtree(tmp_path / str(step))
    steps.database(7).mkdir(parents=True)
    os.link(tmp_path / "kept", steps.database(7) / "data")
    assert steps.first_steps.linked(7, epath.Path(tmp_path / "7")) == {7: 5}


def test_links_to_other_files_of_a_step_do_not_count(tmp_path: Path) -> None:
    """Such as those of a backup: a save links nothing but databases."""
    steps = Steps(tmp_path)
    (tmp_path / "1" / "state").mkdir(parents=True)
    (tmp_path / "1" / "state" / "data").write_bytes(b"1")
    os.link(tmp_path / "1" / "state" / "data", tmp_path / "backup")
    assert steps.first_steps.linked(1, epath.Path(tmp_path / "1")) == {}


@pytest.mark.parametrize("linked", [[[1]], [["1", 2]], [[1, -2]], {"1": 2}, [[1, 2]] * 21, 1])
def test_what_is_no_list_of_links_is_left_out(linked: Any) -> None:
    values = {"num_bytes": 3, "linked": linked}
    line = json.dumps({"at": 1.0, "event": "durable", "step": 1, **values}).encode()
    assert Event.of_line(line) == Event("durable", 1.0, 1, {"num_bytes": 3})


def test_more_links_than_a_reader_accepts_are_cut() -> None:
    (links,) = bounded({"linked": [[n, 1] for n in range(50)]}).values()
    event = Event("durable", 1.0, 1, {"linked": links})
    assert Event.of_line(event.to_line()) == event
