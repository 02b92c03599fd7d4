"""Says that a run is new, and whether the name of its directory may be a typing mistake."""

from __future__ import annotations

import logging
import re

from etils import epath

from torchax_ckpt.runtime.user_messages import fields, tell
from torchax_ckpt.storage.directory import commit_record

logger = logging.getLogger(__name__)

# A capital letter begins a word, as in ``runA``.
_WORD = re.compile(r"[A-Z]+[^\W\d_A-Z]*|[^\W\d_A-Z]+")
_MIN_LETTERS = 3


def announce(path: epath.Path, *, looks_around: bool) -> None:
    """Logs that a run without steps begins, as a warning if a run with nearly its name is beside.

    ``looks_around`` says whether to list the folder above.
    """
    text = f"new run in {path}: it has no step to resume from"
    about = fields(step=0, path=path)
    if looks_around and (found := _run_with_nearly_the_name(path)) is not None:
        sibling, step = found
        logger.warning(
            "%s. The run %s, whose name differs by one letter, has step %d: if this run was to "
            "continue that one, end the program and give it that directory",
            text,
            sibling,
            step,
            extra=about,
        )
    elif looks_around:
        tell(logger, text, about)
    else:
        logger.info("%s", text, extra=about)


def _run_with_nearly_the_name(path: epath.Path) -> tuple[epath.Path, int] | None:
    try:
        for sibling in path.parent.iterdir():
            if may_be_mistyped(path.name, sibling.name):
                step = commit_record.newest_in(sibling)
                if step is not None:
                    return sibling, step
    except Exception as error:  # bucket clients raise errors of their own
        logger.debug("%s: the runs beside it cannot be listed: %s", path, error)
    return None


def may_be_mistyped(a: str, b: str) -> bool:
    """Returns whether two names differ by one character, or two swapped ones, of a longer word.

    Names that differ by a number, or by a word of one or two letters, are variants: ``seed-3`` and
    ``seed-4``, ``lr_a`` and ``lr_b``.
    """
    start = _num_common(a, b)
    rests = a[start:], b[start:]
    end = _num_common(*(rest[::-1] for rest in rests))
    changed = [rest[: len(rest) - end] for rest in rests]
    is_swap = len(changed[0]) == 2 and changed[0] == changed[1][::-1]
    if a == b or not (is_swap or max(map(len, changed)) == 1):
        return False
    if any(c.isdigit() for text in changed for c in text):
        return False
    words = [
        word
        for text, part in zip((a, b), changed, strict=True)
        for word in _WORD.finditer(text)
        if word.start() < start + len(part) and start < word.end()
    ]
    return all(len(word[0]) >= _MIN_LETTERS for word in words)


def _num_common(a: str, b: str) -> int:
    """Returns how many characters two texts have in common at their beginnings."""
    differs = (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))
