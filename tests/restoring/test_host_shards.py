"""One slice of several hosts, each of which saves its part for itself; no part has another copy."""

from __future__ import annotations

import logging
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torchax
from jax.sharding import NamedSharding
from processes_program import Training
from support import PROGRAMS
from support.commands import run
from support.live import Together
from support.processes import Running
from support.training import P, fsdp_mesh
from support.waiting import wait_until
from typer.testing import CliRunner

from torchax_ckpt import LocalTier, TorchaxCheckpointer, load_torch_state_dict, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.restoring import host_shards
from torchax_ckpt.state.component import LeafRead
from torchax_ckpt.state.leaf import Spec

PROGRAM = PROGRAMS / "group.py"


def settings(place: Path, *do: Any, **more: Any) -> dict[str, Any]:
    """Of a run of two hosts, each with a local tier for its own shards."""
    # In several batches, of which the later are begun while the other tier's save goes on.
    options = {"process_timeout_secs": 60, "max_host_bytes": 1000}
    places = {"directory": str(place / "run"), "ramdisks": str(place / "ramdisks")}
    return {**places, "options": options, "do": do, **more}


def started(
    together: Together, place: Path, seed: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Trains to the end; returns from what each process began, and its state at the end."""
    given = settings(place, "attach", ["train", 7], "close", seed=seed)
    return [(first, end) for first, end, _ in together(PROGRAM, 2, given)]


@pytest.fixture(scope="module")
def killed(together: Together, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where a run of two killed hosts has left its steps, and how one that was not killed ends."""
    place = tmp_path_factory.mktemp("parts")
    do = "attach", ["train", 6], "wait", "steps", "die"
    with Running(PROGRAM, 2, settings(place, *do)) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output(0)[1][-3000:]
        for index in range(2):
            first, _, end = running.reports(index)
            assert (first["start"], end["local"]) == (0, [5, 6])
    return place, started(together, place / "straight", 0)


@pytest.fixture
def left(killed: tuple[Path, Any], tmp_path: Path) -> tuple[Path, Path]:
    """A copy of what the killed run has left: its directory, and the ramdisks of both hosts."""
    for name in ("run", "ramdisks"):
        shutil.copytree(killed[0] / name, tmp_path / name)
    return tmp_path / "run", tmp_path / "ramdisks"


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "start", "tier"), [(None, 6, "local"), (1, 4, "durable")])
def test_killed_hosts_go_on_from_their_own_parts_and_a_lost_host_from_the_durable_step(
    lost: int | None,
    start: int,
    tier: str,
    killed: tuple[Path, list[Any]],
    left: tuple[Path, Path],
    together: Together,
) -> None:
    directory, ramdisks = left
    if lost is not None:
        shutil.rmtree(ramdisks / str(lost))
    found = started(together, directory.parent, 77)
    for (first, here), (_, there) in zip(found, killed[1], strict=True):
        assert (first["start"], first["tier"]) == (start, tier)
        assert len(first["warned"]) == (0 if lost is None else 2)
        assert (here["own"], here["whole"]) == (there["own"], there["whole"])
    assert len({end["own"]["torch"] for _, end in found}) == 2


@pytest.mark.parametrize("said", [["fsdp", "fsdp"], [["fsdp", "fsdp"]], [{}], 3, None, ["zebra"]])
def test_a_manifest_that_says_an_impossible_sharding_changes_no_read(said: Any) -> None:
    placement = NamedSharding(fsdp_mesh(), P())
    read = LeafRead("w", Spec("torchax", "float32", (8, 8)), placement)
    assert host_shards.as_saved({"w": read}, {"w": said}) == {"w": read}
    assert host_shards.as_saved({"w": read}, {"w": ["fsdp"]}) != {"w": read}


REFUSED = r"expected the whole leaf, \[256, 8\], found \[128, 8\]: .* holds one host's part"
OF_TWO = "step 4 was saved by 2 processes and is restored by 1"


@pytest.mark.slow
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
        assert f"resumed from step 4 of {directory} (durable tier), saved" in caplog.text
        training.step()
        assert ckpt.save(5)
        ckpt.wait_until_finished()
        assert ckpt.all_steps("local") == [5]


@pytest.mark.slow
def test_no_reader_takes_a_hosts_part_for_a_whole(left: tuple[Path, Path], tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_what_cannot_be_put_together_fails_alike_and_leaves_nothing(
    together: Together, tmp_path: Path
) -> None:
    local = {"tier": "local"}
    verified: list[Any] = [["verify", 1, local], ["verify", 2, local], "steps"]
    damaged: list[Any] = [["flip", [1], 1]]
    damaged += [["attempt", "restore", 1, local], ["attempt", "load", 1, local]]
    damaged += [["train", 4, 3], "wait", "steps"]
    lost: list[Any] = [["lose", [1], 4], "restore"]
    failed: list[Any] = [
        ["fail_disk", 1],
        ["train", 5, 5],
        "wait",
        "steps",
        ["train", 6, 6],
        "wait",
        "steps",
    ]
    do = ["attach", ["train", 2], "wait", *verified, *damaged, *lost, *failed, "close"]
    given = settings(tmp_path, *do, every=[4], keep_local=9)
    for reports, marked in zip(together(PROGRAM, 2, given), ([1, 2], [2]), strict=True):
        _, _, one, two, sound, *told, _, after = reports[:9]
        assert (one["verify"], two["verify"], sound["marked"]) == (1, 2, [1, 2])
        assert told == [{"told": "CorruptCheckpointError"}] * 2
        assert after["marked"] == marked, "its own copy is sound, or not"
        restored, _, failure, there, _, end, _ = reports[9:]
        assert restored == {"step": 4, "tier": "durable", "skipped": [4], "said": 1}
        assert "Input/output error" in failure["failed"]
        assert "5" not in there["files"]
        assert end["local"] == [1, 2, 3, 6]
        assert [name for name in end["files"] if name.isdigit()] == ["1", "2", "3", "6"]


@pytest.mark.slow
def test_one_host_that_is_told_to_end_has_all_save_the_same_durable_step(tmp_path: Path) -> None:
    given = settings(tmp_path, "attach", "train_until_told", every=[])
    with Running(PROGRAM, 2, given) as running:

        def has_saved() -> bool:
            assert [process.poll() for process in running.processes] == [None] * 2
            return (tmp_path / "ramdisks" / "1" / "2").exists()

        wait_until(has_saved, timeout_secs=280)
        running.processes[1].terminate()
        assert running.wait() == [128 + signal.SIGTERM] * 2, running.output(0)[1][-3000:]
        ends = [running.reports(index)[-1] for index in range(2)]
    step = ends[0]["step"]
    for end in ends:
        assert (end["step"], end["durable"]) == (step, [step])
        assert end["local"] == [step - 2, step - 1]
