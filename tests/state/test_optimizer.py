"""Optimizers: state and hyperparameters by parameter name, never by position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_trees_identical, bits, copied, training_state
from support.training import (
    fsdp_mesh,
    fsdp_rule,
    mlp,
    on_cpu,
    place,
    restore,
    resume,
    save,
    train_step,
)
from torch.optim import Optimizer

from torchax_ckpt import TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import MismatchError, UnsupportedLeafError
from torchax_ckpt.formats.optimizer_state import optimizers_of, state_dict_of
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep

Pair = tuple[Any, Any]  # a model and its optimizer


def step(optimizer: Optimizer, seed: int = 0, only: set[int] | None = None) -> None:
    """A step on random gradients, of the parameters at these places in the optimizer."""
    generator = torch.Generator().manual_seed(seed)
    for index, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        if only is None or index in only:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype).to("jax")
    optimizer.step()


def state_by_name(model: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name; only of parameters that have some."""
    return {
        name: copied(dict(optimizer.state[parameter]))
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def models() -> Pair:
    return mlp(width=8), mlp(width=8)


def refused(directory: Path, *attached: Any) -> MismatchError:
    """Attaching is refused, and changes nothing."""
    before = training_state(*attached)
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(*attached)
    assert_trees_identical(training_state(*attached), before)
    return caught.value


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    "Adam-capturable": (torch.optim.Adam, {"capturable": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OPTIMIZERS["Muon"] = (torch.optim.Muon, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_never_stopped(directory: Path, name: str) -> None:
    kind, arguments = OPTIMIZERS[name]
    model = mlp(width=8, bias=False)
    optimizer = kind(model.parameters(), lr=1e-2, **arguments)  # type: ignore[call-arg]
    for seed in range(3):
        train_step(model, optimizer, seed)
    save(directory, model, optimizer)
    want = training_state(model, optimizer)

    torch.manual_seed(1)
    fresh = mlp(width=8, bias=False)
    fresh_optimizer = kind(fresh.parameters(), lr=0.5)  # type: ignore[call-arg]
    resume(directory, fresh, fresh_optimizer)
    assert_trees_identical(training_state(fresh, fresh_optimizer), want)

    for seed in range(3, 5):
        train_step(model, optimizer, seed)
        train_step(fresh, fresh_optimizer, seed)
    assert_trees_identical(training_state(fresh, fresh_optimizer), training_state(model, optimizer))


def adamw(*groups: Any, **hyperparameters_: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=1e-2, **hyperparameters_)


def one_group(model: Any) -> torch.optim.AdamW:
    return adamw({"params": list(model.parameters())})


def reversed_order(model: Any) -> torch.optim.AdamW:
    return adamw({"params": list(reversed(list(model.parameters())))})


def two_groups(model: Any, **second: Any) -> torch.optim.AdamW:
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return adamw({"params": biases}, {"params": weights, **second})


def of_names(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.named_parameters(), lr=1e-2)


def of_names_reversed(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(reversed(list(model.named_parameters())), lr=1e-2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (one_group, reversed_order),
        (one_group, two_groups),
        (two_groups, one_group),
        (of_names, of_names_reversed),
        (two_groups, of_names),
    ],
)
def test_reordered_and_regrouped_parameters_get_their_own_moments(
    directory: Path, before: Any, after: Any
) -> None:
    model, fresh = models()
    optimizer, regrouped = before(model), after(fresh)
    named = regrouped.param_groups[0].get("param_names")
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    step(optimizer)
    save(directory, model, optimizer)
    resume(directory, fresh, regrouped)
    assert_trees_identical(state_by_name(fresh, regrouped), state_by_name(model, optimizer))
    assert len(state_by_name(fresh, regrouped)) == 4
    assert {group["lr"] for group in regrouped.param_groups} == {0.25}
    assert regrouped.param_groups[0].get("param_names") == named


def test_merging_groups_that_differ_is_refused_with_the_hyperparameter_named(
    directory: Path,
) -> None:
    model, fresh = models()
    saved = two_groups(model, weight_decay=0.5)
    saved.param_groups[0]["lr"] = saved.param_groups[1]["lr"] = 0.25
    step(saved)
    save(directory, model, saved)
    optimizer = adamw({"params": list(fresh.parameters())}, weight_decay=0.125)
    named = ["optimizer/param_groups/0/weight_decay"]
    assert list(refused(directory, fresh, optimizer).mismatched) == named
    # Without strict, the live value stays.
    assert list(restore(directory, fresh, optimizer, strict=False).mismatched) == named
    (group,) = optimizer.param_groups
    assert (group["weight_decay"], group["lr"]) == (0.125, 0.25)
    assert_trees_identical(state_by_name(fresh, optimizer), state_by_name(model, saved))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_parameter_of_two_models_gets_its_moments_under_either_name(
    directory: Path, order: str
) -> None:
    def build(names: str) -> Pair:
        shared = torch.nn.Linear(2, 2).to("jax")
        two = {name: torch.nn.Sequential(shared) for name in names}
        return two, torch.optim.AdamW(shared.parameters())

    (model, saved), (fresh, optimizer) = build("ab"), build(order)
    step(saved)
    save(directory, model, saved)
    resume(directory, fresh, optimizer)
    assert_trees_identical(training_state(optimizer), training_state(saved))
    assert fresh["a"][0].weight is fresh["b"][0].weight


def test_hyperparameters_of_every_group_come_back_with_their_types(directory: Path) -> None:
    def build(model: Any, lr: float, note: Any) -> Optimizer:
        a, b, c, d = model.parameters()
        return torch.optim.SGD(
            [
                {"params": [a], "lr": lr, "note": note},
                {"params": [c, b], "nesterov": True},
                {"params": [d]},
            ],
            lr=0.5,
            momentum=0.5,
        )

    model, fresh = models()
    note = ("text", None, {"deep": [True, 2, 0.1]}, on_cpu(0.5), on_cpu(0.25).to("jax"))
    saved = build(model, 0.1, note)
    optimizer = build(fresh, 0.2, None)
    save(directory, model, saved)
    resume(directory, fresh, optimizer)
    assert_trees_identical(hyperparameters(optimizer), hyperparameters(saved))


def test_a_tensor_learning_rate_stays_the_tensor_it_is_and_replaces_a_number(
    directory: Path,
) -> None:
    def build(model: Any, *rates: Any) -> Optimizer:
        a, b, c, d = model.parameters()
        groups = [{"params": [a, b], "lr": rates[0]}, {"params": [c, d], "lr": rates[1]}]
        return torch.optim.SGD(groups)

    model, fresh = models()
    on_device, on_host = on_cpu(0.25).to("jax"), on_cpu(0.125)
    shared, others = on_cpu(0.5).to("jax"), [on_cpu(0.5).to("jax"), on_cpu(0.5)]
    cases: list[tuple[list[Any], list[Any]]] = [  # the saved rates, and the live ones
        ([on_device, on_host], [0.1, 0.1]),
        ([on_device, on_host], others),
        ([on_device, on_device], [shared, shared]),
    ]
    for number, (saved, live) in enumerate(cases):
        save(directory / str(number), model, build(model, *saved))
        optimizer = build(fresh, *live)
        resume(directory / str(number), fresh, optimizer)
        found = [group["lr"] for group in optimizer.param_groups]
        assert_trees_identical(found, saved)
        if isinstance(live[0], torch.Tensor):
            assert [id(rate) for rate in found] == [id(rate) for rate in live]


def narrow(model: Any) -> torch.optim.AdamW:
    """An optimizer that has stepped, with moments in bfloat16."""
    optimizer = one_group(model)
    step(optimizer)
    for entry in optimizer.state.values():
        entry["exp_avg_sq"] = entry["exp_avg_sq"].to(torch.bfloat16)
    return optimizer


def stepped(optimizer: Optimizer, only: set[int] | None = None) -> Optimizer:
    step(optimizer, only=only)
    return optimizer


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        # Parameters that never got a gradient have no state afterwards either.
        (lambda m: stepped(one_group(m), {0, 3}), lambda m: stepped(one_group(m))),
        (one_group, one_group),  # it never stepped
        (
            lambda m: stepped(torch.optim.AdamW(list(m.parameters())[2:])),
            lambda m: torch.optim.AdamW(list(m.parameters())[2:]),
        ),
        # Entries that the checkpoint lacks are gone afterwards.
        (
            lambda m: stepped(torch.optim.RMSprop(m.parameters())),
            lambda m: stepped(torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.9)),
        ),
        (narrow, one_group),  # moments of another dtype than the parameters
    ],
    ids=["some gradients", "no step", "some parameters", "fewer entries", "narrow moments"],
)
def test_the_state_is_the_saved_one_afterwards_and_no_other(
    directory: Path, saved: Any, live: Any
) -> None:
    model, fresh = models()
    optimizer, fresh_optimizer = saved(model), live(fresh)
    want = state_by_name(model, optimizer), hyperparameters(optimizer)
    save(directory, model, optimizer)
    resume(directory, fresh, fresh_optimizer)
    found = state_by_name(fresh, fresh_optimizer), hyperparameters(fresh_optimizer)
    assert_trees_identical(found, want)
    assert len(fresh_optimizer.state) == len(want[0])


def test_state_that_is_there_is_overwritten_in_the_same_tensors(directory: Path) -> None:
    model: Any = mlp(width=8)
    optimizer = one_group(model)
    step(optimizer)
    want = training_state(model, optimizer)
    live = dict(optimizer.state[model[0].weight])
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer)
        ckpt.save(1, force=True)
        step(optimizer, seed=1)
        ckpt.restore(1)
    assert_trees_identical(training_state(model, optimizer), want)
    restored = optimizer.state[model[0].weight]
    assert [restored[key] is tensor for key, tensor in live.items()] == [True] * 3


