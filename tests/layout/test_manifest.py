"""The manifest: JSON that reads back as it was written, and clear errors for anything else."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.damage import edit_json

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.array_digests import Digests
from torchax_ckpt.layout.manifest import FORMAT, VERSION, Manifest
from torchax_ckpt.layout.nodes import decode
from torchax_ckpt.layout.unchanged import Database

EMPTY: dict[str, Any] = {"format": FORMAT, "version": VERSION, "empty": []}
EMPTY |= {part: {} for part in ("versions", "document", "stacks", "digests")}
PARTS = ("document", "stacks", "empty")
Change = Callable[[Any], object]
LEAF: dict[str, Any] = {"array": "model/w", "kind": "jax", "dtype": "float32", "shape": [2]}


def read(raw: Any) -> Manifest:
    return Manifest.from_json(raw, path="runs/5/manifest")


OTHERS: list[Any] = [None, [], 5, "torchax_ckpt", {}, {"format": "other"}]
DTYPES: list[Any] = [None, {}, "float33", "f4,,", "O"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        *((raw, "torchax_ckpt") for raw in OTHERS),
        *(({**EMPTY, "version": v}, rf"version.*{v!r}") for v in (VERSION + 1, -1, None, "0")),
        *(({**EMPTY, part: value}, "") for part in PARTS for value in (None, 5, "x")),
        *(({k: v for k, v in EMPTY.items() if k != part}, "") for part in PARTS),
        *(
            ({**EMPTY, "stacks": {"host_scalars/int64": members}}, "")
            for members in (5, [["a"]], [5])
        ),
        ({**EMPTY, "empty": [["a"]]}, ""),
        ({**EMPTY, "empty": [5]}, ""),
        ({**EMPTY, "versions": 5}, ""),
    ],
)
def test_what_is_no_manifest_of_this_version_is_refused_by_path(raw: Any, message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"runs/5/manifest.*{message}") as caught:
        read(raw)
    assert caught.value.path == "runs/5/manifest"


@pytest.mark.parametrize(
    "change",
    [
        *({"array": array} for array in (5, ["a"])),
        *({"kind": kind} for kind in (None, "zebra", "key")),  # a key needs an impl
        *({"dtype": dtype} for dtype in DTYPES),
        *({"shape": shape} for shape in (None, 2, [-1], [2.0], [True], ["2"])),
        *({"whole": whole} for whole in (True, [-1], [2, 2, 2])),
        *(dict.fromkeys([key], "absent") for key in ("kind", "dtype", "shape")),
    ],
    ids=str,
)
def test_a_malformed_leaf_is_refused_by_path_and_name(change: dict[str, Any]) -> None:
    leaf = {key: value for key, value in {**LEAF, **change}.items() if value != "absent"}
    with pytest.raises(CorruptCheckpointError, match="runs/5/manifest: malformed leaf") as caught:
        read({**EMPTY, "document": {"model": {"dict": [["w", leaf]]}}})
    assert caught.value.path == "runs/5/manifest"
    assert caught.value.key_path == str(leaf["array"])


WHOLE: dict[str, Any] = {
    **EMPTY,
    "document": {
        "model": {
            "dict": [
                [name, LEAF | {"array": f"model/{name}", "shape": shape}]
                for name, shape in {"w": [2, 8], "x": [2], "y": [2], "z": [2]}.items()
            ]
        }
    },
    "stacks": {"model/[xy]": ["model/x", "model/y"]},
}
OUTSIDE = {"../x": {"copy": 0, "xxh3_128": {}}}  # a database
FUTURE = {"version": VERSION + 1, "versions": {"torchax_ckpt": "9.1"}}
INSTALL = "Install the release of torchax_ckpt that wrote it, '9.1', or a newer one"


def leaf_with(**changes: Any) -> Change:
    return lambda raw: raw["document"]["model"]["dict"][0][1].update(changes)


def members_with(change: Callable[[list[str]], object]) -> Change:
    return lambda raw: change(raw["stacks"]["model/[xy]"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (leaf_with(shape=[2**40, 2**40]), "at most"),
        (leaf_with(shape=[1] * 33), "at most"),
        (leaf_with(shape=[2] * 1_000_000), "at most"),
        (leaf_with(shape=[float("nan")]), "malformed leaf"),
        (leaf_with(dtype="object"), "malformed leaf"),
        (leaf_with(kind="pickle"), "malformed leaf"),
        (leaf_with(kind="numpy_scalar"), "malformed leaf"),
        (leaf_with(array="model/\ud800"), "malformed leaf"),
        (leaf_with(array=""), "malformed leaf"),
        (leaf_with(array="model/z"), "one leaf of this name, found two"),
        (lambda raw: raw["empty"].append("model/nowhere"), "model/nowhere.* listed in 'empty'"),
        (lambda raw: raw["empty"].append("model/w"), "no entry in 'empty'"),
        (leaf_with(shape=[0, 8]), "an entry in 'empty'"),
        (members_with(lambda names: names.append("model/nowhere")), "a leaf in stack"),
        (members_with(lambda names: names.append(names[0])), "stored in one place"),
        (members_with(lambda names: names.append("model/w")), "one dtype and shape"),
        (members_with(lambda names: names.clear()), "a stack of leaves"),
        (lambda raw: raw["stacks"].update({"model/w": ["model/x"]}), "a valid stack name"),
        (lambda raw: raw["versions"].update(torch=5), "in another form"),
        (lambda raw: raw.update(unchanged=OUTSIDE), "'unchanged' to list databases"),
        (
            lambda raw: raw.update(FUTURE),
            f"expected manifest version {VERSION}, found {VERSION + 1}.*{INSTALL}",
        ),
        (lambda raw: raw.update(version=10**30), "expected manifest version"),
        (lambda raw: raw.update(version=0.0), "expected manifest version"),
    ],
)
def test_a_manifest_with_a_contradiction_is_refused(change: Change, match: str) -> None:
    raw = copy.deepcopy(WHOLE)
    assert len(read(raw).leaves) == 4
    change(raw)
    with pytest.raises(CorruptCheckpointError, match=f"^runs/5/manifest: .*{match}") as caught:
        read(raw)
    assert caught.value.path == "runs/5/manifest"


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


@settings(max_examples=60)
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
        *({}, {"zebra": 1}, {"tuple": None}, {"set": [[1]]}),
        *({"dict": value} for value in (5, [["key"]], [[["unhashable"], 1]], [[LEAF, 1]])),
        *({"int": value} for value in (5, "zz")),
        *({"float": value} for value in ("00", 1.5, float("nan"))),
        *({"complex": value} for value in ([1, "a"], [1, 2, 3], [10**400, 0.0])),
        *({"bytes": value} for value in ("!", 5, "é")),
        *({"scalar": "AAAAAAAAAAA=", "type": "float32"}, float("nan")),
    ],
    ids=str,
)
def test_a_malformed_node_is_corrupt(node: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="in the manifest"):
        decode([1, {"tuple": [node]}], lambda leaf: [])  # as an array, no key of a dict


@pytest.mark.parametrize("node", [{"zebra": 1}, {"dict": [[["unhashable"], 1]]}], ids=str)
def test_load_names_the_path_of_a_step_with_a_malformed_node(directory: Path, node: Any) -> None:
    state = {"w": jnp.ones(2), "x": {"y": 1}}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(7, state=state)
    (path,) = (directory / "7" / "manifest").iterdir()
    edit_json(path, lambda raw: operator.setitem(raw["document"]["state"]["dict"][1], 1, node))
    for abstract_state in ({"w": state["w"], "x": 1}, None):
        with pytest.raises(CorruptCheckpointError, match=str(directory / "7")) as caught:
            TorchaxCheckpointer(directory).load(7, abstract_state)
        assert caught.value.step == 7
        assert caught.value.path is not None
        assert caught.value.path.startswith(str(directory / "7"))


DIGESTS = {"model/w": Digests((2,), bytes(16), bytes(range(32)))}


@pytest.mark.parametrize("processes", [None, (0,), (0, 3, 12)])
def test_a_database_is_read_as_it_was_described(processes: tuple[int, ...] | None) -> None:
    known = {"unchanged0": Database(1, ("model/w",), processes)}
    raw = unchanged.to_json(known, DIGESTS)["unchanged"]
    short = {name: Digests(d.block, d.values) for name, d in DIGESTS.items()}
    assert unchanged.from_json(raw, short, path="manifest") == (known, DIGESTS)


@pytest.mark.parametrize("processes", [[], [1, 0], [0, 0], [-1], [True], ["0"], [0.0], 1, {}, "01"])
def test_a_wrong_list_of_processes_is_refused(processes: Any) -> None:
    raw = unchanged.to_json({"unchanged0": Database(0, ("model/w",))}, DIGESTS)["unchanged"]
    raw["unchanged0"]["processes"] = processes
    with pytest.raises(CorruptCheckpointError, match="'unchanged' to list databases"):
        unchanged.from_json(raw, DIGESTS, path="manifest")


def test_each_process_has_a_folder_of_its_own() -> None:
    assert unchanged.folders_of("unchanged1", None) == ["ocdbt.process_unchanged1"]
    folders = [f for n in (1, 11) for f in unchanged.folders_of(f"unchanged{n}", [1, 11, 111])]
    assert len({*folders, "ocdbt.process_unchanged1"}) == 7
    for folder in folders:
        assert folder.startswith(unchanged.FOLDER_PREFIX)
        assert folder.removeprefix("ocdbt.process_").isalnum()  # else Orbax would not merge it
