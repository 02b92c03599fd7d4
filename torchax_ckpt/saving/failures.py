"""The failures of a tier's saves: logs each new one, and keeps it until a call raises it."""

from __future__ import annotations

import logging

from etils import epath

from torchax_ckpt.errors import CheckpointError, LeaseError, SaveError
from torchax_ckpt.runtime import background
from torchax_ckpt.runtime.user_messages import counted, fields
from torchax_ckpt.storage.medium import storage_errors
from torchax_ckpt.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)

# Directory -> the failure of its newest save at the end of the program. ``closing`` sets the exit
# code by it, because what other threads than the main thread raise does not change the code.
unmended: dict[epath.Path, CheckpointError] = {}


class Failures:
    """The failures of the background work for one tier; ``unread`` were not raised yet."""

    def __init__(self, path: epath.Path, telemetry: Telemetry, *, is_local: bool) -> None:
        self._path, self._telemetry, self._is_local = path, telemetry, is_local
        self.newest: SaveError | None = None  # that of the newest save, unless that is durable
        self._num_saves = 0  # that failed, in a row
        self._known: dict[str, str] = {}
        self.unread: list[CheckpointError] = []

    def of_save(self, step: int, error: BaseException, age_secs: float = 0.0) -> SaveError:
        """Reports the failure of a save, also of one that could not begin; returns it."""
        path, is_ending = self._path, background.ending.is_set
        again = "" if is_ending else "; the next save tries again"
        failure = SaveError(
            f"saving step {step} to {path} failed: {storage_errors.explained(error, path)} "
            + ("" if isinstance(error, LeaseError) else f"Earlier steps are intact{again}."),
            step=step,
            path=getattr(error, "path", None) or path,
            key_path=getattr(error, "key_path", None),
        )
        failure.__cause__ = storage_errors.without_locals(error)
        self.newest = failure
        self._num_saves += 1
        if is_ending and not self._is_local:
            unmended[path] = failure
        self.report(failure, "" if is_ending else "saving", storage_errors.kind(error))
        self._telemetry.emit("failed", step, secs=age_secs, error=str(failure))
        return failure

    def mended(self) -> None:
        """Records that a save is durable."""
        if self._num_saves:
            text, failed = "saving to %s works again after %s", "failed save"
            logger.info(text, self._path, counted(self._num_saves, failed))
        self.newest, self._num_saves = None, 0
        unmended.pop(self._path, None)
        self.over("saving")

    def report(self, failure: CheckpointError, action: str = "", kind: str = "") -> None:
        """Logs a failure, and keeps it until ``raise_oldest`` raises it.

        A failure is a repetition if the last one of the same action had the same kind (the same
        remedy), and ``over`` was not called since. Repetitions are logged at level DEBUG instead of
        ERROR, and not kept while earlier failures wait to be raised.
        """
        is_known = bool(action) and self._known.get(action) == kind
        level = logging.DEBUG if is_known else logging.ERROR
        logger.log(level, "%s", failure, extra=fields(step=failure.step, path=failure.path))
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
