"""Attributes of another library that are replaced for a time, on any number of threads."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One attribute to replace, and the function that builds the replacement."""

    module: Any
    path: str
    make: Callable[[Any], Any]


_ABSENT = object()


class ReplacedAttributes:
    """A context that replaces attributes while at least one thread is within it.

    Attributes:
      patches: the attributes and their replacements, as the decorator ``replaces`` adds them.
    """

    def __init__(self) -> None:
        self.patches: list[Patch] = []
        self._lock = threading.Lock()
        self._num_within = 0
        # Owner, name, original (``_ABSENT`` if the owner inherits it), replacement.
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replaces(
        self, module: Any, path: str
    ) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Makes the decorated function build, from the original, the replacement of an attribute.

        Args:
          module: the module that has the attribute.
          path: the name of the attribute in the module; ``Class.name`` for one of a class.
        """

        def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
            self.patches.append(Patch(module, path, make))
            return make

        return register

    def __enter__(self) -> None:
        with self._lock:
            if self._num_within == 0:
                try:
                    for patch in self.patches:
                        self._replace(patch)
                except BaseException:
                    self._put_back()
                    raise
            self._num_within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if self._num_within == 0:
                self._put_back()

    def _replace(self, patch: Patch) -> None:
        *outer, name = patch.path.split(".")
        owner = operator.attrgetter(".".join(outer))(patch.module) if outer else patch.module
        original = vars(owner).get(name, _ABSENT)
        replacement = patch.make(getattr(owner, name) if original is _ABSENT else original)
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))

    def _put_back(self) -> None:
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name) is not replacement:
                continue  # other code has replaced it since, and may call our replacement
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
