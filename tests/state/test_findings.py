"""The last sentence of a MismatchError says what helps for its cause."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from support.compare import assert_trees_identical
from support.models import Plain
from support.training import adamw, save
from torch import nn

from torchax_ckpt import TorchaxCheckpointer, warm_start
from torchax_ckpt.errors import MismatchError
from torchax_ckpt.state.findings import Findings


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
        with TorchaxCheckpointer(directory) as ckpt:
            ckpt.attach(fresh, adamw(fresh), resume=False)
            assert ckpt.restore(rename=ast.literal_eval(rename.removesuffix(")."))).step == 1
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
