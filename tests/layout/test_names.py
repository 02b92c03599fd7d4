"""Names: from key paths to strings and back; patterns over names, and what they select."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.strategies import any_text

from torchax_ckpt.errors import SelectionError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.selection import Selection


@pytest.mark.parametrize(
    ("pattern", "taken", "left"),
    [
        ("head", ["head", "head.weight"], ["header.weight", "a.head"]),
        ("head.*", ["head.weight"], ["head"]),
        ("*.bias", ["layers.0.q.bias"], ["bias"]),
        ("*.lora_A", ["layers.0.q.lora_A.weight"], []),
        ("layers.1", [], ["layers.10.weight"]),
        ("generator", ["generator/0.weight"], []),
        ("a.b", [], ["aXb"]),
        ("a[0]", [], ["a0"]),
        ("*", ["anything.at.all"], []),
    ],
)
def test_a_pattern_names_a_tensor_or_all_of_a_module(
    pattern: str, taken: list[str], left: list[str]
) -> None:
    for name in (*taken, *left):
        assert Selection(include=pattern).takes(name) is (name in taken)
        assert Selection(exclude=[pattern]).takes(name) is (name in left)


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


# --- names ---

# Few enough characters that two different paths often look alike.
_confusable = st.lists(st.text("%/*2F\ud83d\ude00", max_size=3), min_size=1, max_size=3)


@given(any_text())
@example("")
@example("%25")
@example("a%2Fb")
@example("\ud83d\ude00")
@example("\U0001f600")
@example("é/\x7f\x80*")
def test_an_escaped_key_is_one_part_of_a_name_and_comes_back(key: str) -> None:
    part = names.escape(key)
    assert names.unescape(part) == key
    assert part
    assert not re.search(r"[/*\x00-\x1f\x7f]", part)
    part.encode("utf-8")


@given(st.lists(any_text(), min_size=1, max_size=4))
@example([""])
@example(["", ""])
@example(["a/b", "", "%"])
def test_split_undoes_join(key_path: list[str]) -> None:
    assert names.split(names.join(key_path)) == tuple(key_path)


@given(_confusable, _confusable)
@example(["a/b"], ["a", "b"])
@example(["%"], [""])
@example(["a/b"], ["a%2Fb"])
@example(["\ud83d\ude00"], ["\U0001f600"])
def test_different_key_paths_have_different_names(one: list[str], other: list[str]) -> None:
    assert (names.join(one) == names.join(other)) == (one == other)


def test_torch_names_pass_unchanged() -> None:
    for fqn in ("encoder.layers.0.in_proj_weight", "weight.original0", "größe|#? 名前"):
        assert names.join(("model", fqn)) == f"model/{fqn}"
    assert names.join(("optimizer", "param_groups", 0)) == "optimizer/param_groups/0"
    assert names.component_and_rest("state") == ("state", "")


@given(st.lists(any_text(), min_size=2, max_size=3))
def test_the_component_is_the_first_part_of_a_name(key_path: list[str]) -> None:
    component, rest = names.component_and_rest(names.join(key_path))
    assert component == names.escape(key_path[0])
    assert names.split(rest) == tuple(key_path[1:])
