"""A short run of the fuzz harness, and proof that it finds what a naive reader lets through."""

from __future__ import annotations

from typing import Any

import pytest
from fuzz import Corpus, Readers, fuzz

from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.layout.plan import Plan


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("fuzz"))


def test_no_input_does_harm(corpus: Corpus) -> None:
    found = fuzz(Readers(corpus), seed=1, count=2_000, max_secs=12)
    assert not found.problems, str(found)
    assert sum(found.outcomes.values()) > 100, found
    assert {outcome for _, outcome in found.outcomes} >= {"read", "CorruptCheckpointError"}


def naive(document: Any) -> Manifest:
    """Takes a manifest at its word."""
    stacks = {stored: tuple(members) for stored, members in document["stacks"].items()}
    return Manifest(document["document"], Plan(stacks, frozenset(document["empty"])), {}, {})


def test_the_harness_finds_what_a_naive_reader_lets_through(corpus: Corpus) -> None:
    found = fuzz(Readers(corpus, naive), seed=1, count=600)
    assert len(found.problems) > 10, str(found)
    crashes = {outcome for _, outcome in found.outcomes if outcome.startswith("!!")}
    assert {"!! KeyError", "!! TypeError"} <= crashes, found


def test_the_harness_finds_a_change_of_what_is_live(corpus: Corpus) -> None:
    readers = Readers(corpus)

    def half(raw: bytes) -> None:
        corpus.live.box.state["seen"] += 1
        readers.restore(raw)

    readers.by_name["restore"] = (corpus.manifest, half, 1.0)
    found = fuzz(readers, seed=1, count=60)
    assert any("what is live has changed" in problem for problem in found.problems), found
