"""Patterns over names: what they select, what they make of names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchax_ckpt.errors import SelectionError
from torchax_ckpt.layout.selection import Selection


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("head", "head", True),
        ("head", "head.weight", True),
        ("head", "header.weight", False),
        ("head", "a.head", False),
        ("head.*", "head.weight", True),
        ("head.*", "head", False),
        ("*.bias", "layers.0.q.bias", True),
        ("*.bias", "bias", False),
        ("*.lora_A", "layers.0.q.lora_A.weight", True),
        ("layers.1", "layers.10.weight", False),
        ("generator", "generator/0.weight", True),
        ("a.b", "aXb", False),
        ("a[0]", "a0", False),
        ("*", "anything.at.all", True),
    ],
)
def test_a_pattern_names_a_tensor_or_all_of_a_module(
    pattern: str, name: str, matches: bool
) -> None:
    assert Selection(include=pattern).takes(name) is matches
    assert Selection(exclude=[pattern]).takes(name) is not matches


def test_exclude_is_stronger_than_include() -> None:
    selection = Selection(include=["encoder", "head"], exclude="*.bias")
    names = ["encoder.0.weight", "encoder.0.bias", "head.bias", "embed.weight"]
    assert [selection.takes(name) for name in names] == [True, False, False, False]
    assert list(selection.left_out) == ["encoder.0.bias", "head.bias", "embed.weight"]
    with pytest.raises(SelectionError, match="'encoder', include: 'nose'"):
        Selection(include=["encoder", "nose"]).require_used()


@pytest.mark.parametrize(
    ("rename", "name", "renamed"),
    [
        ({"head": "classifier"}, "head.weight", "classifier.weight"),
        ({"h.*.attn": "layers.*.attention"}, "h.3.attn.q.bias", "layers.3.attention.q.bias"),
        ({"h.*.attn.*": "layers.*.attention.*"}, "h.3.attn.q.bias", "layers.3.attention.q.bias"),
        ({"h.*.attn.*": "layers.*.attention.*"}, "h.3.attn.attn.x", "layers.3.attention.attn.x"),
        ({"model.*": "*"}, "model.layers.0.weight", "layers.0.weight"),
        ({"*": "backbone.*"}, "layers.0.weight", "backbone.layers.0.weight"),
        ({"a.b": "x", "a": "y"}, "a.b.c", "x.c"),
        ({"a": "y", "a.b": "x"}, "a.b.c", "y.b.c"),
        ({"other": "x"}, "a.b", "a.b"),
        ({"generator": "g"}, "generator/0.weight", "g/0.weight"),
    ],
)
def test_names_are_mapped_by_the_first_rule_that_matches(
    rename: dict[str, str], name: str, renamed: str
) -> None:
    assert Selection(rename=rename).taken([name]) == {name: renamed}


def test_include_and_exclude_go_by_the_programs_names() -> None:
    selection = Selection(include="layers", exclude="layers.1", rename={"h.*": "layers.*"})
    found = selection.taken(["h.0.weight", "h.1.weight", "layers.2.weight", "embed"])
    assert found == {"h.0.weight": "layers.0.weight", "layers.2.weight": "layers.2.weight"}
    selection.require_used()


def test_two_tensors_never_get_one_name() -> None:
    with pytest.raises(SelectionError, match="a and b of the checkpoint would both be named b"):
        Selection(rename={"a": "b"}).taken(["a", "b"])
    assert Selection(rename={"a": "b", "b": "a"}).taken(["a", "b"]) == {"a": "b", "b": "a"}
    assert Selection(exclude="b", rename={"a": "b"}).taken(["a", "b"]) == {}


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("include", "", "expected a pattern, found ''"),
        ("include", [], "expected at least one pattern"),
        ("exclude", [3], "expected a pattern, found 3"),
        ("exclude", 3, "expected a pattern, found 3"),
        ("rename", [("a", "b")], "expected a mapping"),
        ("rename", {"a": 3}, "expected a name, found 3"),
        ("rename", {"a": ""}, "expected a name, found ''"),
        ("rename", {"a.*": "b"}, "as many \\*"),
        ("rename", {"a": "b.*"}, "as many \\*"),
    ],
)
def test_what_is_no_pattern_is_refused(argument: str, value: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        Selection(**{argument: value})


@given(st.from_regex(r"[a-c]{1,3}(\.[a-c0-2]{1,3}){0,4}", fullmatch=True))
def test_a_prefix_added_and_taken_off_again_changes_nothing(name: str) -> None:
    assert Selection().taken([name]) == {name: name}
    there = Selection(rename={"*": "prefix.*"}).taken([name])[name]
    assert there == f"prefix.{name}"
    assert Selection(rename={"prefix.*": "*"}).taken([there]) == {there: name}
