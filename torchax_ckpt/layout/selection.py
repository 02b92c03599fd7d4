"""Owns which weights a restore takes, and under which names: patterns over torch's names.

A pattern names a tensor, or a module and with it everything below: ``encoder`` covers
``encoder.0.weight``. ``*`` stands for one or more characters of any kind, dots too, as few as
possible: ``*.bias``, ``layers.*.attention``. Nothing else is special. Names are escaped as
everywhere (``names.escape``), and where several models are attached, they begin with the model's
name and ``/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torchax_ckpt.errors import SelectionError

_ANY = "*"
_MAX_LISTED = 5


class Selection:
    """Which tensors a restore is about; one restore each, since it notes what it has seen.

    It holds for both sides alike: what is not selected is neither taken from the checkpoint nor
    expected there, and what is selected must fit.

    Args:
      include: patterns; only what one of them matches is selected. None for everything.
      exclude: patterns; what one of them matches is not selected.
      rename: pattern of names in the checkpoint -> their names in the program, with as many ``*``,
        which stand for the same, in order. The first pattern that matches a name counts. The
        others are written for the program's names.

    Attributes:
      left_out: names that were seen, on either side, and are not selected.

    Raises:
      SelectionError: a pattern is none.
    """

    def __init__(
        self,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        self._include = None if include is None else _patterns("include", include)
        self._exclude = _patterns("exclude", () if exclude is None else exclude)
        if rename is not None and not isinstance(rename, Mapping):
            raise SelectionError(f"rename: expected a mapping, found {rename!r:.80}")
        self._rename = _patterns("rename", rename or {})
        self._targets = dict(rename or {})
        if include is not None and not self._include:
            raise SelectionError("include: expected a pattern at least, found none")
        for pattern, target in self._targets.items():
            if not isinstance(target, str) or not target:
                raise SelectionError(f"rename: {pattern!r}: expected a name, found {target!r:.80}")
            if pattern.count(_ANY) != target.count(_ANY):
                raise SelectionError(
                    f"rename: {pattern!r}: expected as many * in {target!r}, to carry them over"
                )
        self._unused = {
            f"{argument}: {pattern!r}"
            for argument, patterns in (
                ("include", self._include or {}),
                ("exclude", self._exclude),
                ("rename", self._rename),
            )
            for pattern in patterns
        }
        self.left_out: dict[str, None] = {}

    def takes(self, name: str) -> bool:
        """Whether a tensor of this name, as the program has it, is selected."""
        # All of them, since every pattern that matches something has done its part.
        included = self._include is None or self._matches("include", self._include, name)
        excluded = self._matches("exclude", self._exclude, name)
        if included and not excluded:
            return True
        self.left_out[name] = None
        return False

    def taken(self, stored: Iterable[str], ties: Mapping[str, str] | None = None) -> dict[str, str]:
        """Name in the checkpoint -> name in the program, of those that are selected.

        Args:
          stored: names in the checkpoint.
          ties: another name of a tensor -> its own: these may become one.

        Raises:
          SelectionError: two tensors would have the same name.
        """
        ties = ties or {}
        found: dict[str, str] = {}
        origins: dict[str, str] = {}
        for name in stored:
            target = self.renamed(name)
            if not self.takes(target):
                continue
            other = origins.setdefault(target, name)
            if ties.get(other, other) != ties.get(name, name):
                raise SelectionError(
                    f"{other} and {name} of the checkpoint would both be {target}; "
                    "exclude one of them, or rename it to something else",
                    key_path=name,
                )
            found[name] = target
        return found

    def require_used(self) -> None:
        """Raises SelectionError if a pattern has matched nothing: it is misspelled, or too much."""
        if not self._unused:
            return
        listed = ", ".join(sorted(self._unused)[:_MAX_LISTED])
        more = len(self._unused) - _MAX_LISTED
        raise SelectionError(
            f"nothing matches {listed}{f' and {more} more' if more > 0 else ''}, neither in the "
            "checkpoint nor in what is attached; names are torch's (encoder.0.weight), after the "
            "model's own and / where there are several. Nothing was changed."
        )

    def renamed(self, name: str) -> str:
        """The program's name of a tensor that has this name in the checkpoint."""
        for pattern, compiled in self._rename.items():
            if match := compiled.match(name):
                self._unused.discard(f"rename: {pattern!r}")
                first, *others = self._targets[pattern].split(_ANY)
                carried = zip(match.groups(), others, strict=True)
                return first + "".join(a + b for a, b in carried) + name[match.end() :]
        return name

    def _matches(self, argument: str, patterns: Mapping[str, re.Pattern[str]], name: str) -> bool:
        matching = [pattern for pattern, compiled in patterns.items() if compiled.match(name)]
        self._unused.difference_update(f"{argument}: {pattern!r}" for pattern in matching)
        return bool(matching)


def _patterns(argument: str, patterns: str | Iterable[str]) -> dict[str, re.Pattern[str]]:
    listed: list[Any] = [patterns]
    if not isinstance(patterns, str) and isinstance(patterns, Iterable):
        listed = list(patterns)
    for pattern in listed:
        if not isinstance(pattern, str) or not pattern:
            raise SelectionError(f"{argument}: expected a pattern, found {pattern!r:.80}")
    return {pattern: _compiled(pattern) for pattern in listed}


def _compiled(pattern: str) -> re.Pattern[str]:
    """It matches from the beginning of a name to the end of one of its parts."""
    text = "(.+?)".join(re.escape(part) for part in pattern.split(_ANY))
    return re.compile(rf"{text}(?=[./]|\Z)", re.DOTALL)
