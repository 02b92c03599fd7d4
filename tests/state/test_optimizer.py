"""Optimizers: state and hyperparameters by parameter name, never by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from support.compare import assert_trees_identical, bits, copied, training_state
from support.training import fsdp_mesh, fsdp_rule, mlp, train_step
from torch.optim import Optimizer

from torchax_ckpt import TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import MismatchError
from torchax_ckpt.formats.optimizer_state import optimizers_of
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep


def save(directory: Path, model: Any, optimizer: Any, **more: Any) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer, resume=False, **more)
        assert ckpt.save(1, force=True)


def resume(directory: Path, model: Any, optimizer: Any, **more: Any) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.attach(model, optimizer, **more) == 1


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


def on_cpu(value: float) -> torch.Tensor:
    with torchax_backend.native_torch():
        return torch.tensor(value)


# --- every optimizer that steps under torchax --------------------------------------------------

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD-momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam-capturable": (torch.optim.Adam, {"capturable": True}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "RMSprop-centered": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Muon": (torch.optim.Muon, {}),
}


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


# --- order and grouping ------------------------------------------------------------------------


def adamw(*groups: Any, **hyperparameters_: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=1e-2, **hyperparameters_)


def one_group(model: Any) -> torch.optim.AdamW:
    return adamw({"params": list(model.parameters())})


def two_groups(model: Any, **second: Any) -> torch.optim.AdamW:
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return adamw({"params": biases}, {"params": weights, **second})


def test_reordered_parameters_get_their_own_moments(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    reordered = torch.optim.AdamW(reversed(list(fresh.parameters())))
    save(directory, model, optimizer)
    resume(directory, fresh, reordered)
    assert_trees_identical(state_by_name(fresh, reordered), state_by_name(model, optimizer))
    assert len(state_by_name(fresh, reordered)) == 4


@pytest.mark.parametrize(
    ("before", "after"), [(one_group, two_groups), (two_groups, one_group)], ids=["split", "merged"]
)
def test_regrouped_parameters_get_their_own_moments(
    directory: Path, before: Any, after: Any
) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    optimizer, regrouped = before(model), after(fresh)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = 0.25
    step(optimizer)
    save(directory, model, optimizer)
    resume(directory, fresh, regrouped)
    assert_trees_identical(state_by_name(fresh, regrouped), state_by_name(model, optimizer))
    assert {group["lr"] for group in regrouped.param_groups} == {0.25}


def test_groups_in_another_order_get_their_own_hyperparameters(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    save(directory, model, two_groups(model, lr=0.5, weight_decay=0.0, betas=(0.5, 0.6)))
    optimizer = two_groups(fresh)
    optimizer.param_groups.reverse()
    resume(directory, fresh, optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 1e-2]
    assert [g["betas"] for g in optimizer.param_groups] == [(0.5, 0.6), (0.9, 0.999)]


def test_merging_groups_that_differ_is_refused_with_the_hyperparameter_named(
    directory: Path,
) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    save(directory, model, two_groups(model, weight_decay=0.5))
    optimizer = one_group(fresh)
    before = training_state(fresh, optimizer)
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(fresh, optimizer)
    assert list(caught.value.mismatched) == ["optimizer/param_groups/0/weight_decay"]
    assert_trees_identical(training_state(fresh, optimizer), before)


def test_merging_groups_that_differ_keeps_the_live_value_if_not_strict(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    saved = two_groups(model, weight_decay=0.5)
    saved.param_groups[0]["lr"] = saved.param_groups[1]["lr"] = 0.25
    step(saved)
    save(directory, model, saved)
    optimizer = adamw({"params": list(fresh.parameters())}, weight_decay=0.125)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(fresh, optimizer, resume=False)
        report = ckpt.restore(strict=False)
    assert list(report.mismatched) == ["optimizer/param_groups/0/weight_decay"]
    assert (optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["lr"]) == (
        0.125,
        0.25,
    )
    assert_trees_identical(state_by_name(fresh, optimizer), state_by_name(model, saved))


def test_an_optimizer_built_from_named_parameters_keeps_its_names_when_reordered(
    directory: Path,
) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    optimizer = torch.optim.AdamW(model.named_parameters())
    step(optimizer)
    save(directory, model, optimizer)
    reordered = torch.optim.AdamW(reversed(list(fresh.named_parameters())))
    resume(directory, fresh, reordered)
    assert_trees_identical(state_by_name(fresh, reordered), state_by_name(model, optimizer))
    assert reordered.param_groups[0]["param_names"] == ["2.bias", "2.weight", "0.bias", "0.weight"]


def test_an_optimizer_built_from_named_parameters_may_be_regrouped(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    named = list(model.named_parameters())
    save(directory, model, torch.optim.SGD([{"params": named[:2]}, {"params": named[2:]}], lr=0.5))
    optimizer = torch.optim.SGD(fresh.named_parameters(), lr=0.1)
    resume(directory, fresh, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in named]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_tied_parameter_gets_its_moments_under_any_of_its_names(
    directory: Path, order: str
) -> None:
    def build(names: str) -> tuple[Any, Optimizer]:
        model, weight = torch.nn.Module(), torch.nn.Parameter(torch.ones(3, device="jax"))
        for name in names:
            model.register_parameter(name, weight)
        return model, torch.optim.AdamW(model.parameters())

    (model, saved), (fresh, optimizer) = build("ab"), build(order)
    step(saved)
    save(directory, model, saved)
    resume(directory, fresh, optimizer)
    assert_trees_identical(training_state(optimizer), training_state(saved))


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]], ids="".join)
def test_a_parameter_shared_by_two_models_gets_its_moments(
    directory: Path, order: list[str]
) -> None:
    def build(order: list[str]) -> tuple[dict[str, Any], Optimizer]:
        shared = torch.nn.Linear(2, 2).to("jax")
        models = {name: torch.nn.Sequential(shared) for name in order}
        return models, torch.optim.AdamW(shared.parameters())

    (models, saved), (fresh, optimizer) = build(["a", "b"]), build(order)
    step(saved)
    save(directory, models, saved)
    resume(directory, fresh, optimizer)
    assert_trees_identical(
        training_state(fresh["a"], optimizer), training_state(models["a"], saved)
    )
    assert fresh["a"][0].weight is fresh["b"][0].weight


# --- hyperparameters ---------------------------------------------------------------------------


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

    model, fresh = mlp(width=8), mlp(width=8)
    note = ("text", None, {"deep": [True, 2, 0.1]}, on_cpu(0.5), on_cpu(0.25).to("jax"))
    saved = build(model, 0.1, note)
    optimizer = build(fresh, 0.2, None)
    save(directory, model, saved)
    resume(directory, fresh, optimizer)
    assert_trees_identical(hyperparameters(optimizer), hyperparameters(saved))


@pytest.mark.parametrize("capturable", [True, False], ids=["torchax", "cpu"])
def test_a_tensor_learning_rate_comes_back_in_the_same_tensor(
    directory: Path, capturable: bool
) -> None:
    def build(model: Any, lr: float) -> tuple[torch.Tensor, Optimizer]:
        rate = torch.tensor(lr).to("jax") if capturable else on_cpu(lr)
        return rate, torch.optim.AdamW(model.parameters(), lr=rate, capturable=capturable)

    model, fresh = mlp(width=8), mlp(width=8)
    _, saved = build(model, 0.25)
    rate, optimizer = build(fresh, 0.5)
    step(saved)
    save(directory, model, saved)
    resume(directory, fresh, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    step(saved, seed=1)
    step(optimizer, seed=1)
    assert_trees_identical(training_state(fresh, optimizer), training_state(model, saved))


def test_a_tensor_learning_rate_takes_the_place_of_a_number(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    rates = [torch.tensor(0.25).to("jax"), on_cpu(0.125)]
    a, b, c, d = model.parameters()
    save(directory, model, torch.optim.SGD(
        [{"params": [a, b], "lr": rates[0]}, {"params": [c, d], "lr": rates[1]}]
    ))  # fmt: skip
    a, b, c, d = fresh.parameters()
    optimizer = torch.optim.SGD([{"params": [a, b]}, {"params": [c, d]}], lr=0.1)
    resume(directory, fresh, optimizer)
    assert_trees_identical([g["lr"] for g in optimizer.param_groups], rates)


def test_a_tensor_learning_rate_shared_by_two_groups_stays_shared(directory: Path) -> None:
    def build(model: Any, lr: float) -> Optimizer:
        a, b, c, d = model.parameters()
        rate = torch.tensor(lr).to("jax")
        return torch.optim.SGD([{"params": [a, b]}, {"params": [c, d]}], lr=rate)

    model, fresh = mlp(width=8), mlp(width=8)
    save(directory, model, build(model, 0.25))
    optimizer = build(fresh, 0.5)
    resume(directory, fresh, optimizer)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert first is second
    assert torchax_backend.buffer(first) == 0.25


# --- state -------------------------------------------------------------------------------------


def test_parameters_that_never_got_a_gradient_have_no_state_afterwards_either(
    directory: Path,
) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    saved, optimizer = one_group(model), one_group(fresh)
    step(saved, only={0, 3})
    step(optimizer)  # all four have state now
    save(directory, model, saved)
    resume(directory, fresh, optimizer)
    assert list(state_by_name(fresh, optimizer)) == ["0.weight", "2.bias"]
    assert_trees_identical(state_by_name(fresh, optimizer), state_by_name(model, saved))


def test_an_optimizer_that_never_stepped_comes_back_without_state(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    save(directory, model, one_group(model))
    optimizer = one_group(fresh)
    resume(directory, fresh, optimizer)
    assert len(optimizer.state) == 0


def test_an_optimizer_of_some_of_the_parameters_comes_back(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    saved, optimizer = (torch.optim.AdamW(list(m.parameters())[2:]) for m in (model, fresh))
    step(saved)
    save(directory, model, saved)
    resume(directory, fresh, optimizer)
    assert_trees_identical(training_state(fresh, optimizer), training_state(model, saved))


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


def test_state_that_the_checkpoint_lacks_is_gone_afterwards(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    saved = torch.optim.RMSprop(model.parameters())
    optimizer = torch.optim.RMSprop(fresh.parameters(), centered=True, momentum=0.9)
    step(saved)
    step(optimizer)
    save(directory, model, saved)
    resume(directory, fresh, optimizer)
    assert_trees_identical(training_state(fresh, optimizer), training_state(model, saved))


def test_moments_of_another_dtype_than_their_parameter_keep_it(directory: Path) -> None:
    def build() -> tuple[Any, Optimizer]:
        model = torch.nn.Linear(4, 3, dtype=torch.bfloat16).to("jax")
        return model, one_group(model)

    (model, saved), (fresh, optimizer) = build(), build()
    step(saved)
    for entry in saved.state.values():
        entry["exp_avg"] = entry["exp_avg"].to(torch.float32) / 3
    want = training_state(model, saved)
    save(directory, model, saved)
    resume(directory, fresh, optimizer)
    assert_trees_identical(training_state(fresh, optimizer), want)
    assert {e["exp_avg"].dtype for e in optimizer.state.values()} == {torch.float32}


def test_live_moments_of_another_dtype_are_refused_with_both_dtypes(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    saved, optimizer = one_group(model), one_group(fresh)
    step(saved)
    step(optimizer)
    for entry in optimizer.state.values():
        entry["exp_avg_sq"] = entry["exp_avg_sq"].to(torch.bfloat16)
    save(directory, model, saved)
    before = training_state(fresh, optimizer)
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(fresh, optimizer)
    assert caught.value.mismatched["optimizer/0.weight/exp_avg_sq"] == (
        "expected bfloat16[8, 8], found float32[8, 8]"
    )
    # The other entries of the parameter are not restored without this one.
    assert caught.value.mismatched["optimizer/0.weight"] == (
        "expected entries that all fit, found differences in exp_avg_sq"
    )
    names = [f"optimizer/{name}" for name, _ in fresh.named_parameters()]
    assert caught.value.mismatched.keys() == {*names, *(f"{name}/exp_avg_sq" for name in names)}
    assert_trees_identical(training_state(fresh, optimizer), before)


def test_every_entry_of_state_that_does_not_fit_is_named(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    saved, optimizer = one_group(model), one_group(fresh)
    step(saved)
    step(optimizer)
    for entry in optimizer.state.values():
        for key in entry:
            entry[key] = entry[key].to(torch.bfloat16)
    save(directory, model, saved)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(fresh, optimizer, resume=False)
        report = ckpt.restore(strict=False)
    names = [name for name, _ in fresh.named_parameters()]
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert report.mismatched.keys() == {f"optimizer/{n}/{key}" for n in names for key in keys}


def test_another_optimizer_class_is_refused_with_both_names(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    save(directory, model, torch.optim.Adam(model.parameters()))
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(fresh, optimizer)
    assert caught.value.mismatched == {"optimizer": "expected SGD, found Adam"}
    assert "optimizer: expected SGD, found Adam" in str(caught.value)
    # What the error says helps: the rest is restored, and the optimizer stays as it is.
    assert "call attach(resume=False), then restore(strict=False)" in str(caught.value)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(fresh, optimizer, resume=False)
        ckpt.restore(strict=False)
    assert_trees_identical(dict(fresh.state_dict()), dict(model.state_dict()))
    assert not optimizer.state


def test_parameters_that_only_one_of_both_optimizers_steps_are_named(directory: Path) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
    save(directory, model, torch.optim.SGD(list(model.parameters())[:3], lr=0.1))
    optimizer = torch.optim.SGD(list(fresh.parameters())[1:], lr=0.1)
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(fresh, optimizer)
    assert caught.value.missing == ("optimizer/2.bias",)
    assert caught.value.unexpected == ("optimizer/0.weight",)


def test_state_of_a_group_that_was_removed_is_named_when_it_is_not_restored(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = mlp(width=8)
    fresh: Any = mlp(width=8)
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


def test_every_save_holds_the_optimizer_as_it_was_then(directory: Path) -> None:
    model: Any = mlp(width=8)
    optimizer = torch.optim.AdamW(list(model.parameters())[:2], lr=1.0)
    wants: list[Any] = []
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        ckpt.attach(model, optimizer)

        def save_now() -> None:
            ckpt.save(len(wants), force=True)
            wants.append(training_state(model, optimizer))

        save_now()  # no state yet
        step(optimizer, only={0})
        save_now()
        step(optimizer)
        save_now()
        optimizer.param_groups[0]["lr"] = 0.5
        save_now()
        optimizer.param_groups[0]["note"] = "new"
        save_now()
        optimizer.add_param_group({"params": list(model.parameters())[2:], "lr": 0.25})
        step(optimizer)
        save_now()
        optimizer.param_groups[0]["lr"] = torch.tensor(0.125).to("jax")
        save_now()

    assert len({str(want) for want in wants}) == len(wants) == 7
    for number, want in enumerate(wants):
        fresh: Any = mlp(width=8)
        fresh_optimizer = torch.optim.AdamW(list(fresh.parameters())[:2], lr=3.0)
        if number >= 5:
            fresh_optimizer.add_param_group({"params": list(fresh.parameters())[2:]})
        with TorchaxCheckpointer(directory) as ckpt:
            ckpt.attach(fresh, fresh_optimizer, resume=False)
            ckpt.restore(number)
        assert_trees_identical(training_state(fresh, fresh_optimizer), want)


def test_a_later_save_names_moments_as_the_parameters_are_named_then(directory: Path) -> None:
    def build() -> tuple[Any, Optimizer]:
        parts = {name: torch.nn.Linear(2, 2) for name in "ab"}
        model = torch.nn.ModuleDict(parts).to("jax")
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    step(optimizer)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer)
        ckpt.save(1, force=True)
        model["a"], model["b"] = model["b"], model["a"]
        ckpt.save(2, force=True)
    fresh, fresh_optimizer = build()
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.attach(fresh, fresh_optimizer) == 2
    assert_trees_identical(training_state(fresh), training_state(model))
    assert_trees_identical(state_by_name(fresh, fresh_optimizer), state_by_name(model, optimizer))


def test_state_under_other_keys_than_parameters_comes_back_as_torch_keeps_it(
    directory: Path,
) -> None:
    model, fresh = mlp(width=8), mlp(width=8)
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
    stored = StoredStep(RunDirectory(directory, read_only=True).find(1))
    exported = optimizers_of(stored).state_dicts(lambda name: name, by_name=False)["state"]
    assert [exported[key] for key in ("k", "rate")] == [3, "optimizer/other_state/rate"]
    assert set(exported) == {0, 1, 2, 3, *others}
    assert_trees_identical(state_by_name(fresh, optimizer), state_by_name(model, saved))


# --- sharded parameters ------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.parametrize("capturable", [False, True])
def test_moments_of_a_fresh_optimizer_are_sharded_as_their_parameters(
    directory: Path, capturable: bool
) -> None:
    def build() -> tuple[Any, Optimizer]:
        model = mlp(width=16)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=capturable)

    rule = fsdp_rule(fsdp_mesh())
    (model, saved), (fresh, optimizer) = build(), build()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, saved, shardings=rule)
        step(saved)
        ckpt.save(1, force=True)
    resume(directory, fresh, optimizer, shardings=rule)
    assert_moments_are_where_their_parameters_are(optimizer)
    assert len({str(torchax_backend.buffer(p).sharding) for p in fresh.parameters()}) > 1

    step(saved, seed=1)
    step(optimizer, seed=1)
    # torch's own zeros_like left the uninterrupted run's moments unsharded.
    assert_trees_identical(
        training_state(fresh, optimizer), training_state(model, saved), shardings=False
    )


def test_moments_follow_parameters_that_are_sharded_already(directory: Path) -> None:
    model, fresh = mlp(width=16), mlp(width=16)
    saved, optimizer = one_group(model), one_group(fresh)
    step(saved)
    save(directory, model, saved)
    rule = fsdp_rule(fsdp_mesh(4))
    for name, parameter in fresh.named_parameters():
        array = torchax_backend.buffer(parameter)
        torchax_backend.set_buffer(parameter, jax.device_put(array, rule(name, array)))
    resume(directory, fresh, optimizer)
    assert_moments_are_where_their_parameters_are(optimizer)
    assert [bits(p) for p in fresh.parameters()] == [bits(p) for p in model.parameters()]


def test_live_moments_move_to_where_their_parameters_go(directory: Path) -> None:
    model, fresh = mlp(width=16), mlp(width=16)
    saved, optimizer = one_group(model), one_group(fresh)
    step(saved)
    step(optimizer)
    save(directory, model, saved)
    resume(directory, fresh, optimizer, shardings=fsdp_rule(fsdp_mesh()))
    assert_moments_are_where_their_parameters_are(optimizer)


# --- wrappers ----------------------------------------------------------------------------------


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


class Adding(Optimizer):
    """Adds state of its own to that of another optimizer, as Lookahead does."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


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


def test_an_optimizer_around_another_that_has_state_of_its_own_stays_itself(
    directory: Path,
) -> None:
    model = mlp(width=8)
    save(directory, model, Adding(one_group(model)))
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(model, one_group(model))
    assert caught.value.mismatched == {"optimizer": "expected AdamW, found Adding"}
