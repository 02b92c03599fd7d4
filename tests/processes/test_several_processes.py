"""Several processes: one state, saved and restored together, resumed bit for bit."""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes_program import digest
from support import PROGRAMS
from support.live import Together
from support.processes import run_processes

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend

GROUP = PROGRAMS / "group.py"
CALLS, ARRAYS = PROGRAMS / "calls_on_processes.py", PROGRAMS / "arrays_on_processes.py"


@pytest.fixture(scope="module")
def straight(
    together: Together, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """A run of 8 steps on 2 processes x 2 devices, with steps 4 and 8, and what each reported."""
    run = tmp_path_factory.mktemp("straight") / "run"
    do = "attach", ["train", 8], "listens", "close"
    reports = together(GROUP, 2, {"directory": str(run), "do": do})
    assert [first["start"] for first, *_ in reports] == [0, 0]
    return run, [report | sockets for _, report, sockets, _ in reports]


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit_and_fail_alike(
    straight: tuple[Path, list[Any]], together: Together, directory: Path
) -> None:
    run, expected = straight
    shutil.copytree(run, directory)
    given = {"directory": str(directory), "seed": 77}
    resumed = together(PROGRAMS / "resumed_with_faults.py", 2, given)
    for (attached, again, outcome, end), whole in zip(resumed, expected, strict=True):
        assert (attached["whole"], attached["own"]) == (whole["whole"], whole["own"])
        assert (again["whole"], again["own"]) == (whole["whole"], whole["own"])
        assert again["seen"] == whole["seen"][4:]
        kind, message, _ = outcome["failure"]
        assert kind == "SaveError"
        assert "No space left on device" in message
        assert outcome["files"] == ["10", "4", "8", "9", "abandoned-8", "events", "lease"]
        kind, message, is_unchanged = outcome["refused"]
        assert (kind, is_unchanged) == ("MismatchError", True)
        assert "not mine" in message
        assert outcome["verified"] == 9
        assert outcome["restored"] == [9, 10]
        assert outcome["is_verified"]
        assert "skipping an unreadable checkpoint" in outcome["warned"][0]
        assert outcome["steps"] == [4, 9, 10]
        assert outcome["damaged"][0] == "CorruptCheckpointError"
        assert outcome["missing"][0] == "StepNotFoundError"
        assert end["steps"] == [4, 9, 11]
    # Each process has a state of its own; else little was shown.
    assert expected[0]["own"] != expected[1]["own"]
    assert expected[0]["seen"] != expected[1]["seen"]


@pytest.mark.slow
def test_slices_read_and_write_each_a_part_and_one_may_read_for_both(
    together: Together, directory: Path
) -> None:
    """Both have all of the state, in every width; what one does not read comes from the other."""
    first, second = together(ARRAYS, 2, "bytes_of_restore", directory)
    (each_0, one_0, end), (each_1, one_1, _) = first, second
    nbytes = 256 * 256 * 4
    for written in end["written"]:
        assert nbytes / 2 <= written < nbytes * 0.6
    assert each_0["read"] >= nbytes <= each_1["read"]
    assert one_0["read"] == each_0["read"]
    assert one_1["read"] < nbytes / 100


@pytest.mark.slow
def test_nothing_listens_on_every_address(straight: tuple[Path, list[Any]]) -> None:
    """JAX's coordination service is on loopback; gloo goes where the host's name leads, no further.

    JAX has no setting for where gloo listens.
    """
    _, reports = straight
    own = {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None)}
    assert reports[0]["listening"], "the coordination service was not seen"
    for report in reports:
        for address in report["listening"]:
            assert ipaddress.ip_address(address).is_loopback or address in own


