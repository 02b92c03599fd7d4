"""Owns preemption: whether this run has been told to end."""

from __future__ import annotations

import jax
from jax.experimental import multihost_utils


class Preemption:
    """JAX's preemption notice, latched: once reached, it stays reached.

    JAX answers True at one step only, the one on which all processes agree, so every process
    must ask at every step. Without ``jax.distributed`` there is no notice.
    """

    def __init__(self) -> None:
        self._reached_at: int | None = None

    def reached(self, step: int) -> bool:
        """Whether the run should save and end, asked after completing ``step``."""
        if self._reached_at is None and jax.distributed.is_initialized():
            try:
                if multihost_utils.reached_preemption_sync_point(step):
                    self._reached_at = step
            except RuntimeError:
                return False  # the preemption service is turned off in JAX's configuration
        return self._reached_at is not None
