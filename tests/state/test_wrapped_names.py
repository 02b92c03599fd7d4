"""Names that differ by a wrapper's attribute, of torch.compile or DataParallel, are one name."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from support.compare import assert_trees_identical, copied
from support.models import WithExtraState
from support.training import restore, resume, save
from torch import nn
from torchax.interop import JittableModule

from torchax_ckpt import TorchaxCheckpointer, load_torch_state_dict, warm_start
from torchax_ckpt.errors import MismatchError, UnsupportedLeafError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.selection import Selection


class Layer(WithExtraState):
    """Has a buffer, extra state and a tied weight."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.register_buffer("scale", torch.randn(2))
        self.tied = self.weight
        self.extra = 0


class Wrapper(nn.Module):
    """Keeps a module in an attribute, as ``torch.compile`` and ``DataParallel`` do."""

    def __init__(self, attribute: str, module: nn.Module) -> None:
        super().__init__()
        setattr(self, attribute, module)


def built(wrapper: str | None) -> tuple[nn.Module, Layer, torch.optim.Optimizer]:
    layer: Any = Layer().to("jax")
    layer.tied = layer.weight
    model: nn.Module = nn.Sequential(layer)
    if wrapper == "inner":
        model = nn.Sequential(Wrapper("_orig_mod", layer))
    elif wrapper:
        model = Wrapper(wrapper, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    layer.weight.grad = torch.randn(2, 2).to("jax")
    optimizer.step()
    return model, layer, optimizer


def saved_as_called(directory: Path, wrapper: str) -> tuple[Layer, torch.optim.Optimizer]:
    """Saves what ``torch.compile`` puts into names, as older steps have it."""
    model, layer, optimizer = built(wrapper)
    layer.extra = 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "without_compile", lambda fqn: fqn)
        save(directory, model, optimizer)
    return layer, optimizer


def values(layer: Layer, optimizer: torch.optim.Optimizer) -> Any:
    moments = optimizer.state[layer.weight]
    return copied([layer.weight, layer.scale, layer.extra, dict(moments)])


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("_orig_mod", None), ("module", "_orig_mod"), ("inner", None), ("inner", "module")],
)
def test_a_run_resumes_with_and_without_a_wrapper_and_says_so_once(
    directory: Path, caplog: pytest.LogCaptureFixture, saved: str, resumed: str | None
) -> None:
    caplog.set_level(logging.INFO, "torchax_ckpt")
    layer, optimizer = saved_as_called(directory, saved)
    fresh, fresh_layer, fresh_optimizer = built(resumed)
    assert resume(directory, fresh, fresh_optimizer) == 1
    assert_trees_identical(values(fresh_layer, fresh_optimizer), values(layer, optimizer))
    assert fresh_layer.tied is fresh_layer.weight
    (said,) = [r.getMessage() for r in caplog.records if "wrapper" in r.message]
    assert said.startswith("model: 4 names of the checkpoint are matched")


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_compiled_model_is_stored_under_the_names_of_the_plain_one(
    directory: Path, is_inner: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchax_ckpt")
    model, layer, optimizer = built(None)
    layer.extra = 7
    attached: Any = nn.Sequential(compiled(layer)) if is_inner else compiled(model)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(attached, optimizer)
        ckpt.save(1, force=True)
        ckpt.wait_until_finished()
        names = ["0.weight", "0.scale", "0.tied", "0._extra_state"]
        assert list(ckpt.load()["model"]) == names
        assert list(load_torch_state_dict(directory)) == ["0.weight", "0.scale", "0.tied"]
        ckpt.restore()
    for wrapper in (None, "_orig_mod"):
        fresh, fresh_layer, fresh_optimizer = built(wrapper)
        assert resume(directory, fresh, fresh_optimizer) == 1
        assert_trees_identical(values(fresh_layer, fresh_optimizer), values(layer, optimizer))
    assert "wrapper" not in caplog.text


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_jittable_module_around_a_compiled_one_is_stored_with_its_newest_values(
    directory: Path, is_inner: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).to("jax")
    if is_inner:
        model[0] = compiled(model[0])
    jittable = JittableModule(compiled(model))
    newest = {name: torch.randn(value.shape).to("jax") for name, value in jittable.params.items()}
    jittable.params = newest  # as a jitted training step does it
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(jittable)
        ckpt.save(1, force=True)
        ckpt.wait_until_finished()
        stored = ckpt.load()["model"]
    expected = {f"0.{name.rpartition('.')[2]}": value for name, value in newest.items()}
    assert_trees_identical(dict(sorted(stored.items())), dict(sorted(expected.items())))


def test_patterns_name_the_programs_names_of_a_wrapped_checkpoint(directory: Path) -> None:
    layer, _ = saved_as_called(directory, "_orig_mod")
    fresh, fresh_layer, fresh_optimizer = built(None)
    report = restore(directory, fresh, fresh_optimizer, include="0.scale")
    assert_trees_identical(copied(fresh_layer.scale), copied(layer.scale))
    assert "optimizer/0.weight" in report.left_out
    assert not [name for name in report.left_out if "_orig_mod" in name]


def test_wrapped_models_attached_by_name_keep_to_themselves(
    directory: Path, tmp_path: Path
) -> None:
    a, b = ({"x": nn.Linear(2, 2).to("jax"), "y": nn.Linear(2, 2).to("jax")} for _ in range(2))
    save(directory, {name: Wrapper("module", m) for name, m in a.items()})
    resume(directory, b)
    for name, model in a.items():
        assert_trees_identical(dict(b[name].state_dict()), dict(model.state_dict()))
    larger = {"x": nn.Linear(2, 3).to("jax"), "y": b["y"]}  # is not taken for the wrapped one
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.attach(larger)
    assert set(caught.value.mismatched) == {"model/x/weight", "model/x/bias"}

    two = Wrapper("_orig_mod", nn.Linear(2, 2))
    two.register_buffer("bias", torch.ones(2))
    said = pytest.raises(UnsupportedLeafError, match="bias: two tensors have this name without _or")
    with TorchaxCheckpointer(tmp_path / "two") as ckpt, said:
        ckpt.attach(two.to("jax"))

    want = np.array([[1, 2], [3, 4]], np.float32)
    safetensors.numpy.save_file({"module.weight": want}, tmp_path / "a.safetensors")
    plain: Any = nn.Linear(2, 2, bias=False).to("jax")
    warm_start(plain, tmp_path / "a.safetensors")
    assert np.array_equal(np.asarray(plain.weight.jax()), want)


@pytest.mark.parametrize(
    ("stored", "live", "matched"),
    [
        (["module.w"], ["w"], {"module.w": "w"}),
        (["m/a.module.w"], ["m/a._orig_mod.w"], {"m/a.module.w": "m/a._orig_mod.w"}),
        (["module.w", "w"], ["w"], {}),  # the equal name is the one
        (["w"], ["module.w", "w"], {}),
        (["a.module.w", "module.a.w"], ["a.w"], {}),  # two could be meant
        (["module.w"], ["modulew"], {}),
        (["m/w"], ["n/w"], {}),
    ],
)
def test_only_unambiguous_names_are_matched(
    stored: list[str], live: list[str], matched: dict[str, str]
) -> None:
    for theirs, ours in itertools.product(*map(itertools.permutations, (stored, live))):
        assert Selection().match_wrapped(theirs, ours) == matched
