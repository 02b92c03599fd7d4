"""Several processes reuse frozen leaves; other numbers of processes go on from there."""

from __future__ import annotations

import errno
import signal
import subprocess
from pathlib import Path
from typing import Any, Protocol

import pytest
from support import PROGRAMS
from support.compare import entries
from support.damage import flip_bit
from support.linked import data_file, databases, folders
from support.live import Together
from support.processes import Running
from support.reusing import HOST, QUARTER, Run

PROGRAM = PROGRAMS / "reuse_on_processes.py"

pytestmark = pytest.mark.slow


class Do(Protocol):
    def __call__(self, directory: Path, count: int, *do: Any, **settings: Any) -> list[Any]: ...


@pytest.fixture(scope="module")
def run(together: Together) -> Do:
    """What each process reports at its end, and from which step it went on; see the program."""

    def done(directory: Path, count: int, *do: Any, **settings: Any) -> list[Any]:
        told = together(PROGRAM, count, {"directory": str(directory), "do": do, **settings})
        return [reports[-1] | reports[0] | {"failed": reports[1:-1]} for reports in told]

    return done


@pytest.fixture(scope="module")
def by_two(run: Do, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run of 6 steps on 2 processes with 2 devices each, and what each reported."""
    directory = tmp_path_factory.mktemp("by_two") / "run"
    return directory, run(directory, 2, ["save", 6])


@pytest.fixture
def directory(by_two: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of that run, with its links."""
    subprocess.run(["cp", "-a", f"{by_two[0].parent}/.", tmp_path], check=True)
    (tmp_path / "run" / "lease").unlink(missing_ok=True)
    return tmp_path / "run"


def assert_whole(directory: Path, *steps: int) -> None:
    """Asserts that this process and Orbax alone read what the processes saved, bit for bit."""
    with Run(directory) as here:
        here.check(*steps, by_others=True)


def test_two_processes_write_what_changed_only(by_two: tuple[Path, Any], directory: Path) -> None:
    assert by_two[1][0]["reused"]["whole"] == "ww2222"
    assert by_two[1][0]["reused"][HOST] == "ww2222"
    assert folders(directory, 6) == [
        *(f"ocdbt.process_unchanged0x{index}" for index in range(2)),
        "ocdbt.process_unchanged1x0",  # of the leaves on the host
    ]
    assert_whole(directory, 5, 6)


def test_only_a_save_that_may_take_something_over_asks_the_others(
    run: Do, by_two: tuple[Path, Any], tmp_path: Path
) -> None:
    without = run(tmp_path / "without", 2, ["save", 4], reuse=False)
    for told, plain in zip(by_two[1], without, strict=True):
        (number,) = {*plain["messages"][1:]}
        assert told["messages"][1:] == [number, *4 * [number + 1]]


@pytest.mark.parametrize(
    "mode", ["copy", *(pytest.param(m, marks=pytest.mark.long) for m in ("reference", "auto"))]
)
def test_two_processes_look_at_no_array_that_is_the_same_object(
    run: Do, mode: str, tmp_path: Path
) -> None:
    """At steps 9 and 11, one array is another object with the same values, on process 1 alone.

    Before step 11, the database is lost that the save would take over. From step 13 on, the objects
    are those of a restart, at which one save looks.
    """
    do: list[Any] = [["save", 8], ["on", 1, "renew", "rows"], ["save", 2]]
    do += [["on", 1, "renew", "rows"], ["on", 0, "lose_file", 9], ["save", 2]]
    do += [["restart"], ["save", 3]]
    told = run(tmp_path / "run", 2, *do, is_proof=True, snapshot=mode)
    assert told[0]["reused"]["looked"] == "110000000010100"
    assert told[1]["reused"]["looked"] == "110000001010100"
    assert told[0]["reused"]["whole"] == "ww22222222w2w22"
    assert_whole(tmp_path / "run", 7, 8, 10, 11, 12, 13, 14, 15)


def test_no_process_answers_for_others(run: Do, directory: Path) -> None:
    """Blocks of the restored step lie on two processes each, and one of these changes its part."""
    run(directory, 4, ["change_quarter"], ["save", 3], is_proof=True)
    with Run(directory) as here:
        assert here.versions["sharded"] == QUARTER
        here.check(7, 8, 9, by_others=True)


def test_two_processes_go_on_after_a_failed_save(run: Do, directory: Path) -> None:
    """The failure of one process while it links; later the base changes too."""
    no_space = ["fail_on", 1, errno.ENOSPC, "link unchanged arrays"]
    told = run(directory, 2, ["save"], no_space, ["save", 2], ["change", "rows"], ["save", 2])
    for each in told:
        assert "No space left on device" in each["failed"][0]["failed"]
        assert each["steps"] == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]
    assert told[0]["reused"]["whole"] == "wx33ww"  # a full disk leaves the base as it is
    assert_whole(directory, 7, 9, 10, 11, 12)


@pytest.mark.parametrize("index", [0, 1])
def test_what_a_failed_save_has_sent_is_no_base_of_the_next(
    run: Do, index: int, directory: Path
) -> None:
    """The base changes in a save that fails on one process once it has written its part.

    To the next saves the base then equals what was sent, but no step has it.
    """
    late = ["fail_on", index, errno.EIO, "write the arrays", "after"]
    told = run(directory, 2, ["save", 2], ["change", "rows"], late, ["save", 4])
    assert told[0]["reused"]["whole"] == "w2xww22"
    assert told[1]["steps"] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13]
    assert_whole(directory, 8, 10, 11, 12, 13)


