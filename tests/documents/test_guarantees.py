"""The guarantees page: `make test` runs at least one test of every promise on it."""

from __future__ import annotations

import ast
import itertools
import re

from mutations import ROWS
from support import ROOT, TESTS

PAGE = ROOT / "docs" / "guarantees.md"
SECTIONS = ("Guarantees", "Damage detection", "Single writer", "Checkpoints from other sources")
# Begins what is no promise, but what a promise does not cover.
EXCEPTION = "- JAX, Orbax and gcsfs start some threads"

# How a promise begins, and under it the names of tests of it, all of which `make test` runs.
TESTED = """
A killed run resumes
    test_a_process_killed_on_this_host_never_blocks
    test_killed_before_the_old_branch_is_set_aside_it_still_does_not_come_back
    test_leftovers_of_killed_processes_go_with_the_next_save
    test_a_short_torture_finds_nothing
A restored state is identical to the bit
    test_any_tree_survives_any_layout_snapshot_and_change_of_mesh
    test_every_dtype_of_every_kind_comes_back_as_it_was_saved
    test_a_resumed_run_ends_on_the_same_bits
    test_each_process_has_its_own_state_of_a_golden_checkpoint_again
A step is listed only after
    test_a_storage_failure_is_logged_kept_until_read_and_raised_by_close
    test_a_run_is_saved_pruned_resumed_resharded_and_goes_back_twice
    test_a_step_that_cannot_be_taken_back_is_not_listed_and_goes_before_the_next_save
A restore changes everything or nothing
    test_a_refused_checkpoint_changes_no_byte_of_anything
A restore does not wait for ever
    test_a_restore_from_a_bucket_that_trickles_fails_by_name_and_changes_nothing
    test_a_read_of_a_file_that_hangs_is_logged_by_name_and_goes_on
What one process gets wrong
    test_an_error_of_one_is_raised_by_all
    test_one_of_three_that_makes_another_call_costs_all_that_call_only
    test_a_metric_that_cannot_be_ranked_costs_no_step_that_must_be_saved
A damaged newest step is skipped
    test_an_unreadable_newest_step_is_skipped_and_then_abandoned
    test_an_error_filter_for_warnings_does_not_keep_a_run_from_resuming
The run resumes from the newest step
    test_an_unreadable_newest_step_is_skipped_and_then_abandoned
If a host cannot read its local tier
    test_the_durable_tier_is_read_with_a_warning_that_names_host_and_file
If a step in the durable directory cannot be read
    test_resuming_goes_back_past_damage_but_not_past_what_cannot_be_read
If every step is damaged
    test_a_run_does_not_begin_anew_over_its_only_step
A step with a damaged commit record
    test_a_damaged_step_takes_no_place_from_a_sound_one
A program that ends without
    test_an_error_in_the_loop_lets_the_save_in_flight_finish
    test_a_program_that_ends_without_close_still_completes_its_save
A save that the program begins
    test_a_training_thread_that_outlives_the_main_thread_saves
    test_an_exit_handler_saves
    test_a_finalizer_is_refused
    test_failures_that_nothing_mends_are_all_said_and_fail_the_exit_code
Ctrl-C ends a wait
    test_an_interrupted_wait_leaves_the_save_as_it_is
    test_an_interrupt_while_a_save_begins_leaves_nothing_to_wait_for
An unreachable checkpointer hands over
    test_a_cell_that_is_run_again_goes_on_from_the_checkpointer_it_replaces
A closed checkpointer leaves no thread
    test_a_closed_checkpointer_leaves_nothing_behind
JAX, Orbax and gcsfs start
    test_a_closed_checkpointer_leaves_nothing_behind
While checkpointers use a bucket
    test_settings_that_the_program_shares_are_as_before_once_nobody_needs_them
If `close` raises `SaveTimeoutError`
    test_close_can_be_tried_again_after_a_late_save
Every block of the array bytes
    test_a_flipped_bit_is_noticed_on_every_mesh_and_the_leaf_named
The manifest and the metrics
    test_a_file_that_no_save_writes_is_refused
Orbax's records of the commit time
    test_a_commit_record_that_is_not_what_was_sealed_is_damaged
A restore of everything
    test_a_step_that_was_restored_is_verified
`ckpt.verify(step)`
    test_a_damaged_step_is_named_with_its_leaf_and_file
With `CheckpointOptions(read_back=True)` every commit
    test_a_step_that_does_not_read_back_is_deleted_and_its_save_has_failed
    test_no_keep_rule_deletes_the_newest_verified_step
One program writes to a directory
    test_readers_take_no_lease
The first save takes a lease
    test_a_second_checkpointer_in_one_process_is_refused_until_the_first_is_closed
While one program holds
    test_a_process_that_runs_on_this_host_refuses_at_once
The lease of a program that died
    test_a_holder_that_died_elsewhere_blocks_until_its_last_sign_of_life_is_60_s_old
A copy of a run's directory
    test_the_lease_of_a_running_process_in_a_copy_of_its_directory_refuses_nobody
    test_a_copy_of_a_run_is_saved_to_while_the_run_goes_on
A program that stalled
    test_a_writer_that_lost_its_lease_while_writing_commits_nothing_and_stops
    test_nothing_is_committed_moved_or_removed_without_the_lease
Another program can take the lease
    test_a_late_first_save_mixes_in_neither_tier
The library unpickles nothing of a step
    test_no_code_of_a_file_is_run
    test_no_code_of_a_checkpoint_is_run
    test_code_named_in_a_commit_record_is_not_imported
    test_nothing_is_pickled_or_evaluated
The library refuses a step that contains links
    test_a_file_that_no_save_writes_is_refused
Before it allocates memory
    test_array_metadata_that_contradicts_the_manifest_is_refused_before_memory_is_taken
The library refuses leaves that this host cannot hold
    test_a_claim_beyond_the_hosts_memory_is_refused_even_if_all_agrees
A compressed chunk that unpacks to another size
    test_a_chunk_of_blosc_that_lies_is_refused_by_name
    test_as_many_chunks_are_unpacked_at_once_as_the_host_has_memory_for
A defective step raises
    test_a_file_that_no_save_writes_is_refused
"""


