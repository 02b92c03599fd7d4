"""Strict restores change nothing unless all fits; others take what fits and report the rest."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_trees_identical, bits, copied, training_state
from support.models import Box, WithExtraState
from support.training import mlp, on_cpu, restore, resume, save, train_step
from torch import nn
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import RestoreReport, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import MismatchError


def refused(directory: Path, *attached: Any, **more: Any) -> MismatchError:
    with pytest.raises(MismatchError) as caught:
        resume(directory, *attached, **more)
    return caught.value


def restore_what_fits(directory: Path, *attached: Any, **more: Any) -> RestoreReport:
    """Also asserts that a strict restore names the same differences."""
    error = refused(directory, *attached, **more)
    report = restore(directory, *attached, strict=False, **more)
    assert dataclasses.replace(report, is_verified=False) == RestoreReport(
        1, error.missing, error.unexpected, error.mismatched
    )
    return report


def on_jax(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return on_cpu(values, dtype).to("jax")


def parameters(**tensors: torch.Tensor) -> nn.Module:
    return nn.ParameterDict(tensors)


def values(model: Any) -> dict[str, list[float]]:
    return {n: torchax_backend.buffer(t).tolist() for n, t in model.state_dict().items()}


def step_once(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()


def wider_head() -> nn.Module:
    model: Any = mlp()
    model[2] = nn.Linear(16, 5).to("jax")
    return model


def shorter() -> nn.Module:
    return nn.Sequential(*list(mlp())[:2])  # type: ignore[call-overload]


def longer() -> nn.Module:
    return nn.Sequential(*mlp(), nn.Linear(4, 4).to("jax"))  # type: ignore[misc]


def tied_biases() -> nn.Module:
    model: Any = mlp()
    model[0].again = model[0].bias
    return model


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own call
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")
@pytest.mark.parametrize("build", [wider_head, shorter, longer, tied_biases])
def test_a_refused_checkpoint_changes_no_byte_of_anything(
    directory: Path, build: Callable[[], nn.Module]
) -> None:
    def attach_all(model: Any) -> tuple[Any, Any, dict[str, Any]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step_once(model, optimizer)
        loader = StatefulDataLoader(range(9), shuffle=True, collate_fn=list)  # draws a seed
        return (
            model,
            optimizer,
            {
                "lr_scheduler": lr_scheduler.StepLR(optimizer, 3),
                "dataloader": loader,
            },
        )

    model, optimizer, more = attach_all(mlp())
    optimizer.param_groups[0]["lr"] = 0.5
    save(directory, model, optimizer, **more)

    fresh, optimizer, more = attach_all(build())

    def everything() -> Any:
        with torchax_backend.native_torch():
            generator = torch.get_rng_state()
        return copied(
            [
                training_state(fresh, optimizer),
                more["lr_scheduler"].state_dict(),
                [torchax_backend.prng_key(), generator, random.getstate()],
                np.random.get_state(legacy=False)["state"]["key"],
            ]
        )

    objects, before = [id(p) for p in fresh.parameters()], everything()
    refused(directory, fresh, optimizer, **more)
    assert_trees_identical(everything(), before)
    assert [id(p) for p in fresh.parameters()] == objects


@pytest.mark.parametrize("saved_on_cpu", [True, False])
def test_a_buffer_goes_to_where_the_live_one_is(directory: Path, saved_on_cpu: bool) -> None:
    def build(is_on_cpu: bool, value: float) -> nn.Module:
        model = parameters(w=on_jax(1.0))
        buffer = on_cpu([value])
        model.register_buffer("b", buffer if is_on_cpu else buffer.to("jax"))
        return model

    save(directory, build(saved_on_cpu, 5.0))
    fresh: Any = build(not saved_on_cpu, 0.0)
    resume(directory, fresh)
    kind = "torchax" if saved_on_cpu else "torch"
    assert bits(fresh.b) == (kind, "float32", (1,), np.float32(5).tobytes())


def tied(first: float, second: float | None = None) -> nn.Module:
    """Parameters a and b, which are one if only one value is given."""
    model = parameters(other=on_jax(first))
    model.register_parameter("a", nn.Parameter(on_jax(first)))
    b = model.a if second is None else nn.Parameter(on_jax(second))
    model.register_parameter("b", b)  # type: ignore[arg-type]
    return model


HALF = torch.float16
SHAPE_AND_DTYPE = {
    "model/shape": "expected float32[2], found float32[1]",
    "model/dtype": "expected float16[1], found float32[1]",
}
EACH_ON_ITS_OWN = {
    f"model/{name}": f"expected {name} on its own, found a tied to b" for name in "ab"
}
TIED = "expected a tied to b, found a on its own, b on its own"
DIFFERENCES: dict[str, tuple[Any, Any, RestoreReport, dict[str, Any]]] = {
    "all kinds": (
        lambda: parameters(same=on_jax(1, 2), shape=on_jax(1), dtype=on_jax(1), old=on_jax(1, 1)),
        lambda: parameters(
            same=on_jax(7, 7), shape=on_jax(7, 7), dtype=on_jax(7, dtype=HALF), new=on_jax(7)
        ),
        RestoreReport(1, ("model/new",), ("model/old",), SHAPE_AND_DTYPE),
        {"same": [1, 2], "shape": [7, 7], "dtype": [7], "new": [7]},
    ),
    "would be cast": (
        lambda: parameters(w=on_jax(1, 2)),
        lambda: parameters(w=on_jax(7, 7, dtype=torch.bfloat16)),
        RestoreReport(1, mismatched={"model/w": "expected bfloat16[2], found float32[2]"}),
        {"w": [7, 7]},
    ),
    "would be broadcast": (
        lambda: parameters(w=on_jax(1)),
        lambda: parameters(w=on_jax(7).reshape(())),
        RestoreReport(1, mismatched={"model/w": "expected float32[], found float32[1]"}),
        {"w": 7},
    ),
    "a tie that the checkpoint lacks": (
        lambda: tied(1, 2),
        lambda: tied(7),
        RestoreReport(1, mismatched={"model/a": TIED}),
        {"other": [1], "a": [7], "b": [7]},
    ),
    "a tie that only the checkpoint has": (
        lambda: tied(1),
        lambda: tied(7, 8),
        RestoreReport(1, mismatched=EACH_ON_ITS_OWN),
        {"other": [1], "a": [7], "b": [8]},
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_fits_is_restored_and_the_rest_reported_by_name(name: str, directory: Path) -> None:
    stored, live, expected, after = DIFFERENCES[name]
    save(directory, stored())
    model = live()
    is_tied = getattr(model, "a", None) is getattr(model, "b", None)
    assert restore_what_fits(directory, model) == expected
    assert values(model) == after
    assert is_tied == (getattr(model, "a", None) is getattr(model, "b", None))


def test_a_restore_without_differences_reports_none(directory: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer)
        ckpt.save(3, force=True)
        assert ckpt.restore(strict=False) == ckpt.restore() == RestoreReport(3, is_verified=True)


def test_a_parameter_that_does_not_fit_keeps_its_state(directory: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer, 0)
    save(directory, model, optimizer)
    fresh: Any = wider_head()
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    train_step(fresh, fresh_optimizer, 0)
    before = training_state(fresh_optimizer)[0]["moments"][2:]
    report = restore_what_fits(directory, fresh, fresh_optimizer)
    assert report.mismatched == {
        "model/2.weight": "expected float32[5, 16], found float32[4, 16]",
        "model/2.bias": "expected float32[5], found float32[4]",
        **{
            f"optimizer/{name}": f"expected state of model/{name} as attached, found state of "
            f"model/{name} as stored, which differs"
            for name in ("2.weight", "2.bias")
        },
    }
    after = training_state(fresh_optimizer)[0]["moments"]
    assert_trees_identical(after, training_state(optimizer)[0]["moments"][:2] + before)


def test_state_of_each_of_several_optimizers_is_reported_under_its_name(directory: Path) -> None:
    def build(model: Any) -> tuple[Any, dict[str, torch.optim.Optimizer]]:
        optimizers = {
            "body": torch.optim.AdamW(model[0].parameters()),
            "head": torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
        }
        step_once(model, *optimizers.values())
        return model, optimizers

    save(directory, *build(mlp()))
    report = restore_what_fits(directory, *build(wider_head()))
    assert report.mismatched.keys() == {
        "model/2.weight", "model/2.bias", "optimizer/head/2.weight", "optimizer/head/2.bias"
    }  # fmt: skip


def test_a_new_parameter_has_no_state_and_that_of_one_that_is_gone_is_reported(
    directory: Path,
) -> None:
    model, fresh, without = mlp(), longer(), shorter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    train_step(model, optimizer, 0)
    save(directory, model, optimizer)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    report = restore_what_fits(directory, fresh, fresh_optimizer)
    assert set(report.missing) == {
        "model/3.weight", "model/3.bias", "optimizer/3.weight", "optimizer/3.bias"
    }  # fmt: skip
    assert fresh_optimizer.param_groups[0]["lr"] == 0.125
    assert [p in fresh_optimizer.state for p in fresh.parameters()] == [True] * 4 + [False] * 2
    report = restore_what_fits(directory, without, torch.optim.AdamW(without.parameters()))
    assert {"optimizer/2.weight", "optimizer/2.bias"} <= set(report.unexpected)


def test_components_that_only_one_side_has_are_reported(directory: Path) -> None:
    def build() -> tuple[Any, Any, Any]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, scheduler = build()
    save(directory, model, optimizer, stateful={"seen": Box(1), "old": Box(2)})
    model, optimizer, scheduler = build()
    boxes = {"seen": Box(0), "new": Box(0)}
    report = restore_what_fits(directory, model, optimizer, lr_scheduler=scheduler, stateful=boxes)
    assert set(report.missing) == {"lr_scheduler", "stateful/new"}
    assert report.unexpected == ("stateful/old",)
    assert {name: box.state for name, box in boxes.items()} == {"seen": 1, "new": 0}


def test_an_optimizer_in_the_checkpoint_that_is_not_attached_is_unexpected(directory: Path) -> None:
    model, fresh = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_step(model, optimizer, 0)
    save(directory, model, optimizer)
    report = restore_what_fits(directory, fresh)
    assert report.missing == ()
    assert all(name.startswith("optimizer") for name in report.unexpected)
    assert report.unexpected
    assert_trees_identical(training_state(fresh), training_state(model))


@pytest.mark.parametrize("saved_as_dict", [True, False])
def test_one_model_is_not_taken_for_a_dict_of_one(directory: Path, saved_as_dict: bool) -> None:
    def build(as_dict: bool, value: float) -> Any:
        model = parameters(w=on_jax(value))
        return {"w": model} if as_dict else model

    save(directory, build(saved_as_dict, 1.0))
    fresh = build(not saved_as_dict, 7.0)
    report = restore_what_fits(directory, fresh)
    assert (len(report.missing), len(report.unexpected), report.mismatched) == (1, 1, {})
    assert values(fresh["w"] if isinstance(fresh, dict) else fresh) == {"w": [7.0]}


def test_extra_state_that_only_one_side_has_is_reported(directory: Path) -> None:
    def build(first: type[nn.Linear], second: type[nn.Linear]) -> Any:
        return nn.Sequential(first(2, 2), second(2, 2)).to("jax")

    save(directory, build(WithExtraState, nn.Linear))
    fresh = build(nn.Linear, WithExtraState)
    report = restore_what_fits(directory, fresh)
    assert report.missing == ("model/1/_extra_state",)
    assert report.unexpected == ("model/0/_extra_state",)
    assert fresh[1].extra == "live"


def test_a_tie_among_other_names_is_refused(directory: Path) -> None:
    def build(*groups: str) -> nn.Module:
        model = nn.Module()
        for value, group in enumerate(groups):
            shared = nn.Parameter(on_jax(float(value)))
            for name in group:
                model.register_parameter(name, shared)
        return model

    save(directory, build("ab", "cd"))
    error = refused(directory, build("ac", "bd"))
    assert error.mismatched == {
        "model/a": "expected a tied to c, found a tied to b, c tied to d",
        "model/b": "expected b tied to d, found a tied to b, c tied to d",
    }
