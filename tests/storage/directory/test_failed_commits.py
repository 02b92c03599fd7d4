"""Saves that fail when their step already has its name: no step is left, not even on storage."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from support.live import Together
from support.steps import save, save_due, state

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.storage.medium import fsync

KEEP = policies.LatestN(2)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"lease", "events", "run"}


class Disk:
    """Storage that reports an error once a step has its name, and may refuse to take it back."""

    def __init__(self, directory: Path, step: int, number: int = errno.EIO) -> None:
        self._name, self._number = directory / str(step), number
        self._is_due = True
        self.refuses = False
        self.meanwhile: Callable[[], Any] = lambda: None
        self.done: list[str] = []

    def error(self) -> OSError:
        return OSError(self._number, os.strerror(self._number))

    @contextlib.contextmanager
    def fails(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        sync, kind = fsync.sync, type(epath.Path(self._name))
        rename, rmtree = kind.rename, kind.rmtree

        def synced(path: Any) -> None:
            if Path(path) == self._name.parent and self._is_due and self._name.exists():
                self._is_due = False
                self.meanwhile()
                raise self.error()
            sync(path)
            self.done.append(f"synced {Path(path).name}")

        def renamed(path: Any, target: Any) -> Any:
            if self.refuses and not self._is_due and Path(path) == self._name:
                raise self.error()
            self.done.append(f"renamed {path.name}")
            return rename(path, target)

        def removed(path: Any, *args: Any) -> None:
            self.done.append(f"removed {path.name}")
            rmtree(path, *args)

        with monkeypatch.context() as failing:
            failing.setattr(fsync, "sync", synced)
            failing.setattr(kind, "rename", renamed)
            failing.setattr(kind, "rmtree", removed)
            yield


@pytest.mark.parametrize("tier", ["durable", "local"])
def test_a_step_whose_name_is_not_synced_is_taken_back(
    tier: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = directory / tier
    every, never = policies.FixedIntervalPolicy(1), policies.FixedIntervalPolicy(1 << 40)
    events: list[Any] = []
    with TorchaxCheckpointer(
        directory / "durable",
        save_decision_policy=every if tier == "durable" else never,
        preservation_policy=KEEP,
        local=LocalTier(place, save_decision_policy=every, keep=2) if tier == "local" else None,
        on_event=events.append,
    ) as ckpt:
        save_due(ckpt, 1, 2)
        for step, number in ((4, errno.EIO), (5, errno.EMFILE), (6, errno.ENOSPC)):
            message = f"saving step {step} .*{os.strerror(number)}"
            with (
                Disk(place, step, number).fails(monkeypatch),
                pytest.raises(SaveError, match=message),
            ):
                save_due(ckpt, step)
            assert ckpt.all_steps(tier) == [1, 2]
            assert names(place) == {"1", "2"}
        save_due(ckpt, 10)
        assert ckpt.all_steps(tier) == [2, 10]
    assert [e.step for e in events if e.name == "failed"] == [4, 5, 6] * (tier == "durable")
    assert names(place) == {"2", "10"}


def test_a_step_that_cannot_be_taken_back_is_not_listed_and_goes_before_the_next_save(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(directory, 4)
    disk.refuses = True
    with TorchaxCheckpointer(directory, preservation_policy=KEEP) as ckpt:
        save(ckpt, 2, 3)
        with disk.fails(monkeypatch):
            with pytest.raises(SaveError, match="saving step 4 .*Input/output error"):
                save(ckpt, 4)
            assert ckpt.all_steps() == [2, 3]
            assert ckpt._directory.candidates(3)[-1].step == ckpt.latest_step() == 3
            # Whoever starts now finds a whole step.
            restarted = TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True))
            assert restarted.all_steps() == [2, 3, 4]
            assert restarted.verify(4) == 4
            with pytest.raises(SaveError, match="saving step 4 .*Input/output error"):
                save(ckpt, 4)  # it cannot be taken back yet
            assert names(directory) == {"2", "3", "4"}
            disk.refuses = False
            disk.done.clear()
            save(ckpt, 4)
        # A power cut must not leave the name without the files.
        assert disk.done.index("renamed 4") < disk.done.index(f"synced {directory.name}")
        assert disk.done.index(f"synced {directory.name}") < next(
            i for i, what in enumerate(disk.done) if what.startswith("removed writing-4-")
        )
        assert ckpt.all_steps() == [3, 4]
        np.testing.assert_array_equal(ckpt.load(4)["w"], state(4)["w"])
    assert names(directory) == {"3", "4"}


def test_no_reader_lists_a_step_before_its_commit(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its files are there by then; only the name of its folder tells."""
    sync_tree, listed = fsync.sync_tree, list[Any]()
    reading = CheckpointOptions(read_only=True)

    def looking(*args: Any, **kwargs: Any) -> None:
        sync_tree(*args, **kwargs)
        listed.append(TorchaxCheckpointer(directory, options=reading).all_steps())

    monkeypatch.setattr(fsync, "sync_tree", looking)
    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1, 2)
    assert listed == [[], [1]]


def test_nothing_is_taken_back_unleased(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have resumed from the step by then."""
    disk = Disk(directory, 4)
    disk.meanwhile = lambda: shutil.copy(os.devnull, directory / "lease")
    ckpt = TorchaxCheckpointer(directory)
    save(ckpt, 3)
    with (
        disk.fails(monkeypatch),
        pytest.raises(SaveError, match="saving step 4 .*Input/output error"),
    ):
        save(ckpt, 4)
    with pytest.raises(SaveError, match="has lost its lease"):
        save(ckpt, 5)
    assert {"3", "4"} <= names(directory)
    assert ckpt.all_steps() == [3, 4], "those of the other program"
    with pytest.raises(SaveError, match="has lost its lease"):
        ckpt.close()


@pytest.mark.slow
def test_no_process_lists_a_step_that_process_0_cannot_take_back(
    together: Together, directory: Path
) -> None:
    program = """
        import sys
        from pathlib import Path

        import numpy as np
        import pytest
        from processes_program import INDEX, report
        from storage.directory.test_failed_commits import Disk, names
        from support.steps import save

        from torchax_ckpt import TorchaxCheckpointer, policies
        from torchax_ckpt.errors import SaveError

        directory = Path(sys.argv[4])
        disk = Disk(directory, 4)
        disk.refuses = True
        with TorchaxCheckpointer(directory, preservation_policy=policies.LatestN(2)) as ckpt:
            save(ckpt, 2, 3)
            with disk.fails(pytest.MonkeyPatch()):
                with pytest.raises(SaveError, match="saving step 4"):
                    save(ckpt, 4)
                report(steps=ckpt.all_steps(), names=sorted(names(directory)))
                with ckpt._run.processes.round("looking"):
                    ckpt._run.processes.meet()
                disk.refuses = False
                save(ckpt, 9)
            report(steps=ckpt.all_steps())
    """
    found = together(program, 2, directory)
    assert [told[0]["steps"] for told in found] == [[2, 3]] * 2
    assert "4" in found[0][0]["names"]
    assert [told[1]["steps"] for told in found] == [[3, 9]] * 2