def promises() -> list[str]:
    """How each promise of the page begins: its bold sentences and its bullets."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    pattern = re.compile(r"^(?:\*\*|- )(.+)$", re.M)
    return [begin for section in SECTIONS for begin in pattern.findall(sections[section])]


def table() -> dict[str, list[str]]:
    """How each promise begins -> its tests."""
    parts = re.split(r"^(?=\S)", TESTED.strip(), flags=re.M)
    lines = [part.splitlines() for part in parts if part]
    return {begin: [name.strip() for name in names] for begin, *names in lines}


def test_every_promise_has_tests() -> None:
    found = promises()
    assert len(found) > 25
    begins = table()
    assert [p for p in found if not any(p.startswith(begin) for begin in begins)] == []
    assert [b for b in begins if not any(p.startswith(b) for p in found)] == []
    assert all(begins.values())


def test_every_promise_has_a_mutation() -> None:
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=- )", PAGE.read_text())]
    begins = tuple(b for p in promises() for b in (f"**{p}", f"- {p}"))
    found = [p for p in paragraphs if p.startswith(begins) and not p.startswith(EXCEPTION)]
    assert len(found) == len(promises()) - 1
    assert [p for p in found if not any(row.promise in p for row in ROWS)] == []


def test_make_test_runs_the_tests_of_every_promise() -> None:
    functions: dict[str, list[ast.FunctionDef]] = {}
    for file in TESTS.rglob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    for name in itertools.chain(*table().values()):
        assert len(functions.get(name, [])) == 1, name
        (function,) = functions[name]
        marks = [ast.unparse(mark) for mark in function.decorator_list]
        assert not {"pytest.mark.slow", "pytest.mark.long"} & set(marks), name
