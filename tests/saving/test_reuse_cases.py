"""What a table of saves does not show of reuse: odd states, odd file systems, and the log."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from orbax import checkpoint as v0
from orbax.checkpoint import v1 as ocp
from support.compare import entries
from support.damage import halve
from support.linked import aside, assert_holds, data_file, files
from support.reusing import Run
from support.stages import at
from support.steps import save

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.saving.reuse import known, reuse
from torchax_ckpt.saving.reuse.reuse import SaveReuse
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import local_medium
from torchax_ckpt.storage.medium.local_medium import LocalMedium
from torchax_ckpt.stored.stored_step import parse_manifest

REUSE = CheckpointOptions(reuse=["state"])
ALL = policies.PreserveAll()


def saved(directory: Path, *states: Any) -> None:
    """Saves functional states as the steps from 1 on."""
    with TorchaxCheckpointer(directory, options=REUSE, preservation_policy=ALL) as ckpt:
        for step, state in enumerate(states, 1):
            save(ckpt, step, of=state)


def zeros(*shape: int, dtype: str = "float32") -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype), jax.devices()[0])


@pytest.fixture
def identity_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the identity of an array prove its values, as on accelerators."""
    monkeypatch.setattr(known, "is_proof", lambda array: isinstance(array, jax.Array))


def test_a_save_does_not_read_the_manifests_that_this_program_has_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def parse(committed: CommittedStep) -> Any:
        read.append(committed.path.name)
        return parse_manifest(committed)

    monkeypatch.setattr(reuse, "parse_manifest", parse)
    saved(directory, *5 * [{"w": zeros(8)}])
    assert read == []


# --- what counts as the same -----------------------------------------------------------------


def test_an_array_that_changes_under_its_identity_is_written(directory: Path) -> None:
    """On the CPU, an array may share memory with an array of numpy."""
    octets = np.zeros((1 << 21) + 64, np.uint8)
    start = -octets.ctypes.data % 64  # JAX shares memory that is aligned like this
    host = octets[start : start + (1 << 21)].view(np.float32).reshape(-1, 16)
    array = jax.device_put(host)
    saved(directory, *6 * [{"w": array}])
    with TorchaxCheckpointer(directory, options=REUSE) as ckpt:
        save(ckpt, *range(7, 12), of={"w": array})
        host[0] = 7
        save(ckpt, 12, of={"w": array})
    assert_holds(directory, 12, {"w": np.array(host)})


@pytest.mark.usefixtures("identity_proves")
def test_a_stack_is_taken_over_only_if_it_has_the_same_leaves(directory: Path) -> None:
    """Equal values in leaves of other names have equal digests."""
    layers, states = {str(i): zeros(1 << 18) + (i == 0) for i in range(3)}, []
    for step in range(1, 14):
        if step <= 5:
            layers["3"] = zeros(1 << 18) + step % 5
        else:
            layers["0"] = zeros(1 << 18) + (0 if step == 6 else step)
        states.append({"h": dict(layers)})
    saved(directory, *states)
    for step in (12, 13):
        assert_holds(directory, step, states[step - 1])


@pytest.mark.usefixtures("identity_proves")
@pytest.mark.parametrize(("shape", "dtype"), [((1024, 512), "int32"), ((512, 1024), "float32")])
def test_an_array_of_another_form_and_equal_bytes_is_written(
    shape: tuple[int, ...], dtype: str, directory: Path
) -> None:
    states = 6 * [{"w": zeros(1024, 512)}] + 5 * [{"w": zeros(*shape, dtype=dtype)}]
    saved(directory, *states)
    for step in (7, 8, 9, 10, 11):
        assert_holds(directory, step, states[-1])


@pytest.mark.usefixtures("identity_proves")
def test_no_buffer_is_kept_alive_between_saves(directory: Path) -> None:
    with TorchaxCheckpointer(directory, options=REUSE) as ckpt:
        state = {"w": zeros(1 << 18) + 1}
        save(ckpt, *range(1, 7), of=state)
        array = weakref.ref(state["w"])
        del state
        gc.collect()
        assert array() is None


# --- files that are lost, damaged or of others -------------------------------------------------

