"""The random generators of torch, numpy and Python: their states, and whether they take one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchax_ckpt.plain_torch import native_torch
from torchax_ckpt.state import node_checks


def states() -> dict[str, Any]:
    """Returns the states of the three generators, by library."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def set_states(state: Mapping[str, Any]) -> None:
    """Sets the states of the three generators."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def _try_torch(state: Any) -> None:
    torch.Generator().set_state(state)


def _try_numpy(state: Any) -> None:
    # numpy accepts any position, and would then read words beyond the end of the buffer.
    twister = state["state"]
    for position, words in (
        (twister.get("pos"), twister.get("key")),  # MT19937
        (state.get("buffer_pos"), state.get("buffer")),  # Philox
    ):
        if position is not None and not 0 <= position <= len(words):
            raise ValueError(f"position {position} of {len(words)} words")
    generator = type(np.random.get_bit_generator())()  # type: ignore[attr-defined]
    np.random.RandomState(generator).set_state(state)


def _try_python(state: Any) -> None:
    random.Random().setstate(state)
    if not isinstance(state[2], float | None):
        raise TypeError(
            "random state: expected a float or None as the number that Python's random.gauss keeps "
            f"for its next call, found a {type(state[2]).__name__}. Use the state that "
            "random.getstate() returned"
        )


# Each raises if its generator cannot take the state; tried on throwaway generators.
TRIALS: Mapping[str, Callable[[Any], None]] = {
    "torch": _try_torch,
    "numpy": _try_numpy,
    "python": _try_python,
}


def check(state: Mapping[str, Any], trials: Mapping[str, Callable[[Any], None]] = TRIALS) -> None:
    """Raises CorruptCheckpointError unless the generators can take this random state."""
    for part, attempt in trials.items():
        try:
            with native_torch():
                attempt(state[part])
        except Exception as error:  # the generators raise many types
            raise node_checks.corrupt(f"rng/{part}", "random state", f"{error!r:.200}") from error