def test_fewer_and_more_processes_go_on(run: Do, directory: Path) -> None:
    """One process after two, on twice as many devices; then two again.

    Their arrays are cut into other blocks, so each writes both copies once.
    """
    with Run(directory) as here:
        here.save(4)
        assert here.reused["whole"] == "ww22"
        reused = "ocdbt.process_unchanged1x0"  # of the host, under its name
        assert folders(directory, 8) == ["ocdbt.process_unchanged0", reused]
        here.check(7, 8, 9, 10, by_others=True)
    told = run(directory, 2, ["save", 4])
    assert told[0]["reused"]["whole"] == "ww22"
    assert_whole(directory, 11, 12, 13, 14)


def test_a_process_that_is_killed_between_link_and_commit_harms_no_step(directory: Path) -> None:
    settings = {"directory": str(directory), "do": [["save"], ["die_on", 1]]}
    with Running(PROGRAM, 2, settings | {"process_timeout_secs": 5}) as running:
        assert running.wait() == [3, -signal.SIGKILL]
        told = running.reports(0)[-1]
    assert "process 1 of 2, on host" in told["failed"]  # told by its connection
    assert told["reused"] == "wx"
    assert {"5", "6", "7"} < entries(directory)
    assert "8" not in entries(directory)
    with Run(directory) as here:
        here.check(5, 6, 7)
        here.save(2)
        here.check(6, 7, 8, 9, by_others=True)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_each_host_takes_over_local_steps(run: Do, is_damaged: bool, tmp_path: Path) -> None:
    """After a restart, a host takes over only what it has compared in its own copy."""
    directory, ramdisks = tmp_path / "run", tmp_path / "ramdisks"
    places = {"ramdisks": str(ramdisks), "durable": [1, 2]}
    for told in run(directory, 2, ["save", 6], **places):
        assert told["reused"]["local whole"] == "ww2222"
        assert told["reused"][f"local {HOST}"] == "ww2222"
    for index in range(2):
        expected = [f"ocdbt.process_unchanged{number}" for number in range(2)]
        assert folders(ramdisks / str(index), 6) == expected
    restored = 6
    if is_damaged:
        flip_bit(path := data_file(ramdisks / "1", 6), path.stat().st_size // 2)
        restored = 5
    for told in run(directory, 2, ["save", 3], ["restart"], **places):
        assert told["start"] == restored
        assert told["reused"]["local whole"] == "w22"


def test_process_0_takes_over_the_leaves_on_the_host(run: Do, tmp_path: Path) -> None:
    """After a restart from a local step, it writes each durable copy once; then one goes on."""
    directory, ramdisks = tmp_path / "run", tmp_path / "ramdisks"
    places = {"ramdisks": str(ramdisks), "durable": [*range(1, 100)]}
    run(directory, 2, ["save", 6], **places)
    (told, _) = run(directory, 2, ["save", 4], ["change", HOST], ["save", 2], **places)
    assert told["start"] == 6
    assert told["reused"]["whole"] == "ww2222"
    assert told["reused"][HOST] == "ww22ww"
    with Run(directory) as here:
        here.check(6, 8, 11, 12, by_others=True)
        here.save(4)
        assert here.reused[HOST][-1] == "2"
        here.check(13, 16, by_others=True)


def test_the_states_of_single_processes_are_always_written(run: Do, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    told = run(directory, 2, ["save", 5], is_stateful=True, keep=1)
    assert told[0]["reused"]["whole"] == "wwaaa"  # and the program asserts how much was written
    assert entries(directory) == {"5", "unchanged"}
    leaves = set().union(*(leaves for leaves, _ in databases(directory, 5)))
    assert all(name.startswith("model/") for name in leaves)


def test_what_process_0_names_is_frozen_on_all(run: Do, tmp_path: Path) -> None:
    """Whatever the others name, or count as frozen; also when a parameter is trained later."""
    here: list[dict[str, Any]] = [{"reuse": ["model.rows"]}, {"reuse": ["model.whole"]}]
    (told, _) = run(tmp_path / "named", 2, ["save", 3], here=here)
    assert {leaf: told["reused"][leaf] for leaf in ("rows", "whole")} == {
        "rows": "ww2",
        "whole": "www",
    }
    by_gradients: list[dict[str, Any]] = [{"reuse": True}, {"reuse": True, "frozen": False}]
    trained = [["on", 0, "unfreeze", "layers.2"], ["train", "layers.2"]]
    (told, _) = run(tmp_path / "trained", 2, ["save", 4], *trained, ["save", 7], here=by_gradients)
    assert told["reused"]["layers.2"] == "ww22" + 7 * "w"
    assert told["reused"]["whole"] == "ww22www2222"
    assert_whole(tmp_path / "trained", 4, 6, 10, 11)


def test_a_pattern_that_matches_nothing_is_refused_on_all(run: Do, tmp_path: Path) -> None:
    told = run(tmp_path / "run", 2, ["is_refused"], ["is_refused"], reuse=["model.whole", "base"])
    for each in told:
        assert each["steps"] == []
        assert [
            said["failed"].count("nothing in the state matches 'base'") for said in each["failed"]
        ] == [1, 1]


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_cannot_save_keeps_no_other_waiting_for_what_is_frozen(
    index: int, run: Do, tmp_path: Path
) -> None:
    """At the first save, at which process 0 would say what is frozen."""
    told = run(tmp_path / "run", 2, ["refuse_on", index], ["save", 3])
    for each in told:
        assert "metric 'loss': expected a number" in each["failed"][0]["failed"]
        assert each["failed"][0]["secs"] < 20  # of 60
        assert each["steps"] == [2, 3, 4]
    assert told[0]["reused"]["whole"][-3:] == "ww2"
