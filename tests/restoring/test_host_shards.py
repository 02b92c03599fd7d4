"""One slice of several hosts, each of which saves its part for itself; no part has another copy."""

from __future__ import annotations

import logging
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torchax
from processes_program import Training
from support.commands import run
from support.processes import Running, run_processes
from typer.testing import CliRunner

from torchax_ckpt import LocalTier, TorchaxCheckpointer, load_torch_state_dict, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app
from torchax_ckpt.errors import CorruptCheckpointError

OPENED = """
    import os, pathlib, shutil, signal, sys, time, warnings
    from processes_program import INDEX, Training, report
    from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies

    directory, mine = sys.argv[4], pathlib.Path(sys.argv[5], str(INDEX))
    training = Training(int(sys.argv[6]))

    def opened(durable, keep=2):
        return TorchaxCheckpointer(
            directory,
            save_decision_policy=durable,
            local=LocalTier(
                mine, save_decision_policy=policies.FixedIntervalPolicy(1), keep=keep
            ),
            # In several batches, of which the later are begun while the other tier's save goes on.
            options=CheckpointOptions(process_timeout_secs=60, max_host_bytes=1000),
        )
"""

RUN = (
    OPENED
    + """
    kill_at = int(sys.argv[7])
    ckpt = opened(policies.FixedIntervalPolicy(4))
    with warnings.catch_warnings(record=True) as said:
        start = training.attach(ckpt)
    tier = ckpt.restore(start).tier if start else None
    for step in range(start + 1, 8):
        training.step()
        ckpt.save(step)
        if step == kill_at:
            ckpt.wait_until_finished()
            report(start=start, local=ckpt.all_steps("local"))
            os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    report(
        start=start, tier=tier, skipped=len(said), own=training.own(), whole=training.whole()
    )
"""
)


def started(directory: Path, ramdisks: Path, seed: int) -> list[dict[str, Any]]:
    reports = run_processes(RUN, 2, str(directory), str(ramdisks), str(seed), "0")
    return [report for (report,) in reports]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where a run of two killed hosts has left its steps, and how one that was not killed ends."""
    place = tmp_path_factory.mktemp("parts")
    arguments = str(place / "run"), str(place / "ramdisks"), "0", "6"
    with Running(RUN, 2, *arguments) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output(0)[1][-3000:]
        for index in range(2):
            assert running.reports(index) == [{"start": 0, "local": [5, 6]}]
    return place, started(place / "straight", place / "straight-ramdisks", 0)


@pytest.fixture
def left(killed: tuple[Path, Any], tmp_path: Path) -> tuple[Path, Path]:
    """A copy of what the killed run has left: its directory, and the ramdisks of both hosts."""
    for name in ("run", "ramdisks"):
        shutil.copytree(killed[0] / name, tmp_path / name)
    return tmp_path / "run", tmp_path / "ramdisks"


@pytest.mark.parametrize(("lost", "start", "tier"), [(None, 6, "local"), (1, 4, "durable")])
def test_killed_hosts_go_on_from_their_own_parts_and_a_lost_host_from_the_durable_step(
    lost: int | None,
    start: int,
    tier: str,
    killed: tuple[Path, list[dict[str, Any]]],
    left: tuple[Path, Path],
) -> None:
    directory, ramdisks = left
    if lost is not None:
        shutil.rmtree(ramdisks / str(lost))
    found = started(directory, ramdisks, 77)
    for here, there in zip(found, killed[1], strict=True):
        assert (here["start"], here["tier"]) == (start, tier)
        assert here["skipped"] == (0 if lost is None else 2)
        assert (here["own"], here["whole"]) == (there["own"], there["whole"])
    assert len({report["own"]["torch"] for report in found}) == 2


# --- where fewer hosts look at it ----------------------------------------------------------------

REFUSED = r"expected all of it, \[256, 8\], found \[128, 8\]: .* holds one host's part"
OF_TWO = "step 4 was saved by 2 processes and is restored by 1"


def test_one_process_takes_no_hosts_part_for_the_whole(
    left: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory, ramdisks = left
    with (
        TorchaxCheckpointer(
            directory,
            save_decision_policy=policies.FixedIntervalPolicy(4),
            local=LocalTier(ramdisks / "0", save_decision_policy=policies.FixedIntervalPolicy(1)),
        ) as ckpt,
        caplog.at_level(logging.INFO, "torchax_ckpt"),
    ):
        assert ckpt.all_steps("local") == [5, 6]
        with pytest.warns(UserWarning, match=REFUSED), pytest.warns(UserWarning, match=OF_TWO):
            state = ckpt.load()
        assert state["model"]["0.weight"].shape == (256, 8)
        with pytest.raises(CorruptCheckpointError, match=REFUSED) as raised:
            ckpt.load(6, tier="local")
        assert (raised.value.step, raised.value.key_path) == (6, "model/0.weight")
        assert ckpt.verify(6, tier="local") == 6  # every byte is as it was saved
        torchax.disable_globally()
        training = Training(77)  # builds its model, and enables torchax
        with pytest.warns(UserWarning, match=REFUSED), pytest.warns(UserWarning, match=OF_TWO):
            assert training.attach(ckpt) == 4
        assert f"restored step 4 from the durable tier, {directory}" in caplog.text
        training.step()
        assert ckpt.save(5)
        ckpt.wait_until_finished()
        assert ckpt.all_steps("local") == [5]


def test_a_reader_takes_no_hosts_part_for_the_whole(
    left: tuple[Path, Path], tmp_path: Path
) -> None:
    directory, ramdisks = left
    local = ramdisks / "1"
    assert load_torch_state_dict(directory)["0.weight"].shape == (256, 8)
    with pytest.raises(CorruptCheckpointError, match=REFUSED):
        load_torch_state_dict(local)
    for command in (
        ("show", local),
        ("export", local, "6", tmp_path / "out"),
        ("copy", local / "6", tmp_path / "copy"),
        ("diff", local / "6", directory / "4"),
    ):
        result = CliRunner().invoke(app, list(map(str, command)))
        assert result.exit_code == exit_codes.FOUND, result.output
        assert re.search(REFUSED, " ".join(result.stderr.split())), command
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "copy").exists()
    assert "step 6:" in run("verify", local)


# --- what one host meets, all do -----------------------------------------------------------------

FAULTS = (
    OPENED
    + """
    from torchax_ckpt import errors
    from torchax_ckpt.storage.directory.run_directory import StepDirectory

    ckpt = opened(policies.SpecificStepsPolicy((4,)), keep=9)
    training.attach(ckpt)

    def train(*steps):
        for step in steps:
            training.step()
            assert ckpt.save(step)
        ckpt.wait_until_finished()

    train(1, 2)
    for step in (1, 2):
        assert ckpt.verify(step, tier="local") == step
    marks = {step: mine / str(step) / "verified" for step in (1, 2)}
    assert all(mark.exists() for mark in marks.values())

    # The copy of one host is damaged.
    if INDEX == 1:
        for file in (mine / "1" / "state").rglob("d/*"):
            content = bytearray(file.read_bytes())
            content[-20] ^= 1
            file.write_bytes(content)
    told = []
    for call in (ckpt.restore, ckpt.load):
        try:
            call(1, tier="local")
        except errors.CheckpointError as error:
            told.append(type(error).__name__)
    train(3, 4)
    report(told=told, marked=[step for step in marks if marks[step].exists()])

    # One host has lost a step.
    if INDEX == 1:
        shutil.rmtree(mine / "4")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = ckpt.restore()
    report(step=found.step, tier=found.tier, skipped=found.skipped_steps, said=len(said))

    # One host's disk fails when the others have committed.
    commit = StepDirectory.commit
    def failing(self, step, written, at=None):
        if str(self.path) == str(mine):
            time.sleep(1)
            raise OSError(5, "Input/output error")
        return commit(self, step, written, at)
    if INDEX == 1:
        StepDirectory.commit = failing
    training.step()
    assert ckpt.save(5)
    try:
        ckpt.wait_until_finished()
    except errors.SaveError as error:
        failure = str(error)
    StepDirectory.commit = commit
    report(failed="Input/output error" in failure, there=sorted(os.listdir(mine)))
    train(6)
    ckpt.close()
    report(local=ckpt.all_steps("local"), there=[n for n in os.listdir(mine) if n[0].isdigit()])
