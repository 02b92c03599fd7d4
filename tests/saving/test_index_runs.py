"""Messages to all processes name the writers of a database in the same few bytes for any number."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from etils import epath
from hypothesis import given, strategies

from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.unchanged import division
from torchax_ckpt.saving.unchanged.comparison import Offer
from torchax_ckpt.saving.unchanged.division import Decision
from torchax_ckpt.saving.unchanged.index_runs import indices_of, runs_of
from torchax_ckpt.saving.unchanged.known_databases import Content, KnownDatabase
from torchax_ckpt.storage.arrays import chunking

CONTENT = Content(("state/w",), (8,), "float32", Digests((8,), bytes(8), bytes(16)))


@given(strategies.sets(strategies.integers(0, 60)))
def test_runs_describe_any_indices(indices: set[int]) -> None:
    assert indices_of(json.loads(json.dumps(runs_of(sorted(indices))))) == sorted(indices)


def test_all_processes_or_one_replica_of_them_are_one_run() -> None:
    assert runs_of([]) == []
    assert runs_of(range(1024)) == [[0, 1024, 1]]
    assert runs_of(range(0, 1024, 4)) == [[0, 256, 4]]
    assert runs_of([0, *range(512, 1024)]) == [[0, 2, 512], [513, 511, 1]]


def sent(
    processes: Sequence[int], monkeypatch: pytest.MonkeyPatch, array: Any = None
) -> tuple[Any, Any]:
    """Returns what all processes are sent about databases that some processes have written."""
    monkeypatch.setattr(chunking, "storing_processes", lambda _: frozenset(processes))
    stored = KnownDatabase((3, 1), "unchanged0", {"w": CONTENT}, False, tuple(processes))
    decision = Decision(0)
    decision.take_over(stored, "3", {"w": array})
    decision.write(("v",), {"v": array}, len(processes))
    return decision.to_json(), dataclasses.astuple(Offer.of(stored, "3"))


def test_what_a_save_tells_all_processes_does_not_grow_with_the_writers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = (len(json.dumps(sent(range(n), monkeypatch))) for n in (16, 1024))
    assert many - few <= 3 * len("1024")


def test_every_process_finds_the_folders_of_all_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = [0, 2, 4, 5]
    decided, offered = json.loads(json.dumps(sent(writers, monkeypatch)))
    folders = [f"ocdbt.process_unchanged0x{index}" for index in writers]
    assert Offer(*offered).folders() == [f"3/state/{folder}" for folder in folders]
    arrays: Any = {"w": None, "v": None}
    linked: list[str] = []
    for index in range(3):
        process = Processes("dividing", 30, None, index=index, count=3)
        found = division.divided(decided, arrays, epath.Path("run"), process)
        assert [d.processes for d in found.databases.values()] == [tuple(writers)] * 2
        linked += [old.name for old, _ in found.links]
    assert sorted(linked) == folders


def test_process_0_alone_takes_over_the_folders_of_host_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if several processes wrote them, as an array on devices."""
    array = np.zeros(8, np.float32)
    decided, _ = json.loads(json.dumps(sent([0, 2], monkeypatch, array)))
    for index, arrays in enumerate([{"w": array, "v": array}, {}]):
        process = Processes("dividing", 30, None, index=index, count=2)
        found = division.divided(decided, arrays, epath.Path("run"), process)
        assert [d.processes for d in found.databases.values()] == [(0, 2)] * 2
        assert found.linked == {"w"}
        assert found.folders.keys() == arrays.keys() - {"w"}
        expected = ["ocdbt.process_unchanged0x0", "ocdbt.process_unchanged0x2"] if arrays else []
        assert [old.name for old, _ in found.links] == expected
