"""Warnings to the user that no warning filter can turn into an error."""

from __future__ import annotations

import contextlib
import logging
import warnings

logger = logging.getLogger(__name__)


def warn(message: str, stacklevel: int = 1) -> None:
    """Logs a message as a warning, and issues it as a UserWarning too, at ``stacklevel``.

    The log reaches the log files of a job; the UserWarning reaches programs that collect warnings.
    It is never raised as an error, because a run must resume under ``python -W error`` too.
    """
    logger.warning("%s", message)
    with contextlib.suppress(UserWarning):  # raised if a filter turns warnings into errors
        warnings.warn(message, stacklevel=stacklevel + 1)
