"""Undoes the calls of a restore if a later one fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def undone_on_failure() -> Iterator[list[Callable[[], object]]]:
    """Yields a list to add undos to; if the block fails, calls them, the last one first."""
    undos: list[Callable[[], object]] = []
    try:
        yield undos
    except BaseException:
        for undo in reversed(undos):
            try:
                undo()
            except Exception:
                # One object that refuses its old state must not stop the other undos.
                logger.exception("a restore failed, and undoing one of its calls failed")
        raise
