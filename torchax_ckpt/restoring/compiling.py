"""Compiles a jitted step on another thread while a checkpoint is read."""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import xxhash
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Sharding

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.sharding import placement_of
from torchax_ckpt.errors import CallError
from torchax_ckpt.state import random_state

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def compiling(step: Callable[..., Any], *arguments: Any, **keywords: Any) -> Iterator[None]:
    """Compiles ``step`` on another thread while the block restores a checkpoint::

        with torchax_ckpt.compiling(train_step, params, opt_state, batch):
            start = ckpt.attach(model, optimizer)

    The end of the block waits for the compilation; the first call then compiles nothing. ``step``
    is traced before the block and after it. If the traces differ, because ``step`` uses what the
    block restored without taking it as an argument, or if the compilation fails, a WARNING says so,
    and the first call compiles.

    Args:
      step: what ``jax.jit`` or ``torchax.interop.jax_jit`` returned, without static arguments.
      arguments, keywords: what the first call will take. Only shapes, dtypes and placements of
        arrays and torchax tensors count. For an array that does not exist yet, give
        ``jax.ShapeDtypeStruct``, with its sharding if the array will be committed to devices.

    Raises:
      CallError: ``step`` is not jitted, or has static arguments.
      UnsupportedLeafError: ``step`` draws from torchax's own random key.
      Exception: what ``step`` raises when it is traced.
    """
    program = torchax_backend.jitted(step)
    if not hasattr(program, "trace"):
        raise CallError(
            "compiling: expected a jitted function, as jax.jit and torchax.interop.jax_jit return "
            f"it, found {step!r}; jit it"
        )
    arguments, keywords = jax.tree_util.tree_map(_abstract, (arguments, keywords))
    with _without_draws():
        traced = program.trace(*arguments, **keywords)
    given, taken = map(jax.tree_util.tree_leaves, ((arguments, keywords), traced.args_info))
    if len(given) != len(taken):
        raise CallError(
            f"compiling: expected a function without static arguments, found {step!r}; bind them "
            "by functools.partial before it is jitted"
        )
    before = _digests(traced.jaxpr)  # the restore may free the arrays
    # Python waits at its end for the thread of this executor. A daemon thread would abort there.
    executor = ThreadPoolExecutor(1, "torchax_ckpt.compiling")
    compiled = executor.submit(traced.lower().compile)
    executor.shutdown(wait=False)
    try:
        yield
        after = _traced_anew(program.__wrapped__, arguments, keywords)
    except BaseException:
        jax.clear_caches()  # else the first call would use what the step had before the block
        raise
    changed = [
        old for (old, bits), (_, new) in zip(before, _digests(after), strict=False) if bits != new
    ]
    if changed or _text(traced.jaxpr) != _text(after):
        jax.clear_caches()  # also those of functions that the step calls
        logger.warning(
            "compiling: %s in the step has changed since it was compiled, so the first call "
            "compiles it again. Pass what a restore changes as an argument of the step.",
            changed[0] if changed else "an operation",
        )
    elif (error := compiled.exception()) is not None:
        logger.warning("compiling failed, so the first call compiles: %s", error)


def _abstract(leaf: Any) -> Any:
    array = torchax_backend.buffer(leaf) if torchax_backend.is_device_tensor(leaf) else leaf
    if not isinstance(array, jax.Array):
        return leaf
    placement, is_weak = placement_of(array), getattr(array.aval, "weak_type", False)
    sharding = placement if isinstance(placement, Sharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=is_weak)


@contextlib.contextmanager
def _without_draws() -> Iterator[None]:
    """Resets the random state after a trace; raises if the trace replaced torchax's random key."""
    with random_state.reset_after(on_success=True):
        yield
        random_state.RandomStateComponent().capture()


def _traced_anew(function: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    """Traces a function, and the functions that it calls, without the traces that JAX keeps.

    JAX keeps the trace of a function that is jitted, scanned or checkpointed. Metadata is part of
    the key of such a trace, and changes no operation.
    """
    with _without_draws(), set_xla_metadata(torchax_ckpt=uuid.uuid4().hex):
        return jax.make_jaxpr(lambda *args, **kwargs: function(*args, **kwargs))(
            *arguments, **keywords
        )


def _values(jaxpr: Any) -> Iterator[Any]:
    """Yields each array and number in a traced function, and in the functions that it calls."""
    yield from getattr(jaxpr, "consts", ())
    for equation in jaxpr.eqns:
        yield from (v.val for v in equation.invars if hasattr(v, "val"))
        for inner in jax.tree_util.tree_leaves(equation.params):
            if hasattr(inner, "eqns"):
                yield from _values(inner)


def _digests(jaxpr: Any) -> list[tuple[str, bytes]]:
    """Returns each value of a traced function in words, and the digest of its bytes."""
    found = []
    for value in _values(jaxpr):
        is_key = hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if is_key else value)
        found.append((_described(value), xxhash.xxh3_128_digest(array.tobytes())))
    return found


def _text(jaxpr: Any) -> str:
    return re.sub("0x[0-9a-fA-FX]+", "", str(jaxpr))  # functions are written with their addresses


def _described(value: Any) -> str:
    return f"the array {value.aval}" if isinstance(value, jax.Array) else f"the value {value}"
