"""Steps whose folders the system does not rename, such as those in a lower layer of overlayfs."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.compare import entries
from support.live import Together
from typer.testing import CliRunner

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app
from torchax_ckpt.errors import DirectoryError

ALWAYS = policies.FixedIntervalPolicy(1)
KEEP_ALL, KEEP_ONE = policies.PreserveAll(), policies.LatestN(1)
Refuse = Callable[[], None]


@pytest.fixture(params=[errno.EXDEV, pytest.param(errno.EPERM, marks=pytest.mark.slow)])
def refuse(
    directory: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Refuse:
    """From its call on, the system does not rename the folders that are in the directory then."""
    rename = os.rename

    def start() -> None:
        fixed = {str(path) for path in directory.iterdir() if path.name[-1].isdigit()}

        def refusing(source: Any, target: Any, **kwargs: Any) -> None:
            if os.fspath(source) in fixed:
                raise OSError(request.param, os.strerror(request.param), str(source))
            rename(source, target, **kwargs)

        monkeypatch.setattr(os, "rename", refusing)

    return start


def save(ckpt: TorchaxCheckpointer, *steps: int, plus: int = 0) -> None:
    for step in steps:
        assert ckpt.save(step, state={"w": np.full(3, step + plus)}, force=True)
        ckpt.wait_until_finished()


def files(directory: Path, *names: int) -> dict[str, bytes]:
    folders = [directory / str(name) for name in names]
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def values(directory: Path) -> dict[int, int]:
    """What a program that starts now finds."""
    ckpt = TorchaxCheckpointer(directory)
    return {step: int(ckpt.load(step)["w"][0]) for step in ckpt.all_steps()}


def abandons(directory: Path, name: str) -> list[int]:
    summary = json.loads((directory / name / "summary/data.json").read_text())
    return sorted(number for number, _ in _found(summary, "abandons"))


def _found(node: Any, key: str) -> Any:
    if not isinstance(node, dict):
        return None
    return node.get(key) or next((v for n in node.values() if (v := _found(n, key))), None)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_steps_that_cannot_be_deleted_stay_whole_and_stop_no_save(
    directory: Path, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        save(ckpt, 2, 3)
    before = files(directory, 2, 3)
    refuse()
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ONE) as ckpt:
        save(ckpt, 5, 6, 7)
        (text,) = said(caplog)
        pattern = (
            rf"{directory}: steps 2, 3 can be neither deleted nor set aside, .*\. (\d+) bytes "
        )
        pattern += (
            rf"stay\. .*overlayfs.*sticky bit.*: torchax-ckpt copy {directory} NEW_DIRECTORY$"
        )
        found = re.match(pattern, text)
        assert found is not None, text
        assert int(found[1]) == sum(map(len, before.values()))
        with pytest.raises(DirectoryError, match=rf"{directory}/2 can be neither deleted nor set "):
            ckpt.delete(2)
        save(ckpt, 8)
        assert ckpt.all_steps() == [2, 3, 8]
    assert files(directory, 2, 3) == before
    assert values(directory) == {2: 2, 3: 3, 8: 8}
    assert entries(directory) == {"2", "3", "8"}


def test_abandoned_steps_that_cannot_be_set_aside_stay_abandoned(
    directory: Path, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        save(ckpt, 2, 3, 4)
    before = files(directory, 3, 4)
    refuse()
    for start in (2, 5):  # goes back, and is started again
        with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
            assert ckpt.attach() == (4 if start == 2 else 5)
            ckpt.restore(start)
            ckpt.load(start)
            save(ckpt, *range(start + 1, start + 4), plus=100)
            with pytest.raises(DirectoryError, match=r"lists the steps \[3, 4\] as abandoned"):
                ckpt.delete(start + 3)
    assert [text.partition(";")[0] for text in said(caplog) if "bytes stay" not in text] == [
        f"{directory}: steps [3, 4] are not on the branch that this run continues"
    ]
    assert len([text for text in said(caplog) if "steps 3, 4 can be neither" in text]) == 2
    assert files(directory, 3, 4) == before
    names = ["incoming-3", "incoming-4", "5", "6", "7", "8"]
    assert entries(directory) == {"2", "3", "4", *names}
    assert {name: abandons(directory, name) for name in names} == {name: [3, 4] for name in names}
    assert values(directory) == {2: 2} | {step: step + 100 for step in range(3, 9)}
    refuse()  # the container's state becomes an image
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        ckpt.attach()
        ckpt.restore(3)
        save(ckpt, 4, 5, plus=200)
    assert values(directory) == {2: 2, 3: 103, 4: 204, 5: 205}
    assert abandons(directory, "incoming-5") == [3, 4, 4, 5, 6, 7, 8]


def test_a_local_tier_says_what_helps_there(
    directory: Path, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    local = LocalTier(directory, save_decision_policy=ALWAYS, keep=1)
    with TorchaxCheckpointer(f"{directory}-durable", local=local) as ckpt:
        ckpt.save(1, state={"w": np.ones(3)})
        ckpt.wait_until_finished()
        refuse()
        for step in (2, 3):
            ckpt.save(step, state={"w": np.ones(3)})
            ckpt.wait_until_finished()
        (text,) = said(caplog)
        assert text.startswith(f"{directory}: steps 1 can be neither")
        assert text.endswith("Give LocalTier a folder on a disk of its own")
        assert ckpt.all_steps("local") == [1, 3]


def test_a_step_whose_rename_failed_once_is_deleted_after_the_next_save(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename, failures = os.rename, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def failing(source: Any, target: Any, **kwargs: Any) -> None:
        if Path(source) == directory / "1" and failures:
            raise failures.pop()
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", failing)
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ONE) as ckpt:
        save(ckpt, 1, 2)
        assert ckpt.all_steps() == [1, 2]
        save(ckpt, 3)
        assert ckpt.all_steps() == [3]
    (text,) = said(caplog)
    assert "bytes stay. The next save tries again. The medium reports an I/O error" in text
    assert "overlayfs" not in text


def test_prune_deletes_the_others_and_says_what_stays(
    directory: Path, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        save(ckpt, 2, 3)
        refuse()
        save(ckpt, 4, 5)
    before, words = files(directory, 2, 3), ("prune", directory, "--policy", "LatestN(1)")
    told = CliRunner().invoke(app, [*map(str, words), "--delete", "--json"])
    assert told.exit_code == exit_codes.UNAVAILABLE
    found = json.loads(told.stdout)
    assert (found["deleted"], found["kept"]) == ([4], [2, 3, 5])
    (text,) = said(caplog)
    assert text.startswith(f"{directory}: steps 2, 3 can be neither deleted nor set aside")
    assert files(directory, 2, 3) == before
    assert entries(directory) == {"2", "3", "5"}


def test_a_leftover_that_cannot_be_removed_stops_no_save(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = directory / "deleting-1"
    (left / "state").mkdir(parents=True)
    remove = shutil.rmtree

    def refusing(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path) == str(left):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refusing)
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ONE) as ckpt:
        save(ckpt, 1, 2, 3)
        assert ckpt.all_steps() == [3]
    assert left.exists()
    (text,) = said(caplog)
    assert f"{left}, left behind by a killed save or delete, cannot be removed: Permission" in text


TWO = """
    import os, sys
    from processes_program import MESH, P, NamedSharding, jax, np, patch, report, torchax
    torchax.enable_globally()
    from torchax_ckpt import TorchaxCheckpointer, policies
    from torchax_ckpt.errors import DirectoryError

    run = sys.argv[4]

    def save(ckpt, *steps):
        for step in steps:
            array = jax.device_put(np.arange(8.0), NamedSharding(MESH, P("fsdp")))
            ckpt.save(step, state={"w": array}, force=True)
            ckpt.wait_until_finished()

    with TorchaxCheckpointer(run) as ckpt:
        save(ckpt, 2, 3, 4)
    rename, fixed = os.rename, {f"{run}/{step}" for step in (2, 3, 4)}

    def refusing(source, target, **kwargs):
        if os.fspath(source) in fixed:
            raise OSError(18, "Invalid cross-device link", str(source))
        rename(source, target, **kwargs)

    patch(os, "rename", refusing)
    with TorchaxCheckpointer(run, preservation_policy=policies.LatestN(2)) as ckpt:
        ckpt._run.go_on_from(2)
        save(ckpt, 3, 4, 5, 6)
        branches = ckpt._run.durable.tier.history.branches
        known = [[s.step for s in each] for each in (branches.committed, branches.abandoned)]
        try:
            ckpt.delete(2)
        except DirectoryError as error:
            report(steps=ckpt.all_steps(), known=known, said="2 can be neither" in str(error))
"""


@pytest.mark.slow
def test_two_processes_know_which_steps_stay(together: Together, directory: Path) -> None:
    for (found,) in together(TWO, 2, directory):
        assert found == {"steps": [2, 5, 6], "known": [[2, 5, 6], [3, 4]], "said": True}
