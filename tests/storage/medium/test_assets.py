"""Names and sizes of assets: none leads out of a folder, and none is a program."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchax_ckpt.storage.medium import assets, seals
from torchax_ckpt.storage.medium.assets import Assets


@pytest.mark.parametrize(
    "name",
    [
        "../config.json", "/config.json", "a/../config.json", "a//config.json", "a/./config.json",
        "", ".json", "a/.config.json", "a\\config.json", "a\nb.json", "a\x00.json", "ä.json",
        "C:/config.json", f"{'a' * 201}.json", f"{'a/' * 500}b.json", "~/config.json",
    ],
)  # fmt: skip
def test_a_name_that_is_no_relative_path_is_refused(name: str) -> None:
    assert assets.why_refused(name) is not None


@pytest.mark.parametrize("name", ["a.py", "a.sh", "a.pkl", "a.safetensors", "json", "a.json/b"])
def test_a_name_of_another_kind_of_file_is_refused(name: str) -> None:
    assert assets.why_refused(name) == "does not end in .json, .txt, .jinja"


@pytest.mark.parametrize("key", ["a", "", "..", ".a", "a/b", "a b", "ä", "\ud800", "~", "%", "a*"])
def test_any_key_becomes_one_part_of_a_name(key: str) -> None:
    part = assets.part_of(key)
    assert "/" not in part
    assert assets.why_refused(f"model/{part}/config.json") is None


def test_different_keys_become_different_parts() -> None:
    keys = ["a", "", "%", "..", ".", "%2E", ".a", "/", "a/b", "a%2Fb", "~"]
    assert len({assets.part_of(key) for key in keys}) == len(keys)


def test_assets_come_back_as_they_were() -> None:
    files = {"model/config.json": "{}\n", "tokenizer/merges.txt": "ä \ud800 \x1f"}
    found = Assets.of(files)
    assert assets.parsed(seals.unseal(json.loads(found.content))) == files
    assert json.loads(found.content)["xxh3_64"] == found.seal
    assert Assets.of(files) == found
    assert Assets.of({**files, "tokenizer/merges.txt": ""}).seal != found.seal


@pytest.mark.parametrize(
    "content",
    [[], {}, {"files": []}, {"files": {"a.json": 1}}, {"files": {"../a.json": ""}}, {"file": {}}],
)
def test_content_of_another_form_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a JSON object|is not a relative path"):
        assets.parsed(content)


def test_assets_have_at_most_64_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert assets.MAX_BYTES == 64_000_000
    monkeypatch.setattr(assets, "MAX_BYTES", 4)
    Assets.of({"a.txt": "ää"})
    with pytest.raises(ValueError, match="at most 4 bytes, found 5"):
        Assets.of({"a.txt": "ää", "b.txt": "b"})
