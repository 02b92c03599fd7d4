"""Ties that a model declares, as those of transformers do, and loses on its way to devices."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from jax.sharding import NamedSharding
from support.compare import assert_trees_identical, bits, training_state
from support.training import P, before_enabling, fsdp_mesh, save
from torch import nn
from torchax.interop import JittableModule

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend, warm_start
from torchax_ckpt.errors import DirectoryError, MismatchError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.state.modules import ties


@pytest.fixture(autouse=True)
def _nothing_seems_frozen(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Ties are made again only where the garbage collector sees everything.

    What conftest.py has frozen refers to nothing of these tests. Each collection of it takes 0.4 s.
    """
    if frozen_objects.__name__ in request.node.name:
        yield
        gc.freeze()
        return
    seen = SimpleNamespace(get_freeze_count=int, unfreeze=lambda: None)
    seen.collect, seen.get_referrers = gc.collect, gc.get_referrers
    monkeypatch.setattr(ties, "gc", seen)
    yield


class Declaring(nn.Module):
    """A language model with tied embeddings, which declares the tie as transformers 5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.all_tied_weights_keys = {"head.weight": "embed.weight"}
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight


class DeclaringAliases(Declaring):
    """Declares the tie as transformers 4 does."""

    def __init__(self, tie_word_embeddings: bool = True) -> None:
        super().__init__()
        del self.all_tied_weights_keys
        self._tied_weights_keys = ["head.weight"]
        self.config = SimpleNamespace(tie_word_embeddings=tie_word_embeddings)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def warnings_of(directory: Path, caplog: pytest.LogCaptureFixture, model: Any) -> list[str]:
    caplog.clear()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model)
        ckpt.save(1, force=True)
        ckpt.restore(1)
    return [r.message for r in caplog.records if "tie_weights" in r.message]


@pytest.mark.parametrize("build", [Declaring, DeclaringAliases])
def test_a_declared_tie_that_the_tensors_lack_is_said_once_with_its_remedy(
    directory: Path, caplog: pytest.LogCaptureFixture, build: Any
) -> None:
    model = build().to("jax")
    assert model.head.weight is not model.embed.weight, "torchax no longer unties in .to"
    (said,) = warnings_of(directory / "lost", caplog, model)
    assert f"model: {build.__name__} declares tied weights that are separate tensors" in said
    assert "head.weight (tied to embed.weight)" in said
    assert "call model.tie_weights() after it" in said
    model.tie_weights()
    assert warnings_of(directory / "mended", caplog, model) == []


def test_ties_are_declared_under_the_names_of_the_whole_model() -> None:
    tie = {"head.weight": "embed.weight"}
    for build in (Declaring, DeclaringAliases):
        compiled: Any = torch.compile(build().to("jax"), backend="eager")
        assert ties.lost_ties(compiled) == tie
    assert ties.lost_ties(DeclaringAliases(tie_word_embeddings=False).to("jax")) == {}
    outer = nn.ModuleDict({"base": nn.ModuleDict({"model": Declaring().to("jax")})})
    assert ties.lost_ties(outer) == {"base.model.head.weight": "base.model.embed.weight"}
    # As PEFT does to a layer that it adapts: the declared name is gone, and so is the tie.
    outer["base"]["model"].head = nn.ModuleDict({"base_layer": nn.Linear(4, 6)})  # type: ignore
    assert ties.lost_ties(outer) == {}
    assert ties.lost_ties(torch.nn.Linear(2, 2)) == {}


SOURCES = {
    "first": {"embed.weight": np.arange(24, dtype=np.float32).reshape(6, 4)},
    "alias": {"head.weight": np.arange(24, dtype=np.float32).reshape(6, 4)},
}


def file_of(folder: Path, arrays: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folder


def untied(build: Any = Declaring) -> Any:
    model = build().to("jax")
    assert model.head.weight is not model.embed.weight
    return model


def expect_tied(model: Any, source: dict[str, Any]) -> None:
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]
    (array,) = source.values()
    assert bits(model.embed.weight)[1:] == bits(array)[1:]


@pytest.mark.parametrize("build", [Declaring, DeclaringAliases])
@pytest.mark.parametrize("name", SOURCES)
def test_a_warm_start_ties_again_what_the_source_has_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Any, name: str
) -> None:
    model = untied(build)
    kept = {"first": model.embed, "alias": model.head}[name].weight
    caplog.set_level(logging.INFO)
    report = warm_start(model, file_of(tmp_path, SOURCES[name]))
    assert (report.missing, report.unexpected, dict(report.mismatched)) == ((), (), {})
    expect_tied(model, SOURCES[name])
    assert model.embed.weight is kept, "the parameter that the source names stays the object it was"
    (said,) = [r.message for r in caplog.records if "tied again" in r.message]
    ours, other = ("head", "embed") if name == "first" else ("embed", "head")
    assert f": {ours}.weight (to {other}.weight). Call model.tie_weights()" in said
    caplog.clear()
    warm_start(model, tmp_path)
    assert not [r for r in caplog.records if "tied again" in r.message], "they are tied already"


@pytest.mark.parametrize("restore_in_budget", [False, True])
@pytest.mark.parametrize("is_on_meta", [False, True])
def test_a_run_of_tied_weights_ties_a_sharded_model(
    directory: Path, is_on_meta: bool, restore_in_budget: bool
) -> None:
    origin = untied()
    origin.tie_weights()
    save(directory, origin)
    if is_on_meta:
        with before_enabling(), torch.device("meta"):
            model = Declaring()
            model.head.weight = nn.Parameter(torch.empty(6, 4))
    else:
        model = untied()
    mesh = fsdp_mesh(2)
    asked: list[str] = []

    def rule(name: str, abstract: Any) -> NamedSharding:
        asked.append(name)
        return NamedSharding(mesh, P("fsdp"))

    options = CheckpointOptions(restore_in_budget=restore_in_budget)
    warm_start(model, directory, shardings=rule, options=options)
    expect_tied(model, {"": np.asarray(torchax_backend.buffer(origin.embed.weight))})
    assert torchax_backend.buffer(model.head.weight).sharding == NamedSharding(mesh, P("fsdp"))
    assert set(asked) == {"embed.weight"}, "the name that a tied weight has in every other call"


def test_two_stored_values_and_a_name_that_is_left_out_stay_two_weights(tmp_path: Path) -> None:
    model = untied()
    arrays = {n: a + i for i, s in enumerate(SOURCES.values()) for n, a in s.items()}
    warm_start(model, file_of(tmp_path, arrays))
    assert bits(model.embed.weight)[1:] == bits(arrays["embed.weight"])[1:]
    assert bits(model.head.weight)[1:] == bits(arrays["head.weight"])[1:]
    warm_start(model, file_of(tmp_path, SOURCES["first"]), exclude="head")
    assert bits(model.head.weight)[1:] == bits(arrays["head.weight"])[1:]
    assert model.head.weight is not model.embed.weight


def test_a_chain_of_ties_hangs_on_the_one_name_that_the_source_has(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({n: nn.Linear(2, 2, bias=False) for n in "abcd"}).to("jax")
    model.all_tied_weights_keys = {"a.weight": "b.weight", "b.weight": "c.weight"}
    arrays = {n: np.full((2, 2), ord(n[0]), np.float32) for n in ("c.weight", "d.weight")}
    warm_start(model, file_of(tmp_path, arrays))
    assert model["a"].weight is model["b"].weight is model["c"].weight is not model["d"].weight
    assert bits(model["a"].weight)[1:] == bits(arrays["c.weight"])[1:]


def frozen_head(model: Any) -> Any:
    model.head.weight.requires_grad_(False)
    return model


def jittable_beside(model: Any) -> Any:
    model.kept_by = [JittableModule(model)]
    return model


def in_a_dict(model: Any) -> Any:
    model.kept_by = [dict(model.named_parameters())]
    return model


def frozen_objects(model: Any) -> Any:
    gc.freeze()
    return model


@pytest.mark.parametrize(
    "prepare",
    [torch.optim.AdamW, JittableModule, jittable_beside, in_a_dict, frozen_head, frozen_objects],
)
def test_weights_stay_separate_where_something_holds_both(tmp_path: Path, prepare: Any) -> None:
    """Each of them would go on with a parameter that the model no longer has."""
    for name, source in SOURCES.items():
        model = untied()
        before = training_state(model)
        takes_parameters = prepare is torch.optim.AdamW
        prepared = prepare(model.parameters() if takes_parameters else model)
        target = model if takes_parameters else prepared
        folder = file_of(tmp_path / name, source)
        with pytest.raises(MismatchError, match=r"call model\.tie_weights\(\) after it"):
            warm_start(target, folder)
        assert model.head.weight is not model.embed.weight
        if prepare is not frozen_head:
            assert_trees_identical(training_state(model), before)
        del prepared
        if prepare is frozen_objects:
            gc.unfreeze()
    warm_start(untied(), folder)  # without a holder


def test_a_failed_warm_start_leaves_the_weights_separate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = untied()
    embed, head, before = model.embed.weight, model.head.weight, training_state(model)

    def fails(self: Any) -> None:
        assert model.head.weight is model.embed.weight, "tied before the other processes answer"
        raise DirectoryError("another process has failed")

    monkeypatch.setattr(Processes, "meet", fails)
    with pytest.raises(DirectoryError, match="another process"):
        warm_start(model, file_of(tmp_path, SOURCES["alias"]))
    assert model.embed.weight is embed
    assert model.head.weight is head
    assert_trees_identical(training_state(model), before)
