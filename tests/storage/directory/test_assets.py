"""Names and sizes of assets: none leads out of a folder, and none is a program."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchax_ckpt.storage.directory import assets
from torchax_ckpt.storage.directory.assets import Assets
from torchax_ckpt.storage.medium import seals


def test_a_name_that_is_no_relative_path_or_another_kind_of_file_is_refused() -> None:
    for name in (
        "../config.json", "/config.json", "a/../config.json", "a//config.json", "a/./config.json",
        "", ".json", "a/.config.json", "a\\config.json", "a\nb.json", "a\x00.json", "ä.json",
        "C:/config.json", f"{'a' * 201}.json", f"{'a/' * 500}b.json", "~/config.json",
    ):  # fmt: skip
        assert assets.why_refused(name) is not None, name
    for name in ("a.py", "a.pkl", "a.safetensors", "json", "a.json/b"):
        assert assets.why_refused(name) == "does not end in .json, .txt, .jinja"


def test_any_key_becomes_one_part_of_a_name_and_another_key_another_part() -> None:
    keys = ["a", "", "..", ".", ".a", "/", "a/b", "a%2Fb", "a b", "ä", "\ud800", "~", "%", "%2E"]
    parts = [assets.part_of(key) for key in keys]
    assert len(set(parts)) == len(keys)
    for part in parts:
        assert "/" not in part
        assert assets.why_refused(f"model/{part}/config.json") is None


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
