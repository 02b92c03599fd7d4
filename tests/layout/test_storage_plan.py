"""The plan: where each leaf is stored, found again exactly once."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchax_ckpt.layout.storage_plan import (
    MAX_STACK_BYTES,
    MAX_STACKED_LEAF_BYTES,
    LeafSpec,
    Plan,
    plan_leaves,
)
from torchax_ckpt.options import Layout

Specs = dict[str, LeafSpec]
layouts: st.SearchStrategy[Layout] = st.sampled_from(get_args(Layout))
few = settings(max_examples=40)


def spec(
    shape: tuple[int, ...], dtype: str = "float32", placement: Any = True, is_on_host: bool = True
) -> LeafSpec:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return LeafSpec(shape, dtype, nbytes=nbytes, placement=placement, is_on_host=is_on_host)


def plan_of(specs: Specs, layout: Layout = "auto") -> Plan:
    return plan_leaves(list(specs), list(specs.values()), layout)


# Few names, dtypes and shapes, so that leaves often have much in common.
_parts = st.sampled_from(["w", "0", "1", "2", "10", "a.0.w", "a.1.w", "1a", "", "%2A", "0.1"])
_names = st.lists(_parts, min_size=1, max_size=3).map(lambda parts: "/".join(["state", *parts]))
_shapes: st.SearchStrategy[tuple[int, ...]] = st.sampled_from([(), (), (3,), (0,), (2, 0), (2, 3)])
_dtypes = st.sampled_from(["int64", "float32", "bfloat16"])
_specs = st.dictionaries(
    _names,
    st.builds(spec, _shapes, _dtypes, st.sampled_from(["x", "y", None]), st.booleans()),
    max_size=12,
)
_host_specs = st.dictionaries(_names, st.builds(spec, _shapes, _dtypes), max_size=12)


@few
@given(_specs, layouts)
def test_a_stack_holds_leaves_that_differ_in_indices_only(specs: Specs, layout: Layout) -> None:
    for stored, members in plan_of(specs, layout).stacks.items():
        assert len(members) > 1
        looks = {specs[m] for m in members}
        assert {s.placement for s in looks} != {None}
        if stored.startswith("host_scalars/"):
            dtype = re.sub(r"\*.*", "", stored.removeprefix("host_scalars/"))
            assert {(s.shape, s.dtype, s.is_on_host) for s in looks} == {((), dtype, True)}
        else:
            assert len(looks) == 1
            assert len({re.sub(r"\d+", "0", m) for m in members}) == 1
            assert "*" in stored


@few
@given(_host_specs)
def test_host_scalars_of_one_dtype_share_one_array(specs: Specs) -> None:
    for dtype in ("int64", "float32", "bfloat16"):
        scalars = tuple(n for n, s in specs.items() if (s.shape, s.dtype) == ((), dtype))
        expected = {f"host_scalars/{dtype}": scalars} if len(scalars) > 1 else {}
        stacks = plan_of(specs).stacks
        found = {n: m for n, m in stacks.items() if n.startswith(f"host_scalars/{dtype}")}
        assert found == expected


def test_layers_and_experts_are_stacked_under_their_pattern() -> None:
    stacks = {
        "model/layers.*.attn.weight": tuple(f"model/layers.{i}.attn.weight" for i in range(12)),
        "model/layers.*.attn.bias": tuple(f"model/layers.{i}.attn.bias" for i in range(12)),
        "model/layers.*.experts.*.w1": tuple(
            f"model/layers.{i}.experts.{e}.w1" for i in range(3) for e in range(4)
        ),
    }
    specs = {name: spec((len(members),)) for members in stacks.values() for name in members}
    specs["model/embed.weight"] = spec((4, 4))
    assert plan_of(specs).stacks == stacks
    assert plan_of(specs, "flat").stacks == {}


def test_leaves_of_another_look_are_stacked_apart() -> None:
    specs = {
        **{f"model/{i}.w": spec((4,)) for i in (0, 1)},
        **{f"model/{i}.w": spec((5,)) for i in (2, 3)},
        **{f"model/{i}.w": spec((5,), "bfloat16") for i in (4, 5)},
        **{f"model/{i}.w": spec((5,), placement="elsewhere") for i in (6, 7)},
        **{f"model/{i}.w": spec((5,), placement=None) for i in (8, 9)},
    }
    stacks = plan_of(specs).stacks
    assert sorted(stacks.values()) == [
        tuple(f"model/{i}.w" for i in pair) for pair in ((0, 1), (2, 3), (4, 5), (6, 7))
    ]


def test_large_leaves_are_not_stacked() -> None:
    for size, is_stacked in ((MAX_STACKED_LEAF_BYTES // 4, True), (MAX_STACKED_LEAF_BYTES, False)):
        specs = {f"model/{i}.w": spec((size,)) for i in range(3)}
        assert bool(plan_of(specs).stacks) is is_stacked


def test_no_stack_outgrows_its_bound() -> None:
    side = MAX_STACKED_LEAF_BYTES // 4
    specs = {f"model/{i}.w": spec((side,)) for i in range(150)}
    stacks = plan_of(specs).stacks
    assert sum(map(len, stacks.values())) == 150
    for members in stacks.values():
        assert sum(specs[m].nbytes for m in members) <= MAX_STACK_BYTES
