"""Modules: parameters, buffers, extra state and ties, by torch's names, into the same objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_trees_identical, bits, copied, training_state
from support.models import WithExtraState
from support.training import mlp, on_cpu, restore, resume, save, train_step
from torch import nn
from torchax import interop
from torchax.train import ScannedModule

from torchax_ckpt import TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import AttachError, UnsupportedLeafError
from torchax_ckpt.layout import names
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep


def stored_names(directory: Path) -> list[str]:
    newest = RunDirectory(directory).candidates(None)[-1]
    paths = [names.split(name) for name in StoredStep(newest).leaves]
    return [path[1] for path in paths if path[0] == "model"]


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The live tensors themselves, by every name they have."""
    return dict(model.state_dict(keep_vars=True))


def assert_restores(directory: Path, saved: nn.Module, fresh: nn.Module) -> None:
    """A round trip gives the fresh module the saved bits, and no other objects than it had."""
    want, objects = copied(tensors(saved)), tensors(fresh)
    assert {n: bits(t) for n, t in objects.items()} != {n: bits(t) for n, t in want.items()}
    has_grad = {name: tensor.requires_grad for name, tensor in objects.items()}
    save(directory, saved)
    assert resume(directory, fresh) == 1
    assert_trees_identical(tensors(fresh), want)
    assert all(tensor is objects[name] for name, tensor in tensors(fresh).items())
    assert {name: tensor.requires_grad for name, tensor in tensors(fresh).items()} == has_grad


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to("jax")


@pytest.fixture
def _ties_survive_conversion() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


# --- parameters, buffers and submodules --------------------------------------------------------


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(3, 2))
        self.register_buffer("running", random(4))
        self.register_buffer("scratch", random(4), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("bias", None)


def with_second_name() -> nn.Module:
    """A buffer that is persistent under its second name only."""
    model, shared = nn.Linear(2, 2).to("jax"), random(3)
    model.register_buffer("cache", shared, persistent=False)
    model.register_buffer("table", shared)
    return model


def with_wide_buffers_on_the_cpu() -> nn.Module:
    model = nn.Linear(2, 2).to("jax")
    scale = np.random.default_rng(id(model)).integers(1, 2**20).item()
    model.register_buffer("examples", on_cpu(scale * 2**40, torch.int64))
    model.register_buffer("phase", on_cpu([scale * (0.1 + 0.2j)], torch.complex128))
    model.register_buffer("mean", on_cpu([[scale / 3]], torch.float64))
    return model


def with_a_view_of_a_buffer() -> nn.Module:
    model: Any = nn.Linear(2, 2).to("jax")
    model.register_buffer("all", random(6))
    model.register_buffer("part", model.all[2:4])
    return model


def batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("jax")
    model(random(5, 3))
    return model


def repeating() -> nn.Module:
    """A buffer that repeats its memory."""
    model = nn.Linear(2, 2).to("jax")
    row = np.random.default_rng(id(model)).standard_normal((1, 3))
    with torchax_backend.native_torch():
        model.register_buffer("mask", torch.from_numpy(row).expand(4, 3))
    return model


def of_odd_sizes_and_values() -> nn.Module:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,)]
    odd = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-45]).to("jax")
    named = {str(len(shape)) + str(shape): random(*shape) for shape in shapes}
    return nn.ParameterDict({**named, "odd": odd})


def of_narrow_dtypes() -> nn.Module:
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    return nn.ParameterDict({f"w{i}": random(4, 3, dtype=dtype) for i, dtype in enumerate(dtypes)})


def nested() -> nn.Module:
    inner = nn.ModuleDict({"proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    layers = nn.ModuleList([inner, nn.Sequential(nn.Linear(2, 3))])
    inner["proj"].weight.requires_grad_(False)  # and stays so
    return nn.ModuleDict({"layers": layers, "rnn": nn.LSTM(3, 2)}).to("jax")


def shared() -> nn.Module:
    """A submodule with two names."""
    layer = nn.Linear(2, 2).to("jax")
    return nn.ModuleDict({"encoder": layer, "decoder": layer})


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).to("jax"))


