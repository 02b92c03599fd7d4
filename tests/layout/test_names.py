"""Names: from key paths to strings and back, without a collision."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.strategies import any_text

from torchax_ckpt.layout import names

# Few enough characters that two different paths often look alike.
_confusable = st.lists(st.text("%/*2F\ud83d\ude00", max_size=3), min_size=1, max_size=3)


@given(any_text())
@example("")
@example("%")
@example("%25")
@example("a%2Fb")
@example("\ud83d\ude00")
@example("\U0001f600")
@example("é/\x7f\x80*")
def test_unescape_undoes_escape(key: str) -> None:
    assert names.unescape(names.escape(key)) == key


@given(any_text())
@example("")
def test_an_escaped_key_can_be_stored_as_one_part_of_a_name(key: str) -> None:
    part = names.escape(key)
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


@pytest.mark.parametrize(
    "fqn",
    [
        "weight",
        "encoder.layers.0.self_attn.in_proj_weight",
        "model.embed_tokens.weight",
        "parametrizations.weight.original0",
        "_orig_mod.0.bias",
        "größe|#? 名前",
    ],
)
def test_torch_names_pass_unchanged(fqn: str) -> None:
    assert names.join(("model", fqn)) == f"model/{fqn}"


def test_keys_that_are_not_text_stand_as_their_text() -> None:
    assert names.join(("optimizer", "param_groups", 0)) == "optimizer/param_groups/0"


@given(st.lists(any_text(), min_size=2, max_size=3))
def test_the_component_is_the_first_part_of_a_name(key_path: list[str]) -> None:
    component, rest = names.component_and_rest(names.join(key_path))
    assert component == names.escape(key_path[0])
    assert names.split(rest) == tuple(key_path[1:])


def test_a_name_of_one_part_has_no_rest() -> None:
    assert names.component_and_rest("state") == ("state", "")
