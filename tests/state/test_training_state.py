"""What cannot be attached, saved or restored says so, by name, and leaves things as they were."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from support.commands import run
from support.compare import assert_trees_identical, training_state
from support.models import Plain, WithExtraState
from support.training import adamw, mlp, restore, resume, save
from torch import nn

from torchax_ckpt import TorchaxCheckpointer, torchax_backend, warm_start
from torchax_ckpt.errors import (
    AttachError,
    CheckpointError,
    MismatchError,
    StepError,
    StepNotFoundError,
    StepTypeError,
    UnsupportedLeafError,
)
from torchax_ckpt.policies import preservation_rules
from torchax_ckpt.state.findings import Findings


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def said(error: CheckpointError, *words: str) -> None:
    assert [word for word in words if word not in str(error)] == [], str(error)


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


def is_on_cpu(module: str) -> str:
    return f"all parameters of {module} are on the CPU"


# What is attached; the key path of the error; how its message goes on, and what it has too.
NOT_ATTACHED: list[tuple[Callable[[], list[Any]], str, str, str]] = [
    (lambda: [nn.Sequential(nn.Linear(2, 2))], "model", is_on_cpu("Sequential"), "model.to('jax')"),
    (lambda: [prepared_by_accelerate()], "model", is_on_cpu("Linear"),
     "accelerate's prepare moves models there: call Accelerator(device_placement=False)"),
    (lambda: [{"a": mlp(), "b": nn.Linear(2, 2)}], "model/b", is_on_cpu("Linear"), ".to('jax')"),
    (with_early_optimizer, "optimizer", "2 parameters of SGD",
     "the optimizer was built before model.to('jax')"),
    (lambda: [mlp(), sgd(mlp())], "optimizer",
     "4 parameters of SGD are not parameters of the attached model, the first at "
     "param_groups[0]['params'][0]. Attach", "or leave them out"),
    (with_one_parameter_too_many, "optimizer", "1 parameter of SGD",
     "param_groups[1]['params'][0]"),
    (lambda: [None, sgd(mlp())], "optimizer", "SGD is attached without a module", "Attach the mod"),
    (lambda: [mlp(), {"main": mlp().parameters()}], "optimizer/main",
     "expected a torch.optim.Optimizer, found a generator", ""),
    (lambda: [mlp(), nn.ModuleList(nn.Linear(2, 2) for _ in range(100))], "optimizer",
     "expected a torch.optim.Optimizer, found a torch.nn", "ModuleList"),
    (lambda: [{0: mlp()}], "", "model: names must be strings, found 0", ""),
    (lambda: [nn.Linear], "model", "expected a torch.nn.Module, found the class Linear", ""),
    (lambda: ["model"], "model", "expected a torch.nn.Module, found a str", ""),
    (lambda: [{"w": 1}], "model/w", "expected a torch.nn.Module, found a int", ""),
    (lambda: with_buffer(lambda: torch.eye(3).to_sparse()), "model/0.odd",
     "has layout torch.sparse_coo", ""),
    (lambda: with_buffer(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
     "model/0.odd", "is quantized", "qint8"),
    (lambda: with_buffer(lambda: torch.ones(2).as_subclass(Labelled)), "model/0.odd",
     "is a Labelled", ""),
    (lambda: [nn.Sequential(nn.LazyLinear(4))], "model/0.weight", "is lazy", "run the module once"),
    (lambda: [nn.Sequential(Hooked(2, 2)).to("jax")], "model/0.calls", "", "get_extra_state"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "key_path", "begins", "has"), NOT_ATTACHED)
def test_what_cannot_be_attached_is_named_and_attaches_nothing(
    directory: Path, build: Callable[[], list[Any]], key_path: str, begins: str, has: str
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        with pytest.raises((AttachError, UnsupportedLeafError)) as caught:
            ckpt.attach(*build())
        assert str(caught.value).startswith(f"{key_path}: {begins}" if key_path else begins)
        said(caught.value, has)
        assert caught.value.key_path == (key_path or None)
        # Objects are named by their types and not printed, which may take pages.
        assert len(str(caught.value)) < 400
        with pytest.raises(AttachError, match="before anything was attached"):
            ckpt.save(1, force=True)
        for call in (ckpt.restore, lambda: ckpt.steps(3)):
            with pytest.raises(AttachError, match="before attach"):
                call()
        model = mlp()  # a second, sound attach works
        assert ckpt.attach(model, sgd(model)) == 0
        assert ckpt.save(1, force=True)


def test_wrong_rules_a_second_attach_and_a_save_of_nothing_are_refused(directory: Path) -> None:
    model, rule = mlp(), {"0.weight": None}
    for argument in ("shardings", "init"):
        wrong: dict[str, Any] = {argument: rule}
        with TorchaxCheckpointer(directory) as ckpt, pytest.raises(AttachError) as caught:
            ckpt.attach(model, **wrong)
        said(caught.value, f"{argument}: expected a callable", "found a dict")
        assert "0.weight" not in str(caught.value), "a rule may be as long as a model"
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model)
        with pytest.raises(AttachError, match="attach was called before"):
            ckpt.attach(mlp(width=3))
        ckpt.save(1, force=True)
        ckpt.wait_until_finished()
        assert_trees_identical(ckpt.load()["model"], dict(model.state_dict()))
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(resume=False)  # random state alone
        with pytest.raises(AttachError):
            ckpt.save(2, force=True)
        assert ckpt.save(2, state={"w": 1}, force=True)


def add_function(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["schedule"] = lambda step: step


def add_state_of_a_stranger(model: Any, optimizer: Any) -> None:
    optimizer.state[nn.Parameter(torch.ones(2, device="jax"))] = {"momentum_buffer": None}


def replace_layer(model: Any, optimizer: Any) -> None:
    model[2] = nn.Linear(16, 4).to("jax")  # the optimizer still steps the old ones


def donate(model: Any, optimizer: Any) -> None:
    torchax_backend.buffer(model[2].weight).delete()


def test_what_cannot_be_saved_is_named(directory: Path) -> None:
    for spoil, words in (
        (add_function, ("optimizer/param_groups/0/schedule", "function")),
        (add_state_of_a_stranger, ("optimizer/state", "not a parameter of an attached module")),
        (replace_layer, ("optimizer", "param_groups[0]['params'][2]")),
        (donate, ("model/2.weight", "donated", "save(step, state=...)")),
        (
            lambda model, _: setattr(model[3], "extra", {"scale": 1, "activation": [mlp]}),
            ("model/3/_extra_state/activation/0", "function cannot be stored"),
        ),
    ):
        model: Any = nn.Sequential(*mlp().children(), WithExtraState(2, 2)).to("jax")
        optimizer = sgd(model)
        with TorchaxCheckpointer(directory) as ckpt:
            ckpt.attach(model, optimizer)
            spoil(model, optimizer)
            with pytest.raises(CheckpointError) as caught:
                ckpt.save(1, force=True)
        said(caught.value, *words)
        assert ckpt.all_steps() == []


USES_OF_STEPS: dict[str, Callable[[TorchaxCheckpointer, Any], Any]] = {
    "save": lambda ckpt, step: ckpt.save(step, force=True),
    "restore": lambda ckpt, step: ckpt.restore(step),
    "load": lambda ckpt, step: ckpt.load(step),
    "steps": lambda ckpt, step: ckpt.steps(step),
    "should_save": lambda ckpt, step: ckpt.should_save(step),
    "metrics": lambda ckpt, step: ckpt.metrics(step),
    "delete": lambda ckpt, step: ckpt.delete(step),
    "reached_preemption": lambda ckpt, step: ckpt.reached_preemption(step),
    "exit_if_preempted": lambda ckpt, step: ckpt.exit_if_preempted(step),
}


def test_steps_that_are_no_counts_are_refused_everywhere(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        flags = [torch.tensor(True), torch.tensor(True, device="jax"), np.array(True)]
        arrays = [torch.tensor([3]), torch.ones(1, dtype=torch.int32, device="jax"), np.array([3])]
        for use in USES_OF_STEPS.values():
            for step in (1.0, True, np.True_, np.float32(2), "3", [4], *flags, *arrays):
                with pytest.raises(StepTypeError, match="expected an int") as caught:
                    use(ckpt, step)
                assert isinstance(caught.value, TypeError)
            with pytest.raises(StepError, match="expected 0 or more, found -1") as negative:
                use(ckpt, -1)
            assert isinstance(negative.value, ValueError)


def test_the_largest_step_is_listed_and_resumed_from_and_a_larger_one_is_refused(
    directory: Path,
) -> None:
    largest = 2**63 - 1
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        for step in (10**18, largest):
            assert ckpt.save(step, force=True)
        for step in (2**63, 10**30):
            with pytest.raises(StepError, match=r"expected at most 9223372036854775807"):
                ckpt.save(step, force=True)
        with pytest.raises(StepNotFoundError):
            ckpt.load(2**63)
    assert TorchaxCheckpointer(directory).all_steps() == [10**18, largest]
    assert resume(directory, mlp()) == largest
    assert str(largest) in run("ls", directory)
    assert preservation_rules.parsed(f"CustomSteps({largest})")["steps"] == [largest]


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


def test_a_step_that_is_not_there_comes_with_those_that_are(directory: Path) -> None:
    asking = [USES_OF_STEPS[use] for use in ("restore", "load", "metrics", "delete")]
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        for ask in (ckpt.restore, ckpt.load):
            with pytest.raises(StepNotFoundError, match="there are no checkpoints"):
                ask()
        assert ckpt.latest_step() is None
        for use in asking:
            with pytest.raises(StepNotFoundError, match="no checkpoint at step 3; there are: none"):
                use(ckpt, 3)
        assert not directory.exists()
        ckpt.save(2, force=True)
        ckpt.save(4, force=True)
        ckpt.wait_until_finished()
        for use in asking:
            with pytest.raises(StepNotFoundError) as caught:
                use(ckpt, 3)
            said(caught.value, str(directory), "no checkpoint at step 3; there are: 2, 4")
            assert (caught.value.step, caught.value.path) == (3, str(directory))
            assert isinstance(caught.value, FileNotFoundError)


def test_a_checkpoint_of_another_model_is_refused_with_every_difference_at_once(
    directory: Path,
) -> None:
    old = nn.ModuleDict({"body": nn.Linear(2, 3), "old": nn.Linear(3, 1)}).to("jax")
    save(directory, old, sgd(old), step=7)
    model = nn.ModuleDict({"body": nn.Linear(2, 4), "new": nn.Linear(4, 1)}).to("jax")
    optimizer = sgd(model)
    before = training_state(model, optimizer)
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(model, optimizer)
    error = caught.value
    parts = [
        f"{part}/{{}}.{leaf}" for part in ("model", "optimizer") for leaf in ("weight", "bias")
    ]
    assert set(error.missing) == {part.format("new") for part in parts}
    assert set(error.unexpected) == {part.format("old") for part in parts}
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


# --- the last sentence of a MismatchError ---


def refused(directory: Path, *attached: Any) -> str:
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(*attached)
    return str(caught.value).splitlines()[-1]


def test_a_prefix_comes_with_the_rename_that_makes_it_fit(directory: Path) -> None:
    model = sequential()
    save(directory, model, adamw(model))
    for build in (lambda: nn.ModuleDict({"net": sequential()}), lambda: sequential()[0]):
        fresh: Any = build()
        said = refused(directory, fresh, adamw(fresh))
        cause, _, rename = said.partition(": call attach(resume=False), then restore(rename=")
        assert cause == "The model's names differ by a prefix"
        names = ast.literal_eval(rename.removesuffix(")."))
        assert restore(directory, fresh, adamw(fresh), rename=names).step == 1
        restored, saved = (list(m.state_dict().values()) for m in (fresh, model))
        assert_trees_identical(restored, saved)


def sequential() -> Any:
    return nn.Sequential(nn.Linear(8, 8)).to("jax")


@pytest.mark.parametrize(
    ("missing", "unexpected", "rename"),
    [
        (["model/w", "model/b"], ["model/a.w", "model/a.b"], "{'a.*': '*'}"),
        (["model/a.b.w"], ["model/w"], "{'*': 'a.b.*'}"),
        (["model/w", "model/b"], ["model/a.w"], None),
        (["model/w"], ["model/aw"], None),
        (["model/gen/w"], ["model/gen/a.w"], None),
        (["model/w"], ["optimizer"], None),
        ([], ["model/w"], None),
    ],
)
def test_only_a_common_prefix_is_taken_for_one(
    missing: list[str], unexpected: list[str], rename: str | None
) -> None:
    said = str(Findings(missing, unexpected).error(1, "run"))
    assert ("differ by a prefix" in said) == (rename is not None)
    assert rename is None or f"(rename={rename})" in said


@pytest.mark.parametrize("several", [False, True])
def test_a_parameter_is_listed_once_with_its_optimizer_state_and_many_as_a_pattern(
    directory: Path, several: bool
) -> None:
    def built(rank: int) -> tuple[Any, Any]:
        layers = {str(i): nn.Linear(8, rank, bias=False) for i in range(5)}
        model = nn.ModuleDict({**layers, "head": nn.Linear(rank, 2, bias=False)}).to("jax")
        optimizer: Any = torch.optim.SGD(model.parameters(), momentum=0.9)
        for parameter in model.parameters():  # a step would take seconds to compile
            optimizer.state[parameter]["momentum_buffer"] = torch.ones(parameter.shape).to("jax")
        return ({"net": model}, {"adam": optimizer}) if several else (model, optimizer)

    save(directory, *built(2))
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(*built(4))
    net = "net/" * several
    texts = (
        "expected float32[4, 8], found float32[2, 8]",
        "expected float32[2, 4], found float32[2, 2]",
    )
    assert str(caught.value).splitlines()[2:-1] == [
        f"    model/{net}*.weight (5 of this pattern) and their optimizer state: {texts[0]}",
        f"    model/{net}head.weight and its optimizer state: {texts[1]}",
    ]
    assert len(caught.value.mismatched) == 12, "an attribute lacks some names"


def test_names_of_one_section_alone_are_listed_as_they_are() -> None:
    missing = ["model/1.w", "model/2.w", "model/3.w", "optimizer/x"]
    unexpected = ["optimizer/1.w", "model/x1"]
    said = str(Findings(missing, unexpected).error(1, "run")).splitlines()
    assert [line.strip() for line in said[1:-1]] == [
        "missing from the checkpoint:",
        *missing,
        "in the checkpoint, but not attached:",
        *unexpected,
    ]


def test_a_tie_that_only_the_checkpoint_has_asks_for_tie_weights(directory: Path) -> None:
    tied, untied = Plain().to("jax"), Plain().to("jax")
    tied.head.weight = tied.embed.weight
    save(directory / "tied", tied)
    assert "model.tie_weights()" in refused(directory / "tied", untied)
    save(directory / "untied", untied)
    assert "tie_weights" not in refused(directory / "untied", tied)


def test_weight_files_are_not_called_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, file)
    with pytest.raises(MismatchError) as caught:
        warm_start(torch.nn.Linear(2, 2).to("jax"), file)
    said = str(caught.value)
    assert "missing from the files" in said
    assert "in the files, but not in the model" in said
    assert said.endswith("take only the tensors that match (strict=False).")
    assert not {"checkpoint", "restore", "attach"} & set(said.replace("(", " ").split())


def test_load_asks_for_an_abstract_state_that_fits(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": np.ones(2)}, force=True)
        ckpt.wait_until_finished()
        with pytest.raises(MismatchError) as caught:
            ckpt.load(1, {"v": np.ones(2)})
    said = str(caught.value)
    assert "does not fit abstract_state" in said
    assert "Give an abstract_state that fits" in said
    assert "attach" not in said
