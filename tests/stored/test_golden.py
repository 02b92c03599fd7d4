"""Checkpoints of every format version ever released are read as they were saved."""

from __future__ import annotations

import contextlib
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
    APART,
    GOLDEN,
    KINDS,
    LATER,
    METRICS,
    PLACES,
    STEP,
    TOGETHER,
    fingerprint,
    model,
    several,
    train,
)
from processes_program import digest
from support import ROOT, golden
from support.live import Together

from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    load_torch_state_dict,
    torchax_backend,
)
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout.manifest import VERSION

VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
CASES = [
    (version, kind)
    for version in VERSIONS
    for kind in json.loads((GOLDEN / version / "expected.json").read_text())
]
FORMAT_PAGE = ROOT / "docs" / "format.md"


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
    said = pytest.warns(UserWarning, match="saved by 2 processes and is restored by 1")
    with said if kind == "processes" else contextlib.nullcontext():
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
        leaf = fingerprint(np.asarray(torchax_backend.to_numpy(module.get_parameter("1.weight"))))
        assert leaf[1:] in [entry[1][1:] for entry in dict(expected["dict"])["'model'"]["dict"]]
        ckpt.save(STEP + 1, force=True)
    assert TorchaxCheckpointer(tmp_path / "run").all_steps() == [STEP, STEP + 1]


def test_frozen_arrays_of_a_golden_checkpoint_are_reused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v1" / "linked", tmp_path / "run")
    module: Any = torch.nn.Linear(8, 4).to("jax")
    base = torch.zeros(1024, 512).to("jax")
    module.base = torch.nn.Parameter(base, requires_grad=False)
    with TorchaxCheckpointer(tmp_path / "run", options=CheckpointOptions(reuse=True)) as ckpt:
        assert ckpt.attach(module) == STEP
        for step in (STEP + 1, STEP + 2):
            ckpt.save(step, force=True)
    old, new = (
        next((tmp_path / "run" / str(step)).glob("state/ocdbt.process_unchanged0/d/*"))
        for step in (STEP, STEP + 2)
    )
    assert old.samefile(new)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_group_has_its_ties_and_extra_state_again(version: str, tmp_path: Path) -> None:
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
            assert (
                torchax_backend.to_numpy(parameter).tobytes()
                == torchax_backend.to_numpy(stored).tobytes()
            )


def of_processes(version: str, kind: str) -> list[dict[str, Any]]:
    """What each of the processes had that have written a golden checkpoint together."""
    expected: list[dict[str, Any]] = json.loads((GOLDEN / version / TOGETHER).read_text())[kind]
    assert len(expected) == golden.COUNT
    # Else it would not show whose state is whose.
    assert len({json.dumps(told["own"]) for told in expected}) == len(expected)
    return expected


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_that_processes_have_saved_together_are_read_by_name(version: str) -> None:
    whole = of_processes(version, "processes")[0]["whole"]
    found = load_torch_state_dict(GOLDEN / version / "processes", STEP)
    with torchax_backend.native_torch():
        weights = {name: digest(tensor.numpy()) for name, tensor in found.items()}
    assert weights == {name: whole[name] for name in whole if "/" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["processes", APART])
def test_each_process_has_its_own_state_of_a_golden_checkpoint_again(
    kind: str, version: str, together: Together, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / version / kind, tmp_path / "run")
    hosts = tmp_path / "run" if kind == APART else None
    durable = tmp_path / "run" / "durable" if kind == APART else tmp_path / "run"
    tier = "local" if kind == APART else "durable"
    found = golden.read(together, durable, STEP, hosts)
    for here, there in zip(found, of_processes(version, kind), strict=True):
        assert here == {"start": STEP, "tier": tier, **there}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_part_of_a_host_is_not_taken_for_the_whole(version: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / version / APART, tmp_path / "run")
    durable, *hosts = (tmp_path / "run" / place for place in PLACES)
    for host in hosts:
        assert (host / str(STEP)).is_dir()
        with pytest.raises(CorruptCheckpointError, match="holds one host's part"):
            load_torch_state_dict(host, STEP)
        ckpt = TorchaxCheckpointer(durable, local=LocalTier(host))
        with pytest.raises(CorruptCheckpointError, match="holds one host's part"):
            ckpt.attach()
        ckpt.close()


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
        for database in manifest.pop("unchanged", {}).values():
            database.pop("xxh3_128")
            found |= {"unchanged", "xxh3_128", *database}
        summary.pop("metrics")
        found |= {*keys_of(manifest), *keys_of(summary)}
    assert {"ties", "extra_state", "class", "group", "weak", "impl", "abandons", "copy"} <= found
    page = FORMAT_PAGE.read_text()
    assert [key for key in sorted(found) if not re.search(rf"[\"`]{key}[\"`]", page)] == []
