"""A run with a local tier on every host: killed, resumed, and never killed."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.processes import Running, run_processes

TWO_TIERS = """
    import os, signal, sys
    import processes_program as program
    from processes_program import INDEX, Training, report
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies

    directory, ramdisks, kill_at, seed = *sys.argv[4:6], *map(int, sys.argv[6:8])
    program.MESH = MESH = Mesh(np.array(jax.devices()).reshape(2, -1), ("replica", "fsdp"))

    def rule(name, abstract):
        for dim, length in enumerate(abstract.shape):
            if length and length % MESH.shape["fsdp"] == 0:
                return NamedSharding(MESH, P(*[None] * dim, "fsdp"))
        return NamedSharding(MESH, P())

    program.rule = rule
    training = Training(seed)
    every = policies.FixedIntervalPolicy
    ckpt = TorchaxCheckpointer(
        directory,
        save_decision_policy=every(4),
        local=LocalTier(f"{ramdisks}/{INDEX}", save_decision_policy=every(1)),
        options=CheckpointOptions(process_timeout_secs=60),
    )
    start = training.attach(ckpt)
    tier = ckpt.restore().tier if start else None
    for step in range(start + 1, 8):
        training.step()
        ckpt.save(step)
        if step == kill_at:
            ckpt.wait_until_finished()
            report(start=start, tier=tier, local=ckpt.all_steps("local"))
            os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    report(start=start, tier=tier, own=training.own(), whole=training.whole())
"""


def killed(
    directory: Path | str,
    ramdisks: Path,
    count: int,
    *,
    at: int,
    seed: int = 0,
    env: Mapping[str, str] = {},
    fresh: bool = False,
) -> None:
    """A run whose processes were all killed after a step, with what they had saved until then."""
    arguments = str(directory), str(ramdisks), str(at), str(seed)
    with Running(TWO_TIERS, count, *arguments, env=env, fresh=fresh) as running:
        assert running.wait() == [-signal.SIGKILL] * count, running.output(0)[1][-3000:]
        for index in range(count):
            assert running.reports(index) == [{"start": 0, "tier": None, "local": [at - 1, at]}]


def resumed(
    directory: Path | str,
    ramdisks: Path,
    count: int,
    env: Mapping[str, str] = {},
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """The end of a run that goes on; from other seeds, so that what is not restored differs."""
    arguments = str(directory), str(ramdisks), "0", "77"
    reports = run_processes(TWO_TIERS, count, *arguments, env=env, fresh=fresh)
    return [report for (report,) in reports]


def straight(tmp_path: Path, count: int) -> list[dict[str, Any]]:
    places = str(tmp_path / "straight"), str(tmp_path / "straight-ramdisks")
    return [report for (report,) in run_processes(TWO_TIERS, count, *places, "0", "0")]


def assert_ends_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for here, there in zip(found, expected, strict=True):
        assert here["whole"] == there["whole"]
        assert here["own"] == there["own"]
    # Each process has random state and a loader of its own, which would otherwise show nothing.
    assert len({report["own"]["torch"] for report in expected}) == len(expected)
