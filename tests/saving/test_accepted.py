"""Whatever ``save`` accepts, a checkpointer that shares nothing with it lists and restores."""

from __future__ import annotations

import collections
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from support.models import Box
from support.strategies import any_text, fingerprint, plain_leaves, trees

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import MetricsError, StepError, UnsupportedLeafError

REFUSALS = (MetricsError, StepError, UnsupportedLeafError)
Point = collections.namedtuple("Point", ["x", "y"])


@jax.tree_util.register_static
class Static:
    """A node of JAX without children, which can be hashed."""


def as_read(value: Any, *, is_hashed: bool = False) -> Any:
    """The value that docs/concepts.md says comes back."""
    kind: Any = type(value)
    if isinstance(value, dict):
        pairs = [(as_read(k, is_hashed=True), as_read(v)) for k, v in value.items()]
        if kind is collections.defaultdict:
            factory = getattr(value, "default_factory", None)
            return kind(factory, pairs) if factory in (int, None) else dict(pairs)
        return kind(dict(pairs)) if kind is collections.Counter else kind(pairs)
    if kind is Static:
        return {}
    if kind is Point and not is_hashed:
        return {field: as_read(getattr(value, field)) for field in value._fields}
    if kind in (list, tuple, set, frozenset, Point, torch.Size):
        is_hashed |= kind in (set, frozenset)
        as_kind = tuple if kind in (Point, torch.Size) else kind
        return as_kind([as_read(child, is_hashed=is_hashed) for child in value])
    return value


def nested(depth: int, wrap: Any, inner: Any) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def odd_arrays() -> st.SearchStrategy[Any]:
    """Arrays near the limits of what storage holds: dims, their product, several of one form."""
    ranks = st.integers(30, 34)
    shapes = ranks.map(lambda n: (1,) * n) | st.sampled_from([(2**40, 0, 2**16), (2**40, 0, 2**20)])
    array = shapes.map(lambda shape: np.zeros(shape, np.int8))
    keys = ranks.map(lambda n: jax.random.split(jax.random.key(0), 1).reshape((1,) * n))
    on_device = ranks.map(lambda n: jnp.zeros((1,) * n, jnp.int8))
    return array | keys | on_device | ranks.map(lambda n: [np.ones((1,) * n)] * 2)


def default_of(factory: Any) -> Any:
    return collections.defaultdict(factory, a=[1])


def odd_values() -> st.SearchStrategy[Any]:
    """Values of types that come back as others, or that only look as if they could be stored."""
    hashed = st.sampled_from(
        [Point(1, "a"), torch.Size([1, 2]), Static(), (Point(1, 2),), 10**4000]
    )
    many = st.integers(63_990, 64_010).map(lambda n: {"k" * n: np.zeros(2)})
    return st.one_of(
        odd_arrays(),
        many,
        hashed,
        hashed.map(lambda v: {v: np.zeros(2)}),
        hashed.map(lambda v: {"s": {v, 1}, "f": frozenset([v])}),
        st.sampled_from([int, None, lambda: 0]).map(default_of),
        st.integers(90, 105).map(lambda n: nested(n, lambda v: {"k": v}, np.zeros(1))),
        st.integers(90, 105).map(lambda n: {nested(n, lambda v: (v,), 1): 1}),
        st.sampled_from([range(3), object(), {1: {2: print}}]),
    )


def states() -> st.SearchStrategy[Any]:
    return st.recursive(
        trees(max_leaves=4) | odd_values(),
        lambda c: st.lists(c, max_size=2) | st.dictionaries(any_text(), c, max_size=2),
        max_leaves=3,
    )


def metrics() -> st.SearchStrategy[Any]:
    equal = plain_leaves().filter(lambda v: not isinstance(v, float) or not math.isnan(v))
    deep = st.integers(90, 110).map(lambda n: nested(n, lambda v: [v], 0))
    keys = any_text() | st.sampled_from([1, "1", True, None, 1.5])
    tree = st.recursive(equal, lambda c: st.lists(c) | st.dictionaries(keys, c), max_leaves=4)
    return st.dictionaries(any_text(), tree | deep | st.just(10**4000), max_size=2)


def steps() -> st.SearchStrategy[int]:
    return st.integers(0, 2**65) | st.sampled_from([10**18, 2**63 - 1, 2**63, 10**30])


def as_json(value: Any) -> Any:
    """What JSON makes of a value: the keys of its dicts are texts."""
    if isinstance(value, dict):
        texts = [next(iter(json.loads(json.dumps({key: 0})))) for key in value]
        return dict(zip(texts, map(as_json, value.values()), strict=True))
    return [as_json(v) for v in value] if isinstance(value, (list, tuple)) else value


def check(folder: Path, step: int, state: Any, own: Any, name: str, metrics: Any) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with TorchaxCheckpointer(folder) as ckpt:  # whose end raises the error of a save
        ckpt.attach(stateful={name: Box(own)}, rng=False)
        try:
            ckpt.save(step, state=[state], metrics=metrics, force=True)
        except REFUSALS:
            return
    box = Box(None)
    with TorchaxCheckpointer(folder) as fresh:
        assert fresh.all_steps() == [step]
        assert fresh.attach(stateful={name: box}, rng=False) == step
        found = fresh.load(step)
        assert fingerprint(fresh.metrics(step)) == fingerprint(as_json(metrics))
        assert fresh.verify() == step
    assert fingerprint(found) == fingerprint(as_read([state]))
    assert fingerprint(box.state) == fingerprint(as_read(own))


ARGUMENTS = st.tuples(steps(), states(), states(), any_text(), metrics())


@pytest.mark.filterwarnings("ignore:.*comes back as a:UserWarning")
@settings(max_examples=20)
@given(ARGUMENTS)
@example((2**63 - 1, {Point(1, 2): [np.ones((1,) * 32)] * 2}, {Point(1, 2)}, "", {"a": {1: 2}}))
@example((0, {"a": {Static()}}, None, "n", {}))
@example((0, {"a": np.zeros((2**40, 0, 2**20), np.int8)}, None, "n", {}))
@example((0, {"a": np.zeros((1,) * 33)}, None, "n", {}))
@example((0, {"a" * 64_010: np.zeros(2)}, None, "n", {}))
@example((2**63, 1, None, "n", {}))
@example((0, 1, None, "n", {"a": {1: 2, "1": 3}}))
def test_what_a_save_accepts_comes_back(
    tmp_path_factory: pytest.TempPathFactory, arguments: tuple[Any, ...]
) -> None:
    check(tmp_path_factory.getbasetemp() / "accepted", *arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*comes back as a:UserWarning")
@settings(max_examples=100, phases=[Phase.generate])
@given(ARGUMENTS)
def test_much_of_what_a_save_accepts_comes_back(
    tmp_path_factory: pytest.TempPathFactory, arguments: tuple[Any, ...]
) -> None:
    check(tmp_path_factory.getbasetemp() / "accepted", *arguments)
