"""What cannot be attached, saved or restored says so, by name, and leaves things as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.compare import assert_trees_identical, training_state
from support.training import mlp, save
from torch import nn

from torchax_ckpt import TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import (
    AttachError,
    CheckpointError,
    DirectoryError,
    MismatchError,
    StepError,
    StepNotFoundError,
    StepTypeError,
    UnsupportedLeafError,
)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def said(error: CheckpointError, *words: str) -> None:
    assert [word for word in words if word not in str(error)] == [], str(error)


# --- what cannot be attached -------------------------------------------------------------------


def prepared_by_accelerate() -> nn.Module:
    model: Any = nn.Linear(2, 2)
    model._is_accelerate_prepared = True  # accelerate 1.15, Accelerator.prepare_model
    return model


def with_early_optimizer() -> list[Any]:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    model.to("jax")
    return [model, optimizer]


def with_one_parameter_too_many() -> list[Any]:
    model = mlp()
    optimizer = sgd(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, device="jax"))]})
    return [model, optimizer]


class Labelled(torch.Tensor):
    """A subclass that may hold more than its values."""


class Hooked(nn.Linear):
    """A module to whose state a hook adds."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "calls"] = torch.ones(1)


def with_buffer(build: Callable[[], torch.Tensor]) -> list[Any]:
    model = mlp()
    with torchax_backend.native_torch():
        model[0].register_buffer("odd", build())  # type: ignore[index]
    return [model]


# What is attached; the key path of the error; how its message begins, and what it has too.
NOT_ATTACHED: list[tuple[Callable[[], list[Any]], str | None, str, str]] = [
    (lambda: [nn.Sequential(nn.Linear(2, 2))], "model",
     "model: all parameters of Sequential are on the CPU", "model.to('jax')"),
    (lambda: [prepared_by_accelerate()], "model", "model: all parameters of Linear are on the CPU",
     "accelerate's prepare moves models there: call Accelerator(device_placement=False)"),
    (lambda: [{"a": mlp(), "b": nn.Linear(2, 2)}], "model/b",
     "model/b: all parameters of Linear are on the CPU", "model.to('jax')"),
    (with_early_optimizer, "optimizer", "optimizer: 2 parameters of SGD",
     "the optimizer was built before model.to('jax')"),
    (lambda: [mlp(), sgd(mlp())], "optimizer",
     "optimizer: 4 parameters of SGD are not parameters of the attached model, the first at "
     "param_groups[0]['params'][0]. Attach", "or leave them out"),
    (with_one_parameter_too_many, "optimizer", "optimizer: 1 parameters of SGD",
     "param_groups[1]['params'][0]"),
    (lambda: [None, sgd(mlp())], "optimizer", "optimizer: SGD is attached without a module",
     "Attach the module"),
    (lambda: [mlp(), {"main": mlp().parameters()}], "optimizer/main",
     "optimizer/main: expected a torch.optim.Optimizer, found a generator", ""),
    (lambda: [mlp(), nn.ModuleList(nn.Linear(2, 2) for _ in range(100))], "optimizer",
     "optimizer: expected a torch.optim.Optimizer, found a torch.nn", "ModuleList"),
    (lambda: [{0: mlp()}], None, "model: names must be strings, found 0", ""),
    (lambda: [nn.Linear], "model", "model: expected a torch.nn.Module, found the class Linear", ""),
    (lambda: ["model"], "model", "model: expected a torch.nn.Module, found a str", ""),
    (lambda: [{"w": 1}], "model/w", "model/w: expected a torch.nn.Module, found a int", ""),
    (lambda: [[mlp]], "model", "model: expected a torch.nn.Module, found a list", ""),
    (lambda: with_buffer(lambda: torch.eye(3).to_sparse()), "model/0.odd",
     "model/0.odd: has layout torch.sparse_coo", ""),
    (lambda: with_buffer(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
     "model/0.odd", "model/0.odd: is quantized", "qint8"),
    (lambda: with_buffer(lambda: torch.ones(2).as_subclass(Labelled)), "model/0.odd",
     "model/0.odd: is a Labelled", ""),
    (lambda: [nn.Sequential(nn.LazyLinear(4))], "model/0.weight", "model/0.weight: is lazy",
     "run the module once"),
    (lambda: [nn.Sequential(Hooked(2, 2)).to("jax")], "model/0.calls", "model/0.calls: ",
     "get_extra_state"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "key_path", "begins", "has"), NOT_ATTACHED, ids=[case[2] for case in NOT_ATTACHED]
)
def test_what_cannot_be_attached_is_named_and_attaches_nothing(
    directory: Path, build: Callable[[], list[Any]], key_path: str | None, begins: str, has: str
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        with pytest.raises((AttachError, UnsupportedLeafError)) as caught:
            ckpt.attach(*build())
        assert str(caught.value).startswith(begins)
        said(caught.value, has)
        assert caught.value.key_path == key_path
        # Objects are named by their types and not printed, which may take pages.
        assert len(str(caught.value)) < 400
        with pytest.raises(AttachError, match="before anything was attached"):
            ckpt.save(1, force=True)
        with pytest.raises(AttachError, match="before attach"):
            ckpt.restore()
        model = mlp()  # a second, sound attach works
        assert ckpt.attach(model, sgd(model)) == 0
        assert ckpt.save(1, force=True)


@pytest.mark.parametrize("argument", ["shardings", "init"])
def test_a_rule_that_cannot_be_called_is_refused(directory: Path, argument: str) -> None:
    rule: dict[str, Any] = {argument: {"0.weight": None}}
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(AttachError) as caught:
        ckpt.attach(mlp(), **rule)
    said(caught.value, f"{argument}: expected a callable", "found a dict")
    assert "0.weight" not in str(caught.value), "a rule may be as long as a model"


# --- what cannot be saved ----------------------------------------------------------------------


class WithFunction(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": 1, "activation": [lambda x: x]}


def add_function(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["schedule"] = lambda step: step


def add_state_of_a_stranger(model: Any, optimizer: Any) -> None:
    optimizer.state[nn.Parameter(torch.ones(2, device="jax"))] = {"momentum_buffer": None}


def replace_layer(model: Any, optimizer: Any) -> None:
    model[2] = nn.Linear(16, 4).to("jax")  # the optimizer still steps the old ones


def donate(model: Any, optimizer: Any) -> None:
    torchax_backend.buffer(model[2].weight).delete()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (add_function, ("optimizer/param_groups/0/schedule", "function")),
        (add_state_of_a_stranger, ("optimizer/state", "not a parameter of an attached module")),
        (replace_layer, ("optimizer", "param_groups[0]['params'][2]")),
        (donate, ("model/2.weight", "donated", "save(step, state=...)")),
        (None, ("model/0/_extra_state/activation/0", "function cannot be stored")),
    ],
)
def test_what_cannot_be_saved_is_named(directory: Path, spoil: Any, words: tuple[str, ...]) -> None:
    model: Any = mlp() if spoil else nn.Sequential(WithFunction(2, 2)).to("jax")
    optimizer = sgd(model)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer)
        if spoil:
            spoil(model, optimizer)
        with pytest.raises(CheckpointError) as caught:
            ckpt.save(1, force=True)
    said(caught.value, *words)
    assert ckpt.all_steps() == []


# --- the order of calls ------------------------------------------------------------------------


def test_attaching_twice_keeps_what_was_attached_first(directory: Path) -> None:
    model = mlp()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model)
        with pytest.raises(AttachError, match="attach was called before"):
            ckpt.attach(mlp(width=3))
        ckpt.save(1, force=True)
    with TorchaxCheckpointer(directory) as ckpt:
        assert_trees_identical(ckpt.load()["model"], dict(model.state_dict()))


