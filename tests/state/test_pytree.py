"""Trees of state: through JSON and back, type for type and bit for bit; the rest is refused."""

from __future__ import annotations

import collections
import enum
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import torch.utils._mode_utils
from hypothesis import example, given, settings
from support.compare import bits
from support.models import Node
from support.strategies import KEY_IMPLS, fingerprint, make_leaf, trees

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.layout.manifest import array_nodes
from torchax_ckpt.layout.nodes import decode
from torchax_ckpt.state.leaf import describe
from torchax_ckpt.state.pytree import Encoder, revive


def through_json(tree: Any) -> Any:
    """The tree encoded, written as strict JSON, read and decoded."""
    encoder = Encoder()
    node = json.loads(json.dumps(encoder.encode(tree, ("state",)), allow_nan=False))

    def leaf(found: Mapping[str, Any]) -> Any:
        array = encoder.leaves[found["array"]]
        assert (array.dtype.name, list(array.shape)) == (found["dtype"], found["shape"])
        return revive(found, array)

    return decode(node, leaf)


def refused(value: Any, reason: str | None = None) -> None:
    """Asserts that the value, three levels down, is refused by name and for this reason."""
    with pytest.raises(UnsupportedLeafError, match=reason) as caught:
        Encoder().encode({"a": [0, {"b/c": value}]}, ("state",))
    assert caught.value.key_path == "state/a/1/b%2Fc"
    assert caught.value.key_path in str(caught.value)


@given(trees(max_leaves=20))
@example({1: "int", "1": "text", (1,): "tuple", ("1",): "tuple of text"})
@example([float("nan"), -float("nan"), float("inf"), -0.0, 5e-324, 1e300, 2**53, -(2**53), 10**400])
@example({"array": "tags of nodes", "dict": [["k", "v"]], "int": {"float": {"array": 1}}})
@example([["k", "v"], ("dict", []), {"tuple": ()}, set(), frozenset({frozenset()})])
@example(collections.OrderedDict([("b", 1), ("a", collections.Counter({"x": -1, 2: 0}))]))
@example({"": {"": {"": np.float32(1)}}, "%": {"/": np.float32(2)}, "a/b": {"*": np.float32(3)}})
@example([True, 1, 1.0, 1 + 0j, "1", b"1", np.bool_(True), np.int8(1), None])
@example({1: np.zeros(2), "1": np.ones(2), "1%2": np.ones(3)})
@example({np.int64(3): np.zeros(2), np.int64(4): np.ones(2)})
@example({np.int64(3): np.zeros(2), "a": np.ones(2)})
@example({(np.int64(3),): np.zeros(2), 0: np.ones(2)})
def test_a_tree_comes_back_from_json_type_for_type(tree: Any) -> None:
    assert fingerprint(through_json(tree)) == fingerprint(tree)


@settings(max_examples=40)
@given(trees())
def test_every_leaf_has_a_name_of_its_own(tree: Any) -> None:
    encoder = Encoder()
    found = [node["array"] for node in array_nodes(encoder.encode(tree, ("state",)))]
    assert sorted(found) == sorted(encoder.leaves)


@pytest.mark.parametrize("content", [{2: 5, 1: 6}, {1: 5, "a": 6}], ids=str)
def test_a_default_dict_keeps_the_types_of_its_keys(content: dict[Any, int]) -> None:
    """Also of keys without an order."""
    assert through_json(collections.defaultdict(int, content)) == content


class Point(collections.namedtuple("Point", ["x", "y"])):
    """A namedtuple of a user."""


def test_namedtuples_and_registered_classes_come_back_as_dicts_by_field() -> None:
    assert through_json(torch.Size([2, 3])) == (2, 3)
    assert through_json(Point(1, (2,))) == {"x": 1, "y": (2,)}
    assert through_json([Node(1, Point(2, 3))]) == [{"left": 1, "right": {"x": 2, "y": 3}}]


def test_device_arrays_are_taken_by_reference() -> None:
    array = jnp.ones(3)
    encoder = Encoder()
    encoder.encode({"jax": array, "torchax": torchax_backend.wrap(array)}, ("state",))
    assert encoder.leaves["state/jax"] is array
    assert encoder.leaves["state/torchax"] is array


