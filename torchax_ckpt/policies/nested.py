"""Walks through policies that contain other policies, such as ``AnySavePolicy``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def with_children(policy: Any) -> Iterator[Any]:
    """Yields a policy and, recursively, all policies inside it."""
    yield policy
    for child in getattr(policy, "policies", None) or ():
        yield from with_children(child)
