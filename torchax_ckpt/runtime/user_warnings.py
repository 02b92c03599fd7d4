"""Warnings to the user that no filter of Python's can turn into an error."""

from __future__ import annotations

import contextlib
import logging
import warnings

logger = logging.getLogger(__name__)


def warn(message: str, stacklevel: int = 1) -> None:
    """Logs a message as a warning, and issues it as a UserWarning too.

    The log reaches the logs of a job; the UserWarning reaches programs that collect warnings.
    Whoever calls this goes on in any case: under ``python -W error`` a run must resume all the
    same.

    Args:
      message: what to say.
      stacklevel: which caller the UserWarning names, as for ``warnings.warn``.
    """
    logger.warning("%s", message)
    with contextlib.suppress(UserWarning):  # of a filter that turns warnings into errors
        warnings.warn(message, stacklevel=stacklevel + 1)
