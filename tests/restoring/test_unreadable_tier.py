"""A local tier that one host cannot read: the steps of other hosts and of the run count."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
import torch
from support.compare import assert_trees_identical
from support.live import Together
from support.slices import PROGRAM, settings
from support.steps import save_due, state, two_tiers
from support.unreadable import unreadable

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.directory import run_directory

EVERY = policies.SpecificStepsPolicy([2, 3, 4])
RECORD = "_CHECKPOINT_METADATA"
FAILURES = [
    ("listing", errno.EIO),
    ("listing", errno.EACCES),
    ("listing", errno.ESTALE),
    (RECORD, errno.EIO),
    ("summary/data.json", errno.EIO),
    ("manifest/data.json", errno.EIO),
    ("manifest/data.json", errno.EACCES),
    ("arrays", errno.EIO),
    ("arrays", errno.ESTALE),
]


@pytest.fixture(autouse=True)
def _warns_again() -> None:
    run_directory._warn_of_lost_tier.cache_clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 1 and 2, and a local tier with steps 2 to 4."""
    place = tmp_path_factory.mktemp("tiers")
    with opened(place) as ckpt:
        save_due(ckpt, 1, 2, 3, 4)
    return place


def opened(place: Path) -> TorchaxCheckpointer:
    return two_tiers(place / "run", place / "local", durable=(1, 2), local=EVERY)


@pytest.mark.parametrize(("what", "number"), FAILURES)
def test_the_durable_tier_is_read_with_a_warning_that_names_host_and_file(
    what: str, number: int, saved: Path
) -> None:
    unread = saved / "local"
    with unreadable(unread, what, number), pytest.warns(UserWarning, match="host") as warned:
        assert_trees_identical(opened(saved).load(), state(2))
    texts = [str(warning.message) for warning in warned]
    assert all(f"host {socket.gethostname()}" in text for text in texts)
    assert all(str(unread) in text for text in texts)
    if what == "arrays":
        assert all("first part that cannot be read lies in" in text for text in texts)
    elif what != "listing":
        assert f"{unread}/4/{what}" in texts[0]
    assert_trees_identical(opened(saved).load(), state(4))


def test_one_unreadable_local_step_leaves_the_others(saved: Path) -> None:
    for what in (f"4/{RECORD}", "4/summary/data.json", "4/manifest/data.json"):
        with unreadable(saved / "local", what, errno.EIO), pytest.warns(UserWarning, match=what):
            assert_trees_identical(opened(saved).load(), state(3))


def test_a_run_goes_on_and_saves_to_the_tier_that_it_could_not_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2).to("jax")
    with opened(tmp_path) as ckpt:
        ckpt.attach(model)
        save_due(ckpt, 1, 2, 3, of=None)
    with unreadable(tmp_path / "local", "manifest/data.json", errno.EIO), opened(tmp_path) as ckpt:
        with pytest.warns(UserWarning, match="skips a step of its local tier"):
            assert ckpt.attach(model) == 2
        ckpt.save(3)
    assert opened(tmp_path).all_steps("local") == [2, 3]


def test_a_local_step_that_is_asked_for_and_in_no_other_tier_is_an_error(saved: Path) -> None:
    with (
        unreadable(saved / "local", "manifest/data.json", errno.EIO),
        pytest.raises(DirectoryError, match="step 4 .*cannot be read now.*Input/output error"),
    ):
        opened(saved).load(4)
    # An error of the durable directory still stops a run, because only this has its steps.
    with (
        unreadable(saved / "run", "listing", errno.EIO),
        pytest.raises(DirectoryError, match="cannot read .*run: .*Input/output error"),
    ):
        opened(saved).load()


@pytest.mark.slow
def test_other_hosts_send_what_a_host_cannot_read(together: Together, tmp_path: Path) -> None:
    do: list[object] = ["attach", ["train", 2], "wait", "sync"]
    for what, number in FAILURES:
        do += [["fail_reads", 0, what, number], ["reopen", 77], "attach", "stop_failing"]
    given = settings(tmp_path / "run", tmp_path / "ramdisks", *do, every=[], is_replicated=True)
    for _, saved_state, *found in together(PROGRAM, 2, given):
        assert [(each["start"], each["tier"]) for each in found] == [(2, "local")] * len(FAILURES)
        assert all(each["whole"] == saved_state["whole"] for each in found)
        assert all(each["own"] == saved_state["own"] for each in found)
