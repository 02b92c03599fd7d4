"""Killed at any moment, a publisher leaves no half folder to a reader that never stops loading."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from support import PROGRAMS
from support.compare import bits
from support.processes import Started
from support.waiting import wait_until

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.publishing import Reader
from torchax_ckpt.publishing.published_folders import CONTROL

NUM_FILES = 6  # a file for each layer, an index and the digests
KEPT_STEPS, MAX_LIFE_SECS = 2, 0.8
MAX_SECS = 40  # on a busy machine; then there are no more kills


def read(out: Path, is_over: threading.Event, seen: dict[str, Any]) -> None:
    """Loads the folder that ``latest`` names again and again; each weight must be its step.

    The first layer is 0, in a file that all folders share.
    """
    reader = Reader(out)
    while not is_over.wait(0.01):  # leaves time for the training in this process
        try:
            for key, tensor in reader.poll().items():
                weight = np.frombuffer(bits(tensor)[-1], np.float32)
                assert (weight == (0 if key == "0.weight" else reader.step)).all(), key
                seen["first layers"] += key == "0.weight"
        except Exception as error:
            seen["wrong"].append(f"the Reader, after step {reader.step}: {error!r:.500}")
        for path in out.glob("step-*"):
            with contextlib.suppress(FileNotFoundError):  # deleted after it was listed
                num_files = len([*path.iterdir()])
                if num_files != NUM_FILES and path.exists():
                    seen["wrong"].append(f"{path.name} has {num_files} files")
        if (out / "latest").exists():
            name = (out / "latest").read_text().strip()
            step = int(name.removeprefix("step-"))
            try:
                index = json.loads((out / name / "model.safetensors.index.json").read_text())
                for file in {*index["weight_map"].values()}:
                    for key, weight in safetensors.numpy.load_file(out / name / file).items():
                        assert (weight == (0 if key == "0.weight" else step)).all(), file
                    seen["links"] += (out / name / file).stat().st_nlink > 1
            except Exception as error:
                seen["wrong"].append(f"{name}: {error!r:.500}")
            seen["loads"] += 1
            seen["folders"].add(name)


def publish_under_kills(tmp_path: Path, num_kills: int, *weakenings: str) -> dict[str, Any]:
    """Trains, publishes, kills the publisher, and reads, all at once; returns what was seen."""
    run, out, choose = tmp_path / "run", tmp_path / "out", random.Random(7)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(NUM_FILES - 2)]
    model, is_over = torch.nn.Sequential(*layers).to("jax"), threading.Event()
    seen: dict[str, Any] = {"kills": 0, "while writing": 0, "loads": 0, "folders": set()}
    seen |= {"wrong": [], "first layers": 0, "links": 0}
    reader = threading.Thread(target=read, args=(out, is_over, seen), daemon=True)
    publish = [str(PROGRAMS / "publishes_steps.py"), str(run), str(out), *weakenings]
    policy = policies.LatestN(KEPT_STEPS)
    step = 0

    def train(ckpt: TorchaxCheckpointer) -> None:
        nonlocal step
        step += 1
        for name, parameter in model.named_parameters():
            parameter.data = torch.full_like(parameter, 0 if name == "0.weight" else step)
        ckpt.save(step, force=True)  # and deletes an older step, which may be being read

    with TorchaxCheckpointer(run, preservation_policy=policy) as ckpt:
        ckpt.attach(model)
        train(ckpt)
        with Started(*publish):  # starting the first one of a kind takes long
            wait_until(lambda: (out / "latest").exists())
        reader.start()
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
        is_over.set()
        reader.join()
    return seen


@pytest.mark.slow
def test_a_reader_never_meets_half_a_folder(tmp_path: Path) -> None:
    seen = publish_under_kills(tmp_path, 15)
    assert seen["wrong"] == []
    assert seen["kills"] >= 5, seen
    assert seen["while writing"] >= 1, seen
    assert seen["loads"] >= 5, seen
    assert len(seen["folders"]) >= 2, seen
    assert seen["first layers"] == 1, seen  # which does not change
    assert seen["links"] >= 1, seen


@pytest.mark.slow
@pytest.mark.long
def test_a_publisher_that_is_less_careful_is_found_out(tmp_path: Path) -> None:
    assert publish_under_kills(tmp_path, 8, "in-place")["wrong"]
