"""Parts of a checkpoint: with another head, other names, into a run of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_trees_identical, bits, training_state
from support.models import WithExtraState
from support.training import adamw, mlp, restore, save, train_and_save, train_step
from torch import nn

from torchax_ckpt import TorchaxCheckpointer, warm_start
from torchax_ckpt.errors import MismatchError, SelectionError


def other_head() -> Any:
    """The body of ``mlp``, whose head is the module 2, with more classes."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6)).to("jax")


class Renamed(nn.Module):
    """``mlp`` under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(8, 16)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body[0](x)))


RENAME = {"0": "body.0", "2": "head"}


@pytest.fixture
def trained(directory: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """A run of two steps."""
    model = mlp()
    optimizer = adamw(model)
    train_and_save(directory, model, optimizer)
    return directory, model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[Any]:
    return training_state(optimizer)[0]["moments"]


def test_a_run_goes_on_with_another_head(trained: Any) -> None:
    directory, model, optimizer = trained
    fresh = other_head()
    fresh_optimizer = adamw(fresh, lr=0.5)
    head = [bits(p) for p in fresh[2].parameters()]
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(fresh, fresh_optimizer, resume=False)
        report = ckpt.restore(exclude="2")
        assert (report.step, report.missing, report.unexpected) == (2, (), ())
        assert report.mismatched == {}
        assert set(report.left_out) == {
            "model/2.weight", "model/2.bias", "optimizer/2.weight", "optimizer/2.bias"
        }  # fmt: skip
        assert not report.is_verified
        assert_trees_identical(training_state(fresh[0]), training_state(model[0]))
        assert [bits(p) for p in fresh[2].parameters()] == head
        # The optimizer's state goes with its parameters, and its settings with them.
        assert_trees_identical(moments(fresh_optimizer)[:2], moments(optimizer)[:2])
        assert moments(fresh_optimizer)[2:] == [{}, {}]
        assert fresh_optimizer.param_groups[0]["lr"] == 1e-2
        for step in ckpt.steps(3):
            assert step == 3
            train_step(fresh, fresh_optimizer, step)
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.latest_step() == 3


def test_what_is_not_selected_keeps_its_state(trained: Any) -> None:
    directory, _, _ = trained
    fresh = other_head()
    fresh_optimizer = adamw(fresh)
    train_step(fresh, fresh_optimizer, 7)
    before = training_state(fresh[2]), moments(fresh_optimizer)[2:]
    restore(directory, fresh, fresh_optimizer, include="0")
    assert_trees_identical((training_state(fresh[2]), moments(fresh_optimizer)[2:]), before)


def test_a_run_goes_on_under_other_names(trained: Any) -> None:
    directory, model, optimizer = trained
    fresh = Renamed().to("jax")
    fresh_optimizer = adamw(fresh)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(fresh, fresh_optimizer, resume=False)
        report = ckpt.restore(rename=RENAME)
        assert report.is_verified
        assert report.left_out == ()
        for step in ckpt.steps(3):
            train_step(fresh, fresh_optimizer, step)
    train_step(model, optimizer, 3)
    assert [bits(p) for p in fresh.parameters()] == [bits(p) for p in model.parameters()]
    assert_trees_identical(moments(fresh_optimizer), moments(optimizer))


@pytest.mark.parametrize("patterns", [{"exclude": "head.weight"}, {"include": ["body", "*.bias"]}])
def test_what_is_left_out_has_the_programs_names(trained: Any, patterns: dict[str, Any]) -> None:
    directory, _, optimizer = trained
    fresh = Renamed().to("jax")
    fresh_optimizer = adamw(fresh)
    report = restore(directory, fresh, fresh_optimizer, rename=RENAME, **patterns)
    assert set(report.left_out) == {"model/head.weight", "optimizer/head.weight"}
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), {})
    expected = moments(optimizer)
    expected[2] = {}
    assert_trees_identical(moments(fresh_optimizer), expected)


def test_what_is_selected_must_fit(trained: Any) -> None:
    directory, _, _ = trained
    fresh = other_head()
    before = training_state(fresh)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(fresh, resume=False, rng=False)
        with pytest.raises(MismatchError) as caught:
            ckpt.restore(exclude="0.bias")
        assert set(caught.value.mismatched) == {"model/2.weight", "model/2.bias"}
        with pytest.raises(MismatchError) as caught:
            ckpt.restore(rename={"2": "3"}, exclude="0")
        assert caught.value.missing == ("model/2.weight", "model/2.bias")
        assert {n for n in caught.value.unexpected if n.startswith("model")} == {
            "model/3.weight", "model/3.bias"
        }  # fmt: skip
        assert_trees_identical(training_state(fresh), before)
        report = ckpt.restore(rename={"2": "3"}, exclude="0", strict=False)
        assert report.missing == ("model/2.weight", "model/2.bias")
    assert_trees_identical(training_state(fresh), before)


def test_patterns_that_match_nothing_are_misspelled(trained: Any) -> None:
    directory, _, _ = trained
    fresh = mlp()
    before = training_state(fresh)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(fresh, adamw(fresh), resume=False)
        for arguments in (
            {"include": ["0", "haed"]},
            {"exclude": "haed"},
            {"rename": {"haed": "x"}},
            {"rename": {"0": "2"}},
        ):
            with pytest.raises(SelectionError, match=r"haed|would both be named 2\."):
                ckpt.restore(strict=False, **arguments)
        assert_trees_identical(training_state(fresh), before)


def test_one_of_several_models_is_selected_by_its_name(directory: Path) -> None:
    models = {"g": mlp(), "d": mlp()}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(models, {"g": adamw(models["g"])})
        train_step(models["g"], adamw(models["g"]), 0)
        ckpt.save(1, force=True)
    fresh = {"g": mlp(), "d": mlp()}
    kept = training_state(fresh["d"])
    restore(directory, fresh, {"g": adamw(fresh["g"])}, include="g")
    assert_trees_identical(training_state(fresh["g"]), training_state(models["g"]))
    assert_trees_identical(training_state(fresh["d"]), kept)


def test_a_rename_stays_within_its_model(directory: Path) -> None:
    models = {"gen/a": mlp(), "disc": mlp()}
    save(directory, models, rng=False)
    fresh = {"gen/a": mlp(), "disc": mlp()}
    before = {name: training_state(model) for name, model in fresh.items()}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(fresh, resume=False, rng=False)
        for target in ("disc/0", "0", "gen/a/0", "gen%2Fa/x/0", "gen%2Fa/%FF", "%FF/0"):
            said = rf"gen%2Fa/0\..* would become {target}\..*: expected gen%2Fa/ followed by torch"
            with pytest.raises(SelectionError, match=said):
                ckpt.restore(strict=False, rename={"gen%2Fa/0": target})
        assert_trees_identical({n: training_state(model) for n, model in fresh.items()}, before)
        ckpt.restore(strict=False, rename={"gen%2Fa/0": "gen%2Fa/2", "gen%2Fa/2": "gen%2Fa/0"})
    with pytest.raises(
        SelectionError, match=r"would become gen/0\..*: expected torch's name alone"
    ):
        warm_start(mlp(), directory, at="model/disc", rename={"0": "gen/0"}, strict=False)


def test_extra_state_goes_with_its_module(directory: Path) -> None:
    def build(extra: str) -> Any:
        model: Any = nn.ModuleDict({"a": WithExtraState(2, 2), "b": WithExtraState(2, 2)})
        model.to("jax")
        model["a"].extra = model["b"].extra = extra
        return model

    save(directory, build("stored"))
    fresh: Any = nn.ModuleDict({"a": WithExtraState(2, 2), "c": WithExtraState(2, 2)}).to("jax")
    restore(directory, fresh, exclude="a", rename={"b": "c"})
    assert (fresh["a"].extra, fresh["c"].extra) == ("live", "stored")