@pytest.mark.slow
def test_other_numbers_of_processes_restore_it(
    straight: tuple[Path, list[Any]], together: Together, directory: Path
) -> None:
    run, expected = straight
    shutil.copytree(run, directory)
    # Written in several batches.
    options = {"process_timeout_secs": 60, "max_host_bytes": 1000}
    do = "attach", ["train", 12], ["restore", 8], ["train", 12, 9], "close"
    given = {"directory": str(directory), "do": do, "seed": 5, "options": options}
    reports = together(GROUP, 4, given)
    for index, (attached, first, _, again, _) in enumerate(reports):
        assert attached["start"] == 8
        assert attached["whole"] == expected[0]["whole"]
        assert attached["own"] == expected[index % 2]["own"]
        assert first == again
        if index == 0:
            (warned,) = attached["warned"]
            assert "was saved by 2 processes and is restored by 4" in warned
            assert "dataloader, rng" in warned
            assert "processes 2 to 3 start with the same state as others" in warned
    # This process alone, with eight devices, reads what four have written.
    with (
        TorchaxCheckpointer(directory) as ckpt,
        pytest.warns(UserWarning, match="each process from 1 on is left out"),
    ):
        loaded = ckpt.load(12)
    for name, value in loaded["model"].items():
        assert digest(np.asarray(torchax_backend.buffer(value))) == reports[0][3]["whole"][name]
    assert loaded["dataloader"]["position"] == 12


@pytest.mark.slow
def test_redistributed_loaders_lose_no_sample_and_see_none_twice(
    together: Together, directory: Path
) -> None:
    seen: list[int] = []
    for count in (2, 4, 1):
        reports = together(CALLS, count, "redistributed", directory)
        seen += [sample for (told,) in reports for sample in told["samples"]]
    assert sorted(seen) == list(range(24))


def test_wrong_options_and_those_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="set only one"):
        CheckpointOptions(single_replica_restore=True, restore_in_budget=True)
    for name, said, values in (
        ("process_timeout_secs", "a positive number", (None, 0, -1.0, float("inf"), True, "1")),
        ("min_read_bytes_per_sec", "a positive number of b", (None, 0, -1, float("inf"), True)),
        ("on_save_error", "one of continue, raise", ("ignore",)),
    ):
        for value in values:
            with pytest.raises(ValueError, match=f"{name}: expected {said}"):
                CheckpointOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.slow
def test_load_belongs_to_the_training_thread_where_processes_send_each_other_what_they_read(
    together: Together, tmp_path: Path
) -> None:
    for reports in together(CALLS, 2, "loads_on_thread", tmp_path / "run"):
        found = {told["name"]: told["found"] for told in reports}
        assert found.pop("plain") == [0, 1, 2]
        assert len(found) == 2
        for refused in found.values():
            assert refused.startswith("CallError: load was called on thread 'other'")
        assert [told["here"] for told in reports] == [[0, 1, 2]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("count", "on_save_error"), [(2, "raise"), (4, "continue")])
def test_threads_may_read_while_another_trains_in_any_order(
    count: int, on_save_error: str, together: Together, tmp_path: Path
) -> None:
    for reports in together(CALLS, count, "reads_beside", tmp_path / "run", on_save_error):
        for told in reports:
            assert told["trained"] == [2, True, True]
            assert told["read"] == [[1, [0, 1, 2], [1, 2]], [[1, 2], [0, 1, 2], 1]]
            assert told["secs"] < 20, "process_timeout_secs is 60"


@pytest.mark.slow
def test_replicas_that_differ_are_stored_as_each_process_has_its_part(
    together: Together, directory: Path
) -> None:
    for (told,) in together(ARRAYS, 2, "differing_replicas", directory):
        assert told == {"steps": [1]}
    loaded = np.asarray(TorchaxCheckpointer(directory).load(1)["w"])
    expected = np.arange(4096, dtype=np.float32).reshape(64, 64)
    expected[32:] += 1
    np.testing.assert_array_equal(loaded, expected)


@pytest.mark.slow
def test_what_process_0_records_is_the_metrics_of_all_and_decides_on_due_steps(
    together: Together, tmp_path: Path
) -> None:
    first, second = together(CALLS, 2, "ranked_by_the_first", tmp_path / "run")
    assert first == second
    fifth, every = first
    assert fifth["steps"] == [*range(5, 44, 5)]
    assert (fifth["answers"], fifth["best"]) == ([True, False], 10)
    local = {"own": 0}
    known = [{"val": -abs(step - 11), **local} for step in (5, 10, 15)]
    assert fifth["metrics"][:4] == [*known, local]
    assert every["steps"] == []
    assert every["metrics"] == [{"val": -7, **local}]
    assert fifth["reopened"] == fifth["metrics"]


