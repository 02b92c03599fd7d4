"""Saves and restores torchax's random key and torch's, numpy's and Python's random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.sharding import Local, placement_of
from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.state import generators, node_checks
from torchax_ckpt.state.component import (
    Captured,
    add_read,
    encoded,
)
from torchax_ckpt.state.leaf import Spec, array_of
from torchax_ckpt.state.plans.restoration import Change, Restoration, leaf_names
from torchax_ckpt.state.pytree import value_of


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
        return encoded(RandomState().state_dict(), self.key_path)

    def prepare(self, node: Node, plan: Restoration) -> None:
        """Plans to set torchax's key and the generators' states."""
        stored = node_checks.fields(node, "rng")
        if stored.keys() != _TRIALS.keys():
            raise node_checks.corrupt(
                "rng", f"the states {sorted(_TRIALS)}", f"{sorted(stored)!r:.80}"
            )
        key_placement = placement_of(array_of(torchax_backend.prng_key(), "rng"))
        for child in array_nodes(node):
            add_read(
                plan.reads, child, key_placement if Spec.of_node(child).on_device else Local.HOST
            )
        needs = leaf_names(node)
        # The check tries the state on throwaway generators. The random state is set last, because
        # loading other state may draw random numbers.
        plan.calls.append(
            Change(lambda values: generators.check(value_of(node, values), _TRIALS), needs=needs)
        )
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
        with torchax_backend.native_torch():
            return {"torchax": torchax_backend.prng_key(), **generators.states()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets torchax's key and the states of the generators.

        Raises:
          CorruptCheckpointError: a generator refuses its state; nothing was changed.
        """
        generators.check(state_dict, _TRIALS)
        _set(state_dict)


def _set(state: Mapping[str, Any]) -> None:
    torchax_backend.set_prng_key(state["torchax"])
    with torchax_backend.native_torch():
        generators.set_states(state)


def _try_key(key: Any) -> None:
    if not isinstance(key, jax.Array):
        raise TypeError(
            "random state: expected a JAX array as torchax's random key, found a "
            f"{type(key).__name__}. Use the state that RandomState().state_dict() returned"
        )
    jax.eval_shape(jax.random.split, key)


_TRIALS: Mapping[str, Callable[[Any], None]] = {"torchax": _try_key, **generators.TRIALS}


@contextlib.contextmanager
def reset_after(*, on_success: bool) -> Iterator[None]:
    """Resets the random state after the block; if ``on_success`` is false, only if it raises.

    User code may draw in unexpected places: ``state_dict()`` of a data loader draws its seeds.
    """
    before = RandomState().state_dict()
    try:
        yield
    except BaseException:
        _set(before)
        raise
    if on_success:
        _set(before)
