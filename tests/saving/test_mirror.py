"""A mirror: durable steps are copied to a second place, and a run whose disk is gone goes on."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PROGRAMS
from support.commands import run, run_json
from support.damage import flip_arrays
from support.events import recorded
from support.live import Together
from support.mirrored import opened, require_fetched_to_the_bit, steps_of, trained, wait_for
from support.stages import Gate, at, fail_at
from support.steps import save, save_due, state, two_tiers
from support.waiting import wait_until

from torchax_ckpt import CheckpointOptions, Event, LocalTier, Mirror, TorchaxCheckpointer, policies
from torchax_ckpt.errors import (
    CorruptCheckpointError,
    DirectoryError,
    LeaseError,
    MirrorError,
    PolicyError,
)
from torchax_ckpt.runtime import durable_steps, preemption
from torchax_ckpt.saving.mirroring import copying, mirroring
from torchax_ckpt.storage.directory import lineage
from torchax_ckpt.storage.directory.commit_record import RECORD
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium.local_medium import LocalMedium
from torchax_ckpt.stored import copy

pytest_plugins = ("support.folder_bucket",)


@pytest.fixture(autouse=True)
def _leaves_nothing(impatient: None) -> Iterator[None]:
    yield
    assert durable_steps.listeners == []


@contextlib.contextmanager
def without_lineage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Saves in the block record no lineage, as those of older versions."""
    with monkeypatch.context() as patch:
        patch.setattr(lineage, "for_summary", lambda of: {})
        yield


def slow_link(monkeypatch: pytest.MonkeyPatch, secs: float) -> None:
    """Has each copy take about so long."""
    copy_files = copy.copy_files

    def slowly(source: Any, target: Any, known: Any, on_bytes: Any, **more: Any) -> None:
        copy_files(source, target, known, on_bytes, **more)
        end = time.monotonic() + secs
        while time.monotonic() < end:
            on_bytes(0)
            time.sleep(0.005)

    monkeypatch.setattr(copy, "copy_files", slowly)


# --- copies -------------------------------------------------------------------------------------


def test_a_run_whose_disk_is_gone_goes_on_from_its_mirror(directory: Path, place: Path) -> None:
    require_fetched_to_the_bit(directory, place)
    assert not list(directory.glob("fetching-*"))
    run("verify", place, "--all")


def test_the_mirror_keeps_the_latest_two(directory: Path, place: Path) -> None:
    with opened(directory, place) as ckpt:
        for step in (1, 2, 3, 4):
            save(ckpt, step)
            wait_for(ckpt, step)
    assert steps_of(place) == [3, 4]
    assert ckpt.stats().num_mirrored == 4


def test_the_mirror_stays_within_its_bytes_and_keeps_the_newest(
    directory: Path, mirror: Path
) -> None:
    trained(directory, Mirror(mirror, preservation_policy=policies.PreserveAll()), 1, 2, 3)
    assert 3 in steps_of(mirror)
    trained(directory, Mirror(mirror, max_bytes=1), 4)
    assert steps_of(mirror) == [4]


