"""The log of failures of background work, such as saves, which may fail repeatedly."""

from __future__ import annotations

import logging

from torchax_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


class FailureLog:
    """The failures of background work; ``unread`` were not raised to the user yet."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self.unread: list[CheckpointError] = []

    def report(self, failure: CheckpointError, action: str = "", kind: str = "") -> None:
        """Logs a failure, and keeps it until ``raise_oldest`` raises it.

        A failure is a repetition if the last one of the same action had the same kind (the same
        remedy), and ``over`` was not called since. Repetitions are logged at level DEBUG instead of
        ERROR, and not kept while earlier failures wait to be raised.
        """
        is_known = bool(action) and self._known.get(action) == kind
        logger.log(logging.DEBUG if is_known else logging.ERROR, "%s", failure)
        if action:
            self._known[action] = kind
        if not is_known or not self.unread:
            self.unread.append(failure)

    def over(self, action: str) -> None:
        """Records that the action succeeded, so that its next failure counts as new."""
        self._known.pop(action, None)

    def raise_oldest(self, kind: type[CheckpointError] = CheckpointError) -> None:
        """Raises the oldest failure of this class that was not raised yet; nothing without one."""
        for failure in self.unread:
            if isinstance(failure, kind):
                self.unread.remove(failure)
                raise failure