@pytest.mark.slow
def test_what_one_process_cannot_save_stops_no_other(tmp_path: Path) -> None:
    first, second = run_processes(CALLS, 2, "refused_on_one", tmp_path / "run")
    found = {told["name"]: (told, other) for told, other in zip(first, second, strict=True)}

    def kinds(name: str) -> list[list[str]]:
        return [[text.partition(":")[0] for text in told["found"]] for told in found[name]]

    refused = {
        "at the first save": "metric 'loss': expected a number",
        "not to be ranked": "metric 'loss' at step 3 is nan",
        "forced, not to be stored": "metric 'loss': expected a number",
        "nothing to save": "save was called before anything was attached",
        "no thread": "can't start new thread",
    }
    for name, why in refused.items():
        told, other = found[name]
        assert told["found"][0] == "True"
        if name == "no thread":  # this save has failed, in place of the call
            assert other["found"][0] == "False"
            assert why in other["found"][1]
        else:
            assert why in other["found"][0]
        assert told["found"][1].startswith("SaveError: ")
        assert "process 1: " in told["found"][1]
        assert why in told["found"][1]
    # What cannot be ranked costs no forced step.
    assert kinds("forced, not to be ranked") == [["True", "None"], ["True", "MetricsError"]]
    assert kinds("nothing wrong") == [["True", "None"]] * 2
    assert kinds("no decision") == [
        ["ZeroDivisionError", "ZeroDivisionError", "True"],
        ["ProcessError", "ProcessError", "True"],
    ]
    assert found["no decision"][0]["steps"] == [2, 7]
    # Both raise what one knows, at the same step, and then go on together.
    for told in found["a failure that one knows"]:
        raised, *after = told["found"]
        assert "what only process 1 knows" in raised
        assert after == ["True", "None"]
        assert told["steps"] == [1, 3]
    # Calls that read, and attach: what the bad process raises, and what the other does.
    for name, own, others in (
        ("attach: on the CPU", "AttachError", "AttachError: process 1: "),
        ("attach: no values", "ValueError", "ProcessError: process 1: ValueError: "),
        ("attach: again", "AttachError", "AttachError: attach was called before"),
        *(
            (f"{call}: tier", "TierError", "TierError: process 1: ")
            for call in ("restore", "load", "verify", "delete")
        ),
        ("load: state", "MismatchError", "MismatchError: process 1: "),
        ("restore: step", "StepTypeError", "ProcessError: the processes do not make the same"),
        ("should_save: step", "StepTypeError", "False"),
    ):
        assert kinds(name)[1] == [own], name
        assert found[name][0]["found"][0].startswith(others), name
    for name, answer in {"attach": "0", "saved": "True", "restore": "2"}.items():
        assert [told["found"][0] for told in found[name]] == [answer] * 2
    assert [told["steps"] for told in found["delete"]] == [[], []]
    assert all(told["secs"] < 40 for pair in found.values() for told in pair)  # of 60


