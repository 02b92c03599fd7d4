"""Averages of weights: computed, resumed bit for bit on any mesh, applied and taken off again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import torchax
from support.commands import run
from support.compare import assert_trees_identical, bits, training_state
from support.models import Plain, values
from support.training import adamw, before_enabling, fsdp_mesh, fsdp_rule, mlp, place, train_step
from torchax.interop import JittableModule

from torchax_ckpt import TorchaxCheckpointer, WeightAverage, torchax_backend
from torchax_ckpt.errors import AttachError, CallError, MismatchError
from torchax_ckpt.state.modules.module_tensors import Slot


def arrays(average: WeightAverage) -> dict[str, Any]:
    return {name: bits(tensor)[1:] for name, tensor in average.state_dict()["weights"].items()}


def tied() -> Any:
    model = Plain()
    model.layers[1].bfloat16()
    model.layers[2].weight.requires_grad_(False)
    model.to("jax")
    model.head.weight = model.embed.weight
    return model


@pytest.mark.parametrize("decay", [0.9, None])
def test_an_average_is_that_of_torch(decay: float | None) -> None:
    """torch's AveragedModel, which cannot copy a model on "jax", on a model on the CPU."""
    from torch.optim import swa_utils

    found = mlp()
    with before_enabling():
        plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        ema = None if decay is None else swa_utils.get_ema_multi_avg_fn(decay)
        theirs = swa_utils.AveragedModel(plain, multi_avg_fn=ema)
    average = WeightAverage(found, decay)
    for step in range(5):
        for (_, ours), parameter in zip(found.named_parameters(), plain.parameters(), strict=True):
            value = np.random.default_rng(step).standard_normal(ours.shape).astype(np.float32)
            torchax_backend.set_buffer(ours, jax.numpy.asarray(value))
            with before_enabling():
                parameter.data.copy_(torch.from_numpy(value))
        average.update()
        with before_enabling():
            theirs.update_parameters(plain)
    assert average.num_updates == 5
    with before_enabling():
        expected = {name: p.detach().numpy() for name, p in theirs.module.named_parameters()}
    for name, tensor in average.state_dict()["weights"].items():
        np.testing.assert_allclose(np.asarray(tensor.jax()), expected[name], rtol=0, atol=1e-6)


def test_what_is_averaged(directory: Path) -> None:
    """A tied weight once, no frozen weight and no buffer; 16-bit weights in float32."""
    average = WeightAverage(tied())
    found = average.state_dict()["weights"]
    assert sorted(found) == [
        "embed.weight", "layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight",
        "layers.2.bias",
    ]  # fmt: skip
    assert {str(tensor.jax().dtype) for tensor in found.values()} == {"float32"}


def test_small_changes_are_not_rounded_away() -> None:
    model = torch.nn.Linear(1, 1, bias=False).bfloat16().to("jax")
    average = WeightAverage(model, decay=0.999)
    for value in (1.0, *[2.0] * 200):
        torchax_backend.set_buffer(model.weight, jax.numpy.full((1, 1), value, "bfloat16"))
        average.update()
    (found,) = average.state_dict()["weights"].values()
    assert abs(float(found.jax()[0, 0]) - (2 - 0.999**200)) < 1e-4


def trained(directory: Path, num_devices: int, last: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    torchax.default_env().manual_seed(0)
    model = mlp()
    rule = fsdp_rule(fsdp_mesh(num_devices))
    place(model, rule)
    optimizer, average = adamw(model), WeightAverage(model, 0.9)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer, stateful={"average": average})
        for step in ckpt.steps(last):
            train_step(model, optimizer, step)
            average.update()
    return model, optimizer, average


@pytest.mark.slow
def test_an_average_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = trained(tmp_path / "a", 8, 7)
    trained(tmp_path / "b", 8, 4)
    resumed = trained(tmp_path / "b", 8, 7)
    assert_trees_identical(training_state(*resumed[:2]), training_state(*straight[:2]))
    assert_trees_identical(resumed[2].state_dict(), straight[2].state_dict())
    assert resumed[2].num_updates == 7
    # On another mesh, each array gets the sharding of the parameter there.
    model, _, average = trained(tmp_path / "b", 2, 7)
    assert arrays(average) == arrays(straight[2])
    for name, tensor in average.state_dict()["weights"].items():
        assert tensor.jax().sharding == dict(model.named_parameters())[name].jax().sharding
    # Other programs take the averages as they take weights.
    run("export", tmp_path / "b", tmp_path / "x.safetensors", "--at", "stateful/average/weights")
    written = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert {name: bits(array)[1:] for name, array in written.items()} == arrays(straight[2])
    model = mlp()
    narrow = WeightAverage(mlp(width=8))
    with (
        TorchaxCheckpointer(tmp_path / "b") as ckpt,
        pytest.raises(MismatchError, match=r"another model: 0.bias: expected float32\[8\], found"),
    ):
        ckpt.attach(model, adamw(model), stateful={"average": narrow})


@pytest.mark.slow
def test_a_model_on_meta_gets_its_average_on_the_mesh(directory: Path) -> None:
    straight = trained(directory, 8, 3)[2]
    rule = fsdp_rule(fsdp_mesh(4))
    with before_enabling(), torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    average = WeightAverage(model, 0.9, shardings=rule)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, adamw(model), stateful={"average": average}, shardings=rule)
    assert arrays(average) == arrays(straight)
    for name, tensor in average.state_dict()["weights"].items():
        assert tensor.jax().sharding == rule(name, tensor)
    average.update()


