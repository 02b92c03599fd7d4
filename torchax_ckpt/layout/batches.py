"""Divides items into batches whose sizes in bytes are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], size: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yields the items, in their order, in lists; an item above ``max_bytes`` is alone in one."""
    batch: list[T] = []
    nbytes = 0
    for item in items:
        if batch and nbytes + size(item) > max_bytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size(item)
    if batch:
        yield batch
