"""Slices: what the hosts of one have lost comes back from those of another, bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost import multislice
from support import PROGRAMS
from support.live import Together
from support.processes import Running, run_processes
from support.slices import PROGRAM, assert_ends_alike, killed, resumed, settings, straight


@pytest.fixture(scope="module")
def two_slices(
    together: Together, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """Where a killed run of two slices has left its steps, and how one that was not killed ends."""
    place = tmp_path_factory.mktemp("slices")
    killed(place / "run", place / "ramdisks", 2, at=6)
    return place, straight(together, place, 2)


@pytest.fixture(scope="module")
def four_hosts(
    together: Together, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """How a run of two slices of two hosts ends that nobody kills."""
    return straight(together, tmp_path_factory.mktemp("four"), 4)


def left(place: Path, tmp_path: Path, *lost: int) -> tuple[Path, Path]:
    """What is left after the loss of some hosts: the run's directory, and the ramdisks."""
    for name in ("run", "ramdisks"):
        shutil.copytree(place / name, tmp_path / name)
    for index in lost:
        shutil.rmtree(tmp_path / "ramdisks" / str(index))
    return tmp_path / "run", tmp_path / "ramdisks"


@pytest.mark.slow
def test_two_lost_slices_come_back_from_the_durable_tier_and_what_a_host_kept_is_stale(
    together: Together, tmp_path: Path, two_slices: tuple[Path, list[dict[str, Any]]]
) -> None:
    place, never_killed = two_slices
    directory, ramdisks = left(place, tmp_path, 0, 1)
    for _ in range(2):
        found = resumed(together, directory, ramdisks, 2)
        assert [(report["start"], report["tier"]) for report in found] == [(4, "durable")] * 2
        assert_ends_alike(found, never_killed)
        # The run went on without the first host, which comes back as it was; the second is lost.
        shutil.rmtree(ramdisks)
        shutil.copytree(place / "ramdisks" / "0", ramdisks / "0")


@pytest.mark.slow
def test_a_step_that_only_bears_the_same_number_is_not_taken_for_another_hosts(
    together: Together, tmp_path: Path, two_slices: tuple[Path, list[dict[str, Any]]]
) -> None:
    """A host has lost its steps, and still has those of the same numbers of another run."""
    place, never_killed = two_slices
    killed(tmp_path / "other", tmp_path / "others", 2, at=6, seed=5)
    directory, ramdisks = left(place, tmp_path, 0)
    shutil.copytree(tmp_path / "others" / "0", ramdisks / "0")
    found = resumed(together, directory, ramdisks, 2)
    assert [(report["start"], report["tier"]) for report in found] == [(6, "local")] * 2
    assert_ends_alike(found, never_killed)


@pytest.mark.slow
def test_hosts_whose_clocks_differ_know_their_steps_for_the_same(
    tmp_path: Path, two_slices: tuple[Path, list[dict[str, Any]]]
) -> None:
    """The time of a commit is part of what a step is known by; here each host commits its own."""
    _, never_killed = two_slices
    directory, ramdisks = tmp_path / "run", tmp_path / "ramdisks"
    # Fresh: what is imported finds the clocks wrong.
    killed(directory, ramdisks, 2, at=6, env={"SKEW_SECS": "3600"}, fresh=True)
    shutil.rmtree(ramdisks / "0")
    found = resumed(run_processes, directory, ramdisks, 2, env={"SKEW_SECS": "-3600"}, fresh=True)
    assert [(report["start"], report["tier"]) for report in found] == [(6, "local")] * 2
    assert_ends_alike(found, never_killed)


@pytest.mark.slow
def test_hosts_come_back_at_other_places(
    together: Together, tmp_path: Path, four_hosts: list[dict[str, Any]]
) -> None:
    """Two slices of two hosts; the two that are left come up as each other's process."""
    directory, ramdisks = tmp_path / "run", tmp_path / "ramdisks"
    killed(directory, ramdisks, 4, at=6)
    for index in (1, 2):
        shutil.rmtree(ramdisks / str(index))
    (ramdisks / "0").rename(ramdisks / "was 0")
    (ramdisks / "3").rename(ramdisks / "0")
    (ramdisks / "was 0").rename(ramdisks / "3")
    found = resumed(together, directory, ramdisks, 4)
    assert [(report["start"], report["tier"]) for report in found] == [(6, "local")] * 4
    assert_ends_alike(found, four_hosts)


