"""The databases of frozen arrays that a save writes are small for each process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchax_ckpt.saving.reuse import reuse
from torchax_ckpt.storage.arrays import chunking

LIMIT = 100


def array(num_bytes: int, *writers: int) -> Any:
    return SimpleNamespace(size=num_bytes, dtype=np.dtype("uint8"), writers=frozenset(writers))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([array(60, 0), array(40, 0), array(60, 0), array(40, 0)], [2, 2]),
        # Each process writes half of an array.
        ([array(100, 0, 1), array(100, 0, 1), array(2, 0, 1)], [2, 1]),
        ([array(90, 0), array(40, 0, 1), array(80, 1)], [1, 2]),
        # An array of its own may be larger; nothing is put beside it.
        ([array(500, 0), array(1, 0), array(1, 1)], [1, 2]),
        ([], []),
    ],
)
def test_no_process_writes_more_to_a_database_than_the_limit(
    arrays: list[Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "_DATABASE_BYTES", LIMIT)
    monkeypatch.setattr(chunking, "storing_processes", lambda array: array.writers)
    named = {str(number): array for number, array in enumerate(arrays)}
    groups = [*reuse.grouped(named, named)]
    assert [name for group, _ in groups for name in group] == [*named]
    assert [len(group) for group, _ in groups] == expected