def in_order(names: str) -> Any:
    """One parameter under several names."""
    weight, model = nn.Parameter(random(3)), nn.Module()
    for name in names:
        model.register_parameter(name, weight)
    return model


STORED_NAMES: dict[Callable[[], nn.Module], list[str]] = {
    WithBuffers: ["weight", "running"],
    with_second_name: ["weight", "bias", "table"],
    shared: ["encoder.weight", "encoder.bias"],
}


@pytest.mark.parametrize(
    "build",
    [
        WithBuffers, with_second_name, with_wide_buffers_on_the_cpu, with_a_view_of_a_buffer,
        batch_norm, repeating, of_odd_sizes_and_values, of_narrow_dtypes, nested, shared,
        parametrized,
    ],
)  # fmt: skip
def test_every_tensor_of_the_state_dict_comes_back_in_place(
    directory: Path, build: Callable[[], nn.Module]
) -> None:
    fresh: Any = build()
    scratch = copied(fresh.scratch) if build is WithBuffers else None
    assert_restores(directory, build(), fresh)
    if build in STORED_NAMES:
        assert stored_names(directory) == STORED_NAMES[build]
    if build is WithBuffers:
        assert_trees_identical(fresh.scratch, scratch)  # is not persistent
    if build is with_a_view_of_a_buffer:  # they stay linked
        fresh.all.fill_(7.0)
        assert torchax_backend.buffer(fresh.part).tolist() == [7.0, 7.0]


def test_a_model_half_on_the_cpu_is_refused_with_the_names(directory: Path) -> None:
    """As after an adapter was added to a model that was on the devices already."""
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "heads": nn.ModuleList()}).to("jax")
    with torchax_backend.native_torch():
        model["heads"].extend(nn.Linear(2, 2) for _ in range(4))  # type: ignore[operator]
    with TorchaxCheckpointer(directory) as ckpt:
        with pytest.raises(AttachError) as caught:
            ckpt.attach(model)
        said = "model: 8 of 10 parameters of ModuleDict are on the CPU, the others are not: "
        assert str(caught.value).startswith(said + "model/heads.0.weight, model/heads.0.bias, ")
        assert " and 3 more. Move the whole model" in str(caught.value)
        assert caught.value.key_path == "model/heads.0.weight"
        assert ckpt.attach(model.to("jax")) == 0


# --- changes between saves ---------------------------------------------------------------------


def test_every_save_holds_the_module_as_it_was_then(directory: Path) -> None:
    """Other values, shapes, dtypes and kinds, another set of tensors, and other extra state."""

    def first() -> Any:
        model = nn.ParameterDict({"a": random(2), "b": random(2)})
        model.register_buffer("c", random(2))
        model.extra = with_extra_state({"seen": 1})
        return model

    def other_shape(model: Any) -> None:
        model.c = random(2, 2)
        model.extra.extra = {"seen": 2}

    def other_tensors(model: Any) -> None:
        model["a"] = nn.Parameter(random(2, dtype=torch.bfloat16))
        model["d"] = nn.Parameter(random(2))
        model.register_parameter("b", model["d"])
        model.c = on_cpu([2**40, 1], torch.int64)
        model.extra.extra = {"seen": 2.0}

    def other_values(model: Any) -> None:
        with torch.no_grad():
            model["a"].add_(1.0)
        model.extra.extra = {"seen": [2, True]}

    changes: list[Callable[[Any], None]] = [other_values, other_shape, other_tensors]
    model, fresh = first(), first()
    wants = []
    keep = policies.PreserveAll()
    with TorchaxCheckpointer(directory, preservation_policy=keep) as ckpt:
        ckpt.attach(model)
        for step, change in enumerate(changes):
            change(model)
            wants.append((copied(tensors(model)), model.extra.extra))
            ckpt.save(step, force=True)
    for step, change in enumerate(changes):
        change(fresh)
        fresh.extra.extra = None
        assert restore(directory, fresh, step=step).step == step
        assert_trees_identical((tensors(fresh), fresh.extra.extra), wants[step])