@pytest.mark.slow
def test_a_model_is_evaluated_with_its_average() -> None:
    model = tied()
    average = WeightAverage(model, 0.5)
    with pytest.raises(CallError, match=r"no update yet: call update\(\) after a step"):
        average.copy_to()
    first = values(model.state_dict())
    average.update()
    for parameter in model.parameters():
        array = torchax_backend.buffer(parameter)
        torchax_backend.set_buffer(parameter, array * 0 + 1)
    before = values(model.state_dict())
    with pytest.raises(ZeroDivisionError), average.applied():
        assert model.head.weight is model.embed.weight
        expected = {**first, "layers.2.weight": before["layers.2.weight"]}
        assert values(model.state_dict()) == expected
        raise ZeroDivisionError
    assert values(model.state_dict()) == before
    other = tied()
    average.copy_to(other)
    assert values(other.state_dict())["embed.weight"] == first["embed.weight"]
    # The copies are arrays of their own: a program may donate them.
    torchax_backend.buffer(other.embed.weight).delete()
    average.copy_to(other)


def test_other_parameters_are_refused_before_anything_changes() -> None:
    model = mlp()
    average = WeightAverage(model, 0.5)
    average.update()
    before = arrays(average), values(model.state_dict())
    narrow = mlp(width=8)
    first = values(narrow.state_dict())
    with pytest.raises(
        ValueError, match=r"0.bias: expected shape \[16\], found shape \[8\]; 0.weight: "
    ):
        average.copy_to(narrow)
    with pytest.raises(ValueError, match=r"0.bias: expected shape \[16\], found none; .*2.weight"):
        average.copy_to(torch.nn.Tanh())
    assert values(narrow.state_dict()) == first
    given: dict[str, Any] = dict(model.named_parameters())
    broadcasts = jax.numpy.ones(())
    for name, value, said in (
        ("2.bias", broadcasts, r"2.bias: expected shape \[4\], found shape \[\]"),
        ("2.weight", np.ones((4, 16)), "found a ndarray that is not on the devices"),
    ):
        with pytest.raises(ValueError, match=said):
            average.update({**given, name: value})
    with pytest.raises(ValueError, match=r"2.bias: expected shape \[4\], found none"):
        average.update({name: given[name] for name in given if name != "2.bias"})
    assert (arrays(average), values(model.state_dict())) == before
    assert average.num_updates == 1
    average.update({**given, "more": None})
    average.copy_to(mlp().requires_grad_(False))


def test_what_is_swapped_or_trained_later_is_seen_by_the_next_update() -> None:
    model: Any = mlp()
    model[0].bias.requires_grad_(False)
    average = WeightAverage(model, 0.5)
    average.update()
    average.update()
    swapped = torch.nn.Parameter(torch.full((4,), 6.0).to("jax"))
    model[2].bias = swapped
    before = np.asarray(average.state_dict()["weights"]["2.bias"].jax())
    average.update()
    found = np.asarray(average.state_dict()["weights"]["2.bias"].jax())
    np.testing.assert_array_equal(found, (before + 6) / 2)
    model[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0.bias: expected none, found shape \[16\]"):
        average.update()
    assert average.num_updates == 3


def test_parameters_that_a_jittable_module_replaced_are_not_kept_alive() -> None:
    jitted: Any = JittableModule(mlp())
    average = WeightAverage(jitted, 0.5)

    def step() -> list[weakref.ref[torch.Tensor]]:
        jitted.params = {name: torch.add(tensor, 1) for name, tensor in jitted.params.items()}
        average.update()
        return [weakref.ref(tensor) for tensor in jitted.params.values()]

    replaced = step()
    jitted.params = {name: torch.add(tensor, 1) for name, tensor in jitted.params.items()}
    gc.collect()
    assert [tensor() for tensor in replaced] == [None] * len(replaced)


def test_one_program_updates_a_small_share_of_the_averages() -> None:
    """Old and new averages of one program are in memory together."""
    sizes = [8, 8, 512, *[16] * 100]
    model = torch.nn.ParameterList([torch.ones(size) for size in sizes]).to("jax")
    chunks = list(WeightAverage(model)._chunks(map(str, range(len(sizes)))))
    assert [name for chunk in chunks for name in chunk] == [str(i) for i in range(len(sizes))]
    most = sum(sizes) // 16
    assert all(len(c) == 1 or sum(sizes[int(n)] for n in c) <= most for c in chunks)
    assert len(chunks) < 24


def test_a_failed_copy_leaves_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    average = WeightAverage(model, 0.5)
    average.update()
    for parameter in model.parameters():
        torchax_backend.set_buffer(parameter, torchax_backend.buffer(parameter) * 0)
    before = values(model.state_dict())
    fill = Slot.fill
    filled: list[Any] = []

    def failing(slot: Slot, array: Any) -> None:
        if filled:
            raise MemoryError
        filled.append(array)
        fill(slot, array)

    monkeypatch.setattr(Slot, "fill", failing)
    with pytest.raises(MemoryError), average.applied():
        pass
    assert filled
    assert values(model.state_dict()) == before


def test_what_has_no_average_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay: expected None or a number .* found 1.0"):
        WeightAverage(mlp(), 1.0)
    with pytest.raises(AttachError, match="expected a torch.nn.Module, found"):
        WeightAverage({})  # type: ignore[arg-type]
    with before_enabling():
        model = torch.nn.Linear(2, 2)
    with pytest.raises(AttachError, match=r"weight: expected a parameter on 'jax' or on 'meta'"):
        WeightAverage(model)
    with pytest.raises(AttachError, match="that require gradients, found none"):
        WeightAverage(mlp().requires_grad_(False))
