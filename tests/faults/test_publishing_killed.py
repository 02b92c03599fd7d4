"""Killed at any moment, a publisher leaves no half folder to a reader that never stops loading."""

from __future__ import annotations

import json
import random
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PROGRAMS
from support.processes import Started
from support.training import before_enabling
from support.waiting import wait_until

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.publishing.published_folders import CONTROL

KEPT_STEPS, MAX_LIFE_SECS = 2, 0.8
MAX_SECS = 20  # on a busy machine; then there are no more kills


def tiny_llama() -> torch.nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    with before_enabling(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False)
        model: torch.nn.Module = transformers.LlamaForCausalLM(config)
    return model.to("jax")


def publish_under_kills(tmp_path: Path, num_kills: int, *weakenings: str) -> dict[str, Any]:
    """Trains, publishes, kills the publisher, and reads, all at once; returns what was seen."""
    run, out, choose = tmp_path / "run", tmp_path / "out", random.Random(7)
    model, seen = tiny_llama(), {"kills": 0, "while writing": 0}
    publish = [str(PROGRAMS / "publishes_steps.py"), str(run), str(out), *weakenings]
    policy = policies.LatestN(KEPT_STEPS)
    step = 0

    def train(ckpt: TorchaxCheckpointer) -> None:
        nonlocal step
        step += 1
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, step)
        ckpt.save(step, force=True)  # and deletes an older step, which may be being read

    with (
        Started(PROGRAMS / "reads_published.py", str(out)) as reader,
        TorchaxCheckpointer(run, preservation_policy=policy) as ckpt,
    ):
        ckpt.attach(model)
        train(ckpt)
        with Started(*publish):  # starting the first one of a kind takes long
            wait_until(lambda: (out / "latest").exists() and reader.output()[0] == "reading\n")
        end = time.monotonic() + MAX_SECS
        while seen["kills"] < num_kills and time.monotonic() < end:
            began, life_secs = time.monotonic(), choose.uniform(0.1, MAX_LIFE_SECS)
            with Started(*publish) as publisher:  # leaving the block kills it
                while time.monotonic() < began + life_secs:
                    train(ckpt)
                assert publisher.process.poll() is None, publisher.output()
            seen["kills"] += 1
            seen["while writing"] += any((out / CONTROL).glob("writing-*"))
        ckpt.wait_until_finished()
        with Started(*publish):
            newest = f"step-{step}\n"
            wait_until(lambda: (out / "latest").exists())
            wait_until(lambda: weakenings or (out / "latest").read_text() == newest)
            wait_until(lambda: not any((out / CONTROL).glob("*ing-*")))
        assert reader.process.poll() is None, reader.output()
        reader.process.terminate()
        reader.process.wait(60)
        told, errors = reader.output()
    assert told.count("\n") == 2, errors
    return {**seen, **json.loads(told.splitlines()[1])}


@pytest.mark.slow
def test_a_reader_never_meets_half_a_folder(tmp_path: Path) -> None:
    seen = publish_under_kills(tmp_path, 15)
    assert seen["wrong"] == []
    assert seen["kills"] >= 5, seen
    assert seen["while writing"] >= 1, seen
    assert seen["loads"] >= 5, seen
    assert seen["folders"] >= 2, seen


@pytest.mark.slow
@pytest.mark.long
def test_a_publisher_that_is_less_careful_is_found_out(tmp_path: Path) -> None:
    assert publish_under_kills(tmp_path, 8, "in-place")["wrong"]
