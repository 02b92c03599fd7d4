"""Owns what is told of failures that happened in the background: once per kind until it is over."""

from __future__ import annotations

import logging

from torchax_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


class FailureLog:
    """Failures that nobody has read yet."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self.unread: list[CheckpointError] = []

    def report(self, failure: CheckpointError, action: str = "", kind: str = "") -> None:
        """Says a failure, and keeps it to be raised; of an action, one of a kind until it is over.

        Args:
          failure: what is said.
          action: what failed, "" for what happens once.
          kind: what failures have in common that are mended in the same way.
        """
        is_known = bool(action) and self._known.get(action) == kind
        logger.log(logging.DEBUG if is_known else logging.ERROR, "%s", failure)
        if action:
            self._known[action] = kind
        if not is_known or not self.unread:
            self.unread.append(failure)

    def over(self, action: str) -> None:
        """The action works again."""
        self._known.pop(action, None)

    def raise_oldest(self) -> None:
        """Raises the oldest failure that nobody has read, once."""
        if self.unread:
            raise self.unread.pop(0)
