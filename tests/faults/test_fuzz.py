"""A short run of the fuzz harness, and proof that it finds what a naive reader lets through."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from fuzz import Corpus, Readers, fuzz
from fuzz_files import Fed

from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.saving.unchanged import comparison
from torchax_ckpt.storage.directory.lease_holder import LeaseHolder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
def test_no_input_does_harm(corpus: Corpus) -> None:
    found = fuzz(Readers(corpus), seed=1, count=2_000, max_secs=8)
    assert not found.problems, str(found)
    assert sum(found.outcomes.values()) > 100, found
    assert {outcome for _, outcome in found.outcomes} >= {"read", "CorruptCheckpointError"}


def naive(document: Any) -> Manifest:
    """Takes a manifest at its word."""
    stacks = {stored: tuple(members) for stored, members in document["stacks"].items()}
    return Manifest(document["document"], Plan(stacks, frozenset(document["empty"])), {}, {})


@pytest.mark.slow
def test_the_harness_finds_what_a_naive_reader_lets_through(corpus: Corpus) -> None:
    readers = Readers(corpus, naive)
    readers.by_name = {name: readers.by_name[name] for name in ("restore", "load")}
    found = fuzz(readers, seed=1, count=500)
    assert len(found.problems) > 10, str(found)
    crashes = {outcome for _, outcome in found.outcomes if outcome.startswith("!!")}
    assert {"!! KeyError", "!! TypeError"} <= crashes, found


@pytest.mark.slow
def test_the_harness_finds_a_reader_that_trusts_a_file(corpus: Corpus) -> None:
    readers = Readers(corpus)
    lease = readers.by_name["lease"]

    def trusting(raw: bytes) -> None:
        LeaseHolder(**json.loads(raw)).describe(0.0)

    readers.by_name = {"lease": dataclasses.replace(lease, read=trusting)}
    found = fuzz(readers, seed=1, count=100)
    crashes = {outcome for _, outcome in found.outcomes if outcome.startswith("!!")}
    assert len(crashes) >= 2, found
    assert len(found.problems) > 20, found


@pytest.mark.slow
def test_the_harness_finds_a_save_that_takes_over_other_arrays(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = Readers(corpus)
    readers.by_name = {"unchanged of a step": readers.by_name["unchanged of a step"]}
    monkeypatch.setattr(comparison, "are_equal", lambda *args: True)
    found = fuzz(readers, seed=1, count=60)
    assert ("unchanged of a step", "!! AssertionError") in found.outcomes, found


@pytest.mark.slow
def test_the_harness_finds_a_change_of_what_is_live(corpus: Corpus) -> None:
    readers = Readers(corpus)

    def half(raw: bytes) -> None:
        corpus.live.box.state["seen"] += 1
        readers.restore(raw)

    readers.by_name["restore"] = Fed(corpus.manifest, half, 1.0)
    found = fuzz(readers, seed=1, count=60)
    assert any("what is live has changed" in problem for problem in found.problems), found