@pytest.mark.slow
def test_a_whole_local_step_is_taken_if_a_later_one_is_half_there(
    together: Together, tmp_path: Path, four_hosts: list[dict[str, Any]]
) -> None:
    """Two slices of two hosts; one host has lost its steps: only one slice has all of step 6."""
    directory, ramdisks = tmp_path / "run", tmp_path / "ramdisks"
    killed(directory, ramdisks, 4, at=6)
    shutil.rmtree(ramdisks / "3")
    do = "attach", ["die_half_committed", 7], ["train", 7], "wait"
    with Running(PROGRAM, 4, settings(directory, ramdisks, *do)) as running:
        assert running.wait() == [-signal.SIGKILL] * 4, running.output(0)[1][-3000:]
    assert [(ramdisks / f"{i}" / "7").exists() for i in range(4)] == [False, True, False, True]
    assert [(ramdisks / f"{i}" / "6").exists() for i in range(4)] == [True, True, True, False]
    found = resumed(together, directory, ramdisks, 4)
    assert [(report["start"], report["tier"]) for report in found] == [(6, "local")] * 4
    assert_ends_alike(found, four_hosts)
    assert not list(ramdisks.glob("*/6")), "removed once a new step is on all hosts"


@pytest.mark.slow
def test_what_hosts_hold_goes_to_wherever_it_is_needed_bit_for_bit(
    together: Together, tmp_path: Path
) -> None:
    """Every dtype and way to shard; hosts 0 and 1 are one slice, and 2 and 3 the other."""
    places = [
        (0, 1, 2, 3),
        (1, 0, 3, 2),  # exchanged within the slices
        (2, 1, 0, 3),  # across slices
        (1, 2, 3, 0),
        (None, 1, 2, None),  # lost, and none of the slices is whole
        (1, 3, 0, None),  # two have one part, and one the other
        (None, 0, None, 1),
        (1, None, 3, None),  # nobody has the first half
    ]
    program, names = PROGRAMS / "arrays_on_processes.py", ("run", "ramdisks")
    arguments = "moved_local_steps", *(tmp_path / name for name in names), json.dumps(places)
    for index, reports in enumerate(together(program, 4, *arguments)):
        *found, lost = reports
        told = {"start": 1, "own": index, "wrong": []}
        for report, hosts in zip(found, places, strict=False):
            assert ("in place of modules" in report.pop("refusal")) == (None in hosts)
        assert found == [{"hosts": list(hosts), **told} for hosts in places[:-1]]
        assert lost["error"] in ("CorruptCheckpointError", "StepNotFoundError")


@pytest.mark.long
def test_hosts_of_one_slice_that_hold_the_same_are_each_given_it(
    together: Together, tmp_path: Path
) -> None:
    """And a damaged copy is not taken for verified because another host's was."""
    do: list[Any] = ["attach", ["train", 1], "wait", "sync", ["flip", [0, 3], 1], ["reopen", 77]]
    do += ["attach", ["train", 2], "wait", "steps"]
    given = settings(tmp_path / "run", tmp_path / "ramdisks", *do, every=[], is_replicated=True)
    verified = [[], [1], [1], []]
    for reports, marked in zip(together(PROGRAM, 4, given), verified, strict=True):
        _, saved, found, _, end = reports
        assert (found["start"], found["tier"]) == (1, "local")
        assert (found["whole"], found["own"]) == (saved["whole"], saved["own"])
        assert end["marked"] == marked


@pytest.mark.slow
@pytest.mark.parametrize(("way", "count"), [("lost", 4), ("exchanged", 2)])
def test_a_process_gets_its_state_with_a_damaged_copy(
    way: str, count: int, together: Together, tmp_path: Path
) -> None:
    last = [count - 2, count - 1]
    harm: Any = [["lose", last, 2], ["damage_state_of_last", 0, 2]]
    if way == "exchanged":
        harm = ["exchange", ["flip", [1], 2]]
    do = "attach", ["train", 2], "close", "sync", *harm, ["reopen", 77], "attach"
    given = {"every": [1], "slices": count, "is_replicated": True}
    given = settings(tmp_path / "run", tmp_path / "ramdisks", *do, **given)
    for _, saved, *_, found in together(PROGRAM, count, given):
        assert (found["start"], found["tier"]) == (2, "local")
        assert found["own"] == saved["own"]


@pytest.mark.slow
def test_orbax_still_loses_bits_on_the_way_to_other_slices() -> None:
    """Where it no longer does, docs/multi-tier.md has a reason less not to build on it."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("replica", "fsdp"))
    first = NamedSharding(Mesh(mesh.devices[0], ("fsdp",)), PartitionSpec("fsdp"))

    def arrives(sent: np.ndarray) -> bool:
        (found,), _ = multislice.broadcast_one_replica_to_all(
            (jax.device_put(sent, first),), mesh, 0, True, memory_limit_bytes=1 << 20
        )
        return (found.dtype, np.asarray(found).tobytes()) == (sent.dtype, sent.tobytes())

    assert arrives(np.arange(16, dtype=np.float32))
    assert not arrives(np.full(4, -0.0, np.float32))
    assert not arrives(np.full(4, 0x7F800001, np.uint32).view(np.float32)), "a signalling NaN"
    assert not arrives(np.array([True, False, True, False]))
    assert not arrives(np.array([1, -2, 3, -4], np.int8))
