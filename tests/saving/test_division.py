"""The databases of unchanged arrays that a save writes are small for each process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchax_ckpt.saving.unchanged import division
from torchax_ckpt.storage.arrays import chunking

LIMIT = 100


def array(num_bytes: int, *writers: int) -> Any:
    return SimpleNamespace(size=num_bytes, dtype=np.dtype("uint8"), writers=frozenset(writers))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([array(60, 0), array(40, 0), array(60, 0), array(40, 0)], [2, 2]),
        # Each process writes half of an array, or other arrays than the other process.
        ([array(100, 0, 1), array(100, 0, 1), array(2, 0, 1)], [2, 1]),
        ([array(60, 0), array(60, 1), array(40, 0), array(40, 1), array(1, 0)], [4, 1]),
        # One process has too much, though the processes together have less than twice the limit.
        ([array(90, 0), array(40, 0, 1), array(80, 1)], [1, 2]),
        # An array of its own may be larger; nothing is put beside it on a process that writes it.
        ([array(500, 0), array(1, 0), array(1, 1)], [1, 2]),
        ([array(500, 0), array(1, 1), array(1, 0)], [2, 1]),
        ([], []),
    ],
)
def test_no_process_writes_more_to_a_database_than_the_limit(
    arrays: list[Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "_DATABASE_BYTES", LIMIT)
    monkeypatch.setattr(chunking, "storing_processes", lambda array: array.writers)
    named = {str(number): array for number, array in enumerate(arrays)}
    groups = [*division.grouped(named, named)]
    assert [name for group in groups for name in group] == [*named]
    assert [len(group) for group in groups] == expected