# --- extra state -------------------------------------------------------------------------------


def with_extra_state(state: Any) -> Any:
    model = WithExtraState(2, 1).to("jax")
    model.extra = state
    return model


def test_extra_state_of_every_submodule_goes_to_its_own(directory: Path) -> None:
    def build(*states: Any) -> Any:
        a, b, c = map(with_extra_state, states)
        return nn.ModuleDict({"a": a, "b": nn.Sequential(b, c), "also c": c})

    state = {
        "version": 3,
        "names": ["a", None, True, 0.1, float("inf")],
        "by_id": {1: (2, 3), "1": 2**80},
        "scale": random(3),
        "count": on_cpu(2**40, torch.int64),
        "table": np.arange(3, dtype=np.uint16),
        "empty": {"list": [], "dict": {}, "tuple": ()},
    }
    save(directory, build(state, "y", "z"))
    for wrap in (lambda model: model, interop.JittableModule):
        fresh = build(None, "", "")
        resume(directory, wrap(fresh))
        assert_trees_identical(fresh["a"].extra, state)
        assert [fresh["b"][0].extra, fresh["b"][1].extra] == ["y", "z"]


# --- ties --------------------------------------------------------------------------------------


class TiedHead(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def tied() -> TiedHead:
    model = TiedHead().to("jax")
    model.head.weight = model.embedding.weight  # to("jax") unties them
    return model


def test_a_tied_weight_is_stored_once_and_restored_under_names_in_any_order(
    directory: Path,
) -> None:
    fresh = tied()
    assert_restores(directory / "tied", tied(), fresh)
    assert fresh.head.weight is fresh.embedding.weight
    assert stored_names(directory / "tied") == ["embedding.weight", "norm.weight", "norm.bias"]
    saved, other = in_order("abc"), in_order("cab")
    save(directory / "other", saved)
    resume(directory / "other", other)
    assert bits(other.c) == bits(saved.a)
    assert other.a is other.b is other.c


@pytest.mark.usefixtures("_ties_survive_conversion")
def test_ties_that_survived_the_conversion_survive_restoring(directory: Path) -> None:
    model, fresh = TiedHead(), TiedHead()
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)  # allowed before .to under swapping
    parameters = list(fresh.parameters())
    model.to("jax")
    fresh.to("jax")
    want = copied(tensors(model))
    save(directory, model, torch.optim.SGD(model.parameters(), lr=0.5))
    resume(directory, fresh, optimizer)
    assert_trees_identical(tensors(fresh), want)
    assert fresh.head.weight is fresh.embedding.weight
    assert [id(p) for p in fresh.parameters()] == [id(p) for p in parameters]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
    assert optimizer.param_groups[0]["lr"] == 0.5


# --- names -------------------------------------------------------------------------------------

ODD_NAMES = [
    "a/b", "a%2Fb", "a%252Fb", "a|b", "*", "**", "#", " ", "two words", "%", "%%", "é", "e\u0301",
    "名前", "🙂", "\n", "\x00", "\udc80", "~", "'\"", "A", "a", "0", "array", "dict", "ties",
    "zarr", "a:b", "c\\d", "?x=y&z", "[0]", "{i}", "$", "n" * 300,
]  # fmt: skip


Attached = tuple[Any, Any]  # a model and an optimizer, or dicts of them


