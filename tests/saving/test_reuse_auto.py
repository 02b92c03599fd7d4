"""By default a save takes unchanged arrays over if half of the state are frozen parameters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import entries
from support.linked import databases, files
from support.models import Tuned
from support.still import ALL, save_all, still_state

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies

HALF = 1024  # outputs of a model half of whose bytes are frozen


def saved(directory: Path, model: Tuned, *steps: int, rng: bool = False, **settings: Any) -> None:
    with TorchaxCheckpointer(directory, **{**ALL, **settings}) as ckpt:
        ckpt.attach(model, rng=rng)
        for step in steps:
            with torch.no_grad():
                model.head.weight.add_(step)
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()


@pytest.mark.parametrize(
    ("num_outputs", "rng", "is_on"),
    [(4, True, True), (HALF, False, True), (HALF, True, False), (2 * HALF, False, False)],
)
def test_frozen_parameters_of_half_the_bytes_switch_it_on(
    num_outputs: int, rng: bool, is_on: bool, directory: Path
) -> None:
    """Random state counts as what changes."""
    saved(directory, Tuned(num_outputs).to("jax"), 1, 2, 3, rng=rng)
    assert bool(databases(directory, 3)) == is_on
    assert bool(files(directory, 3) & files(directory, 1)) == is_on


@pytest.mark.parametrize(("reuse", "is_on"), [(True, True), (False, False)])
def test_true_and_false_decide_alone(reuse: bool, is_on: bool, directory: Path) -> None:
    """With True, arrays that just do not change are found as well."""
    options = CheckpointOptions(reuse=reuse)
    saved(directory, Tuned(2 * HALF if reuse else 4).to("jax"), 1, 2, 3, options=options)
    assert bool(files(directory, 3) & files(directory, 1)) == is_on
    states, run = [still_state(x=step) for step in range(6)], directory.with_name("functional")
    save_all(run, states, options=options, **ALL)
    assert bool(databases(run, 6)) == is_on


def test_arrays_that_only_happen_to_stay_do_not_switch_it_on(directory: Path) -> None:
    save_all(directory, [still_state(x=step) for step in range(6)], options=None, **ALL)
    assert not any(databases(directory, step) for step in range(1, 7))


def test_each_start_decides_anew(directory: Path) -> None:
    model = Tuned().to("jax")
    saved(directory, model, 1, 2, 3)
    model.base.requires_grad_(True)
    saved(directory, model, 4, 5)
    assert not databases(directory, 4)
    assert not databases(directory, 5)
    model.base.requires_grad_(False)
    saved(directory, model, 6, 7, 8)
    assert files(directory, 8) & files(directory, 6)
    assert not files(directory, 8) & files(directory, 7)


def test_local_saves_link_before_a_first_durable_one(directory: Path, tmp_path: Path) -> None:
    """The restored step shows that the run reuses what does not change."""
    model = Tuned().to("jax")
    every = policies.FixedIntervalPolicy
    for steps in ((1, 2, 3, 4), (5, 6, 7)):
        local = LocalTier(tmp_path / "ramdisk", save_decision_policy=every(1), keep=9)
        with TorchaxCheckpointer(directory, save_decision_policy=every(4), local=local) as ckpt:
            assert ckpt.attach(model) == steps[0] - 1
            for step in steps:
                with torch.no_grad():
                    model.head.weight.add_(step)
                ckpt.save(step)
                ckpt.wait_until_finished()
    ramdisk = tmp_path / "ramdisk"
    assert files(ramdisk, 7) & files(ramdisk, 5)
    assert not files(ramdisk, 7) & files(ramdisk, 6)


def test_that_one_step_is_a_risk_is_logged(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    latest = {"preservation_policy": policies.LatestN(1)}
    saved(directory, Tuned(2 * HALF).to("jax"), 1, **latest)
    assert "keeps one step" not in caplog.text
    assert "unchanged" not in entries(directory)
    saved(directory.with_name("frozen"), Tuned().to("jax"), 1, 2, **latest)
    assert caplog.text.count("keeps one step") == 1


LATEST = policies.LatestN(1)
BEST = policies.AnyPreservationPolicy([LATEST, policies.BestN(metric="loss")])


@pytest.mark.parametrize(
    ("policy", "options", "is_warned"),
    [
        (LATEST, {"reuse": True}, True),
        (policies.AnyPreservationPolicy([LATEST]), {"reuse": True}, True),
        (LATEST, {}, False),
        (LATEST, {"reuse": True, "read_back": True}, False),
        (LATEST, {"reuse": True, "read_only": True}, False),
        (policies.LatestN(2), {"reuse": True}, False),
        (BEST, {"reuse": True}, False),
    ],
)
def test_with_reuse_a_policy_that_keeps_one_step_is_warned_of(
    policy: Any, options: Any, is_warned: bool, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TorchaxCheckpointer(
        directory,
        preservation_policy=policy,
        local=LocalTier(directory.with_name("local"), keep=1),
        options=CheckpointOptions(**options),
    )
    said = [r.message for r in caplog.records if "keeps one step" in r.message]
    assert len(said) == is_warned
    if said:
        assert said[0].startswith(f"{directory}: ")
        assert "\n" not in said[0]


def test_so_it_is_where_auto_switches_it_on(directory: Path, caplog: Any) -> None:
    saved(directory, Tuned(4).to("jax"), 1, 2, preservation_policy=LATEST)
    assert caplog.text.count("keeps one step") == 1


def test_a_linked_save_says_how_to_copy(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torchax_ckpt"):
        saved(directory, Tuned().to("jax"), 1, 2, 3, 4, 5)
    (said,) = (text for text in caplog.messages if "cp -r" in text)
    assert said.startswith(f"step 3 of {directory} has ")
    assert "cp -a, rsync -H and torchax-ckpt copy keep the links" in said