@pytest.mark.slow  # saves take some milliseconds, and a copy as long as fifty of them
def test_saves_fifty_times_as_fast_as_the_link(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_secs, ages = 1.5, []
    slow_link(monkeypatch, copy_secs)
    keep = policies.LatestN(1)
    with opened(directory, mirror, preservation_policy=keep) as ckpt:
        at("copy to the mirror", lambda: ages.append(ckpt.stats().mirrored_age_secs))
        end = time.monotonic() + 4.5 * copy_secs
        step = 0
        while time.monotonic() < end:
            step += 1
            ckpt.save(step, state=state(step), force=True)
            time.sleep(copy_secs / 50)
        stats = ckpt.stats()
        assert stats.num_durable >= 50
        assert stats.num_mirrored >= 3
        assert stats.num_mirror_failures == 0
        assert stats.mirrored_age_secs is not None
        assert stats.mirrored_age_secs < 2 * copy_secs + 0.5
        # One more step than the policy keeps: the one that is being copied.
        assert len(ckpt.all_steps()) <= 3
    assert max(age for age in ages if age is not None) < 2 * copy_secs + 0.5


def test_a_step_that_is_being_copied_is_kept(directory: Path, mirror: Path) -> None:
    gate = Gate("copy to the mirror", number=1)
    with opened(directory, mirror, preservation_policy=policies.LatestN(1)) as ckpt:
        save(ckpt, 1)
        assert gate.entered.wait(60)
        save(ckpt, 2, 3)
        assert ckpt.all_steps() == [1, 3]
        gate.opened.set()
        wait_for(ckpt, 3)
        wait_until(lambda: ckpt._saver.tier.mirroring._held is None)  # the thread has looked again
        save(ckpt, 4)
        assert ckpt.all_steps() == [4]
    assert [e.step for e in recorded(directory)[0] if e.name == "mirrored"] == [1, 3, 4]


def test_frozen_files_are_sent_once(directory: Path, place: Path) -> None:
    frozen = np.random.default_rng(0).standard_normal(50_000)
    sent: list[int] = []

    def take(event: Event) -> None:
        if event.name == "mirrored":
            sent.append(event.values["sent_bytes"])

    options = CheckpointOptions(reuse=["state.frozen"])
    with opened(directory, place, options=options, on_event=take) as ckpt:
        for step in range(1, 7):
            save(ckpt, step, of={"frozen": frozen, "w": np.full(3, step)})
            wait_for(ckpt, step)
    assert len(sent) == 6
    assert sent[0] > frozen.nbytes
    # On a disk, two copies of frozen arrays take turns; each goes up once.
    assert sum(each > frozen.nbytes for each in sent) <= 2
    shutil.rmtree(directory)
    with opened(directory, place) as ckpt:
        np.testing.assert_array_equal(ckpt.load(6)["frozen"], frozen)


def test_after_going_back_the_new_branch_wins(
    directory: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = policies.PreserveAll()
    trained(directory, place, 1, 2, 3, 4, preservation_policy=keep)
    gate = Gate("copy to the mirror")
    with opened(directory, place, preservation_policy=keep) as ckpt:
        ckpt.restore(2)
        ckpt.save(3, state=state(30), force=True)
        ckpt.wait_until_finished()
        assert gate.entered.wait(60)
        # Until the new step is there, a fetch gives the old branch, and says so.
        other = directory.with_name("other")
        shutil.copytree(place, other.with_name("mirror-now"))
        with opened(other, other.with_name("mirror-now")) as early:
            assert early.latest_step() == 4
        assert "is of the branch that it had left" in caplog.text
        gate.opened.set()
    assert steps_of(place)[-1] == 3
    assert (place / "abandoned-4").is_dir()
    shutil.rmtree(directory)
    caplog.clear()
    with opened(directory, place) as ckpt:
        assert ckpt.load()["w"][0] == 30
    assert "branch" not in caplog.text


# --- failures -----------------------------------------------------------------------------------


def test_a_failing_copy_is_logged_once_and_counted_and_saves_go_on(
    directory: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end = fail_at("copy to the mirror", OSError(5, "no link"))
    with opened(directory, mirror) as ckpt:
        save(ckpt, 1, 2, 3)
        wait_until(lambda: ckpt.stats().num_mirror_failures >= 3)
        said = [r for r in caplog.records if "cannot be copied to the mirror" in r.message]
        assert [r.levelno for r in said if r.levelno > logging.DEBUG] == [logging.WARNING]
        end()
    assert steps_of(mirror)[-1] == 3


def test_close_says_what_is_not_there(
    directory: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at("copy to the mirror", OSError(5, "no link"), number=None)
    trained(directory, mirror, 1)
    assert "the mirror does not have step 1" in caplog.text
    assert "its copies fail; it is empty" in caplog.text


def test_close_waits_no_longer_than_its_timeout(
    directory: Path,
    mirror: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow_link(monkeypatch, 60)
    began = time.monotonic()
    trained(directory, Mirror(mirror, close_timeout_secs=0.3), 1)
    assert time.monotonic() - began < 20
    assert "it did not arrive in time" in caplog.text
    assert steps_of(mirror) == []
    assert steps_of(directory) == [1]


def test_a_damaged_step_is_not_sent_again_and_again(directory: Path, mirror: Path) -> None:
    with opened(directory, mirror) as ckpt:
        at("copy to the mirror", lambda: (directory / "1/summary/data.json").write_text("{"))
        save(ckpt, 1)
        wait_until(lambda: ckpt.stats().num_mirror_failures == 1)
        stages_over = time.monotonic() + 0.2
        wait_until(lambda: time.monotonic() > stages_over)
        assert ckpt.stats().num_mirror_failures == 1


# --- the lease ----------------------------------------------------------------------------------


def test_a_live_holder_of_the_mirror_refuses_attach(directory: Path, place: Path) -> None:
    with opened(directory, place):
        other = TorchaxCheckpointer(directory.with_name("other"), mirror=place)
        with other, pytest.raises(LeaseError, match=re.escape(str(place))):
            other.attach(stateful={})
    assert opened(directory.with_name("other"), place).close() is None


def test_a_lost_lease_is_a_counted_failure_and_nothing_is_committed(
    directory: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate("mark the step", number=2)  # the first is that of the save
    with opened(directory, mirror) as ckpt:
        save(ckpt, 1)
        assert gate.entered.wait(60)
        (mirror / "lease").write_text("{}")
        gate.opened.set()
        wait_until(lambda: ckpt.stats().num_mirror_failures)
        save(ckpt, 2)
    assert steps_of(mirror) == []
    assert steps_of(directory) == [1, 2]


# --- attach -------------------------------------------------------------------------------------


def copies(*places: Path) -> list[Path]:
    """Copies of directories, as other machines have them."""
    made = [place.with_name(f"{place.name}-b") for place in places]
    for place, new in zip(places, made, strict=True):
        shutil.copytree(place, new)
        (new / "lease").unlink(missing_ok=True)
    return made


def test_neither_has_steps(directory: Path, place: Path) -> None:
    with TorchaxCheckpointer(directory, mirror=place) as ckpt:
        assert ckpt.attach(stateful={}) == 0


def test_only_the_run_has_steps(directory: Path, place: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={})
        save(ckpt, 5)
    with TorchaxCheckpointer(directory, mirror=place) as ckpt:
        assert ckpt.attach(stateful={}) == 5
    assert steps_of(place) == [5]


def test_the_run_continues_the_mirror(directory: Path, place: Path) -> None:
    trained(directory, place, 1)
    fail_at("copy to the mirror", OSError(5, "no link"))
    trained(directory, place, 2, 3, 4, preservation_policy=policies.LatestN(1))
    assert 1 not in steps_of(directory)  # the policy has deleted the step that the mirror has
    assert steps_of(place) == [1]
    with TorchaxCheckpointer(directory, mirror=place) as ckpt:
        assert ckpt.attach(stateful={}) == 4


def test_the_mirror_continues_the_run(directory: Path, place: Path) -> None:
    trained(directory, place, 1, 2)
    [other] = copies(directory)
    one = Mirror(place, preservation_policy=policies.LatestN(1))
    trained(other, one, 3, 4)
    assert 2 not in steps_of(place)
    with TorchaxCheckpointer(directory, mirror=place) as ckpt:
        assert ckpt.attach(stateful={}) == 4
        assert ckpt.all_steps() == [1, 2, 4]


@pytest.fixture
def conflict(directory: Path, place: Path) -> Path:
    """Machine A died at step 5, with step 4 in the mirror; B went on to step 7; A is back."""
    trained(directory, place, 4)
    [other] = copies(directory)
    end = fail_at("copy to the mirror", OSError(5, "no link"))
    trained(directory, place, 5)
    end()
    trained(other, place, 6, 7)
    return directory


def test_a_conflict_is_an_error_with_three_ways_out(conflict: Path, place: Path) -> None:
    there = steps_of(place)
    with TorchaxCheckpointer(conflict, mirror=place) as ckpt, pytest.raises(MirrorError) as error:
        ckpt.attach(stateful={})
    for text in ("step 5", "step 7", "on_conflict='mirror'", "on_conflict='local'", "keep both"):
        assert text in str(error.value)
    assert (steps_of(conflict), steps_of(place)) == ([4, 5], there)


def test_in_a_conflict_the_mirror_may_win(conflict: Path, place: Path) -> None:
    with TorchaxCheckpointer(conflict, mirror=Mirror(place, on_conflict="mirror")) as ckpt:
        assert ckpt.attach(stateful={}) == 7
        save(ckpt, 8)
    assert 5 not in steps_of(conflict)
    assert (conflict / "abandoned-5").is_dir()
    trained(conflict, place)  # the next start finds no conflict


def test_in_a_conflict_the_run_may_win(conflict: Path, place: Path) -> None:
    with TorchaxCheckpointer(conflict, mirror=Mirror(place, on_conflict="local")) as ckpt:
        assert ckpt.attach(stateful={}) == 5
        save(ckpt, 6)
    assert steps_of(place)[-1] == 6
    assert (place / "abandoned-7").is_dir()
    shutil.rmtree(conflict)
    with opened(conflict, place) as ckpt:
        assert ckpt.latest_step() == 6
        assert ckpt.load()["w"][0] == 6


def test_a_damaged_newest_step_of_the_mirror_is_skipped(directory: Path, mirror: Path) -> None:
    with opened(directory, mirror) as ckpt:
        for step in (1, 2):
            save(ckpt, step)
            wait_for(ckpt, step)
    shutil.rmtree(directory)
    flip_arrays(mirror / "2")
    with (
        TorchaxCheckpointer(directory, mirror=mirror) as ckpt,
        pytest.warns(UserWarning, match="skipping a damaged step of the mirror: .*step 2"),
    ):
        assert ckpt.attach(stateful={}) == 1
    assert steps_of(mirror) == [1, 2]
    shutil.rmtree(directory)
    with (
        TorchaxCheckpointer(directory, mirror=mirror) as ckpt,
        pytest.warns(UserWarning, match="step 2"),
    ):
        assert ckpt.attach(stateful={}) == 1


def test_a_mirror_whose_steps_are_all_damaged_is_no_new_run(directory: Path, mirror: Path) -> None:
    trained(directory, mirror, 1)
    shutil.rmtree(directory)
    flip_arrays(mirror / "1")
    with (
        TorchaxCheckpointer(directory, mirror=mirror) as ckpt,
        pytest.warns(UserWarning, match="step 1"),
        pytest.raises(CorruptCheckpointError, match="all steps of the mirror are damaged"),
    ):
        ckpt.attach(stateful={})


def test_a_mirror_that_cannot_be_listed_is_no_new_run(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(directory, mirror, 1)
    shutil.rmtree(directory)
    list_all = RunDirectory.steps

    def unreachable(run: RunDirectory) -> Any:
        if Path(run.path) == mirror:
            raise DirectoryError("cannot list it now", path=run.path)
        return list_all(run)

    with TorchaxCheckpointer(directory, mirror=mirror) as ckpt:
        monkeypatch.setattr(RunDirectory, "steps", unreachable)
        with pytest.raises(DirectoryError, match="cannot list it now"):
            ckpt.attach(stateful={})


@pytest.mark.parametrize("tail", ["cut", "damaged"])
def test_an_interrupted_fetch_goes_on(
    directory: Path, place: Path, tail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(directory, place, 1)
    shutil.rmtree(directory)
    copy_file = copy._copy_file

    def cut(source: Any, target: Any, name: str, *more: Any) -> None:
        copy_file(source, target, name, *more)
        if "/d/" in name:
            content = bytearray((target / name).read_bytes())
            if tail == "damaged":
                content[100] ^= 1
            (target / name).write_bytes(content[: len(content) - 50])
            raise OSError(5, "the link is down")

    monkeypatch.setattr(copy, "_copy_file", cut)
    with TorchaxCheckpointer(directory, mirror=place) as ckpt, pytest.raises(DirectoryError):
        ckpt.attach(stateful={})
    [left] = directory.glob("fetching-*")
    num_left = sum(path.stat().st_size for path in left.rglob("*") if path.is_file())
    got: list[int] = []

    def counted(source: Any, target: Any, name: str, known: Any, on_bytes: Any, *a: Any) -> None:
        def on(num_bytes: int) -> None:
            got.append(num_bytes)
            on_bytes(num_bytes)

        copy_file(source, target, name, known, on, *a)

    monkeypatch.setattr(copy, "_copy_file", counted)
    with TorchaxCheckpointer(directory, mirror=place) as ckpt:
        assert ckpt.attach(stateful={}) == 1
        assert ckpt.verify() == 1
    total = sum(p.stat().st_size for p in (place / "1").rglob("*") if p.is_file())
    assert (sum(got) < total - num_left + 2000) == (tail == "cut")
    assert not list(directory.glob("fetching-*"))


def test_the_first_save_without_attach_does_not_pass_over_the_mirror(
    directory: Path, mirror: Path
) -> None:
    trained(directory, mirror, 5)
    shutil.rmtree(directory)
    with (
        TorchaxCheckpointer(directory, mirror=mirror) as ckpt,
        pytest.raises(MirrorError, match="call attach before the first save"),
    ):
        ckpt.save(1, state=state(1), force=True)
    assert steps_of(mirror) == [5]


def test_a_run_that_does_not_resume_abandons_the_mirror_s_steps(
    directory: Path, place: Path
) -> None:
    trained(directory, place, 5)
    shutil.rmtree(directory)
    with TorchaxCheckpointer(directory, mirror=place) as ckpt:
        assert ckpt.attach(stateful={}, resume=False) == 0
        save(ckpt, 1)
    assert steps_of(place) == [1]
    assert (place / "abandoned-5").is_dir()


# --- going back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["damaged", "restored", "deleted"])
def test_a_run_that_falls_back_to_a_mirrored_step_leaves_the_mirror_as_it_is(
    directory: Path, place: Path, how: str
) -> None:
    with opened(directory, place) as ckpt:
        for step in (4, 5):
            save(ckpt, step)
            wait_for(ckpt, step)
        if how == "deleted":
            ckpt.delete(5)
    if how == "damaged":
        flip_arrays(directory / "5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = opened(directory, place)
    with again as ckpt:
        if how == "restored":
            ckpt.restore(4)
    assert ckpt.stats().num_mirrored == 0
    assert steps_of(place) == [4, 5]
    assert not (place / "left").exists()


def test_an_older_step_that_is_only_looked_at_leaves_the_mirror_as_it_is(
    directory: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchax_ckpt")
    keep = policies.PreserveAll()
    trained(directory, place, 1, 2, 3, 4, preservation_policy=keep)
    before = steps_of(place)
    assert 1 not in before
    with opened(directory, place, preservation_policy=keep) as ckpt:
        ckpt.restore(1)
    assert steps_of(place) == before
    assert "the mirror has the newest step, 4" in caplog.text
    with opened(directory, place, preservation_policy=keep) as ckpt:
        ckpt.restore(1)
        ckpt.restore(4)
        save(ckpt, 5)
    assert steps_of(place) == [4, 5]


@pytest.mark.parametrize("how", ["restored", "begun anew", "damaged there"])
def test_a_run_that_left_the_mirror_s_step_and_was_killed_goes_on(
    directory: Path, place: Path, how: str
) -> None:
    with opened(directory, place) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
            wait_for(ckpt, step)
    if how != "restored":
        shutil.rmtree(directory)
    if how == "damaged there":
        flip_arrays(place / "3")
    end = fail_at("copy to the mirror", OSError(5, "no link"))
    with TorchaxCheckpointer(directory, mirror=place) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt.attach(stateful={}, resume=how != "begun anew")
        if how == "restored":
            ckpt.restore(1)
        save(ckpt, 3, 4, of=lambda step: state(10 * step))
    assert (place / "left").exists()
    end()
    with opened(directory, place) as ckpt:
        assert ckpt.latest_step() == 4
    assert not (place / "left").exists()
    shutil.rmtree(directory)
    with opened(directory, place) as ckpt:
        assert ckpt.load()["w"][0] == 40


def test_a_copy_counts_although_the_steps_that_it_abandons_stay(
    directory: Path, place: Path
) -> None:
    keep = policies.PreserveAll()
    trained(directory, place, 1, 2, 3, preservation_policy=keep)
    gate = Gate("copy to the mirror")
    with opened(directory, place, preservation_policy=keep) as ckpt:
        ckpt.restore(2)
        save(ckpt, 3, of=state(30))
        assert gate.entered.wait(60)
        fail_at("set steps aside", OSError(5, "no link"), number=1)
        gate.opened.set()
    assert steps_of(place)[-1] == 3
    shutil.rmtree(directory)
    with opened(directory, place) as ckpt:
        assert ckpt.load()["w"][0] == 30


@pytest.mark.parametrize("choice", ["error", "mirror", "local"])
def test_steps_without_a_lineage_do_not_lead_to_those_that_have_one(
    directory: Path, place: Path, choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_lineage(monkeypatch), TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={})
        save(ckpt, 1)
    trained(directory.with_name("other"), place, 7)
    if choice == "error":
        run("mirror", directory, place, "--once", code=2)
        run("fetch", place, directory, code=2)
        with pytest.raises(MirrorError, match="gone different ways"):
            opened(directory, place)
    else:
        with opened(directory, Mirror(place, on_conflict=choice)) as ckpt:
            assert ckpt.latest_step() == (7 if choice == "mirror" else 1)
        assert steps_of(place) == [ckpt.latest_step()]


def test_a_step_without_a_lineage_leads_to_the_one_that_was_saved_after_it(
    directory: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_lineage(monkeypatch):
        trained(directory, place, 1)
    with TorchaxCheckpointer(directory, keep=1) as ckpt:
        ckpt.attach(stateful={})
        save(ckpt, 2, 3)
    with opened(directory, place) as ckpt:
        assert (ckpt.all_steps(), steps_of(place)[0]) == ([3], 1)
    assert steps_of(place) == [1, 3]


def test_a_session_without_the_mirror_goes_on_with_the_lineage(
    directory: Path, place: Path
) -> None:
    trained(directory, place, 1)
    with TorchaxCheckpointer(directory, keep=1) as ckpt:
        ckpt.attach(stateful={})
        save(ckpt, 2, 3)
    with opened(directory, place) as ckpt:
        assert ckpt.latest_step() == 3
    assert steps_of(place) == [1, 3]


def test_steps_that_the_mirror_has_left_lose_without_a_conflict(
    directory: Path, place: Path
) -> None:
    keep = policies.PreserveAll()
    trained(directory, place, 1, 2, 3, preservation_policy=keep)
    [other] = copies(directory)
    with opened(other, place, preservation_policy=keep) as ckpt:
        ckpt.restore(1)
        save(ckpt, 2, of=state(20))
    with opened(directory, place) as ckpt:
        assert ckpt.load()["w"][0] == 20
        assert ckpt.all_steps() == [1, 2]
    assert (directory / "abandoned-3").is_dir()


def test_a_mirror_with_abandoned_steps_only_is_no_new_run(directory: Path, place: Path) -> None:
    trained(directory, place, 1)
    (place / "1").rename(place / "abandoned-1")
    shutil.rmtree(directory)
    with pytest.raises(MirrorError, match="all steps of the mirror are abandoned"):
        opened(directory, place)


def test_the_mirror_does_not_win_over_a_step_of_the_local_tier_only(
    directory: Path, place: Path, tmp_path: Path
) -> None:
    trained(directory, place, 4)
    [other] = copies(directory)
    trained(other, place, 6, 7)
    mirror = Mirror(place, on_conflict="mirror")
    with two_tiers(directory, tmp_path / "tier") as ckpt:
        assert ckpt.attach(stateful={}) == 4
        save_due(ckpt, 5)
    assert (tmp_path / "tier" / "5").is_dir()
    with (
        two_tiers(directory, tmp_path / "tier", mirror=mirror) as ckpt,
        pytest.raises(MirrorError, match="would delete this step"),
    ):
        ckpt.attach(stateful={})
    assert (tmp_path / "tier" / "5").is_dir()
    shutil.rmtree(tmp_path / "tier")
    with two_tiers(directory, tmp_path / "tier", mirror=mirror) as ckpt:
        assert ckpt.attach(stateful={}) == 7


# --- whole steps --------------------------------------------------------------------------------


def test_a_link_that_fails_leaves_no_file_in_two_steps(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_over, frozen = LocalMedium.take_over, np.arange(50_000.0)

    def one_of(self: LocalMedium, source: Path, target: Path, names: Any = None) -> None:
        if mirror not in target.parents:
            return take_over(self, source, target, names)
        (target / "d").mkdir(parents=True)
        file = next((source / "d").iterdir())
        os.link(file, target / "d" / file.name)
        raise OSError(5, "no link")

    monkeypatch.setattr(LocalMedium, "take_over", one_of)
    options = CheckpointOptions(reuse=["state.frozen"])
    all_of_them = Mirror(mirror, preservation_policy=policies.PreserveAll())
    with opened(directory, all_of_them, options=options) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, of={"frozen": frozen, "w": np.full(3, step)})
            wait_for(ckpt, step)
    files = [path for path in mirror.rglob("*") if path.is_file()]
    assert [path for path in files if path.stat().st_nlink > 1] == []
    run("verify", mirror, "--all")


def test_a_step_that_is_replaced_while_it_is_copied_does_not_arrive(
    directory: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(directory.with_name("other"), directory.with_name("elsewhere"), 1)
    copy_files = copy.copy_files
    replaced: list[Path] = []

    def replace(source: Any, target: Any, known: Any, on_bytes: Any, but: Any, **more: Any) -> None:
        """Copies the commit record only when another step has the name."""
        if replaced:
            return copy_files(source, target, known, on_bytes, but=but, **more)
        copy_files(source, target, known, on_bytes, but={*but, RECORD}, **more)
        replaced.append((directory / "1").rename(directory / "was-1"))
        (directory.with_name("other") / "1").rename(directory / "1")
        (target / RECORD).write_bytes((source / RECORD).read_bytes())
        return None

    monkeypatch.setattr(copy, "copy_files", replace)
    with opened(directory, place) as ckpt:
        save(ckpt, 1)
        wait_until(lambda: replaced)
        save(ckpt, 2)
        wait_for(ckpt, 2)
        assert ckpt.stats().num_mirrored == 1
    assert steps_of(place) == [2]
    run("verify", place, "--all")


# --- the lease, again ---------------------------------------------------------------------------


def test_a_step_that_arrived_although_its_copy_failed_is_of_this_program(
    directory: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch_to, failures = copying._branch_to, itertools.count()

    def lost(*arguments: Any) -> Any:
        if next(failures) == 1:
            raise OSError(5, "the listing was lost")
        return branch_to(*arguments)

    monkeypatch.setattr(copying, "_branch_to", lost)
    keep = policies.PreserveAll()
    with opened(directory, place, preservation_policy=keep) as ckpt:
        save(ckpt, 5)
        wait_for(ckpt, 5)
        save(ckpt, 10)
        wait_until(lambda: ckpt.stats().num_mirror_failures == 1)
        ckpt.restore(5)
        save(ckpt, 6)
    assert steps_of(place) == [5, 6]


def test_attach_can_be_tried_again_after_a_lease_error(directory: Path, mirror: Path) -> None:
    trained(directory, mirror, 5)
    with TorchaxCheckpointer(directory) as other:
        other.attach(stateful={})
        save(other, 6)
        ckpt = TorchaxCheckpointer(directory, mirror=mirror)
        with pytest.raises(LeaseError):
            ckpt.attach(stateful={})
        save(other, 7)
    with ckpt:
        assert ckpt.attach(stateful={}) == 7


@pytest.mark.parametrize("what", ["lease", "folder"])
def test_a_mirror_that_somebody_has_removed_is_taken_again(
    directory: Path, mirror: Path, what: str
) -> None:
    with opened(directory, mirror) as ckpt:
        save(ckpt, 1)
        wait_for(ckpt, 1)
        (mirror / "lease").unlink() if what == "lease" else shutil.rmtree(mirror)
        save(ckpt, 2)
        wait_until(lambda: ckpt.stats().mirrored_step == 2, 10)
        assert (mirror / "lease").exists()
    assert steps_of(mirror) == ([1, 2] if what == "lease" else [2])
    assert not (mirror / "lease").exists()


def test_steps_of_another_program_are_not_abandoned(directory: Path, mirror: Path) -> None:
    with opened(directory, Mirror(mirror, close_timeout_secs=1)) as ckpt:
        save(ckpt, 1)
        wait_for(ckpt, 1)
        (mirror / "lease").unlink()
        trained(directory.with_name("other"), mirror, 9)
        save(ckpt, 2)
        wait_until(lambda: ckpt.stats().num_mirror_failures >= 2, 10)
    assert steps_of(mirror) == [1, 9]


def test_a_copy_that_outlasts_close_releases_the_lease(
    directory: Path,
    mirror: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mirroring, "_DROPPING_SECS", 0.1)
    settings, gate = Mirror(mirror, close_timeout_secs=0.1), Gate("mark the step", number=2)
    with opened(directory, settings) as ckpt:
        save(ckpt, 1)
        assert gate.entered.wait(60)
    assert "the mirror does not have step 1" in caplog.text
    with pytest.raises(LeaseError):
        opened(directory.with_name("other"), mirror)
    gate.opened.set()
    wait_until(lambda: not (mirror / "lease").exists(), 10)
    opened(directory.with_name("other"), mirror).close()


def test_a_collected_checkpointer_gives_its_mirror_to_the_next(
    directory: Path, mirror: Path
) -> None:
    ckpt = TorchaxCheckpointer(directory, mirror=mirror)
    save(ckpt, 1)
    cycle: Any = [ckpt]
    cycle.append(cycle)
    del ckpt, cycle
    with TorchaxCheckpointer(directory, mirror=mirror) as ckpt:
        save(ckpt, 2)
    assert steps_of(mirror)[-1] == 2


def test_without_a_thread_close_says_what_is_missing(
    directory: Path,
    mirror: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refused:
        def __init__(self, *_: Any) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(mirroring, "Task", Refused)
    trained(directory, mirror, 1)
    assert "the mirror does not have step 1" in caplog.text
    assert "no thread has copied it" in caplog.text
    assert not (mirror / "lease").exists()


def test_a_sigterm_while_close_waits_for_the_mirror_ends_the_wait(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_link(monkeypatch, 60)
    left = iter([math.inf, math.inf, 1.5])
    monkeypatch.setattr(preemption.Preemption, "left_secs", property(lambda _: next(left, 0.0)))
    began = time.monotonic()
    trained(directory, Mirror(mirror, close_timeout_secs=30), 1)
    assert time.monotonic() - began < 15


def test_what_is_being_copied_at_the_program_s_end_is_named(directory: Path, mirror: Path) -> None:
    gate = Gate("copy to the mirror")
    with opened(directory, mirror) as ckpt:
        save(ckpt, 1)
        assert gate.entered.wait(60)
        assert ckpt._closing.running() == ["the copy of step 1 to the mirror"]
        gate.opened.set()


def test_a_damaged_newest_step_goes_before_the_only_sound_one(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1, 2)
    run_directory = RunDirectory(directory)
    run_directory.claim()
    run_directory.verified.note(run_directory.steps()[-1], is_sound=False)
    copying.prune(run_directory, Mirror("unused", max_bytes=1))
    run_directory.release()
    assert steps_of(directory) == [1]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"max_bytes": 0},
        {"max_bytes": 1.5},
        {"close_timeout_secs": None},
        {"close_timeout_secs": True},
        {"on_conflict": "ours"},
    ],
)
def test_values_that_no_mirror_has_are_refused(given: Any, mirror: Path) -> None:
    with pytest.raises(ValueError, match=f"Mirror: {next(iter(given))}: expected"):
        Mirror(mirror, **given)
    with pytest.raises(TypeError, match="Mirror: url"):
        Mirror(3)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="preservation_policy"):
        TorchaxCheckpointer(mirror.with_name("r"), mirror=Mirror(mirror, preservation_policy=2))


@pytest.mark.parametrize("where", ["run", "run/mirror", ".", "link", "tier", "tier/in"])
def test_a_mirror_that_is_not_apart_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path / "run", tmp_path / "link")
    local = LocalTier(tmp_path / "tier")
    with pytest.raises(MirrorError, match="apart from the run's"):
        TorchaxCheckpointer(tmp_path / "run", local=local, mirror=tmp_path / where)


def test_a_mirror_is_not_for_readers(directory: Path, mirror: Path) -> None:
    options = CheckpointOptions(read_only=True)
    with pytest.raises(MirrorError, match="read_only"):
        TorchaxCheckpointer(directory, mirror=mirror, options=options)


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left_secs", "is_dropped"), [(3.0, True), (60.0, False)])
def test_after_sigterm_the_copy_in_flight_is_dropped_if_only_the_last_step_fits(
    directory: Path,
    mirror: Path,
    left_secs: float,
    is_dropped: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "torchax_ckpt")
    copied: list[int] = []
    with opened(
        directory,
        mirror,
        on_event=lambda e: copied.append(e.step) if e.name == "mirrored" else None,
    ) as ckpt:
        save(ckpt, 1)
        wait_for(ckpt, 1)
        ours = ckpt._saver.tier.mirroring
        slow_link(monkeypatch, 0.6)
        save(ckpt, 2)
        wait_until(lambda: ours._copy is not None and ours._copy.sent_bytes)
        ours.copy_secs = 0.6
        monkeypatch.setattr(mirroring.Copy, "secs_left", property(lambda copy: 0.6))
        monkeypatch.setattr(preemption.Preemption, "left_secs", property(lambda _: left_secs))
        save(ckpt, 3)
    assert copied == ([1, 3] if is_dropped else [1, 2, 3])
    assert ("step 2 is not copied to the end" in caplog.text) == is_dropped
    assert "the mirror has the newest step, 3" in caplog.text


def test_the_deadline_reckons_with_a_copy(directory: Path, mirror: Path) -> None:
    with opened(directory, mirror) as ckpt:
        assert ckpt._run._longest_secs() is None
        save(ckpt, 1)
        wait_for(ckpt, 1)
        ckpt._saver.tier.mirroring.copy_secs = 100.0
        longest = ckpt._run._longest_secs()
        assert longest is not None
        assert 100 < longest < 110


# --- what is shown ------------------------------------------------------------------------------


def test_the_newest_mirrored_step_is_shown(directory: Path, mirror: Path) -> None:
    trained(directory, mirror, 7)
    shutil.rmtree(directory)
    with opened(directory, mirror) as ckpt:  # also after a restart
        assert ckpt.stats().mirrored_step == 7
    shutil.rmtree(mirror)  # without it, too
    assert "newest step in the mirror: 7, " in run("ls", directory)
    assert run_json("ls", directory)["mirrored"] == 7


# --- commands -----------------------------------------------------------------------------------


def test_a_run_that_trains_elsewhere_is_mirrored_and_fetched(
    directory: Path, place: Path, tmp_path: Path
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1, 2)
        assert "step 2: copied" in run("mirror", directory, place, "--once")
        assert "nothing to copy" in run("mirror", directory, place, "--once")
        save(ckpt, 3)
    run("mirror", directory, place, "--once")
    new = tmp_path / "new"
    assert "fetched step 3" in run("fetch", place, new)
    assert "nothing to fetch" in run("fetch", place, new)
    np.testing.assert_array_equal(TorchaxCheckpointer(new).load()["w"], state(3)["w"])
    with TorchaxCheckpointer(new, keep=1) as ckpt:
        save(ckpt, 4, 5)
    run("mirror", new, place, "--once")
    assert "fetched step 5" in run("fetch", place, directory)


def test_the_command_refuses_a_mirror_that_the_run_does_not_continue(
    directory: Path, mirror: Path, tmp_path: Path
) -> None:
    for path in (directory, tmp_path / "other"):
        with TorchaxCheckpointer(path) as ckpt:
            save(ckpt, 1)
    run("mirror", directory, mirror, "--once")
    run("mirror", tmp_path / "other", mirror, "--once", code=2)
    run("fetch", mirror, tmp_path / "other", code=2)
    run("mirror", directory, "gs://me:secret@bucket/x", code=2)
    run("mirror", directory, directory / "in", code=2)
    run("fetch", tmp_path / "none", directory, code=2)


def saved(directory: Path, step: int) -> None:
    """Saves a step in a program that leaves SIGTERM, which is for the command, alone."""
    deaf = CheckpointOptions(preemption_grace_secs=None)
    with TorchaxCheckpointer(directory, options=deaf) as ckpt:
        save(ckpt, step)


def copied_then(directory: Path, mirror: Path) -> None:
    """Has step 2 saved when the command has copied step 1, and the command end after that."""

    def act() -> None:
        if steps_of(mirror) == [1]:
            saved(directory, 2)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    at("copy to the mirror", act, when="after")


def test_the_command_goes_on_until_it_is_ended(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchax_ckpt.cli.mirror._POLL_SECS", 0.02)
    saved(directory, 1)
    copied_then(directory, mirror)
    run("mirror", directory, mirror)
    assert steps_of(mirror) == [1, 2]


def test_the_command_ends_although_the_mirror_does_not_answer(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "_DROPPING_SECS", 0.1)
    saved(directory, 1)
    gate = Gate("copy to the mirror")

    def interrupt() -> None:
        assert gate.entered.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    run("mirror", directory, mirror)  # not after ``close_timeout_secs``, ten minutes
    assert not gate.opened.is_set()
    thread.join()
    gate.opened.set()
    wait_until(lambda: not (mirror / "lease").exists())
    assert steps_of(mirror) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_single_copy_that_is_ended_says_so(
    directory: Path, mirror: Path, number: signal.Signals, code: int
) -> None:
    saved(directory, 1)
    at("copy to the mirror", lambda: os.kill(os.getpid(), number))
    run("mirror", directory, mirror, "--once", code=code)
    assert steps_of(mirror) == []
    assert not (mirror / "lease").exists()


def test_the_command_survives_what_fails_and_goes_on(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchax_ckpt.cli.mirror._POLL_SECS", 0.02)
    steps, failures = RunDirectory.steps, [DirectoryError("not now"), CorruptCheckpointError("bad")]

    def failing(of_run: RunDirectory) -> Any:
        if (mirror / "1").is_dir() and Path(of_run.path) == directory and failures:
            raise failures.pop()
        return steps(of_run)

    monkeypatch.setattr(RunDirectory, "steps", failing)
    saved(directory, 1)
    copied_then(directory, mirror)
    run("mirror", directory, mirror)
    assert failures == []
    assert steps_of(mirror) == [1, 2]


def test_the_command_never_sends_an_older_step(directory: Path, place: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1, 2, 3)
        run("mirror", directory, place, "--once")
        save(ckpt, 4)
        run("mirror", directory, place, "--once")
        ckpt.delete(4)
        assert steps_of(place) == [3, 4]
    run("mirror", directory, place, "--once", code=2)  # the mirror has step 4, which is gone here
    assert steps_of(place) == [3, 4]


# --- several processes --------------------------------------------------------------------------


@pytest.mark.slow
def test_process_0_mirrors_what_all_processes_save(tmp_path: Path, together: Together) -> None:
    program = PROGRAMS / "mirror_on_processes.py"
    both = together(program, 2, tmp_path, {"own": False, "saves": [1, 2]})
    [first], [second] = both
    assert (first["start"], first["steps"], first["num_mirrored"] >= 1) == (0, [1, 2], True)
    assert second == {"start": 0, "steps": [1, 2], "num_mirrored": 0}
    shutil.rmtree(tmp_path / "run")
    slowly = {"own": False, "saves": [], "slow_secs": 13, "timeout_secs": 5}
    both = together(program, 2, tmp_path, slowly)
    assert [report["start"] for [report] in both] == [2, 2]
    assert [report["steps"] for [report] in both] == [[2], [2]]


@pytest.mark.slow
def test_processes_with_directories_of_their_own_have_no_mirror(
    tmp_path: Path, together: Together
) -> None:
    program = PROGRAMS / "mirror_on_processes.py"
    for [report] in together(program, 2, tmp_path, {"own": True, "saves": [1]}):
        assert report["kind"] == "MirrorError"
        assert "expected one directory that all processes share" in report["message"]
    assert steps_of(tmp_path / "mirror") == []


def test_looking_at_an_older_step_takes_nothing_from_the_mirror(
    directory: Path, mirror: Path
) -> None:
    with TorchaxCheckpointer(directory, keep=9) as ckpt:
        ckpt.attach(stateful={})
        save(ckpt, 1, 2)
    gate = Gate("copy to the mirror", number=2)
    with opened(directory, mirror, keep=9) as ckpt:
        wait_for(ckpt, 2)
        save(ckpt, 3)
        assert gate.entered.wait(60)
        save(ckpt, 4)
        assert ckpt.restore(1).step == 1  # of before the mirror, while step 3 is being copied
        gate.opened.set()
    assert steps_of(mirror)[-1] == 4
    with opened(directory, mirror, keep=9) as ckpt:
        ckpt.restore(2)
    assert steps_of(mirror)[-1] == 4


def test_a_step_from_before_the_mirror_abandons_no_newer_one_there(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_lineage(monkeypatch), TorchaxCheckpointer(directory, keep=9) as ckpt:
        ckpt.attach(stateful={})
        save(ckpt, 1, 2, 3)
    opened(directory, mirror, keep=9).close()
    assert steps_of(mirror) == [3]
    for place in (directory, mirror):
        (place / "3/manifest/data.json").write_text("{")
    too, skipped = "the mirror has this step damaged too", "skipping an unreadable checkpoint"
    with pytest.warns(UserWarning, match=too), pytest.warns(UserWarning, match=skipped):
        opened(directory, mirror, keep=9).close()
    assert steps_of(mirror) == [3]


def test_a_step_that_becomes_durable_while_the_thread_looks_is_sent_before_the_end(
    directory: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchax_ckpt")
    choose, calls, has_chosen = mirroring.Mirroring.choose, itertools.count(), threading.Event()

    def late(self: mirroring.Mirroring) -> Any:
        chosen = choose(self)
        if next(calls) == 1:
            has_chosen.set()
            wait_until(lambda: self._closing.is_set)
        return chosen

    monkeypatch.setattr(mirroring.Mirroring, "choose", late)
    with opened(directory, mirror) as ckpt:
        assert f"new mirror in {mirror}" in caplog.text
        save(ckpt, 1)
        assert has_chosen.wait(60)
        save(ckpt, 2)
    assert steps_of(mirror)[-1] == 2