@pytest.mark.slow
def test_calls_that_differ_are_named_at_once_and_end_the_run(
    together: Together, tmp_path: Path
) -> None:
    first, second = together(CALLS, 2, "differing", tmp_path / "run")
    found = {a["name"]: (a, b) for a, b in zip(first, second, strict=True)}
    named = {
        "other steps": ("save(10)", "save(12)"),
        "left out": ("save(14)", "save(16)"),
        "left out, unforced": ("save(10)", "save(11)"),
        "by 0": ("save(20)", "save(18)"),
        "by 1": ("save(20)", "save(22)"),
        "forced by 0": ("save(20)", "save(18)"),
        "restoring": ("restore(2)", "save(24)"),
        "while it decides": ("restore(1)", "save(100)"),
        "other restores": ("restore(1)", "restore(2)"),
        "deleting": ("save(25)", "delete(1)"),
        "reading": ("load(1)", "verify(1)"),
        "closing": ("save(28)", "close()"),
        "in flight": ("restore(1)", "save(6)"),
    }
    for name, (one, other) in named.items():
        calls = [re.escape(call) + f" at {CALLS}:\\d+" for call in (one, other)]
        text = f"process 0 called {calls[0]}, but process 1 called {calls[1]}\\."
        error = found[f"after {name}"][0]["found"][0]
        assert re.search(text, error), (name, error)
        # Whoever waits is told; who has closed has nothing left to learn.
        has_ended = (False, name == "closing")
        for told, is_closed in zip(found[name], has_ended, strict=True):
            waits = name not in ("left out", "left out, unforced") or told is found[name][0]
            assert is_closed or not waits or re.search(text, " ".join(told["found"])), told
            assert told["secs"] < 10, "process_timeout_secs is 60"
        for told, is_closed in zip(found[f"after {name}"], has_ended, strict=True):
            assert is_closed or told["found"] == [error] * 7, name
            assert told["secs"] < 5
        for told in found[f"never raising {name}"]:
            assert told["found"] == ["False", "False", "None", "True", "True", "{}", "None", "None"]
        is_left_by_error = name == "restoring"
        for told, is_closed in zip(found[f"closing {name}"], has_ended, strict=True):
            ended = '"the user\'s own"' if is_left_by_error else "None" if is_closed else error
            assert told["found"] == [f"{ended!r}" if is_left_by_error else ended, "None"]
        # A save that all have begun becomes durable; a new checkpointer goes on from there.
        newest = {"left out": 16, "left out, unforced": 5, "in flight": 5}.get(name, 2)
        for told in found[f"again {name}"]:
            assert told["found"] == [newest, True]
            assert told["steps"] == sorted({1, 2, newest, 40})


@pytest.mark.slow
def test_who_waits_for_nobody_learns_of_calls_that_differ_at_its_next_declined_save(
    together: Together, tmp_path: Path
) -> None:
    for _, differing, closing in together(CALLS, 3, "looking_on", tmp_path / "run"):
        text = r"process 0 called save\(100\) at \S+, but process 1 called save\(101\) at"
        assert re.search(text, differing["found"][-1]), differing
        assert differing["secs"] < 5
        assert closing["found"][0].startswith("ProcessError: ")


@pytest.mark.slow
def test_who_is_late_or_refuses_a_call_or_leaves_out_a_declined_save_does_not_differ(
    together: Together, tmp_path: Path
) -> None:
    first, second = together(CALLS, 2, "not_differing", tmp_path / "run")
    found = {a["name"]: (a["found"], b["found"]) for a, b in zip(first, second, strict=True)}
    expected: dict[str, list[str]] = {
        "late": ["2"],
        "late save": ["True", "True", "None"],
        "slow decision": ["False", "False"],
        "after no step": ["True", "None"],
        "after no step, declined": ["True", "None", "False"],
        "declined": ["False"],
        "not foreseen": ["False"],
        "after declined": ["True", "None", "54", "True", "None"],
        "in the end": ["55", "None", "True", "None"],
        "closing": ["None"],
    }
    for name, answers in expected.items():
        for told in found[name]:
            assert told[-len(answers) :] == answers, name
    for name, failing, mine, own in (
        ("no step", "SaveError: ", "save(27)", "save('27')"),
        ("no step to restore", "ProcessError: ", "restore(55)", "restore('55')"),
        ("no step after that", "SaveError: ", "save(34)", "save('34')"),
        ("undecided after that", "SaveError: ", "save(40)", "save('40')"),
    ):
        told, refused = found[name]
        failure = told[1 if name.endswith("after that") else -1]
        assert failure.startswith(failing), (name, told)
        assert f"process 0 called {mine} at {CALLS}:" in failure
        assert f"process 1 called {own} at {CALLS}:" in failure
        also = "'latest', 'best:METRIC' or" if own.startswith("restore") else "found "
        assert refused[0].startswith(f"StepTypeError: step: expected an int, {also}")
    assert found["no step, declined"][0] == ["False"]
    assert max(told["secs"] for told in (*first, *second)) < 10, "process_timeout_secs is 60"
