"""Published folders: which steps, complete or absent, for how long, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from etils import epath
from support.damage import flip_arrays, flip_bit
from support.steps import save_states

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import DirectoryError, LeaseError, MismatchError, SelectionError
from torchax_ckpt.publishing import follower, published_folders
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.publishing.follower import Follower
from torchax_ckpt.publishing.published_folders import CONTROL
from torchax_ckpt.storage.arrays import read_arrays
from torchax_ckpt.storage.medium import fsync, medium
from torchax_ckpt.storage.medium.local_medium import LocalMedium

FORM = FolderForm(format="safetensors", at="state")
LOSSES = {100: 0.5, 200: 0.3, 300: 0.9, 400: 0.1}


def state(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).standard_normal((64, 64))}


def save(directory: Path, *steps: int) -> Path:
    metrics = {step: {"loss": LOSSES.get(step, 1.0)} for step in steps}
    return save_states(directory, {step: state(step) for step in steps}, metrics)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "run", *LOSSES)


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def publish(run: Path, out: Path, form: FolderForm = FORM, **settings: Any) -> int | None:
    """One program that publishes what is due; returns the step."""
    with Follower(run, out, form, **settings) as following:
        new = following.publish_due()
    return None if new is None else new.step


def in_out(out: Path) -> list[str]:
    return sorted(p.name for p in out.iterdir() if p.name not in (CONTROL, "latest"))


def latest(out: Path) -> Path:
    return out / (out / "latest").read_text().strip()


def step_in(folder: Path) -> int:
    """Which step's bits a folder has."""
    found = safetensors.numpy.load_file(folder / "model.safetensors")["w"].tobytes()
    return next(s for s in (*LOSSES, 150, 500, 600) if state(s)["w"].tobytes() == found)


# --- which steps ---


def test_multiples_are_published_or_the_first_steps_after_them(run: Path, out: Path) -> None:
    for step in (200, 300, 400):
        shutil.move(run / str(step), run.parent)
    assert publish(run, out, every=150) is None
    for step, expected in ((200, 200), (300, 300), (400, None)):
        shutil.move(run.parent / str(step), run)
        assert publish(run, out, every=150) == expected
        assert publish(run, out, every=150) is None
    assert in_out(out) == ["step-200", "step-300"]
    assert (out / "latest").read_text() == "step-300\n"
    assert [step_in(out / name) for name in in_out(out)] == [200, 300]
    assert publish(run, out.parent / "late", every=150) == 300  # also if a later step is there


def test_the_end_of_a_run_is_published_in_any_case(run: Path, out: Path) -> None:
    with Follower(run, out, FORM, every=500) as following:
        assert following.publish_due() is None
        new = following.publish_due(is_at_end=True)
        assert new is not None
        assert (new.step, new.path) == (400, out / "step-400")
        assert following.publish_due(is_at_end=True) is None


@pytest.mark.parametrize(
    ("mode", "expected"), [("min", [100, 200, None, 400]), ("max", [100, None, 300, None])]
)
def test_each_new_best_step_is_published(
    run: Path, out: Path, mode: Any, expected: list[int | None]
) -> None:
    waiting = [(run / str(step)).rename(run.parent / str(step)) for step in LOSSES]
    published = []
    for path in waiting:
        shutil.move(path, run)
        assert publish(run, out, best=f"accuracy:{mode}") is None
        published.append(publish(run, out, best=f"loss:{mode}"))
    assert published == expected
    assert publish(run, out, best=f"loss:{mode}") is None


def test_a_metric_is_ranked_as_the_run_ranks_it(directory: Path, out: Path) -> None:
    best = policies.BestN(metric="accuracy", mode="max", n=9)
    metrics = {step: {"accuracy": value} for step, value in ((1, 0.2), (2, 0.9), (3, 0.5))}
    states = {step: state(step) for step in metrics}
    save_states(directory, states, metrics, preservation_policy=best)
    assert publish(directory, out, best="accuracy") == 2
    assert publish(directory, out, best="accuracy:min") == 1


