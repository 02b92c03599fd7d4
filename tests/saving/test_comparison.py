"""Arrays are equal to stored ones only if each block was compared, by whichever process."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from torchax_ckpt.errors import ProcessError
from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.saving.unchanged import comparison
from torchax_ckpt.saving.unchanged.comparison import Answer
from torchax_ckpt.saving.unchanged.known_databases import Content
from torchax_ckpt.snapshot.host_array import HostArray
from torchax_ckpt.storage.arrays import block_digests

HOST = np.random.default_rng(0).random((8, 6), np.float32)
BLOCK = (2, 3)
LONG = block_digests.take_long(HOST.shape, BLOCK, {(0, 0): HOST})
CONTENT = Content(("state/w",), HOST.shape, "float32", Digests(BLOCK, bytes(64), LONG))


def sent(first: int, last: int, host: np.ndarray = HOST) -> dict[str, list[str]]:
    """What a process sends that has some rows of an array."""
    long = block_digests.take_long(HOST.shape, BLOCK, {(first, 0): host[first:last]})
    return {"state/w": [*comparison.encoded(long)]}


def test_all_blocks_must_be_compared_and_equal() -> None:
    contents, other = {"state/w": CONTENT}, HOST.copy()
    other[7, 5] += 1
    assert comparison.are_equal(contents, [sent(0, 4), sent(4, 8)])
    assert comparison.are_equal(contents, [sent(0, 8), {}])
    assert comparison.are_equal(contents, [sent(0, 8), sent(4, 8)])
    assert not comparison.are_equal(contents, [sent(0, 4), sent(6, 8)])
    assert not comparison.are_equal(contents, [sent(0, 4), {}])
    assert not comparison.are_equal(contents, [])
    assert not comparison.are_equal(contents, [sent(0, 4), sent(4, 8, other)])
    assert not comparison.are_equal(contents, [sent(0, 8), sent(4, 8, other)])


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [((0, 4, 8), (0, 3, 6), (0, 8)), ((1, 4, 7), (0, 6), (2, 6)), ((3, 4), (0, 6), None)],
)
def test_the_shards_of_a_process_are_joined_and_cut_to_whole_blocks(
    rows: tuple[int, ...], columns: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    parts: dict[tuple[int, ...], np.ndarray] = {
        (r, c): HOST[r:s, c:d]
        for r, s in itertools.pairwise(rows)
        for c, d in itertools.pairwise(columns)
    }
    sharding = SingleDeviceSharding(jax.devices()[0])
    found = comparison._joined(HostArray(HOST.shape, HOST.dtype, sharding, parts), BLOCK)
    if expected is None:
        assert found == {}
        return
    first, last = expected
    assert [*found] == [(first, 0)]
    assert found[first, 0].tobytes() == HOST[first:last].tobytes()


def test_shards_that_form_no_box_are_not_compared() -> None:
    parts: dict[tuple[int, ...], np.ndarray] = {(0, 0): HOST[:2, :3], (2, 3): HOST[2:4, 3:]}
    sharding = SingleDeviceSharding(jax.devices()[0])
    assert comparison._joined(HostArray(HOST.shape, HOST.dtype, sharding, parts), BLOCK) == {}


def test_processes_with_other_stacks_are_named() -> None:
    answers = [Answer(stacks, [], []) for stacks in ("a", "a", "b")]
    comparison.require_same_stacks(answers[:2])
    with pytest.raises(ProcessError, match="process 2 stacks other leaves than process 0"):
        comparison.require_same_stacks(answers)
