"""``torchax-ckpt plan``: the same numbers as the library's, and from what a run has recorded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support import synthetic
from support.commands import run, run_json

from torchax_ckpt import LocalTier, TorchaxCheckpointer, planning
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.telemetry.events import Event

LARGE = (
    *("plan", "--params", "70B", "--chips", 4096, "--slices", 2, "--host-mtbf", "365d"),
    *("--blocking", "1s", "--durable", "2min", "--slowdown", 0.05, "--restart", "5min"),
)


def test_a_plan_says_what_the_library_says() -> None:
    said = run_json(*LARGE)
    assert said["checkpoint_bytes"] == planning.state_bytes(70_000_000_000).total_bytes
    assert (said["hosts"], said["hosts_per_slice"]) == (1024, 512)
    assert said["ramdisk_bytes_per_host"] == planning.ramdisk_bytes_per_host(
        840_000_000_000, hosts_per_slice=512, num_copies=LocalTier("ramdisk").keep + 1
    )
    assert said["write_bytes_per_sec_and_host"] == 840_000_000_000 / 1024 / 120
    assert said["mtbf_secs"] == 365 * 86_400 / 1024
    tier = planning.Tier(blocking_secs=1, durable_secs=120, slowdown=0.05)
    assert said["save_cost_secs"] == tier.cost_secs
    best = planning.best_interval(
        blocking_secs=1, durable_secs=120, slowdown=0.05, mtbf_secs=said["mtbf_secs"]
    )
    assert said["best_interval_secs"] == best.interval_secs
    assert said["best_is_continuous"] is best.is_continuous is False
    assert said["expected_goodput"] == planning.expected_goodput(
        blocking_secs=1,
        durable_secs=120,
        slowdown=0.05,
        interval_secs=best.interval_secs,
        mtbf_secs=said["mtbf_secs"],
        restart_secs=300 + 120,  # and reading takes as long as writing, unless it is said
    )
    simulated = {row["policy"]: row for row in said["simulated"]}
    assert list(simulated) == ["continuous", "best interval", "every 10 min", "every hour"]
    found = simulated["best interval"]
    assert found["goodput"] == pytest.approx(said["expected_goodput"], rel=0.005)
    assert found["goodput_least"] <= found["goodput"] <= found["goodput_greatest"]
    parts = sum(found[f"{part}_fraction"] for part in ("saving", "lost", "down"))
    assert found["goodput"] + parts == pytest.approx(1, abs=0.001)
    assert found["goodput"] > max(
        simulated["continuous"]["goodput"], simulated["every hour"]["goodput"]
    )


def test_two_tiers_are_compared_where_their_times_are_given() -> None:
    said = run_json(*LARGE, "--local-durable", "10s", "--cluster-fraction", 0.02)
    tiers = said["simulated"][-1]
    assert tiers["policy"] == "two tiers, bucket hourly"
    assert tiers["local_interval_secs"] < tiers["interval_secs"]
    assert tiers["goodput"] > said["simulated"][1]["goodput"]


def test_a_table_for_people() -> None:
    lines = run(*LARGE).splitlines()
    said = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines[1:12])
    assert said["one checkpoint"] == "840 GB"
    assert said["ramdisk of each host, keep=2"] == "5.66 GB"
    assert said["each host writes"] == "6.84 MB/s"
    assert said["restart, then restore"] == "5 min + 2 min"
    assert said["best interval"] == "11 min"
    assert said["a save costs, with slower steps"] == "6.67 s"
    assert any(line.startswith("continuous ") for line in lines)


def test_saving_continuously_is_named_where_it_is_best() -> None:
    text = run("plan", "--size", "1GB", "--chips", 4, "--mtbf", "1h", "--blocking", "5ms",
               "--durable", "30s")  # fmt: skip
    assert re.search(r"best interval +30 s, which is to save continuously", text)


def test_a_plan_from_what_a_run_has_recorded(directory: Path) -> None:
    synthetic.three_runs(directory)
    said = run_json("plan", "--measured", directory, "--chips", 64)
    assert said["measured"] == ["blocking_secs", "durable_secs", "num_bytes", "restore_secs"]
    assert said["restore_secs"] == 21.5
    assert 1.49e9 < said["checkpoint_bytes"] < 1.5e9
    assert 30 < said["durable_secs"] < 50
    # What is said counts.
    assert run_json("plan", "--measured", directory, "--durable", "60")["durable_secs"] == 60
    assert "(measured)" in run("plan", "--measured", directory)


def test_what_saves_did_not_write_is_not_counted_as_written(directory: Path) -> None:
    sizes = {"num_bytes": 10_000, "new_bytes": 100, "linked_bytes": 9_900}
    values = {"blocking_secs": 0.1, "durable_secs": 2.0, **sizes}
    synthetic.write(directory, [[Event("durable", synthetic.BEGAN_SECS, 1, values)]])
    said = run_json("plan", "--measured", directory, "--chips", 4)
    assert said["checkpoint_bytes"] == 10_000
    assert said["write_bytes_per_sec_and_host"] * said["hosts"] == 50
    said = run_json("plan", "--measured", directory, "--chips", 4, "--size", "1GB")
    assert said["write_bytes_per_sec_and_host"] * said["hosts"] == 5e8


def test_what_a_local_tier_restored_says_nothing_of_the_durable_one(directory: Path) -> None:
    told = synthetic.run(first=25, last=500, at_secs=synthetic.BEGAN_SECS)
    local = [
        Event("restored", told[0].time_secs - back, 25, {"secs": 0.1, "tier": "local"})
        for back in (1, 2, 3)
    ]
    synthetic.write(directory, [[*local, *told]])
    assert run_json("plan", "--measured", directory)["restore_secs"] == 21.5


def test_a_plan_from_a_real_run(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state={"w": np.zeros(1000)}, force=True)
            ckpt.wait_until_finished()
        stats = ckpt.stats()
    said = run_json("plan", "--measured", directory)
    assert stats.durable_secs is not None
    assert said["durable_secs"] == pytest.approx(stats.durable_secs.p50, abs=1e-9)
    assert said["restore_secs"] == said["durable_secs"]  # none was recorded


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--params 70B"),
        (("--params", "70B", "--size", "1GB"), "not both"),
        (("--params", "many"), "expected a number such as 70B"),
        (("--params", "1B"), "give --durable"),
        (("--params", "1B", "--durable", "2min"), "give --blocking"),
        (("--params", "1B", "--durable", "soon", "--blocking", "1"), "expected a time such as"),
        (("--params", "1B", "--durable", "1", "--blocking", "2"), "durable_secs"),
        (("--params", "1B", "--durable", "0", "--blocking", "0"), "expected a time above 0"),
        (("--params", "1B", "--durable", "2", "--blocking", "1", "--chips", "6"), "num_chips"),
        (("--params", "1B", "--optimizer", "best"), "optimizer: expected one of"),
        (("--params", "1B", "--durable", "2", "--blocking", "1", "--slowdown", "-1"), "slowdown"),
        (("--measured", "{tmp}"), "no durable save is recorded"),
        (("--measured", "{tmp}/nowhere"), "no such directory"),
    ],
)
def test_wrong_use_is_told(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    filled = [arg.format(tmp=tmp_path) for arg in args]
    assert message in run("plan", *filled, code=exit_codes.USAGE)
