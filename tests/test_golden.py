"""Checkpoints of every format version ever released are read as they were saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from make_golden import GOLDEN, METRICS, STEP, fingerprint, model, train

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt import torchax_backend as backend
from torchax_ckpt.layout.manifest import VERSION

VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
CASES = [(v, kind) for v in VERSIONS for kind in ("attached", "stacked", "flat", "compressed")]


def test_the_present_version_has_golden_checkpoints() -> None:
    assert f"v{VERSION}" in VERSIONS


@pytest.mark.parametrize(("version", "kind"), CASES)
def test_a_golden_checkpoint_reads_as_it_was_saved(version: str, kind: str) -> None:
    expected = json.loads((GOLDEN / version / "expected.json").read_text())[kind]
    ckpt = TorchaxCheckpointer(GOLDEN / version / kind)
    assert ckpt.all_steps() == [STEP]
    assert ckpt.metrics(STEP) == METRICS
    assert fingerprint(ckpt.load(STEP)) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_training_goes_on_from_a_golden_checkpoint(version: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / version / "attached", tmp_path / "run")
    expected = json.loads((GOLDEN / version / "expected.json").read_text())["attached"]
    torch.manual_seed(1)
    module = model()
    optimizer, scheduler = train(module)
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        assert ckpt.attach(module, optimizer, lr_scheduler=scheduler) == STEP
        leaf = fingerprint(np.asarray(backend.to_numpy(module.get_parameter("1.weight"))))
        assert leaf[1:] in [entry[1][1:] for entry in dict(expected["dict"])["'model'"]["dict"]]
        ckpt.save(STEP + 1, force=True)
    assert TorchaxCheckpointer(tmp_path / "run").all_steps() == [STEP, STEP + 1]