def test_tensors_and_arrays_with_unusual_strides_keep_their_values() -> None:
    with torchax_backend.native_torch():
        base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
        complex_base = torch.tensor([1 + 2j, 3 - 4j])
        tensors = [
            base.t(),
            base[:, ::2],
            torch.ones(1).expand(3),
            base.bfloat16().t(),
            torch.nn.Parameter(torch.ones(2)),
            complex_base.conj(),
            complex_base.conj().imag,
        ]
        wanted = [t.detach().clone().contiguous().resolve_conj().resolve_neg() for t in tensors]
    assert fingerprint(through_json(tensors)) == fingerprint(wanted)
    array = np.arange(12).reshape(3, 4)
    tree = [array.T, array[:, ::-1], np.broadcast_to(np.float16(2), (2, 2)), array[:0]]
    assert fingerprint(through_json(tree)) == fingerprint(tree)
    view = torchax_backend.wrap(jnp.arange(6.0).reshape(3, 2))[1:]
    expected = torchax_backend.wrap(jnp.arange(2.0, 6.0).reshape(2, 2))
    assert bits(through_json(view)) == bits(expected)


@pytest.mark.parametrize("impl", sorted(KEY_IMPLS))
def test_a_random_key_is_stored_as_its_data_and_keeps_its_implementation(impl: str) -> None:
    key = make_leaf("key", impl, (2,), 3)
    node = Encoder().encode(key, ("rng",))
    assert node == {
        "array": "rng",
        "kind": "key",
        "dtype": "uint32",
        "shape": [2, KEY_IMPLS[impl]],
        "impl": impl,
    }
    assert fingerprint(through_json(key)) == fingerprint(key)


def test_an_abstract_leaf_is_described_like_a_real_one() -> None:
    for value in (jnp.ones((2, 3), jnp.bfloat16), make_leaf("key", "rbg", (2,), 0)):
        abstract = jax.eval_shape(lambda x: x, value)
        assert describe(abstract, "x") == describe(value, "x")


class _Enum(enum.Enum):
    A = 1


class _IntEnum(enum.IntEnum):
    A = 1


class _Text(str):
    """A subclass that would come back as a plain str."""


OTHERS = [
    lambda: 0, object(), int, range(3), slice(1), bytearray(b"a"), memoryview(b"a"), iter([1]),
    collections.deque([1]), collections.UserDict(a=1), torch.float32, torch.device("cpu"),
    np.dtype("int8"), _Enum.A, _IntEnum.A, _Text("a"), type("Dict", (dict,), {})(a=1),
]  # fmt: skip


ARRAYS = [
    np.array([object()]), np.array(["text"]), np.array([b"bytes"]), np.str_("text"),
    np.array(["2020"], "datetime64[D]"), np.timedelta64(3, "D"), np.zeros(2, [("field", "i4")]),
    np.ma.array([1, 2], mask=[False, True]), np.recarray((2,), [("x", "i4")]),
    np.ones(2, np.longdouble), np.longdouble(1), np.ones(2, np.clongdouble),
    np.ones(2, ml_dtypes.uint4), np.ones(2, ">f4"),
]  # fmt: skip


def test_values_and_arrays_that_storage_cannot_hold_are_refused_by_name() -> None:
    for value in OTHERS:
        refused(value, "cannot be stored")
    for value in ARRAYS:
        refused(value)
    refused(jnp.ones(2, jnp.uint4), "uint4")
    looped: list[Any] = [1]
    looped.append(looped)
    for state, key_path, reason in (
        ({"opt": Point(x=1, y=[lambda: 0])}, "state/opt/y/0", "cannot be stored"),
        ({"d": {_Enum.A: 1}}, "state/d", "cannot be stored"),
        ({"d": "\ud83d\ude00"}, "state/d", "two halves of one character"),
        ({"d": {"\ud83d\ude00": 1}}, "state/d", "two halves of one character"),
        (looped, "state", "contains itself"),
    ):
        with pytest.raises(UnsupportedLeafError, match=reason) as caught:
            Encoder().encode(state, ("state",))
        assert caught.value.key_path == key_path


@pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*CSR.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*ComplexHalf.*:UserWarning")
def test_tensors_that_are_not_plain_are_refused_by_name_and_reason() -> None:
    with torchax_backend.native_torch():
        tensors = {
            "layout torch.sparse_coo": torch.eye(2).to_sparse(),
            "layout torch.sparse_csr": torch.eye(2).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "meta device": torch.empty(2, device="meta"),
            "complex32": torch.zeros(2, dtype=torch.complex32),
            "float8_e8m0fnu": torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            "lazy": torch.nn.UninitializedParameter(),
            "subclass of torch.Tensor": torch.ones(2).as_subclass(type("T", (torch.Tensor,), {})),
        }
    for reason, tensor in tensors.items():
        refused(tensor, reason)


def test_a_tracer_is_refused_by_name() -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        refused(x, "tracer")
        refused(torchax_backend.wrap(x), "tracer")
        return x

    step(jnp.ones(2))
