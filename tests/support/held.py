"""What an object keeps alive, counted, to see what grows with each save."""

from __future__ import annotations

import collections
import gc
import queue
import threading
import types
from typing import Any

_SHARED = (types.ModuleType, types.FunctionType, types.FrameType, type, threading.Thread)
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, queue.SimpleQueue)
# What leads on besides, by names of types: what a function or a thread-local refers to.
_LEADING = {"method", "partial", "cell", "_localdummy", "Group", "Service"}


def held(root: Any) -> dict[str, int]:
    """Returns how many entries the containers have to which an object leads, by their owners.

    Objects of other packages, with all that they have, count as one entry.
    """
    found: collections.Counter[str] = collections.Counter()
    seen, left = {id(root)}, [(root, "")]
    while left:
        each, owner = left.pop()
        if isinstance(each, _CONTAINERS):
            num = each.qsize() if isinstance(each, queue.SimpleQueue) else len(each)
            found[f"{type(each).__name__} of {owner}"] += num
        else:
            owner = type(each).__name__
            if owner not in _LEADING and not type(each).__module__.startswith("torchax_ckpt"):
                continue
        for other in gc.get_referents(each):
            if id(other) not in seen and not isinstance(other, _SHARED):
                seen.add(id(other))
                left.append((other, owner))
    return dict(found)