def test_saving_with_nothing_attached_but_random_state_needs_the_state(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach()
        with pytest.raises(AttachError):
            ckpt.save(1, force=True)
        assert ckpt.save(1, state={"w": 1}, force=True)


# --- steps -------------------------------------------------------------------------------------

USES_OF_STEPS: dict[str, Callable[[TorchaxCheckpointer, Any], Any]] = {
    "save": lambda ckpt, step: ckpt.save(step, force=True),
    "restore": lambda ckpt, step: ckpt.restore(step),
    "load": lambda ckpt, step: ckpt.load(step),
    "steps": lambda ckpt, step: ckpt.steps(step),
    "should_save": lambda ckpt, step: ckpt.should_save(step),
    "metrics": lambda ckpt, step: ckpt.metrics(step),
    "delete": lambda ckpt, step: ckpt.delete(step),
    "reached_preemption": lambda ckpt, step: ckpt.reached_preemption(step),
}


@pytest.mark.parametrize("use", USES_OF_STEPS)
def test_steps_that_are_no_counts_are_refused_everywhere(directory: Path, use: str) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        flags = [torch.tensor(True), torch.tensor(True, device="jax"), np.array(True)]
        arrays = [torch.tensor([3]), torch.ones(1, dtype=torch.int32, device="jax"), np.array([3])]
        for step in (1.0, True, np.True_, np.float32(2), "3", [4], *flags, *arrays):
            with pytest.raises(StepTypeError, match="expected an int, found") as caught:
                USES_OF_STEPS[use](ckpt, step)
            assert isinstance(caught.value, TypeError)
        with pytest.raises(StepError, match="expected 0 or more, found -1") as negative:
            USES_OF_STEPS[use](ckpt, -1)
        assert isinstance(negative.value, ValueError)


def test_steps_may_be_integers_of_numpy_and_tensors_without_dims(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        for step in (np.int64(3), np.array(4), torch.tensor(5), jnp.array(6)):
            assert ckpt.save(step, force=True)  # type: ignore[arg-type]
        on_device = torch.tensor(7, dtype=torch.int32, device="jax")
        assert ckpt.save(on_device, force=True)  # type: ignore[arg-type]
        ckpt.wait_until_finished()
        assert ckpt.all_steps() == [5, 6, 7]
        for number in (np.int32(7), on_device):
            assert type(ckpt.restore(number).step) is int  # type: ignore[arg-type]


def test_a_step_below_the_last_saved_one_is_refused(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        ckpt.save(5, force=True)
        with pytest.raises(StepError) as caught:
            ckpt.save(4)
        said(caught.value, "step 4 is below step 5", "call restore(step) for the step to")
        assert caught.value.step == 4
        assert ckpt.save(5, force=True) is False
        assert ckpt.save(6, force=True)


@pytest.mark.parametrize("use", ["restore", "load", "metrics", "delete"])
def test_a_step_that_is_not_there_comes_with_those_that_are(directory: Path, use: str) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        with pytest.raises(StepNotFoundError, match="no checkpoint at step 3; there are: none"):
            USES_OF_STEPS[use](ckpt, 3)
        ckpt.save(2, force=True)
        ckpt.save(4, force=True)
        ckpt.wait_until_finished()
        with pytest.raises(StepNotFoundError) as caught:
            USES_OF_STEPS[use](ckpt, 3)
    said(caught.value, str(directory), "no checkpoint at step 3; there are: 2, 4")
    assert (caught.value.step, caught.value.path) == (3, str(directory))
    assert isinstance(caught.value, FileNotFoundError)


def test_an_empty_directory_has_no_newest_step_and_is_not_created(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        with pytest.raises(StepNotFoundError, match="there are no checkpoints"):
            ckpt.restore()
        with pytest.raises(StepNotFoundError, match="there are no checkpoints"):
            ckpt.load()
        assert ckpt.latest_step() is None
    assert not directory.exists()


# --- directories -------------------------------------------------------------------------------


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("mine")
    with pytest.raises(DirectoryError, match="expected a directory, found a file") as caught:
        TorchaxCheckpointer(file)
    assert caught.value.path == str(file)
    assert isinstance(caught.value, OSError)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("url", ["s3://bucket/run", "hdfs://host/run"])
def test_a_scheme_that_is_not_supported_is_named(url: str) -> None:
    with pytest.raises(DirectoryError) as caught:
        TorchaxCheckpointer(url)
    said(caught.value, url, f"{url.partition(':')[0]}:// is not supported", "gs://")


def test_a_bucket_in_a_pathlib_path_is_refused_and_not_taken_for_a_local_directory() -> None:
    with pytest.raises(DirectoryError, match="gs://bucket/run"):
        TorchaxCheckpointer(Path("gs://bucket/run"))


@pytest.mark.parametrize("thing", [None, 7, b"run"])
def test_what_is_no_path_is_refused(thing: Any) -> None:
    with pytest.raises(DirectoryError, match="expected a path or a gs:// URL, found"):
        TorchaxCheckpointer(thing)


# --- a checkpoint of something else ------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused_with_every_difference_at_once(
    directory: Path,
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        old = nn.ModuleDict({"body": nn.Linear(2, 3), "old": nn.Linear(3, 1)}).to("jax")
        ckpt.attach(old, sgd(old))
        ckpt.save(7, force=True)
    model = nn.ModuleDict({"body": nn.Linear(2, 4), "new": nn.Linear(4, 1)}).to("jax")
    optimizer = sgd(model)
    before = training_state(model, optimizer)
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(model, optimizer)
    error = caught.value
    assert set(error.missing) == {
        "model/new.weight", "model/new.bias", "optimizer/new.weight", "optimizer/new.bias",
    }  # fmt: skip
    assert set(error.unexpected) == {
        "model/old.weight", "model/old.bias", "optimizer/old.weight", "optimizer/old.bias",
    }  # fmt: skip
    assert error.mismatched == {
        "model/body.weight": "expected float32[4, 2], found float32[3, 2]",
        "model/body.bias": "expected float32[4], found float32[3]",
    }
    said(error, "step 7", str(directory), "nothing was changed", "strict=False")
    named = [*error.missing, *error.unexpected, *error.mismatched]
    said(error, *(n for n in named if n.startswith("model/")), *error.mismatched.values())
    assert (error.step, error.path) == (7, str(directory / "7"))
    assert_trees_identical(training_state(model, optimizer), before)


def test_a_long_list_of_differences_is_cut_in_the_message_but_not_in_the_error(
    directory: Path,
) -> None:
    save(directory, nn.ParameterDict({f"old{i}": torch.ones(1, device="jax") for i in range(30)}))
    model = nn.ParameterDict({"new": torch.ones(1, device="jax")})
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(model)
    assert len(caught.value.unexpected) == 30
    said(caught.value, "... and 10 more")
    assert len(str(caught.value).splitlines()) < 30
