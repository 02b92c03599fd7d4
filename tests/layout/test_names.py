"""Names: from key paths to strings and back, without a collision."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st
from support.strategies import any_text

from torchax_ckpt.layout import names

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
