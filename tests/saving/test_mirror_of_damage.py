"""A damaged step of a run with a mirror: the run takes it from there, and decides as it would."""

from __future__ import annotations

import errno
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from etils import epath
from support import PROGRAMS
from support.damage import flip_arrays, halve
from support.live import Together
from support.mirrored import opened, steps_of, trained, wait_for
from support.stages import Gate, fail_at
from support.steps import save, state

from torchax_ckpt import Mirror, TorchaxCheckpointer, policies
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError
from torchax_ckpt.storage.directory.commit_record import RECORD
from torchax_ckpt.storage.medium import medium
from torchax_ckpt.storage.medium.local_medium import LocalMedium

pytest_plugins = ("support.folder_bucket",)
pytestmark = pytest.mark.usefixtures("impatient")


def torn(name: str) -> Callable[[Path], None]:
    return lambda step: halve(step / name)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "arrays": flip_arrays,
    "manifest": torn("manifest/data.json"),
    "summary": torn("summary/data.json"),
    "metadata": torn("state/_METADATA"),
    "record": torn(RECORD),
    "missing": lambda step: (step / "manifest/data.json").unlink(),
}


@pytest.fixture(params=["path", "bucket"])
def directory(request: pytest.FixtureRequest, directory: Path) -> Path:
    """Where the run is: on a disk, or where all is objects."""
    if request.param == "bucket":
        return Path(request.getfixturevalue("folder_bucket")) / "run"
    return directory


