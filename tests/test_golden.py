"""Checkpoints of every format version ever released are read as they were saved."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_golden import (
    GOLDEN,
    KINDS,
    LATER,
    METRICS,
    STEP,
    fingerprint,
    model,
    several,
    train,
)

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt import torchax_backend as backend
from torchax_ckpt.layout.manifest import VERSION

VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
CASES = [
    (version, kind)
    for version in VERSIONS
    for kind in json.loads((GOLDEN / version / "expected.json").read_text())
]
FORMAT_PAGE = Path(__file__).parents[1] / "docs" / "format.md"


def test_the_present_version_has_golden_checkpoints() -> None:
    assert {kind for version, kind in CASES if version == f"v{VERSION}"} == {*KINDS, *LATER}
    for version, kind in CASES:
        assert (GOLDEN / version / kind / str(STEP)).is_dir()


@pytest.mark.parametrize(("version", "kind"), CASES)
def test_a_golden_checkpoint_reads_as_it_was_saved(version: str, kind: str) -> None:
    expected = json.loads((GOLDEN / version / "expected.json").read_text())[kind]
    ckpt = TorchaxCheckpointer(GOLDEN / version / kind)
    assert ckpt.all_steps() == [STEP]
    assert ckpt.metrics(STEP) == ({} if kind == "imported" else METRICS)
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


@pytest.mark.parametrize("version", VERSIONS)
def test_ties_extra_state_and_groups_come_back_from_a_golden_checkpoint(
    version: str, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / version / "group", tmp_path / "run")
    torch.manual_seed(1)
    modules, optimizers = several()
    generator = modules["generator"]
    generator.body.count = 0
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        assert ckpt.attach(modules, optimizers) == STEP
        loaded = ckpt.load(STEP)
    assert generator.head.weight is generator.embedding.weight
    assert generator.body.count == 5
    for name, module in modules.items():
        for fqn, parameter in module.named_parameters():
            stored = loaded["model"][name][fqn]
            assert backend.to_numpy(parameter).tobytes() == backend.to_numpy(stored).tobytes()


def keys_of(value: Any) -> Iterator[str]:
    """Every key of the objects in some JSON."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            yield from keys_of(child)


def test_the_page_on_the_format_names_every_key_that_golden_checkpoints_have() -> None:
    found: set[str] = set()
    for version, kind in CASES:
        step = GOLDEN / version / kind / str(STEP)
        manifest = json.loads((step / "manifest" / "data.json").read_text())
        summary = json.loads((step / "summary" / "data.json").read_text())
        # Keyed by names of libraries, components, arrays and metrics.
        for named in ("versions", "document", "stacks", "digests"):
            found.add(named)
            found |= set(keys_of(list(manifest.pop(named).values())))
        summary.pop("metrics")
        found |= {*keys_of(manifest), *keys_of(summary)}
    assert {"ties", "extra_state", "class", "group", "weak", "impl", "abandons"} <= found
    page = FORMAT_PAGE.read_text()
    assert [key for key in sorted(found) if not re.search(rf"[\"`]{key}[\"`]", page)] == []
