"""Several processes take over what did not change; other numbers of processes go on from there."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reuse_on_processes import mesh_of, state, values, with_host
from support import PROGRAMS
from support.compare import entries
from support.damage import flip_bit
from support.linked import assert_holds, by_orbax, data_file, databases, files
from support.live import Together
from support.processes import Running

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies

PROGRAM = PROGRAMS / "reuse_on_processes.py"
WHOLE = 8 << 20  # less than the bytes of the leaves that do not change
SMALL = WHOLE / 100  # more than the bytes of the others


Run = Callable[..., list[list[Any]]]


@pytest.fixture(scope="module")
def run(together: Together) -> Run:
    """Has processes save steps; returns what each reports, see the program."""

    def saved(directory: Path, count: int, first: int, last: int, **settings: Any) -> Any:
        return together(PROGRAM, count, directory, first, last, settings)

    return saved


def new_bytes(reports: list[Any]) -> dict[int, int]:
    return {r["step"]: r["new"] for r in reports if "new" in r}


def alone(directory: Path, first: int, last: int, keep: Any = None) -> None:
    """Saves steps in this process, with eight devices."""
    rule = keep or policies.PreserveAll()
    options = CheckpointOptions(reuse=True)
    with TorchaxCheckpointer(directory, options=options, preservation_policy=rule) as ckpt:
        ckpt.attach()
        for step in range(first, last + 1):
            ckpt.save(step, state=state(mesh_of(2), step), force=True)


def assert_whole(directory: Path, step: int, changed: int | None = None, model: int = 2) -> None:
    """Asserts that this process and Orbax alone read what the processes saved, bit for bit."""
    expected = state(mesh_of(model), step, changed)
    assert_holds(directory, step, expected, on_other_devices=True)


def copied(run: Path, directory: Path) -> None:
    """Copies a run with its links."""
    subprocess.run(["cp", "-a", run, directory], check=True)
    (directory / "lease").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def by_two(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """A run of 6 steps on 2 processes with 2 devices each, and what each reported."""
    directory = tmp_path_factory.mktemp("by_two") / "run"
    return directory, run(directory, 2, 1, 6)


@pytest.mark.slow
def test_two_processes_write_what_changed_only(by_two: tuple[Path, list[list[Any]]]) -> None:
    directory, reports = by_two
    new = new_bytes(reports[0])
    assert all(new[step] > WHOLE for step in (1, 2, 3, 4))
    assert all(0 < new[step] < SMALL for step in (5, 6)), new
    for step in (5, 6):
        assert databases(directory, step) == [
            "ocdbt.process_unchanged0x0",
            "ocdbt.process_unchanged0x1",
        ]
        assert files(directory, step) & files(directory, step - 2)
        assert not files(directory, step) & files(directory, step - 1)
        assert_whole(directory, step, model=4)  # on another mesh


@pytest.mark.slow
def test_only_a_save_that_may_take_something_over_asks_the_others(
    run: Run, by_two: tuple[Path, list[list[Any]]], directory: Path
) -> None:
    without = run(directory, 2, 1, 3, reuse=False)
    for told, plain in zip(by_two[1], without, strict=True):
        sent = {r["step"]: r["messages"] for r in told if "step" in r}
        (number,) = {r["messages"] for r in plain if r.get("step") in (2, 3)}
        assert [sent[step] for step in (2, 3, 4)] == 3 * [number]
        assert [sent[step] for step in (5, 6)] == 2 * [number + 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["copy", *(pytest.param(m, marks=pytest.mark.long) for m in ("reference", "auto"))]
)
def test_two_processes_look_at_no_array_that_is_the_same_object(
    run: Run, mode: str, directory: Path
) -> None:
    """At steps 9 and 11, one array is another object with the same values, on process 1 alone.

    Before step 11, the database is lost that the save would take over. From step 13 on, the objects
    are those that ``load`` made, at which one save looks.
    """
    reports = run(directory, 2, 1, 12, same=True, mode=mode, other=[1, 9, 11], lost=11)
    new = new_bytes(reports[0])
    assert all(0 < new[step] < SMALL for step in (*range(5, 11), 12)), new
    assert new[11] > WHOLE
    fetched = [{r["step"]: r["fetched"] for r in told if "step" in r} for told in reports]
    assert [counts[step] for counts in fetched for step in (1, 2, 3, 4)] == 8 * [5]
    assert [counts[step] for counts in fetched for step in (5, 6, 7, 8, 10)] == 10 * [0]
    assert [counts[9] for counts in fetched] == [0, 5]  # all arrays of the database
    assert [counts[11] for counts in fetched] == [5, 5]  # written again, by process 0 as kept
    reports = run(directory, 2, 13, 15, same=True, mode=mode, restored=12)
    assert [r["fetched"] for told in reports for r in told if "step" in r] == 2 * [5, 0, 0]
    new = new_bytes(reports[0])
    assert new[13] > WHOLE
    assert max(new[14], new[15]) < SMALL
    shutil.rmtree(directory / "6")
    for step in (7, 8, 10, 11, 12, 13, 14, 15):
        assert not files(directory, step) & files(directory, step - 1)
        assert_whole(directory, step)


@pytest.mark.slow
def test_no_process_answers_for_others(
    run: Run, by_two: tuple[Path, list[list[Any]]], directory: Path
) -> None:
    """Blocks of the restored step lie on two processes each, and one of these changes its part."""
    copied(by_two[0], directory)
    reports = run(directory, 4, 7, 9, restored=6, same=True, differs=[1, 7])
    assert all(told[0] == {"is_restored": True} for told in reports)
    expected = np.asarray(values(0)["base"]["sharded"]).copy()
    expected[128:256] += 1
    for step in (7, 8, 9):
        for arrays in by_orbax(directory, step, on_other_devices=True):
            assert arrays["state/base/sharded"].tobytes() == expected.tobytes()


@pytest.mark.slow
def test_two_processes_go_on_after_a_failed_save(
    run: Run, by_two: tuple[Path, list[list[Any]]], directory: Path
) -> None:
    """The failure of one process while it links; from step 11 on, the base changes too."""
    copied(by_two[0], directory)
    reports = run(directory, 2, 7, 12, restored=6, odd=[1, 8], changed=11)
    assert all(told[0] == {"is_restored": True} for told in reports)
    for told in reports:
        assert "No space left on device" in told[2]["failed"]  # which leaves the base as it is
        assert told[-1]["steps"] == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]
    new = new_bytes(reports[0])
    assert new[9] < SMALL
    for step in (7, 9, 10, 11, 12):
        changed = 11 if step >= 11 else None
        assert not files(directory, step) & files(directory, step - 1)
        assert_whole(directory, step, changed)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_what_a_failed_save_has_sent_is_no_base_of_the_next(
    run: Run, index: int, directory: Path
) -> None:
    """The base changes in a save that fails on one process once both have written their parts.

    To the next saves the base then equals what was sent, but no step has it.
    """
    reports = run(directory, 2, 1, 12, changed=7, late=[index, 7])
    new = new_bytes(reports[0])
    assert all(new[step] < SMALL for step in (5, 6, 12)), new
    assert all(new[step] > WHOLE for step in (8, 9, 10)), new
    assert reports[-1][-1]["steps"] == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    for step in (6, 8, 9, 10, 12):
        assert_whole(directory, step, 7)


@pytest.mark.slow
def test_fewer_and_more_processes_go_on(
    run: Run, by_two: tuple[Path, list[list[Any]]], directory: Path
) -> None:
    """One process after two, on twice as many devices; then two again, which keep one step.

    Their arrays are cut into other blocks, so each writes both copies once.
    """
    copied(by_two[0], directory)
    alone(directory, 7, 10)
    assert databases(directory, 8) == ["ocdbt.process_unchanged0"]
    for step in (7, 8, 9, 10):
        assert bool(files(directory, step) & files(directory, step - 2)) == (step > 8)
        assert not files(directory, step) & files(directory, step - 1)
        assert_whole(directory, step)
    (reports, _) = run(directory, 2, 11, 14, restored=10, keep=1)
    new = new_bytes(reports)
    assert all((new[step] < SMALL) == (step > 12) for step in (11, 12, 13, 14)), new
    assert entries(directory) == {"14", "unchanged"}
    kept = {path.stat().st_ino for path in (directory / "unchanged").rglob("d/*")}
    assert kept
    assert not kept & files(directory, 14)
    assert_whole(directory, 14)


@pytest.mark.slow
def test_a_process_that_is_killed_between_link_and_commit_harms_no_step(
    by_two: tuple[Path, list[list[Any]]], directory: Path
) -> None:
    copied(by_two[0], directory)
    settings = json.dumps({"restored": 6, "kill": 1, "timeout_secs": 5})
    with Running(PROGRAM, 2, str(directory), "7", "8", settings) as running:
        assert running.wait() == [3, -signal.SIGKILL]
        told = running.reports(0)
    assert "process 1 of 2, on host" in told[-1]["failed"]  # told by its connection
    assert told[-2]["new"] > WHOLE
    assert {"5", "6", "7"} < entries(directory)
    assert "8" not in entries(directory)
    for step in (5, 6, 7):
        assert_whole(directory, step)
    alone(directory, 8, 9)
    for step in (6, 7, 8, 9):
        assert_whole(directory, step)


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [False, True])
def test_each_host_takes_over_local_steps(
    run: Run, is_damaged: bool, directory: Path, tmp_path: Path
) -> None:
    """After a restart, a host takes over only what it has compared in its own copy."""
    ramdisks = [tmp_path / "ramdisks" / str(index) for index in range(2)]
    places = {"ramdisks": str(tmp_path / "ramdisks"), "durable": [1, 2]}
    run(directory, 2, 1, 6, **places)
    for place in ramdisks:
        assert databases(place, 6) == ["ocdbt.process_unchanged0"]
        for step in (5, 6):
            assert files(place, step) & files(place, step - 2)
            assert not files(place, step) & files(place, step - 1)
    restored = 6
    if is_damaged:
        flip_bit(path := data_file(ramdisks[1], 6), path.stat().st_size // 2)
        restored = 5
    reports = run(directory, 2, restored + 1, restored + 3, restored=restored, **places)
    assert all(told[0] == {"is_restored": True} for told in reports)
    for place in ramdisks:
        for step in range(restored + 1, restored + 4):
            is_linked = bool(files(place, step) & files(place, step - 2))
            assert is_linked == (step > restored + 1)
            assert not files(place, step) & files(place, step - 1)
    reports = run(directory, 2, restored + 4, restored + 4, restored=restored + 3, **places)
    assert all(told[0] == {"is_restored": True} for told in reports)


@pytest.mark.slow
def test_process_0_takes_over_the_leaves_on_the_host(
    run: Run, directory: Path, tmp_path: Path
) -> None:
    """After a restart from a local step, it writes each durable copy once; then one goes on."""
    places = {"ramdisks": str(tmp_path / "ramdisks"), "host": True, "changed": 11}
    ramdisks = [tmp_path / "ramdisks" / str(index) for index in range(2)]
    (reports, _) = run(directory, 2, 1, 6, **places)
    new = new_bytes(reports)
    assert all(0 < new[step] < SMALL for step in (5, 6)), new
    for step in (5, 6):
        assert databases(directory, step) == [
            "ocdbt.process_unchanged0x0",
            "ocdbt.process_unchanged0x1",
            "ocdbt.process_unchanged1x0",
        ]
    for place in ramdisks:
        assert databases(place, 6) == ["ocdbt.process_unchanged0", "ocdbt.process_unchanged1"]
        assert files(place, 6) & files(place, 4)
    reports = run(directory, 2, 7, 12, restored=6, **places)
    assert all(told[0] == {"is_restored": True} for told in reports)
    new = new_bytes(reports[0])
    assert all((new[step] < SMALL) == (step > 8) for step in (7, 8, 9, 10)), new
    assert new[11] > SMALL, "the leaf that changed"
    shutil.rmtree(directory / "10")
    for step in (6, 8, 11, 12):
        expected = with_host(state(mesh_of(2), step), step, 11)
        assert_holds(directory, step, expected, on_other_devices=True)
    options = CheckpointOptions(reuse=True)
    rule = policies.PreserveAll()
    with TorchaxCheckpointer(directory, options=options, preservation_policy=rule) as ckpt:
        ckpt.attach()
        for step in (13, 14, 15, 16):
            expected = with_host(state(mesh_of(2), step), step, 11)
            ckpt.save(step, state=expected, force=True)
    assert files(directory, 16) & files(directory, 14)
    for step in (13, 16):
        expected = with_host(state(mesh_of(2), step), step, 11)
        assert_holds(directory, step, expected, on_other_devices=True)


@pytest.mark.slow
def test_the_states_of_single_processes_are_always_written(run: Run, directory: Path) -> None:
    (reports, _) = run(directory, 2, 1, 5, stateful=True)
    manifest = json.loads((directory / "5" / "manifest" / "data.json").read_text())
    stored = {name for entry in manifest["unchanged"].values() for name in entry["xxh3_128"]}
    assert stored
    assert all(name.startswith("state/") for name in stored)
    assert files(directory, 5) & files(directory, 3)
    assert new_bytes(reports)[5] > 2 * SMALL