"""
)


def test_what_cannot_be_put_together_fails_alike_and_leaves_nothing(tmp_path: Path) -> None:
    places = str(tmp_path / "run"), str(tmp_path / "ramdisks")
    first, second = run_processes(FAULTS, 2, *places, "0")
    damaged = {"told": ["CorruptCheckpointError"] * 2}
    assert first[0] == {**damaged, "marked": [1, 2]}, "its own copy is sound"
    assert second[0] == {**damaged, "marked": [2]}
    assert first[1] == second[1] == {"step": 4, "tier": "durable", "skipped": [4], "said": 1}
    for _, _, failed, end in (first, second):
        assert failed["failed"]
        assert "5" not in failed["there"]
        assert end["local"] == [1, 2, 3, 6]
        assert sorted(end["there"]) == ["1", "2", "3", "6"]


TOLD_TO_END = (
    OPENED
    + """
    ckpt = opened(policies.SpecificStepsPolicy(()))
    training.attach(ckpt)
    report(ready=True)
    for step in range(1, 3000):
        training.step()
        ckpt.save(step)
        if ckpt.reached_preemption(step):
            break
    ckpt.close()
    report(step=step, durable=ckpt.all_steps("durable"), local=ckpt.all_steps("local"))
    sys.exit(143)
"""
)


def test_one_host_that_is_told_to_end_has_all_save_the_same_durable_step(tmp_path: Path) -> None:
    places = str(tmp_path / "run"), str(tmp_path / "ramdisks"), "0"
    with Running(TOLD_TO_END, 2, *places) as running:
        while not (tmp_path / "ramdisks" / "1" / "2").exists():
            assert [process.poll() for process in running.processes] == [None] * 2
            time.sleep(0.1)
        running.processes[1].terminate()
        assert running.wait() == [128 + signal.SIGTERM] * 2, running.output(0)[1][-3000:]
        ends = [running.reports(index)[-1] for index in range(2)]
    step = ends[0]["step"]
    for end in ends:
        assert (end["step"], end["durable"]) == (step, [step])
        assert end["local"] == [step - 2, step - 1]
