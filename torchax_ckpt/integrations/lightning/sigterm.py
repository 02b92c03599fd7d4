"""Keeps JAX's handler of SIGTERM in force while Lightning trains on several processes.

JAX's handler makes all processes agree on the step after which they end. It is written in C++, so
Python does not see it, and Lightning replaces it with its own handler when a fit begins. Only the
process that got the SIGTERM would then end, in the middle of the work of all.
"""

from __future__ import annotations

import ctypes
import functools
import signal

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