def test_a_misspelled_metric_is_said_once(
    run: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Follower(run, out, FORM, best="losss") as following:
        assert following.publish_due() is following.publish_due() is None
    [said] = caplog.messages
    assert "has the metric 'losss', by which they are ranked. They have 'loss'." in said


def test_a_run_that_went_back_publishes_its_new_branch(run: Path, out: Path) -> None:
    assert publish(run, out, every=50) == 400
    old = latest(out)
    for step in (200, 300, 400):
        shutil.rmtree(run / str(step))
    save(run, 150)
    assert publish(run, out, every=50) == 150  # 400 was left, and counts no more
    shutil.rmtree(run / "150")
    save(run, 400)
    assert publish(run, out, every=50) == 400
    assert in_out(out) == ["step-150", "step-400", "step-400-2"]
    assert latest(out).name == "step-400-2"
    assert old.exists()


# --- for how long ---


def test_a_replaced_folder_lives_for_its_grace(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(published_folders, "_now_secs", lambda: now)
    monkeypatch.setattr(follower, "GRACE_SECS", 60)
    steps = [run / str(step) for step in (200, 300, 400)]
    for path in steps:
        path.rename(run.parent / path.name)
    with Follower(run, out, FORM, keep=2) as following:
        following.publish_due()
        for path in steps[:2]:
            (run.parent / path.name).rename(path)
            following.publish_due()
        now += 59
        following.publish_due()
        assert in_out(out) == ["step-100", "step-200", "step-300"]
    with Follower(run, out, FORM, keep=2) as following:  # another program counts on
        now += 1
        following.publish_due()
        assert in_out(out) == ["step-200", "step-300"]
        now += 1000  # those that are kept stay for ever
        following.publish_due()
        assert in_out(out) == ["step-200", "step-300"]
        assert sorted(os.listdir(out / CONTROL)) == ["lease", "record.json"]


# --- what folders share ---


def test_files_with_the_same_bytes_are_stored_once_and_never_changed(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "GRACE_SECS", 0)
    shutil.rmtree(run)
    keep, options = policies.PreserveAll(), CheckpointOptions(reuse=["state/b"])
    form = FolderForm(format="safetensors", at="state", max_shard_bytes=1 << 30)
    with (
        TorchaxCheckpointer(run, preservation_policy=keep, options=options) as ckpt,
        Follower(run, out, form, keep=1) as following,
    ):
        numbers = []
        for step in range(1, 6):
            trained = {"a": np.full(5000, float(step)), "c": np.full(99, float(step))}
            ckpt.save(step, state={**trained, "b": np.arange(2.0**17)}, force=True)
            ckpt.wait_until_finished()
            assert following.publish_due() is not None
            files = sorted(latest(out).glob("*.safetensors"))
            if step == 4:  # damage to what is stored once goes no further
                flip_bit(files[0], 999)
            numbers.append([path.stat().st_ino for path in files])
    frozen, found = (safetensors.numpy.load_file(path) for path in files)
    assert {n: a.tobytes() for n, a in found.items()} == {
        n: a.tobytes() for n, a in trained.items()
    }
    assert frozen["b"].tobytes() == np.arange(2.0**17).tobytes()
    assert in_out(out) == ["step-5"]
    third, fourth, fifth = numbers[2:]
    assert third[0] == fourth[0] != fifth[0]
    assert third[1] != fourth[1] != fifth[1]
    assert sorted(p.suffix for p in latest(out).iterdir()) == [".json"] * 2 + [".safetensors"] * 2


# --- what goes wrong ---


def test_a_step_deleted_while_it_is_read_is_skipped(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "large"
    states = {s: {n: np.full((512 + n, 99), s + n) for n in range(4)} for s in (100, 200)}
    save_states(run, states)

    def prune(self: Follower, num_bytes: int) -> None:
        if (run / "200").exists():
            assert list((out / CONTROL).glob("writing-*/*"))
            (run / "200").rename(run / "deleting-200")
            shutil.rmtree(run / "deleting-200")

    form = FolderForm(format="safetensors", at="state")
    monkeypatch.setattr(read_arrays, "STREAMED_BYTES", 1)  # reads piece by piece
    monkeypatch.setattr(Follower, "_wrote", prune)
    with Follower(run, out, form) as following:
        new = following.publish_due()
    assert caplog.text.count("step 200 was deleted meanwhile") == 1
    assert in_out(out) == ["step-100"]
    assert new is not None
    assert new.step == 100
    found = safetensors.numpy.load_file(new.path / "model.safetensors")
    assert {n: a.tobytes() for n, a in found.items()} == {
        str(n): a.tobytes() for n, a in states[100].items()
    }


def test_a_step_that_is_damaged_or_too_large_for_the_dtype_is_skipped(
    run: Path, out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip_arrays(run / "400")
    with Follower(run, out, FORM) as following:
        assert following.publish_due() is not None
        assert following.publish_due() is None
    assert caplog.text.count(f"not published to {out}: step 400 in ") == 1
    assert in_out(out) == ["step-300"]
    states = {step: {"w": np.full(3, 10.0 ** (step / 40))} for step in (100, 200)}
    large = save_states(tmp_path / "large", states)
    form = FolderForm(format="safetensors", at="state", dtype="fp16")
    assert publish(large, tmp_path / "narrow", form) == 100
    assert "step 200: state/w: has values that are too large for float16" in caplog.text


def test_a_failure_leaves_nothing_and_is_tried_again(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Follower, num_bytes: int) -> None:
        failures.append(num_bytes)
        if len(failures) == 3:
            self.stopped.set()
        raise OSError(28, "No space left on device")

    failures: list[int] = []
    monkeypatch.setattr(Follower, "_wrote", fail)
    monkeypatch.setattr(follower, "POLL_SECS", 0.01)
    with Follower(run, out, FORM) as following:
        assert [*following.follow(DirectoryError)] == []
    assert len(failures) == 3
    assert caplog.text.count("No space left on device") == 1  # not at every look
    monkeypatch.undo()
    assert sorted(p.name for p in out.rglob("*")) == [CONTROL]
    assert publish(run, out) == 400


def test_a_folder_that_would_not_load_is_refused(run: Path, out: Path) -> None:
    with pytest.raises(MismatchError, match="stores no config of the model"):
        publish(run, out, FolderForm(at="state"))
    with pytest.raises(SelectionError, match="step 400: nothing matches include"):
        publish(run, out, FolderForm(format="safetensors", at="state", include="x"))
    assert in_out(out) == []


def test_what_killed_programs_left_is_removed_and_completed(run: Path, out: Path) -> None:
    assert publish(run, out, every=400) == 400
    control = out / CONTROL
    shutil.copytree(out / "step-400", control / "writing-step-500")
    shutil.copytree(out / "step-400", control / "deleting-step-1-2")
    (control / "record.json.draft").write_text("{")
    record = json.loads((control / "record.json").read_text())
    # Killed after the record, before the folder got its name: the entry is dropped.
    (out / "step-400").rename(out.parent / "step-400")
    assert publish(run, out, every=500) is None
    assert sorted(os.listdir(control)) == ["record.json"]
    assert not (out / "latest").exists()
    # Killed after the folder got its name, before ``latest``: the folder counts.
    (out.parent / "step-400").rename(out / "step-400")
    assert json.loads((control / "record.json").read_text()) == record
    assert publish(run, out, every=400) is None
    assert latest(out) == out / "step-400"


def test_a_folder_that_a_killed_program_named_but_did_not_finish_is_published_anew(
    run: Path, out: Path
) -> None:
    with Follower(run, out, FORM) as first:
        first.publish_due()
        first._folders._record((), ["step-400"])  # where it was killed
    (out / "step-400" / "left").touch()
    assert publish(run, out) == 400
    assert in_out(out) == ["step-400"]
    assert not (latest(out) / "left").exists()
    assert sorted(os.listdir(out / CONTROL)) == ["record.json"]


def test_a_folder_of_a_user_at_a_name_that_was_about_to_be_given_stays(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user is faster by a moment, or comes after the program was killed."""
    put, note = LocalMedium.put_folder, out / "step-400" / "note.txt"

    def too_late(self: LocalMedium, draft: Path, target: epath.Path, *rest: Any) -> None:
        target.mkdir()
        note.write_text("mine")
        put(self, draft, target, *rest)

    monkeypatch.setattr(LocalMedium, "put_folder", too_late)
    with pytest.raises(DirectoryError, match="not empty"):
        publish(run, out)
    assert note.read_text() == "mine"
    monkeypatch.setattr(LocalMedium, "put_folder", put)
    with Follower(run, out, FORM) as following:
        following._folders.open()
        following._folders._record((), ["step-400"])  # and here it was killed
    assert publish(run, out) == 400
    assert "step-400: not deleted, because it has no digests.json" in caplog.text
    assert note.read_text() == "mine"
    assert in_out(out) == ["step-400", "step-400-2"]
    assert step_in(latest(out)) == 400


def test_the_files_of_a_folder_are_synced_before_its_name_and_its_name_before_latest(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which a loss of power may forget what was not synced."""
    actions: list[tuple[str, str]] = []

    def noted(action: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def do(*paths: Any) -> Any:
            actions.append((action, os.path.relpath(paths[-1], out)))
            return act(*paths)

        return do

    monkeypatch.setattr(fsync, "sync", noted("sync", fsync.sync))
    monkeypatch.setattr(Path, "rename", noted("rename", Path.rename))
    monkeypatch.setattr(Path, "replace", noted("replace", Path.replace))
    publish(run, out)
    named, pointed = actions.index(("rename", "step-400")), actions.index(("replace", "latest"))
    drafts = {path.partition("/")[2] for action, path in actions[:named] if action == "sync"}
    drafts = {path.partition("/")[2] for path in drafts if path.startswith("writing-")}
    assert drafts >= {"", "model.safetensors"}
    assert ("sync", ".") in actions[named:pointed]
    assert ("sync", ".") in actions[pointed:]
    recorded = actions.index(("replace", f"{CONTROL}/record.json"))
    assert recorded < named
    assert ("sync", CONTROL) in actions[recorded:named]


# --- what is left alone ---


@pytest.fixture
def untouched(run: Path) -> Iterator[None]:
    """Checks that nothing is written in the directory of the run."""

    def look() -> dict[Path, tuple[int, int]]:
        found = {path: path.stat() for path in [run, *run.rglob("*")]}
        return {path: (stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in found.items()}

    before = look()
    yield
    assert look() == before


@pytest.mark.usefixtures("untouched")
def test_the_run_is_only_read_and_wrong_arguments_are_refused(run: Path, out: Path) -> None:
    assert publish(run, out) == 400
    (out.parent / "link").symlink_to(run)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        *(
            (place, {}, "outside of the run's directory")
            for place in (run, run / "out", out.parent / "link" / "out")
        ),
        (out, {"keep": 0}, "keep: expected at least 1, found 0"),
        (out, {"every": 0}, "every: expected at least 1, found 0"),
        (out, {"best": "loss:low"}, "expected METRIC, METRIC:min or METRIC:max, found 'loss:low'"),
        (out, {"every": 1, "best": "loss"}, "exclude each other"),
    ]
    for place, settings, said in wrong:
        with pytest.raises(ValueError, match=said):
            Follower(run, place, FORM, **settings)
    with pytest.raises(ValueError, match="outside of the run's directory"):
        Follower("gs://bucket/run", "gs://bucket/run/out", FORM)
    assert Follower(run, Path("."), FORM).out == Path.cwd()
    forms: list[dict[str, Any]] = [
        {"format": "pt"},
        {"dtype": "int8"},
        {"format": "peft", "max_shard_bytes": 9},
        {"format": "safetensors", "config": "x"},
    ]
    for form in forms:
        with pytest.raises(ValueError, match=next(reversed(form))):
            FolderForm(**form)


def test_a_folder_of_others_is_refused_and_left_alone(run: Path, out: Path) -> None:
    out.mkdir()
    (out / "latest").write_text("mine")
    with pytest.raises(DirectoryError, match=r"expected a new or empty folder, .*found 'latest'"):
        publish(run, out)
    assert [p.name for p in out.iterdir()] == ["latest"]
    assert (out / "latest").read_text() == "mine"


def test_folders_of_others_among_the_published_ones_stay(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "GRACE_SECS", 0)
    for step in (300, 400):
        shutil.move(run / str(step), run.parent)
    publish(run, out, keep=1)
    for name in ("step-400", "step-1"):
        (out / name).mkdir()
    shutil.move(run.parent / "400", run)
    publish(run, out, keep=1)
    assert in_out(out) == ["step-1", "step-400", "step-400-2"]
    assert not list((out / "step-400").iterdir())
    assert latest(out).name == "step-400-2"


def test_a_second_program_is_refused(run: Path, out: Path) -> None:
    with Follower(run, out, FORM) as first:
        first.publish_due()
        with pytest.raises(LeaseError, match=f"another program writes to .* pid {os.getpid()}, "):
            publish(run, out)
    assert publish(run, out) is None
    with Follower(run, out, FORM, every=400) as first:
        first.publish_due()
        (out / CONTROL / "lease").write_text("another program's")  # while this one stalled
        shutil.rmtree(out / "step-400")
        first._folders.published = ()
        (out / "latest").write_text("step-500\n")  # that program's
        with pytest.raises(LeaseError, match="has lost its lease"):
            first.publish_due()
        assert (in_out(out), (out / "latest").read_text()) == ([], "step-500\n")
        (out / CONTROL / "lease").unlink()  # it has ended
        assert first.publish_due() is not None


def test_the_step_after_a_skipped_one_is_written_with_the_lease(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_arrays(run / "400")
    write, held = FolderForm.write, []

    def looking(self: FolderForm, *args: Any) -> Any:
        held.append((out / CONTROL / "lease").exists())
        return write(self, *args)

    monkeypatch.setattr(FolderForm, "write", looking)
    assert publish(run, out) == 300
    assert held == [True, True]


def test_without_room_for_a_draft_the_error_names_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    out = epath.Path("gs://bucket/out")
    with pytest.raises(DirectoryError, match="No such file .* Set TMPDIR to a folder"):
        medium.of(out).draft(out / "draft").__enter__()


def test_files_of_others_are_not_removed_from_the_folder_of_drafts(run: Path, out: Path) -> None:
    publish(run, out)
    elsewhere = out.parent / "elsewhere"
    shutil.move(out / CONTROL, elsewhere)
    (elsewhere / "thesis.txt").write_text("mine")
    (out / CONTROL).symlink_to(elsewhere)
    with pytest.raises(DirectoryError, match="expected a folder, found a link"):
        publish(run, out)
    (out / CONTROL).unlink()
    elsewhere.rename(out / CONTROL)
    publish(run, out)
    assert (out / CONTROL / "thesis.txt").read_text() == "mine"


def test_another_run_or_format_and_a_damaged_record_are_refused(
    run: Path, out: Path, tmp_path: Path
) -> None:
    assert publish(run, out, every=400) == 400
    other = shutil.copytree(run, tmp_path / "other")
    hf = FolderForm(at="state")
    for place, form, said in ((other, FORM, "other in the format safet"), (run, hf, "run in the")):
        with pytest.raises(DirectoryError, match=rf"run in .* safetensors, found the run .*{said}"):
            publish(place, out, form)
    (tmp_path / "link").symlink_to(run)
    assert publish(tmp_path / "link", out) is None
    assert latest(out).name == "step-400"
    shutil.rmtree(out / "step-400")
    assert publish(other, out) == 400
    path = out / CONTROL / "record.json"
    path.write_text(path.read_text().replace("step-400", "../../run"))
    with pytest.raises(DirectoryError, match=r"record\.json: is damaged"):
        publish(other, out)
