"""What is encoded once is stored as if it were encoded again, and any change is found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchax_ckpt.storage.medium import seals


def test_known_parts_have_the_text_that_they_would_have_anew() -> None:
    texts = seals.Texts("document", "stacks")
    model, stack = {"dict": [["wäight", {"array": "w"}]]}, ("a", "b")
    for step in range(3):
        document: dict[str, Any] = {"model": model, "state": {"step": step}, 'a"b': None}
        content = {"document": document, "stacks": {"s": stack}, "digests": {"w": step}}
        stored = seals.encoded(content, texts)
        assert stored == seals.encoded(content)
        assert seals.unseal(json.loads(stored)) == json.loads(json.dumps(content))
        assert json.loads(stored) == json.loads(json.dumps(seals.seal(content)))
    with pytest.raises(ValueError, match="the JSON was damaged"):
        seals.unseal(json.loads(stored.replace(b"step", b"stop")))


def test_what_could_not_be_read_again_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "MAX_JSON_BYTES", 1 << 20)
    content = {"small": [], "large": ["x" * (1 << 20)]}
    for encode in (seals.encoded, seals.seal):
        with pytest.raises(ValueError, match="at most 1 MiB, found 1 MiB.*largest part, 'large'"):
            encode(content)
