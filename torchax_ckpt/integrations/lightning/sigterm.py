"""Keeps JAX's handler of SIGTERM in force on several processes, and ends Lightning's with a fit.

JAX's handler makes all processes agree on the step after which they end. It is written in C++, so
Python does not see it, and Lightning replaces it with its own handler when a fit begins. Only the
process that got the SIGTERM would then end, in the middle of the work of all.
"""

from __future__ import annotations

import ctypes
import functools
import signal
from typing import Any

import jax

# Larger than C's struct sigaction on any platform; only the C library looks into it.
_ACTION_BYTES = 1024


@functools.cache
def _action() -> ctypes.Array[ctypes.c_char]:
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    return action


def remember() -> None:
    """Remembers the handler of SIGTERM, at the first call, if ``jax.distributed`` is initialized.

    Call ``remember`` before Lightning registers its handler.
    """
    if jax.distributed.is_initialized():
        _action()


def put_back() -> None:
    """Puts the remembered handler in force again, if ``jax.distributed`` is initialized."""
    if jax.distributed.is_initialized():
        ctypes.CDLL(None).sigaction(signal.SIGTERM, _action(), None)


def end_lightnings(trainer: Any) -> None:
    """Removes Lightning's handler, so that ``close`` finds and removes this package's below it."""
    connector = trainer._signal_connector
    if (handler := connector._original_handlers.pop(signal.SIGTERM, None)) is not None:
        connector._register_signal(signal.SIGTERM, handler)
    put_back()