class Adding(Optimizer):
    """Adds state of its own to that of another optimizer, as Lookahead does."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def sgd_of(some: slice) -> Callable[[Any], Optimizer]:
    return lambda model: torch.optim.SGD(list(model.parameters())[some], lr=0.1)


MOMENTS = [f"optimizer/{name}/exp_avg_sq" for name in ("0.weight", "0.bias", "2.weight", "2.bias")]


@pytest.mark.parametrize(
    ("saved", "live", "differences", "text"),
    [
        # The other entries of a parameter are not restored without the one that differs.
        (
            lambda m: stepped(one_group(m)),
            narrow,
            {*MOMENTS, *(name.removesuffix("/exp_avg_sq") for name in MOMENTS)},
            "exp_avg_sq: expected bfloat16[8, 8], found float32[8, 8]",
        ),
        (
            lambda m: torch.optim.Adam(m.parameters()),
            lambda m: stepped(torch.optim.SGD(m.parameters(), lr=0.25, momentum=0.9)),
            {"optimizer"},
            "optimizer: expected SGD, found Adam",
        ),
        (
            lambda m: Adding(one_group(m)),
            one_group,
            {"optimizer"},
            "optimizer: expected AdamW, found Adding",
        ),
        (
            sgd_of(slice(3)),
            sgd_of(slice(1, 4)),
            {"optimizer/2.bias", "optimizer/0.weight"},
            "optimizer/2.bias",
        ),
    ],
    ids=["dtype", "class", "wrapper with state", "parameters"],
)
def test_an_optimizer_that_does_not_fit_is_refused_and_the_rest_can_be_restored(
    directory: Path, saved: Any, live: Any, differences: set[str], text: str
) -> None:
    model, fresh = models()
    save(directory, model, saved(model))
    optimizer = live(fresh)
    before = training_state(optimizer)
    error = refused(directory, fresh, optimizer)
    assert {*error.missing, *error.unexpected, *error.mismatched} == differences
    assert text in str(error)
    assert "call attach(resume=False), then restore" in str(error)
    assert "strict=False" in str(error)
    restore(directory, fresh, optimizer, strict=False)
    assert_trees_identical(dict(fresh.state_dict()), dict(model.state_dict()))
    if "optimizer" in differences:
        assert_trees_identical(training_state(optimizer), before)


def test_state_of_a_group_that_was_removed_is_named_when_it_is_not_restored(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, fresh = models()
    optimizer = torch.optim.AdamW([{"params": m.parameters()} for m in (model[0], model[2])])
    step(optimizer)
    del optimizer.param_groups[0]  # torch keeps the state of its parameters
    save(directory, model, optimizer)
    resumed = torch.optim.AdamW(fresh[2].parameters())
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.attach(fresh, resumed) == 1
        assert "not restored: the state of 2 parameters that were in no group" in caplog.text
        assert ckpt.restore().left_out == ("optimizer/0.weight", "optimizer/0.bias")
    state = state_by_name(model, optimizer)
    assert_trees_identical(
        state_by_name(fresh, resumed), {name: state[name] for name in ("2.weight", "2.bias")}
    )


def test_state_under_other_keys_than_parameters_comes_back_as_torch_keeps_it(
    directory: Path,
) -> None:
    model, fresh = models()
    saved, optimizer = one_group(model), one_group(fresh)
    step(saved)
    device = on_cpu(0.5).to("jax")
    others: dict[Any, Any] = {"k": 3, ("a", 1): [0.1, on_cpu(2.0)], "rate": device, "0.weight": {}}
    theirs: Any = saved.state
    ours: Any = optimizer.state
    theirs.update(others)
    ours.update({"k": 4, "gone": {"x": 1}})
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        ckpt.attach(model, saved)
        ckpt.save(1, force=True)
        theirs["k"] = 5  # a value is part of the node
        ckpt.save(2, force=True)
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.attach(fresh, optimizer) == 2
        assert ours.pop("k") == 5
        ckpt.restore(1)
    got = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    assert_trees_identical(got, others)
    stored = StoredStep(RunDirectory(directory, read_only=True).candidates(1)[-1])
    node = optimizers_of(stored)[""]
    exported = state_dict_of(node, "optimizer", lambda v: v["array"], by_name=False)["state"]
    assert [exported[key] for key in ("k", "rate")] == [3, "optimizer/other_state/rate"]
    assert set(exported) == {0, 1, 2, 3, *others}
    assert_trees_identical(state_by_name(fresh, optimizer), state_by_name(model, saved))


def assert_moments_are_where_their_parameters_are(optimizer: Optimizer) -> None:
    moments = [
        (torchax_backend.buffer(value), torchax_backend.buffer(parameter))
        for parameter, entry in optimizer.state.items()
        for value in entry.values()
        if torchax_backend.is_device_tensor(value) and value.shape == parameter.shape
    ]
    assert len(moments) == 2 * len(optimizer.state) > 0
    for moment, parameter in moments:
        assert moment.sharding == parameter.sharding
        assert moment.committed


@pytest.mark.parametrize("live", ["placed", "fresh", "on one device"])
def test_moments_go_to_where_their_parameters_are_or_go(directory: Path, live: str) -> None:
    model, fresh = mlp(width=16), mlp(width=16)
    saved, optimizer = one_group(model), one_group(fresh)
    step(saved)
    save(directory, model, saved)
    rule = fsdp_rule(fsdp_mesh(4))
    if live == "placed":
        place(fresh, rule)
    elif live == "on one device":
        step(optimizer)
    resume(directory, fresh, optimizer, shardings=None if live == "placed" else rule)
    assert_moments_are_where_their_parameters_are(optimizer)
    assert len(torchax_backend.buffer(fresh[0].weight).sharding.device_set) == 4  # type: ignore[index]
    assert [bits(p) for p in fresh.parameters()] == [bits(p) for p in model.parameters()]


class Wrapping(Optimizer):
    """Gives away the state of another optimizer, as accelerate's ``AcceleratedOptimizer`` does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def test_odd_hyperparameters_and_state_come_back_or_are_refused_by_name(directory: Path) -> None:
    model = torch.nn.ParameterDict({"other_state": torch.nn.Parameter(torch.ones(2))}).to("jax")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    (weight,) = model.parameters()
    optimizer.param_groups[0] |= {1: 2, None: {("a", 1): 3}}
    optimizer.state["x"] = torch.ones(2, device="jax")
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer)
        for state, reason in (
            ({"x": torch.ones_like(weight)}, "other_state/x: two leaves have this name"),
            ([1, 2], "optimizer/other_state: expected a dict .*, found a list"),
        ):
            optimizer.state[weight] = state
            with pytest.raises(UnsupportedLeafError, match=reason):
                ckpt.save(1, force=True)
        del optimizer.state[weight]
        ckpt.save(1, force=True)
    fresh: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    assert resume(directory, model, fresh) == 1
    assert (fresh.param_groups[0][1], fresh.param_groups[0][None]) == (2, {("a", 1): 3})
    assert fresh.state.keys() == {"x"}


def test_an_optimizer_in_a_wrapper_is_the_optimizer(directory: Path) -> None:
    model, fresh, wrapped = mlp(width=8), mlp(width=8), mlp(width=8)
    optimizer, plain = one_group(model), one_group(fresh)
    step(optimizer)
    save(directory / "a", model, Wrapping(Wrapping(optimizer)))
    resume(directory / "a", fresh, plain)
    save(directory / "b", fresh, plain)
    inner = one_group(wrapped)
    resume(directory / "b", wrapped, Wrapping(inner))
    want = training_state(model, optimizer)
    assert_trees_identical(training_state(fresh, plain), want)
    assert_trees_identical(training_state(wrapped, inner), want)
