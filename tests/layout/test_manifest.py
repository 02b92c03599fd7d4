"""The manifest: JSON that reads back as it was written, and clear errors for anything else."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.damage import edit_json
from support.strategies import trees

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout.manifest import FORMAT, VERSION, Digests, Manifest, array_nodes
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.state.pytree import Encoder, decode

EMPTY: dict[str, Any] = {
    "format": FORMAT,
    "version": VERSION,
    "versions": {},
    "document": {},
    "stacks": {},
    "empty": [],
    "digests": {},
}
LEAF: dict[str, Any] = {"array": "model/w", "kind": "jax", "dtype": "float32", "shape": [2]}


def read(raw: Any) -> Manifest:
    return Manifest.from_json(raw, path="runs/5/manifest")


def manifest_of(tree: Any) -> Manifest:
    encoder = Encoder()
    document = {"state": encoder.encode(tree, ("state",))}
    stacks: dict[str, tuple[str, ...]] = {}
    for name, array in encoder.leaves.items():
        if array.shape == ():
            stack = f"host_scalars/{array.dtype.name}"
            stacks[stack] = (*stacks.get(stack, ()), name)
    empty = frozenset(n for n, a in encoder.leaves.items() if a.size == 0)
    taken = {n: Digests((1,) * a.ndim, a.tobytes()) for n, a in encoder.leaves.items()}
    versions = {"torch": "2", "jax": "0.1"}
    return Manifest(document, Plan(stacks, empty), versions, taken)


@given(trees())
def test_a_manifest_reads_back_from_strict_json(tree: Any) -> None:
    manifest = manifest_of(tree)
    text = json.dumps(manifest.to_json(), allow_nan=False)
    assert read(json.loads(text)) == manifest


@given(trees())
def test_a_manifest_has_one_node_for_every_leaf(tree: Any) -> None:
    encoder = Encoder()
    node = encoder.encode(tree, ("state",))
    assert sorted(n["array"] for n in array_nodes(node)) == sorted(encoder.leaves)


@pytest.mark.parametrize(
    "raw", [None, [], 5, "torchax_ckpt", {}, {"format": "other"}, {**EMPTY, "format": None}]
)
def test_another_format_is_refused_by_path(raw: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"runs/5/manifest: .*torchax_ckpt") as caught:
        read(raw)
    assert caught.value.path == "runs/5/manifest"


@pytest.mark.parametrize("version", [VERSION + 1, 999, -1, None, "0", [0]])
def test_another_version_is_refused_by_number(version: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"runs/5/manifest: .*version") as caught:
        read({**EMPTY, "version": version})
    assert repr(version) in str(caught.value)
    assert caught.value.path == "runs/5/manifest"


@pytest.mark.parametrize("part", ["document", "stacks", "empty"])
@pytest.mark.parametrize("value", [None, 5, "x"])
def test_a_part_of_the_wrong_form_is_refused_by_path(part: str, value: Any) -> None:
    for raw in ({**EMPTY, part: value}, {k: v for k, v in EMPTY.items() if k != part}):
        with pytest.raises(CorruptCheckpointError, match="runs/5/manifest") as caught:
            read(raw)
        assert caught.value.path == "runs/5/manifest"


@pytest.mark.parametrize(
    "change",
    [
        {"stacks": {"host_scalars/int64": 5}},
        {"stacks": {"host_scalars/int64": [["a"]]}},
        {"stacks": {"host_scalars/int64": [5]}},
        {"empty": [["a"]]},
        {"empty": [5]},
        {"versions": 5},
    ],
    ids=str,
)
def test_malformed_names_in_the_plan_are_refused_by_path(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="runs/5/manifest"):
        read({**EMPTY, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"array": 5},
        {"array": ["a"]},
        {"kind": None},
        {"kind": "zebra"},
        {"kind": "key"},  # which needs an impl
        {"dtype": None},
        {"dtype": {}},
        {"dtype": "float33"},
        {"dtype": "f4,,"},
        {"dtype": "O"},
        {"shape": None},
        {"shape": 2},
        {"shape": [-1]},
        {"shape": [2.0]},
        {"shape": [True]},
        {"shape": ["2"]},
        {"whole": True},
        {"whole": [-1]},
        {"whole": [2, 2, 2]},
    ],
    ids=str,
)
def test_a_malformed_leaf_is_refused_by_path_and_name(change: dict[str, Any]) -> None:
    raw = {**EMPTY, "document": {"model": {"dict": [["w", {**LEAF, **change}]]}}}
    with pytest.raises(CorruptCheckpointError, match="runs/5/manifest: malformed leaf") as caught:
        read(raw)
    assert caught.value.path == "runs/5/manifest"
    assert caught.value.key_path == str({**LEAF, **change}["array"])


@pytest.mark.parametrize("key", ["kind", "dtype", "shape"])
def test_an_incomplete_leaf_is_refused_by_path_and_name(key: str) -> None:
    leaf = {k: v for k, v in LEAF.items() if k != key}
    with pytest.raises(CorruptCheckpointError, match="malformed leaf") as caught:
        read({**EMPTY, "document": {"model": [leaf]}})
    assert caught.value.key_path == "model/w"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda c: (
        st.lists(c, max_size=3)
        | st.dictionaries(
            st.sampled_from(["array", "kind", "dtype", "shape", "dict", "tuple", "int", "complex"]),
            c,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "versions": _json,
            "document": st.dictionaries(st.text(max_size=3), _json) | _json,
            "stacks": st.dictionaries(st.text(max_size=3), st.lists(_json)) | _json,
            "empty": st.lists(_json) | _json,
        },
    )
)
@example({"document": {"a": {"dict": [["k", {"complex": [None, 1]}]]}}})
def test_any_json_is_a_manifest_or_corrupt(parts: dict[str, Any]) -> None:
    """What passes the check can be used: no other error comes up later."""
    try:
        manifest = read({**EMPTY, **parts})
        for node in manifest.document.values():
            decode(node, lambda leaf: leaf["array"])
        manifest.plan.locate()
        json.dumps(manifest.to_json())
    except CorruptCheckpointError:
        pass


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"zebra": 1},
        {"dict": 5},
        {"dict": [["key"]]},
        {"dict": [[["unhashable"], 1]]},
        {"tuple": None},
        {"set": [[1]]},
        {"int": 5},
        {"int": "zz"},
        {"float": "00"},
        {"float": 1.5},
        {"complex": [1, "a"]},
        {"complex": [1, 2, 3]},
        {"bytes": "!"},
        {"bytes": 5},
    ],
    ids=str,
)
def test_a_malformed_node_is_corrupt(node: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="in the manifest"):
        decode([1, {"tuple": [node]}], lambda leaf: None)


@pytest.mark.parametrize("node", [{"zebra": 1}, {"dict": [[["unhashable"], 1]]}], ids=str)
@pytest.mark.parametrize("abstract", [False, True])
def test_load_names_the_path_of_a_step_with_a_malformed_node(
    directory: Path, node: Any, abstract: bool
) -> None:
    state = {"w": jnp.ones(2), "x": {"y": 1}}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(7, state=state)
    (path,) = (directory / "7" / "manifest").iterdir()
    edit_json(path, lambda raw: operator.setitem(raw["document"]["state"]["dict"][1], 1, node))
    with pytest.raises(CorruptCheckpointError) as caught:
        TorchaxCheckpointer(directory).load(7, {"w": state["w"], "x": 1} if abstract else None)
    assert caught.value.step == 7
    assert caught.value.path is not None
    assert caught.value.path.startswith(str(directory / "7"))
    assert str(directory / "7") in str(caught.value)


def test_a_plan_locates_no_leaf_of_an_empty_manifest() -> None:
    assert read(EMPTY) == Manifest({}, Plan({}, frozenset()), {}, {})