def folder_of(directory: Path, step: int) -> Path:
    """The folder of a step, whose name has more than the number in a bucket."""
    with TorchaxCheckpointer(directory) as ckpt:
        return Path(ckpt._run.tiers.find(step).path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_step_comes_from_the_mirror(
    directory: Path, place: Path, damage: str
) -> None:
    trained(directory, place, 4, 5)
    DAMAGE[damage](folder_of(directory, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no step is skipped
        with TorchaxCheckpointer(directory, mirror=place) as ckpt:
            assert ckpt.attach(stateful={}) == 5
            assert ckpt.verify(5) == 5
            np.testing.assert_array_equal(ckpt.load(5)["w"], state(5)["w"])
            save(ckpt, 6)
    assert steps_of(directory) == [4, 5, 6]
    assert steps_of(place) == [5, 6]
    assert not list(directory.glob("*fetching*"))


def test_restore_takes_a_damaged_step_from_the_mirror_while_newer_ones_stay(
    directory: Path, place: Path
) -> None:
    with opened(directory, place) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
            wait_for(ckpt, step)
        flip_arrays(folder_of(directory, 2))
        assert ckpt.restore(2).step == 2
        assert ckpt.verify(2) == 2
        assert ckpt.all_steps() == [1, 2, 3]  # no save has left step 3
        assert ckpt.stats().num_failed == 0


def test_if_both_are_damaged_the_run_goes_on_from_the_step_before(
    directory: Path, place: Path
) -> None:
    trained(directory, place, 4, 5)
    for at in (directory, place):
        flip_arrays(folder_of(at, 5))
    with TorchaxCheckpointer(directory, mirror=place) as ckpt:
        too, skipped = "the mirror has this step damaged too", "skipping an unreadable checkpoint"
        with pytest.warns(UserWarning, match=too), pytest.warns(UserWarning, match=skipped):
            assert ckpt.attach(stateful={}) == 4


@pytest.mark.parametrize("how", ["torn", "flipped", "alone"])
def test_if_both_are_damaged_the_mirror_s_step_before_may_be_the_newer_one(
    directory: Path, place: Path, how: str
) -> None:
    keep = policies.PreserveAll()
    mirror = Mirror(place, preservation_policy=keep)
    with opened(directory, mirror, preservation_policy=keep) as ckpt:
        for step in (3, 4, 5):
            save(ckpt, step)
            wait_for(ckpt, step)
        ckpt.delete(4)
        if how == "alone":
            ckpt.delete(3)
    for at in (directory, place):
        DAMAGE["summary" if how == "torn" else "arrays"](folder_of(at, 5))
    said = "damaged step of the mirror" if how == "torn" else "skipping an unreadable checkpoint"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = opened(directory, mirror, preservation_policy=keep)
    assert any(said in str(warning.message) for warning in caught)
    with again as ckpt:
        assert ckpt.latest_step() == 4
        np.testing.assert_array_equal(ckpt.load(4)["w"], state(4)["w"])
        save(ckpt, 6)
    assert steps_of(directory)[-2:] == [4, 6]
    assert steps_of(place)[-2:] == [4, 6]


def test_a_damaged_step_that_cannot_be_deleted_is_passed_over(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(directory, mirror, 4, 5)
    flip_arrays(folder_of(directory, 5))
    refusal = OSError(errno.EXDEV, "a lower layer")
    monkeypatch.setattr(type(medium.of(epath.Path(directory))), "delete", lambda *a: refusal)
    why = "the step of the mirror cannot replace this one"
    with (
        TorchaxCheckpointer(directory, mirror=mirror) as ckpt,
        pytest.warns(UserWarning, match=why),
        pytest.warns(UserWarning, match="skipping an unreadable checkpoint"),
    ):
        assert ckpt.attach(stateful={}) == 4


def test_an_attach_after_one_that_failed_compares_again(directory: Path, place: Path) -> None:
    trained(directory, place, 4, 5)
    flip_arrays(folder_of(directory, 5))
    end = fail_at("mark the step", OSError(5, "I/O error"))
    with TorchaxCheckpointer(directory, mirror=place) as ckpt:
        with pytest.raises((DirectoryError, OSError), match="I/O error"):
            ckpt.attach(stateful={})
        end()
        assert steps_of(directory) == [4]
        assert ckpt.attach(stateful={}) == 5
        save(ckpt, 6)
    assert steps_of(place) == [5, 6]


def test_a_mirror_that_fails_while_a_damaged_step_is_fetched_costs_no_step(
    directory: Path, mirror: Path
) -> None:
    trained(directory, mirror, 4, 5)
    flip_arrays(folder_of(directory, 5))
    end = fail_at("fetch from the mirror", OSError(5, "no link"))
    with (
        TorchaxCheckpointer(directory, mirror=mirror) as ckpt,
        pytest.raises((DirectoryError, OSError), match="no link"),
    ):
        ckpt.attach(stateful={})
    end()
    assert steps_of(directory) == [4, 5]
    with opened(directory, mirror) as ckpt:
        assert ckpt.latest_step() == 5


def test_a_kill_after_the_damaged_step_was_deleted_costs_no_step(
    directory: Path, mirror: Path
) -> None:
    trained(directory, mirror, 4, 5)
    flip_arrays(folder_of(directory, 5))
    end = fail_at("mark the step", RuntimeError("killed"))
    with TorchaxCheckpointer(directory, mirror=mirror) as ckpt, pytest.raises(RuntimeError):
        ckpt.attach(stateful={})
    end()
    assert steps_of(directory) == [4]
    with opened(directory, mirror) as ckpt:
        assert ckpt.latest_step() == 5
        np.testing.assert_array_equal(ckpt.load()["w"], state(5)["w"])


def test_a_step_that_is_known_to_be_damaged_is_not_sent(directory: Path, place: Path) -> None:
    gate = Gate("copy to the mirror")
    with opened(directory, place) as ckpt:
        save(ckpt, 1)
        assert gate.entered.wait(60)
        save(ckpt, 2)
        flip_arrays(folder_of(directory, 2))
        with pytest.raises(CorruptCheckpointError):
            ckpt.verify(2)
        gate.opened.set()
    assert steps_of(place) == [1]


@pytest.mark.parametrize("damage", ["arrays", "record", "summary"])
def test_a_damaged_step_of_a_run_that_went_back_brings_no_step_that_it_has_left(
    directory: Path, mirror: Path, damage: str
) -> None:
    keep = policies.PreserveAll()
    with opened(directory, mirror, preservation_policy=keep) as ckpt:
        for step in (5, 10):
            save(ckpt, step)
            wait_for(ckpt, step)
    end = fail_at("copy to the mirror", OSError(5, "no link"))
    with opened(directory, mirror, preservation_policy=keep) as ckpt:
        ckpt.restore(5)
        save(ckpt, 6)
    end()
    DAMAGE[damage](folder_of(directory, 6))
    with warnings.catch_warnings(), TorchaxCheckpointer(directory, mirror=mirror) as ckpt:
        warnings.simplefilter("ignore")
        assert ckpt.attach(stateful={}) == 5


def test_a_step_that_is_found_damaged_stays_the_parent_of_the_next(
    directory: Path, mirror: Path
) -> None:
    with opened(directory, mirror, keep=1) as ckpt:
        save(ckpt, 9)
        wait_for(ckpt, 9)
        save(ckpt, 10)
        wait_for(ckpt, 10)
    end = fail_at("copy to the mirror", OSError(5, "no link"))
    with opened(directory, mirror, keep=1) as ckpt:
        flip_arrays(folder_of(directory, 10))
        with pytest.raises(CorruptCheckpointError):
            ckpt.verify(10)
        save(ckpt, 11)
    end()
    with opened(directory, mirror, keep=1) as ckpt:
        assert ckpt.latest_step() == 11
    assert steps_of(mirror) == [10, 11]


# --- a torn summary, which says what led to a step ------------------------------------------------


def apart(directory: Path, place: Path) -> None:
    """Step 5 here is not in the mirror, which went on from step 4 to 6 and 7 elsewhere."""
    trained(directory, place, 3, 4)
    end = fail_at("copy to the mirror", OSError(5, "no link"))
    trained(directory, place, 5)
    end()
    other = directory.with_name("other")
    trained(other, place, 6, 7)


def test_if_the_newest_step_here_is_torn_the_mirror_wins_that_leads_on(
    directory: Path, place: Path
) -> None:
    apart(directory, place)
    DAMAGE["summary"](folder_of(directory, 5))
    with opened(directory, place) as ckpt:
        assert ckpt.latest_step() == 7
        save(ckpt, 8)
    with opened(directory, place) as ckpt:
        assert ckpt.latest_step() == 8


def test_if_the_newest_step_of_the_mirror_is_torn_the_one_before_decides(
    directory: Path, place: Path
) -> None:
    trained(directory, place, 3, 4)
    trained(directory.with_name("other"), place, 6, 7)
    DAMAGE["summary"](folder_of(place, 7))
    with (
        TorchaxCheckpointer(directory, mirror=place) as ckpt,
        pytest.warns(UserWarning, match="skipping a damaged step of the mirror: .*step 7"),
    ):
        assert ckpt.attach(stateful={}) == 6


def test_if_all_steps_of_the_mirror_are_torn_nothing_begins_anew(
    directory: Path, place: Path
) -> None:
    trained(directory.with_name("other"), place, 1)
    DAMAGE["summary"](folder_of(place, 1))
    with (
        TorchaxCheckpointer(directory, mirror=place) as ckpt,
        pytest.warns(UserWarning, match="skipping a damaged step of the mirror"),
        pytest.raises(CorruptCheckpointError, match="all steps of the mirror are damaged"),
    ):
        ckpt.attach(stateful={})


def test_a_torn_step_of_the_mirror_that_the_run_leaves_makes_no_conflict(
    directory: Path, mirror: Path
) -> None:
    keep = policies.PreserveAll()
    there = Mirror(mirror, preservation_policy=keep)
    with opened(directory, there, preservation_policy=keep) as ckpt:
        for step in (4, 5, 6):
            save(ckpt, step)
            wait_for(ckpt, step)
    end = fail_at("copy to the mirror", OSError(5, "no link"))
    with opened(directory, there, preservation_policy=keep) as ckpt:
        ckpt.restore(4)
        save(ckpt, 7)
    end()
    DAMAGE["summary"](folder_of(mirror, 6))
    with opened(directory, there, preservation_policy=keep) as ckpt:
        assert ckpt.latest_step() == 7
    assert steps_of(mirror) == [4, 7]


def test_a_mirror_that_cannot_be_written_is_let_go(directory: Path, mirror: Path) -> None:
    trained(directory, mirror, 1)
    full = mock.patch.object(LocalMedium, "prove_writable", side_effect=OSError(28, "full"))
    with (
        TorchaxCheckpointer(directory, mirror=mirror) as ckpt,
        full,
        pytest.raises(DirectoryError, match="full"),
    ):
        ckpt.attach(stateful={})
    trained(directory, mirror, 2)


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_step_of_several_processes_comes_from_the_mirror(
    tmp_path: Path, together: Together
) -> None:
    program = PROGRAMS / "mirror_on_processes.py"
    together(program, 2, tmp_path, {"own": False, "saves": [1, 2]})
    flip_arrays(tmp_path / "run" / "2")
    both = together(program, 2, tmp_path, {"own": False, "saves": [3]})
    assert [(report["start"], report["steps"]) for [report] in both] == [(2, [1, 2, 3])] * 2


@pytest.mark.slow
def test_a_local_step_that_one_host_has_lost_continues_the_mirror(
    tmp_path: Path, together: Together
) -> None:
    program = PROGRAMS / "mirror_on_processes.py"
    together(program, 2, tmp_path, {"own": False, "saves": [1]})
    together(program, 2, tmp_path, {"own": False, "saves": [2, 3], "local": True})
    for lost in ("local-0", "run/1"):
        shutil.rmtree(tmp_path / lost)
    both = together(program, 2, tmp_path, {"own": False, "saves": [], "local": True})
    assert [report.get("start", report) for [report] in both] == [3, 3]
