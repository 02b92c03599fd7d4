"""Owns random state: torchax's key, and the generators of torch, numpy and Python."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.snapshot.sharding import Local, placement_of
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.component import (
    Captured,
    Findings,
    Restoration,
    Values,
    Write,
    encoded,
    revive,
)
from torchax_ckpt.state.leaf import Spec
from torchax_ckpt.state.pytree import decode

_STATES = frozenset({"torchax", "torch", "numpy", "python"})


class RandomStateComponent:
    """The random state of the calling thread's torchax key and of the process's generators."""

    key_path = ("rng",)

    def capture(self) -> Captured:
        """All four; the key stays on its device, so nothing waits for it."""
        if isinstance(torchax_backend.prng_key(), jax.core.Tracer):
            raise UnsupportedLeafError(
                "rng/torchax: torchax's random key is a JAX tracer: a random operation (dropout, "
                "say) ran inside a jitted function and left its traced key behind. Draw a key "
                "outside, env.get_and_rotate_prng_key(), pass it in, and run the operations in "
                "`with env.override_property(prng=key):`. This also makes every step draw anew.",
                key_path="rng/torchax",
            )
        return encoded(_get(), self.key_path)

    def prepare(self, node: Node, findings: Findings, selection: Selection) -> Restoration:
        """Writes all four, last of all: loading other state may draw random numbers.

        What is to be written is first tried on generators that nobody uses.
        """
        restoration = Restoration()
        stored = node_checks.fields(node, "rng")
        if stored.keys() != _STATES:
            raise node_checks.corrupt(
                "rng", f"the states {sorted(_STATES)}", f"{sorted(stored)!r:.80}"
            )
        for child in array_nodes(node):
            on_device = Spec.of_node(child).on_device
            placement = _key_placement() if on_device else Local.HOST
            restoration.read(child, placement)

        def decoded(values: Values) -> Any:
            return decode(node, lambda child: revive(child, values[child["array"]]))

        needs = tuple(child["array"] for child in array_nodes(node))
        restoration.checks.append(Write(lambda values: _check(decoded(values)), needs=needs))
        restoration.writes.append(Write(lambda values: _set(decoded(values)), needs=needs))
        return restoration


class RandomState:
    """The random state that ``attach`` saves, for programs that must put it back at another time.

    Of the calling thread's torchax key, and of the generators of torch, numpy and Python::

        before = RandomState().state_dict()
        ...                                     # draws random numbers
        RandomState().load_state_dict(before)
    """

    def state_dict(self) -> dict[str, Any]:
        """All four states; later draws do not change them."""
        return _get()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Puts all four back.

        Raises:
          CorruptCheckpointError: one is not what its generator takes; nothing was changed.
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


def _check(state: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpointError unless ``_set`` will take the state."""
    for part, attempt in (
        ("torchax", _try_key),
        ("torch", _try_torch),
        ("numpy", _try_numpy),
        ("python", _try_python),
    ):
        try:
            attempt(state[part])
        except Exception as error:  # each generator has its own ways to refuse
            raise node_checks.corrupt(f"rng/{part}", "random state", f"{error!r:.200}") from error


def _try_key(key: Any) -> None:
    if not isinstance(key, jax.Array):
        raise TypeError(f"a {type(key).__name__} for a key")
    jax.eval_shape(jax.random.split, key)


def _try_torch(state: Any) -> None:
    with torchax_backend.native_torch():
        torch.Generator().set_state(state)


def _try_numpy(state: Any) -> None:
    # numpy takes any position, and would then read words from beyond the end.
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
        raise TypeError(f"a {type(state[2]).__name__} for the next Gaussian")


def _set(state: Mapping[str, Any]) -> None:
    torchax_backend.set_prng_key(state["torchax"])
    with torchax_backend.native_torch():
        torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


@contextlib.contextmanager
def left_alone(*, on_success: bool) -> Iterator[None]:
    """Takes back what user code draws within: always if it fails, else if ``on_success``.

    Asked for its state, a loader that has not begun draws its seeds.
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
