"""Reports on a save in flight that takes longer than ``save_timeout_secs``; it is never ended."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

from torchax_ckpt.errors import SaveTimeoutError
from torchax_ckpt.runtime.background import Task
from torchax_ckpt.runtime.save_in_flight import SaveInFlight

logger = logging.getLogger(__name__)


def timeout_error(save: SaveInFlight, path: Any) -> SaveTimeoutError:
    """Returns the error of a caller that has waited too long for a save to ``path``."""
    return SaveTimeoutError(
        f"the save of step {save.step} to {path} is still in flight after "
        f"{save.age_secs:.2f} s. Current stage: {save.where()}. The save continues; earlier "
        "steps are intact.",
        step=save.step,
        path=path,
    )


def watch(save: SaveInFlight, limit_secs: float, path: Any) -> None:
    """Starts a thread that logs the save's stage and call stack while the save is overdue.

    The thread logs after 1, 2, 4, 8, ... times ``limit_secs``.
    """

    def run() -> None:
        secs = limit_secs
        while not save.ended.wait(secs - save.age_secs):
            if save.age_secs >= secs:
                frame = sys._current_frames().get(save.thread_id)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else "unknown"
                logger.error("%s Stack of its thread:\n%s", timeout_error(save, path), stack)
                secs *= 2

    Task(f"watch-save-{save.step}", run).start()
