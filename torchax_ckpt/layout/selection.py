"""A selection says, by patterns of names, which weights a restore takes and under which names.

A pattern names a tensor, or a module and everything below it: ``encoder`` also matches
``encoder.0.weight``. ``*`` matches one or more characters of any kind, dots included, and as few as
possible, as in ``*.bias``. Names are written as torch does, with the special characters
percent-encoded by ``names.escape``. If several models are attached, each pattern begins with a
model's name and ``/``, as in ``generator/encoder``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torchax_ckpt.errors import SelectionError

_ANY = "*"
_MAX_LISTED = 5
# The attributes in which wrappers keep the module that they wrap: torch.compile; DataParallel,
# DistributedDataParallel and AveragedModel; checkpoint_wrapper; FSDP.
_WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class Selection:
    """The tensors that one restore selects; it records the names that its patterns matched.

    ``include`` and ``exclude`` are patterns for the program's names, ``rename`` maps patterns for
    names in the checkpoint to the program's; the first that matches applies.
    """

    def __init__(
        self,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        if rename is not None and not isinstance(rename, Mapping):
            raise SelectionError(f"rename: expected a mapping, found {rename!r:.80}")
        self._targets = dict(rename or {})
        given = {"include": include, "exclude": exclude, "rename": self._targets}
        self._patterns = {
            argument: compiled(argument, () if patterns is None else patterns)
            for argument, patterns in given.items()
        }
        self._takes_all = include is None
        if include is not None and not self._patterns["include"]:
            raise SelectionError(
                "include: expected at least one pattern, found none; None selects all tensors"
            )
        for pattern, target in self._targets.items():
            if not isinstance(target, str) or not target:
                raise SelectionError(f"rename: {pattern!r}: expected a name, found {target!r:.80}")
            if pattern.count(_ANY) != target.count(_ANY):
                raise SelectionError(
                    f"rename: {pattern!r}: expected as many * in the new name {target!r} as in the "
                    "pattern, because each * of the new name stands for the text that a * of the "
                    "pattern matched"
                )
        self._unused = {
            f"{argument}: {pattern!r}"
            for argument, patterns in self._patterns.items()
            for pattern in patterns
        }
        # The names, in checkpoint or program, for which ``takes`` has returned False.
        self.left_out: dict[str, None] = {}
        self._unwrapped: dict[str, str] = {}

    def match_wrapped(self, stored: Iterable[str], live: Iterable[str]) -> dict[str, str]:
        """Matches names that differ only by parts that wrappers add; returns stored -> live."""
        theirs, ours = dict.fromkeys(map(self.renamed, stored)), dict.fromkeys(live)
        # Equal names go together first; a name stays as it is if several others could be meant.
        of_ours = _by_plain_name(name for name in ours if name not in theirs)
        matched = {
            names[0]: of_ours[plain][0]
            for plain, names in _by_plain_name(name for name in theirs if name not in ours).items()
            if len(names) == len(of_ours.get(plain, ())) == 1
        }
        self._unwrapped |= matched
        return matched

    def takes(self, name: str) -> bool:
        """Returns whether the tensor that has this name in the program is selected."""
        # Evaluate both arguments, because require_used needs every pattern that matched a name.
        included = self._matches("include", name) or self._takes_all
        excluded = self._matches("exclude", name)
        if included and not excluded:
            return True
        self.left_out[name] = None
        return False

    def taken(self, stored: Iterable[str], ties: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns name in the checkpoint -> name in the program, for the selected tensors.

        Only names of one tensor, which ``ties`` maps to its first, may get the same new name.
        """
        ties = ties or {}
        selected: dict[str, str] = {}
        origins: dict[str, str] = {}
        for name in stored:
            target = self.renamed(name)
            if not self.takes(target):
                continue
            other = origins.setdefault(target, name)
            if ties.get(other, other) != ties.get(name, name):
                raise SelectionError(
                    f"{other} and {name} of the checkpoint would both be named {target}; "
                    "exclude one of them (exclude=), or give it another name (rename=)",
                    key_path=name,
                )
            selected[name] = target
        return selected

    def require_used(self) -> None:
        """Raises SelectionError if a pattern matched no name and so may be misspelled."""
        if not self._unused:
            return
        listed = ", ".join(sorted(self._unused)[:_MAX_LISTED])
        more = len(self._unused) - _MAX_LISTED
        raise SelectionError(
            f"nothing matches {listed}{f' and {more} more' if more > 0 else ''}, neither in the "
            "checkpoint nor in the attached model. Use torch's names (encoder.0.weight). If "
            "several models are attached, begin with the model's name and /. Nothing was changed."
        )

    def renamed(self, name: str) -> str:
        """Returns the name in the program of the tensor that has this name in the checkpoint."""
        for pattern, compiled in self._patterns["rename"].items():
            if match := compiled.match(name):
                self._unused.discard(f"rename: {pattern!r}")
                first, *others = self._targets[pattern].split(_ANY)
                carried = zip(match.groups(), others, strict=True)
                name = first + "".join(a + b for a, b in carried) + name[match.end() :]
                break
        return self._unwrapped.get(name, name)

    def _matches(self, argument: str, name: str) -> bool:
        matching = [p for p, compiled in self._patterns[argument].items() if compiled.match(name)]
        self._unused.difference_update(f"{argument}: {pattern!r}" for pattern in matching)
        return bool(matching)


def _by_plain_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups names by the name that is left without the parts of wrappers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        models, slash, fqn = name.rpartition("/")
        plain = ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)
        groups.setdefault(models + slash + plain, []).append(name)
    return groups


def compiled(argument: str, patterns: str | Iterable[str]) -> dict[str, re.Pattern[str]]:
    """Returns pattern -> regular expression; raises SelectionError for what is no pattern."""
    listed: list[Any] = [patterns]
    if not isinstance(patterns, str) and isinstance(patterns, Iterable):
        listed = list(patterns)
    for pattern in listed:
        if not isinstance(pattern, str) or not pattern:
            raise SelectionError(f"{argument}: expected a pattern, found {pattern!r:.80}")
    # Each matches a whole name, or its beginning up to ``.`` or ``/``.
    texts = {p: "(.+?)".join(map(re.escape, p.split(_ANY))) for p in listed}
    return {p: re.compile(rf"{text}(?=[./]|\Z)", re.DOTALL) for p, text in texts.items()}
