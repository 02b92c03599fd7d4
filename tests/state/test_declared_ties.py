"""Ties that a model declares, as those of transformers do, and loses on its way to devices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.state.modules.declared_ties import declared_ties


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


def test_ties_that_the_configuration_switches_off_are_not_declared() -> None:
    assert declared_ties(DeclaringAliases(tie_word_embeddings=False)) == {}
    assert declared_ties(DeclaringAliases()) == {"head.weight": "embed.weight"}


def test_a_wrapped_model_declares_its_ties_under_the_names_of_the_whole() -> None:
    outer = nn.ModuleDict({"base": nn.ModuleDict({"model": Declaring()})})
    tie = {"base.model.head.weight": "base.model.embed.weight"}
    assert declared_ties(outer) == tie
    # As PEFT does to a layer that it adapts: the declared name is gone, and so is the tie.
    outer["base"]["model"].head = nn.ModuleDict({"base_layer": nn.Linear(4, 6)})  # type: ignore
    assert declared_ties(outer) == {}
    assert declared_ties(torch.nn.Linear(2, 2)) == {}