AGAIN = ": the frozen arrays are written again"


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (os.unlink, "/d/.* is gone"),
        (halve, r"/d/.* bytes in place of \d+"),
        (longer, r"/d/.* bytes in place of \d+"),
        (lambda path: shutil.rmtree(path.parents[1]), "/.* is gone"),
    ],
)
def test_a_lost_or_resized_file_is_noticed_by_the_save_that_would_take_it_over(
    damage: Callable[[Path], None], said: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(directory) as run:
        run.save(4)
        damage(path := data_file(directory, 3))
        run.save(3)
        assert caplog.text.count(AGAIN) == 1
        assert re.search(re.escape(str(path.parents[1])) + said + AGAIN, caplog.text)
        assert run.reused["whole"] == "ww22w22"
        run.check(4, 5, 6, 7)


@pytest.mark.parametrize("where", ["restored", "aside"])
def test_it_is_noticed_in_the_restored_step_and_in_what_is_kept_aside(
    where: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(directory, keep=1 if where == "aside" else None) as run:
        run.save(4)
        if where == "restored":
            run.restart()
        lost = data_file(directory, 4 if where == "restored" else "unchanged")
        lost.unlink()
        run.save(4)
        assert caplog.text.count(AGAIN) == 1
        found = {"restored": "ww22ww22", "aside": "wwaawaaa"}
        assert run.reused["whole"] == found[where]
        run.check(8)


def test_what_was_kept_aside_is_not_missed_once_it_was_removed_for_links_that_failed(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(directory, keep=1) as run:
        run.save(4)
        reuse_of_tier = run.ckpt._run.durable.tier.reuse
        [kept] = [e for e in reuse_of_tier.known.entries.values() if e.is_retained]
        # The step is to be deleted once more, as if that had failed, but somebody has removed it.
        step, nsecs = kept.key
        reuse_of_tier.retain([CommittedStep(step, run.ckpt._run.durable.path / str(step), nsecs)])
        run.save(2)
        assert AGAIN not in caplog.text
        run.check(6)


def test_a_change_after_the_save_has_looked_costs_that_save(directory: Path) -> None:
    with Run(directory) as run:
        run.save(4)
        stop = at("link unchanged arrays", lambda: longer(data_file(directory, 3)), number=1)
        said = run.failed(stop)
        assert re.search("saving step 5 .* in place of .* before the step was", said)
        run.save(3)
        assert run.reused["whole"] == "ww22xw32"
        run.check(8)


def test_a_damaged_index_costs_one_save(directory: Path) -> None:
    """The database cannot be merged, so that save fails; the next one writes all arrays."""
    with Run(directory) as run:
        run.save(4)
        index = data_file(directory, 3).parents[1] / "manifest.ocdbt"
        index.write_bytes(bytes(index.stat().st_size))
        assert "step 5" in run.failed()
        run.save()
        run.check(6)


def test_a_save_without_its_links_is_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(directory) as run:
        run.save(2)
        monkeypatch.setattr(LocalMedium, "take_over", lambda *_: None)
        assert re.search("model/.*: expected . chunks? in the new step, found 0", run.failed())
        assert not (directory / "3").exists()


def test_a_process_that_does_not_know_the_named_step_takes_nothing_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = SaveReuse.candidate

    def of_another_commit(self: SaveReuse, *args: Any) -> list[Any]:
        copy, key, folder = find(self, *args)
        return [copy, key and (key[0], key[1] + 1), folder]

    monkeypatch.setattr(SaveReuse, "candidate", of_another_commit)
    with Run(directory) as run:
        run.save(6)
        assert run.reused["whole"] == "wwwwww"
        run.check()


def test_where_links_are_refused_files_are_copied(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From step to step; none is kept aside."""
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "no")))
    monkeypatch.setattr(local_medium, "_has_warned", False)
    with Run(directory) as run:
        run.save(5)
        assert caplog.text.count("Frozen arrays are copied from step to step") == 1
        assert not files(directory, 5) & files(directory, 3)
        run.check_each_alone()
    with Run(last := directory.with_name("last"), keep=1) as run:
        run.save(5)
        run.ckpt.close()
        assert entries(last) == {"5"}


def test_orbax_does_not_list_what_is_kept_aside_which_goes_when_unused(directory: Path) -> None:
    with Run(directory, keep=1) as run:
        run.save(5)
        run.ckpt.close()
        assert aside(directory)
        with ocp.training.Checkpointer(directory) as checkpointer:
            assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [5]
        with v0.CheckpointManager(directory) as manager:
            assert manager.all_steps() == [5]
    for settings in ({"keep": None}, {"reuse": False}):
        shutil.copytree(directory, copy := directory.with_name(next(iter(settings))))
        shutil.copy(f"{directory}.saved", f"{copy}.saved")
        with Run(copy, **settings) as run:
            run.save(3)
            assert "unchanged" not in entries(copy)
            run.check()


@pytest.mark.parametrize("reuse", [True, False])
def test_a_folder_of_another_owner_is_left_alone(reuse: bool, directory: Path) -> None:
    (directory / "unchanged" / "notes").mkdir(parents=True)
    with Run(directory, reuse=reuse, keep=1) as run:
        run.save(3)
    assert (directory / "unchanged" / "notes").is_dir()


@pytest.mark.parametrize("is_loaded", [True, False])
def test_nothing_is_reused_of_leaves_that_were_not_read(is_loaded: bool, directory: Path) -> None:
    """A restart restores the rest of the state; what was functional is loaded, or is not."""
    state = {"w": zeros(1024, 512)}
    saved(directory, state, state)
    with TorchaxCheckpointer(directory, options=REUSE, preservation_policy=ALL) as ckpt:
        assert ckpt.attach() == 2
        if is_loaded:
            ckpt.load(2)
        save(ckpt, 3, 4, of=state)
    assert bool(files(directory, 4) & files(directory, 2)) == is_loaded
    assert not files(directory, 3) & files(directory, 2)
