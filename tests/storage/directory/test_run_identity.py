"""A name of a run that a power cut left torn costs nothing; the steps themselves name their run."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.steps import save_due, two_tiers
from support.training import save_state

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.directory import run_identity


@pytest.fixture
def local(directory: Path) -> Path:
    return directory.with_name("local")


def saved(directory: Path, local: Path, *steps: int, durable: tuple[int, ...] = ()) -> None:
    """Has a program of its own save each step."""
    for step in steps:
        with two_tiers(directory, local, durable=durable) as ckpt:
            assert ckpt.attach(stateful={}) == step - 1
            save_due(ckpt, step)


def tear(directory: Path, kept: int) -> None:
    """Leaves so many bytes of a name; at -1 zeros instead of all, at -2 all but the last two."""
    path = directory / run_identity.NAME
    content = path.read_bytes()
    path.write_bytes(b"\0" * len(content) if kept == -1 else content[:kept])


@pytest.mark.parametrize(
    ("tier", "kept"), [("durable", 0), ("local", -1), ("both", 9), ("both", -2)]
)
def test_a_torn_name_costs_no_step(tier: str, kept: int, directory: Path, local: Path) -> None:
    saved(directory, local, 1, 2, 3, durable=(1, 3))
    places = {"durable": [directory], "local": [local], "both": [directory, local]}[tier]
    for place in places:
        tear(place, kept)
    with two_tiers(directory, local) as ckpt, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ckpt.attach(stateful={}) == 3
        assert ckpt.all_steps("local") == [1, 2, 3]
        ckpt.load(3)
        save_due(ckpt, 4, 5)
    said = [str(warning.message) for warning in caught]
    assert {text.partition(":")[0] for text in said} == {str(place / "run") for place in places}
    assert len(said) == len(places)
    for text in said:
        assert "as a loss of power may leave it" in text
        if tier == "local":
            assert "count: 1, 2, 3. Other steps, which the next save removes: none." in text
    with two_tiers(directory, local) as ckpt:
        assert ckpt.attach(stateful={}) == 5


def test_without_the_file_the_steps_name_their_run(directory: Path, local: Path) -> None:
    saved(directory, local, 1, 2)
    (local / run_identity.NAME).unlink()
    saved(directory, local, 3)
    with two_tiers(directory, local) as ckpt:
        assert ckpt.all_steps("local") == [1, 2, 3]


def test_with_a_torn_name_another_runs_steps_are_removed(directory: Path, local: Path) -> None:
    saved(directory.with_name("other"), local, 1, 2)
    tear(local, 0)
    elsewhere = directory.with_name("elsewhere")
    saved(directory, elsewhere, 1, durable=(1,))
    with two_tiers(directory, local) as ckpt:
        with pytest.warns(UserWarning, match="count: none. Other steps, .* removes: 1, 2"):
            assert ckpt.attach(stateful={}) == 1
        save_due(ckpt, 2)
    with two_tiers(directory, local) as ckpt:
        assert ckpt.all_steps("local") == [2]
        assert ckpt.attach(stateful={}) == 2


def test_with_a_torn_name_an_absent_host_is_still_known(directory: Path, local: Path) -> None:
    saved(directory, local, 1, 2, 3, durable=(1,))
    elsewhere = directory.with_name("elsewhere")
    with two_tiers(directory, elsewhere) as ckpt:
        assert ckpt.attach(stateful={}) == 1
        save_due(ckpt, 2)
    tear(local, 0)
    with two_tiers(directory, local) as ckpt, pytest.warns(UserWarning, match="count: none"):
        assert ckpt.attach(stateful={}) == 1


def test_without_a_durable_name_no_local_step_counts(directory: Path, local: Path) -> None:
    """They may be another run's, which this one was about to remove."""
    saved(directory, local, 1, 2)
    tear(directory, 0)
    with two_tiers(directory, local) as ckpt:
        with pytest.warns(UserWarning, match="no local step"):
            assert ckpt.attach(stateful={}) == 0
        save_due(ckpt, 1)
    with two_tiers(directory, local) as ckpt:
        assert ckpt.attach(stateful={}) == 1
        assert ckpt.all_steps("local") == [1]


def test_steps_that_are_not_local_are_never_removed(directory: Path, local: Path) -> None:
    save_state(local, {"w": np.arange(3)})
    saved(directory, directory.with_name("elsewhere"), 1)
    shutil.copytree(directory.with_name("elsewhere") / "1", local / "2")
    for content, foreign in ((None, "1, 2"), ("", "1")):
        if content is not None:
            (local / run_identity.NAME).write_text(content)
        with (
            two_tiers(directory.with_name("other"), local) as ckpt,
            warnings.catch_warnings(),
            pytest.raises(DirectoryError, match=f"found steps {foreign} that were not saved to"),
        ):
            warnings.simplefilter("ignore")
            ckpt.save(3, state={"w": np.arange(3)})
    assert {"1", "2"} <= {child.name for child in local.iterdir()}


def test_names_reach_the_media_in_their_order(
    directory: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable name that outlives the local one in a power cut would cost the local steps."""
    done: list[str] = []
    fsync, link, replace = os.fsync, os.link, os.replace

    def synced(opened: int) -> None:
        fsync(opened)
        done.append(f"synced {os.readlink(f'/proc/self/fd/{opened}')}")

    def named(call: Any) -> Any:
        def wrapped(draft: Any, path: Any) -> None:
            call(draft, path)
            done.append(f"named {path}")

        return wrapped

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", named(link))
    monkeypatch.setattr(os, "replace", named(replace))
    saved(directory, local, 1, 2)
    expected = [what for p in (local, directory) for what in (f"named {p / 'run'}", f"synced {p}")]
    named_runs = [i for i, what in enumerate(done) if what in expected[::2]]
    assert [done[i + k] for i in named_runs for k in (0, 1)] == expected * 2
