"""Policies that consist of other policies, such as ``AnySavePolicy``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def with_children(policy: Any) -> Iterator[Any]:
    """Yields a policy, and all policies that it consists of, at any depth."""
    yield policy
    for child in getattr(policy, "policies", None) or ():
        yield from with_children(child)
