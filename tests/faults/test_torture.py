"""Short forms of the tortures, and that each finds what is less careful than it should be."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import fault_endurance
import fault_fuzz
import pytest
from oracle import LOST, RESTORED, WRONG
from starts import HUNG
from support.processes import Started, run_python
from torture import Torture

from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.state import pytree

LONG = (pytest.mark.slow, pytest.mark.long)
EXACT = "steps restored exactly"
GCS = "--rate 0.02 --outage-secs 0"


def run_torture(fault: str, arguments: str) -> tuple[int, dict[str, int], str]:
    """Returns the exit code, the table and the output of a torture."""
    program = Path(__file__).parent / "torture.py"
    words = "--fault", fault, *shlex.split(arguments)
    result = Started(program, *words, devices=None).result(280)
    rows = re.findall(r"^(.+?) +(\d+)$", result.stdout, re.MULTILINE)
    table = {name.strip(): int(value) for name, value in rows}
    return result.returncode, table, result.stdout + result.stderr[-4000:]


@pytest.mark.parametrize(
    ("fault", "arguments", "least"),
    [
        ("kill", "--count 1 --seed 5", {"SIGKILLs": 1, RESTORED: 1}),
        pytest.param(
            *("kill", "--count 15 --seconds 45 --seed 4", {"SIGKILLs": 3, RESTORED: 3}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("kill", "--processes 2 --count 2 --seconds 4 --seed 6", {"SIGKILLs": 1, RESTORED: 1}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("hosts", "--count 9 --seconds 15 --seed 1", {"rounds": 1, RESTORED: 4}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("flips", "--count 24 --seed 1", {"flipped bits": 24, "detected": 2}), marks=LONG
        ),
        pytest.param(
            "gcs",
            f"--count 6 --processes 2 --seed 3 --kill-every 1 --kill-within 3 {GCS}",
            {"killed on the way": 2, EXACT: 2},
            marks=LONG,
        ),
        pytest.param(
            "gcs",
            f"--server independent --count 4 --processes 1 --kill-every 2 --kill-within 9 {GCS}",
            {EXACT: 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("mirror", "--count 5 --seed 2 --out 0.1 --rate 0.05 --kill-within 15", {"rounds": 5}),
            marks=pytest.mark.slow,
        ),
        pytest.param("endurance", "--count 60", {"saves": 60}, marks=LONG),
        pytest.param("endurance", "--count 60 --processes 2", {"saves": 60}, marks=LONG),
        pytest.param("endurance", "--count 30 --bucket", {"saves": 30}, marks=LONG),
    ],
)
def test_a_short_torture_finds_nothing(fault: str, arguments: str, least: dict[str, int]) -> None:
    code, table, output = run_torture(fault, arguments)
    assert code == 0, output
    for row, number in least.items():
        assert table[row] >= number, output


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "arguments", "row"),
    [
        ("kill", "--count 60 --weakened delete-first", LOST),
        ("kill", "--count 60 --weakened mixed", WRONG),
        # It depends on the moment of a kill: half a step, or a step of the same number gone.
        ("kill", "--count 60 --weakened copy", f"{WRONG}|{LOST}"),
        ("kill", "--count 9 --processes 2 --weakened one-copy", WRONG),
        ("hosts", "--weakened delete-local-first --only 'SIGKILL to all'", LOST),
        ("hosts", "--weakened mixed --only nothing", WRONG),
        ("hosts", "--weakened patient --only 'SIGKILL to one'", HUNG),
        ("flips", "--count 32 --seed 1 --weakened orbax", "flips that went wrong"),
        (
            "gcs",
            "--count 3 --processes 1 --rate 0 --outage-secs 0 --kill-every 0 --weakened flip",
            "lost or wrong steps",
        ),
        (
            "mirror",
            "--count 6 --rate 0 --out 0 --kill-within 15 --weakened forgetful",
            "resumed from an older step",
        ),
        ("endurance", "--count 30 --weakened leak", "growth of threads"),
    ],
)
def test_what_is_less_careful_is_found_out(fault: str, arguments: str, row: str) -> None:
    if fault == "hosts":
        arguments += " --count 30 --limit-secs 20 --seed 1"
    code, table, output = run_torture(fault, arguments)
    assert code == 1, output
    assert any(table[each] > 0 for each in row.split("|")), output
    match fault:
        case "gcs":  # every third step is spoiled
            assert (table["durable"], table[row]) == (3, 1), output
            assert "killed on the way" not in table, output
        case "endurance":
            assert all(table[each] == 1 for each in fault_endurance.FINDINGS), output
    assert "one-copy" not in arguments or "share files" in output


@pytest.mark.slow
def test_the_disturbed_program_writes_stacks_in_batches(tmp_path: Path) -> None:
    """A save by reference has a batch for each stack; the first save is one batch."""
    run_python(
        """
        import sys
        from pathlib import Path
        from unittest import mock
        sys.path.insert(0, sys.argv[2])
        import disturbed
        from oracle import Oracle
        from torchax_ckpt.storage.writing import array_writer

        run, log = (Path(sys.argv[1], name) for name in ("run", "log"))
        settings, start = disturbed.Settings(), disturbed.Start(1, 1, 0, 0, 4, False)
        calls = {n: mock.Mock(wraps=getattr(array_writer, n)) for n in ("write_arrays", "_writing")}
        phase = disturbed.Phase(Path(sys.argv[1], "phase"))
        with mock.patch.multiple(array_writer, **calls):
            assert disturbed.run(run, log, settings, start, 0, None, phase) == 0
        num_saves, num_batches = (each.call_count for each in calls.values())
        assert num_batches >= 2 * len(disturbed.STACKED) > num_saves
        assert not any(Oracle(run, log, settings).inspect().found.values())
        """,
        *(str(tmp_path), str(Path(__file__).parent)),
        devices=1,
    )


# --- fuzz ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> fault_fuzz.Readers:
    return fault_fuzz.Readers(tmp_path_factory.mktemp("fuzz"))


def fuzzed(
    readers: fault_fuzz.Readers, count: int, seconds: float = 60
) -> tuple[list[str], set[str]]:
    """Returns what is wrong, and the outcomes."""
    given = argparse.Namespace(count=count, seconds=seconds, seed=1, weakened=None, first=1)
    torture = Torture(given, Path(), fault_fuzz.FINDINGS)
    fault_fuzz.fuzz(torture, readers)
    return torture.findings[fault_fuzz.HARM], set(torture.parts[fault_fuzz.INPUTS])


@pytest.mark.slow
def test_no_input_does_harm(readers: fault_fuzz.Readers) -> None:
    problems, outcomes = fuzzed(
        readers, 500, seconds=200
    )  # by number: a busy machine tries as many
    assert not problems, problems
    readers_of = ("restore", "torch archive", "torch pickle", "dcp metadata", "dcp chunk")
    refused = {f"{name}: CorruptCheckpointError" for name in readers_of}
    assert {"restore: read", "dcp chunk: read"} | refused <= outcomes
    assert len(outcomes) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weakening", "count", "problems", "crashes"),
    [
        ("naive", 200, 10, {"restore: !! TypeError", "load: !! TypeError"}),
        ("trusting", 100, 20, {"lease: !! TypeError"}),
        ("half", 60, 1, set()),
    ],
)
def test_a_reader_that_is_less_careful_is_found_out(
    weakening: str,
    count: int,
    problems: int,
    crashes: set[str],
    readers: fault_fuzz.Readers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = (readers, "by_name"), (Manifest, "from_json"), (pytree, "check_document")
    for owner, name in changed:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # is put back
    fault_fuzz.WEAKENINGS[weakening](readers)
    found, outcomes = fuzzed(readers, count)
    assert len(found) >= problems, found
    assert crashes <= outcomes
    assert crashes or "what is live has changed" in str(found)
