"""Two saves with equal seeds are the same step, and each difference on storage is noticed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchax
import xxhash
from same_step_cases import CASES

from support import PROGRAMS, ROOT
from support.processes import run_python
from support.same_step import MARK, RECORD, assert_same, differences, main
from support.training import fsdp_mesh, fsdp_rule, save_state


def saved(folder: Path, num_devices: int = 8, **changed: Any) -> Path:
    """Saves a step of a run below a folder, with fixed seeds; returns the folder."""
    torch.manual_seed(0)
    torchax.default_env().manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    array = jnp.arange(4096, dtype=jnp.float32)
    sharded = jax.device_put(array, fsdp_rule(fsdp_mesh(num_devices))("", array))
    state = {"device": sharded, "host": np.arange(5000), "small": np.arange(3), "n": 5, **changed}
    save_state(folder / "run", state)
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("expected"))


def test_two_saves_with_equal_seeds_are_the_same_step(expected: Path, tmp_path: Path) -> None:
    found = saved(tmp_path)
    assert_same(found / "run" / "1", expected / "run" / "1")
    assert main(found, expected) == 0
    data = [{path.name for path in each.rglob("d/*")} for each in (found, expected)]
    assert not set.intersection(*data), "the data files have random names"


@pytest.mark.long
@pytest.mark.slow
def test_two_programs_with_equal_seeds_write_the_same_steps(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        program = PROGRAMS / "same_step_cases.py"
        run_python(program, str(folder), env={"PYTHONPATH": str(ROOT)}, fresh=True)
    assert_same(*folders)
    names = {path.name for path in folders[0].iterdir()}
    assert names == {case.__name__ for case in CASES}


def test_a_folder_without_steps_is_not_the_same(expected: Path, tmp_path: Path) -> None:
    assert main(tmp_path, tmp_path) == 1


HOST = np.arange(5000)
CHANGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a value in a data file": ({"host": np.where(HOST == 7, 8, HOST)}, "state.host/0", "is not"),
    "a value in the index": ({"small": np.array([0, 1, 3])}, "state.small/0", "is not"),
    "a dtype": ({"host": HOST.astype(np.float64)}, "state.host/.zarray", "is not"),
    "a chunk shape": ({"num_devices": 4}, "state.device/.zarray", "is not"),
    "a chunk": ({"num_devices": 4}, "state.device/7", "is missing"),
    "a key": ({"new": np.arange(9)}, "state.new/0", "is new"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_arrays_differ_in_all_databases(expected: Path, tmp_path: Path, change: str) -> None:
    changed, key, how = CHANGES[change]
    lines = differences(saved(tmp_path, **changed), expected)
    for database in ("run/1/state", "run/1/state/ocdbt.process_0"):
        assert any(line.startswith(f"{database}: {key}") and how in line for line in lines), lines


def edit(path: Path, key: str, value: Any) -> None:
    """Changes a value of a JSON file, and its seal."""
    content = {**json.loads(path.read_text()), key: value}
    del content["xxh3_64"]
    text = json.dumps(content, separators=(",", ":"))
    seal = xxhash.xxh3_64_hexdigest(text.encode())
    path.write_text(f'{text[:-1]},"xxh3_64":"{seal}"}}')


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "the manifest": ("manifest/data.json", lambda p: edit(p, "attached", ["model"])),
    "a new key of the manifest": ("manifest/data.json", lambda p: edit(p, "new", 1)),
    "the summary": ("summary/data.json", lambda p: edit(p, "metrics", {"loss": 1.0})),
    "the form of the summary": ("summary/data.json", lambda p: replace(p, ",", ", ")),
    "the record": (RECORD, lambda p: replace(p, "JsonHandler", "OtherHandler")),
    "the mark": (MARK, lambda p: replace(p, "committed", "done")),
    "the shardings": ("state/_sharding", lambda p: replace(p, "fsdp", "tp")),
    "Orbax's metadata": ("state/_METADATA", lambda p: replace(p, "key_type", "key_kind")),
    "metadata of arrays": (
        "state/array_metadatas/process_0",
        lambda p: replace(p, "chunk_shape", "chunk"),
    ),
    "a new file": ("state/new", Path.touch),
    "a new folder": ("new", Path.mkdir),
    "a lost file": ("orbax.checkpoint", Path.unlink),
    "permissions": ("state/_METADATA", lambda p: p.chmod(0o600)),
    "a link": ("state/_METADATA", lambda p: os.link(p, p.parents[2] / "link")),
    "a second data file": ("state/d/0123456789abcdef0123456789abcdef", Path.touch),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_other_files_differ(expected: Path, tmp_path: Path, what: str) -> None:
    name, damage = DAMAGE[what]
    found = shutil.copytree(expected / "run", tmp_path / "run") / "1"
    assert_same(found, expected / "run" / "1")
    damage(found / name)
    try:
        lines = differences(found, expected / "run" / "1")
    except AssertionError as error:  # a digest or a seal
        lines = [str(error).removeprefix(f"{found}/")]
    where = name.partition("d/0")[0]
    assert any(line.startswith((where, f"{MARK}: the digest of {where}")) for line in lines), lines


@pytest.mark.parametrize("name", ["manifest/data.json", "summary/data.json", MARK])
def test_wrong_seals_are_noticed(expected: Path, tmp_path: Path, name: str) -> None:
    found = shutil.copytree(expected / "run" / "1", tmp_path / "1")
    digest = found.joinpath(name).read_text().split('"')[-2]
    replace(found / name, digest, "0" * 16)
    with pytest.raises(AssertionError, match="is wrong"):
        differences(found, expected / "run" / "1")