def momentum(*models: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def with_odd_names() -> Attached:
    model = nn.ParameterDict({name: random(2) for name in ODD_NAMES})
    optimizer = momentum(model)
    for parameter in model.parameters():
        parameter.grad = random(2)
    optimizer.step()
    return model, optimizer


def of_odd_names() -> Attached:
    names = ("", "a/b", "a%2Fb", "model", "dict", "名前 *|#")
    models: dict[str, nn.Module] = {name: nn.Linear(2, 1).to("jax") for name in names}
    return models, {name: momentum(model) for name, model in models.items()}


def of_one_optimizer() -> Attached:
    models = {"a": mlp(), "b": mlp()}
    return models, momentum(*models.values())


def scanned() -> Attached:
    layers = ScannedModule([nn.Linear(8, 8).to("jax") for _ in range(3)])
    model = nn.Sequential(layers, nn.Linear(8, 4).to("jax"))
    return model, momentum(model)


def trained(attached: Attached, *seeds: int) -> list[Any]:
    """The state after steps of every model, each on data of one seed."""
    models, optimizers = (
        list(part.values()) if isinstance(part, dict) else [part] for part in attached
    )
    for model, seed in zip(models, seeds, strict=False):
        train_step(model, optimizers[0], seed)
    return training_state(*models, *optimizers)


@pytest.mark.parametrize(
    ("build", "seeds"),
    [(with_odd_names, ()), (of_odd_names, ()), (of_one_optimizer, (0, 1)), (scanned, (0,))],
)
def test_modules_and_their_optimizers_come_back(
    directory: Path, build: Callable[[], Attached], seeds: tuple[int, ...]
) -> None:
    """And a scanned module goes on as if never stopped."""
    saved, fresh = build(), build()
    want = trained(saved, *seeds)
    save(directory, *saved)
    resume(directory, *fresh)
    assert_trees_identical(trained(fresh), want)
    if build is scanned:
        assert_trees_identical(trained(fresh, 1), trained(saved, 1))
    if build is with_odd_names:
        assert sorted(stored_names(directory)) == sorted(ODD_NAMES)


# --- torchax's own modules ---------------------------------------------------------------------


def functional_step(module: Any, by: float = 1.0) -> None:
    """What a jitted train step leaves behind: new tensors in ``params``, the module's own stale."""
    module.params = {
        name: torchax_backend.wrap(torchax_backend.buffer(tensor) + by)
        for name, tensor in module.params.items()
    }


def live(module: Any) -> dict[str, torch.Tensor]:
    return copied({**module.params, **module.buffers})


def frozen_with_buffers() -> nn.Module:
    model = batch_norm()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    return model


@pytest.mark.parametrize("build", [mlp, tied, frozen_with_buffers])
def test_a_jittable_module_is_saved_as_its_functional_step_left_it(
    directory: Path, build: Callable[[], nn.Module]
) -> None:
    """Whatever was saved before, under the names of what it wraps, whose tensors may be gone."""
    module = interop.JittableModule(build())
    wants = []
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(module)
        for step in range(2):
            functional_step(module)
            if build is frozen_with_buffers:
                module.buffers["1.running_var"] = random(4)
            wants.append(live(module))
            if build is mlp and step == 0:
                for tensor in module._model.parameters():
                    torchax_backend.buffer(tensor).delete()
            ckpt.save(step, force=True)
    for step, want in enumerate(wants):
        fresh = interop.JittableModule(build())
        functional_step(fresh, 2.0)
        restore(directory, fresh, step=step)
        assert_trees_identical(live(fresh), want)
        plain = build()
        restore(directory, plain, step=step)
        for model in (fresh._model, plain):
            for name, tensor in want.items():
                assert bits(tensors(model)[name]) == bits(tensor)
    if build is tied:
        assert fresh._model.head.weight is fresh._model.embedding.weight
        tokens = torch.arange(3).to("jax")
        assert bits(fresh(tokens)) == bits(module(tokens))


def test_tied_weights_that_a_functional_step_pulled_apart_are_not_saved_as_one(
    directory: Path,
) -> None:
    module = interop.JittableModule(tied(), dedup_parameters=False)
    functional_step(module)
    module.params["head.weight"] = module.params["head.weight"] * 2
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(module)
        with pytest.raises(UnsupportedLeafError, match=r"head\.weight"):
            ckpt.save(1, force=True)
