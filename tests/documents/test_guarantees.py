"""The guarantees page: every promise on it has a mutation, and a test that `make test` runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mutations import ROWS
from support import ROOT, TESTS

PAGE = ROOT / "docs" / "guarantees.md"
SECTIONS = ("Guarantees", "Damage detection", "Single writer", "Checkpoints from other sources")
# Begins what is no promise, but what a promise does not cover.
EXCEPTION = "- JAX, Orbax, gcsfs and s3fs start some threads"

# How a promise begins, and under it tests of it that no mutation names; `make test` runs them all.
MORE = """
**A killed run resumes
    test_a_short_torture_finds_nothing
**A restored state is identical to the bit
    test_any_tree_survives_any_layout_snapshot_and_change_of_mesh
    test_every_dtype_of_every_kind_comes_back_as_it_was_saved
    test_a_resumed_run_ends_on_the_same_bits
**A step is listed only after
    test_a_run_is_saved_pruned_resumed_resharded_and_goes_back_twice
    test_a_step_that_cannot_be_taken_back_is_not_listed_and_goes_before_the_next_save
**A restore does not wait for ever
    test_a_read_of_a_file_that_hangs_is_logged_by_name_and_goes_on
**What one process gets wrong
    test_a_call_that_one_process_refuses_fails_on_all_and_the_next_is_whole
**A damaged newest step is skipped
    test_an_error_filter_for_warnings_does_not_keep_a_run_from_resuming
**A program that ends without
    test_an_error_in_the_loop_lets_the_save_in_flight_finish
**A save that the program begins
    test_an_exit_handler_saves
**Ctrl-C ends a wait
    test_an_interrupted_wait_leaves_the_save_as_it_is
    test_an_interrupt_while_a_save_begins_leaves_nothing_to_wait_for
- If `close` raises `SaveTimeoutError`
    test_close_can_be_tried_again_after_a_late_save
- A copy of a run's directory
    test_a_copy_of_a_run_is_saved_to_while_the_run_goes_on
- The library unpickles nothing of a step
    test_no_code_of_a_checkpoint_is_run
    test_code_named_in_a_commit_record_is_not_imported
- A compressed chunk that unpacks to another size
    test_a_chunk_of_blosc_that_lies_is_refused_by_name
"""


def promises() -> list[str]:
    """The promises of the page: the paragraphs that begin with a bold sentence, and the bullets."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    texts = [text for name in SECTIONS for text in re.split(r"\n\n|\n(?=- )", sections[name])]
    paragraphs = [" ".join(text.split()) for text in texts]
    return [p for p in paragraphs if p.startswith(("**", "- ")) and not p.startswith(EXCEPTION)]


def more() -> dict[str, list[str]]:
    """How a promise begins -> the tests in ``MORE``."""
    parts = re.split(r"^(?=\S)", MORE.strip(), flags=re.M)
    lines = [part.splitlines() for part in parts if part]
    return {begin: [name.strip() for name in names] for begin, *names in lines}


def test_every_promise_has_a_mutation() -> None:
    assert len(promises()) > 25
    assert [p for p in promises() if not any(row.promise in p for row in ROWS)] == []


def test_make_test_runs_a_test_of_every_promise() -> None:
    mutated = {row.name: {test.partition("::")[2] for test in row.tests} for row in ROWS}
    named = set[str]().union(*mutated.values(), *more().values())
    marks: dict[str, list[str]] = {}
    for text in map(Path.read_text, TESTS.rglob("test_*.py")):
        if named.isdisjoint(re.findall(r"^def (\w+)", text, re.M)):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in named:
                assert node.name not in marks, f"two tests are called {node.name}"
                marks[node.name] = [ast.unparse(mark) for mark in node.decorator_list]
    left_out = {"pytest.mark.slow", "pytest.mark.long"}
    everyday = {name for name, found in marks.items() if left_out.isdisjoint(found)}
    for begin, tests in more().items():
        assert any(promise.startswith(begin) for promise in promises()), begin
        assert set(tests) <= everyday, begin
    for promise in promises():
        tests = [t for row in ROWS if row.promise in promise for t in mutated[row.name]]
        tests += [t for begin in more() if promise.startswith(begin) for t in more()[begin]]
        assert everyday.intersection(tests), promise
