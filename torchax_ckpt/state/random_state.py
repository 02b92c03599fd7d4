"""Saves and restores torchax's random key and torch's, numpy's and Python's random generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.snapshot.sharding import Local, placement_of
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.component import (
    Captured,
    Change,
    Restoration,
    encoded,
    leaf_names,
    value_of,
)
from torchax_ckpt.state.leaf import Spec


class RandomStateComponent:
    """The component of the random state, which ``RandomState`` describes."""

    key_path = ("rng",)

    def capture(self) -> Captured:
        """Returns the generators' states and, without waiting for its device, torchax's key."""
        if isinstance(torchax_backend.prng_key(), jax.core.Tracer):
            raise UnsupportedLeafError(
                "rng/torchax: torchax's random key is a JAX tracer: a random operation (dropout, "
                "say) ran inside a jitted function and left its traced key behind. Draw a key "
                "outside with env.get_and_rotate_prng_key(), pass it in as an argument, and run "
                "the operations in `with env.override_property(prng=key):`. Each step then also "
                "draws new random numbers.",
                key_path="rng/torchax",
            )
        return encoded(_get(), self.key_path)

    def prepare(self, node: Node, plan: Restoration) -> None:
        """Plans to set torchax's key and the generators' states."""
        stored = node_checks.fields(node, "rng")
        if stored.keys() != _TRIALS.keys():
            raise node_checks.corrupt(
                "rng", f"the states {sorted(_TRIALS)}", f"{sorted(stored)!r:.80}"
            )
        for child in array_nodes(node):
            on_device = Spec.of_node(child).on_device
            placement = _key_placement() if on_device else Local.HOST
            plan.add_read(child, placement)
        needs = leaf_names(node)
        # The check tries the state on throwaway generators. The random state is set last, because
        # loading other state may draw random numbers.
        plan.checks.append(Change(lambda values: _check(value_of(node, values)), needs=needs))
        plan.changes.append(Change(lambda values: _set(value_of(node, values)), needs=needs))


class RandomState:
    """Gets and sets the random state, for programs that restore it themselves.

    It consists of the calling thread's torchax key and the states of torch's, numpy's and Python's
    generators. A checkpointer saves and restores it too, unless ``attach`` was called with
    ``rng=False``. A program can draw the same random numbers again::

        before = RandomState().state_dict()
        ...                                     # draws random numbers
        RandomState().load_state_dict(before)
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns torchax's key and the generators' states, as they are at this moment."""
        return _get()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets torchax's key and the states of the generators.

        Raises:
          CorruptCheckpointError: a generator refuses its state; nothing was changed.
        """
        _check(state_dict)
        _set(state_dict)


def _get() -> dict[str, Any]:
    with torchax_backend.native_torch():
        torch_state = torch.get_rng_state()
    return {
        "torchax": torchax_backend.prng_key(),
        "torch": torch_state,
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def _set(state: Mapping[str, Any]) -> None:
    torchax_backend.set_prng_key(state["torchax"])
    with torchax_backend.native_torch():
        torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def _try_key(key: Any) -> None:
    if not isinstance(key, jax.Array):
        raise TypeError(
            "random state: expected a JAX array as torchax's random key, found a "
            f"{type(key).__name__}. Use the state that RandomState().state_dict() returned"
        )
    jax.eval_shape(jax.random.split, key)


def _try_torch(state: Any) -> None:
    with torchax_backend.native_torch():
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


_TRIALS: Mapping[str, Callable[[Any], None]] = {
    "torchax": _try_key,
    "torch": _try_torch,
    "numpy": _try_numpy,
    "python": _try_python,
}


def _check(state: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpointError unless ``_set`` can set this random state."""
    for part, attempt in _TRIALS.items():
        try:
            attempt(state[part])
        except Exception as error:  # the generators raise many types
            raise node_checks.corrupt(f"rng/{part}", "random state", f"{error!r:.200}") from error


@contextlib.contextmanager
def reset_after(*, on_success: bool) -> Iterator[None]:
    """Resets the random state after the block; if ``on_success`` is false, only if it raises.

    User code may draw in unexpected places: ``state_dict()`` of a data loader draws its seeds.
    """
    before = _get()
    try:
        yield
    except BaseException:
        _set(before)
        raise
    if on_success:
        _set(before)


def _key_placement() -> Any:
    key = torchax_backend.prng_key()
    if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return placement_of(key)
