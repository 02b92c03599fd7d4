"""What an object keeps alive, counted, to see what grows with each save."""

from __future__ import annotations

import collections
import gc
import threading
import types
from typing import Any

_SHARED = (types.ModuleType, types.FunctionType, types.FrameType, type, threading.Thread)


def held(root: Any) -> dict[str, int]:
    """Returns how many entries the containers have that an object leads to, by their owners."""
    found: collections.Counter[str] = collections.Counter()
    seen, left = {id(root)}, [(root, "")]
    while left:
        each, owner = left.pop()
        if isinstance(each, dict | list | tuple | set | frozenset | collections.deque):
            found[f"{type(each).__name__} of {owner}"] += len(each)
        else:
            owner = type(each).__name__
        for other in gc.get_referents(each):
            if id(other) not in seen and not isinstance(other, _SHARED):
                seen.add(id(other))
                left.append((other, owner))
    return dict(found)
