"""Replaces attributes of other libraries while a context is open, on any number of threads."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Replacement(NamedTuple):
    """One attribute to replace, and the function that builds the replacement from the original."""

    module: Any
    path: str
    make: Callable[[Any], Any]


_ABSENT = object()


class Replacements:
    """A context in which registered attributes are replaced.

    Several threads may be within the context. The attributes are replaced while at least one thread
    is within it.

    Attributes:
      registered: the attributes to replace.
    """

    def __init__(self) -> None:
        self.registered: list[Replacement] = []
        self._lock = threading.Lock()
        self._num_within = 0
        # Owner, name, original (``_ABSENT`` if the owner inherits it), replacement.
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def register(
        self, module: Any, path: str
    ) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Returns a decorator of the function that builds the replacement from the original.

        Args:
          module: the module or class with the attribute.
          path: the dotted path of the attribute in the module.
        """

        def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
            self.registered.append(Replacement(module, path, make))
            return make

        return register

    def __enter__(self) -> None:
        with self._lock:
            if self._num_within == 0:
                try:
                    for replacement in self.registered:
                        self._replace(replacement)
                except BaseException:
                    self._put_back()
                    raise
            self._num_within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if self._num_within == 0:
                self._put_back()

    def _replace(self, registered: Replacement) -> None:
        *outer, name = registered.path.split(".")
        module = registered.module
        owner = operator.attrgetter(".".join(outer))(module) if outer else module
        original = vars(owner).get(name, _ABSENT)
        replacement = registered.make(getattr(owner, name) if original is _ABSENT else original)
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
