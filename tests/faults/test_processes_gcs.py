"""Several processes on a bucket: saved together, killed, resumed bit for bit, read by others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

# Read when gcsfs is imported: it would ask a gRPC service that the emulator does not have.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcs_proxy
import gcs_server
import pytest
from support import Running, run_processes

RUN = """
    import os, signal, sys
    from processes_program import Training, digest, report, rule
    import numpy as np
    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies, warm_start

    directory, seed = sys.argv[4], int(sys.argv[5])
    training = Training(seed)
    ckpt = TorchaxCheckpointer(
        directory,
        options=CheckpointOptions(process_timeout_secs=60),
        save_decision_policy=policies.FixedIntervalPolicy(2),
        preservation_policy=policies.LatestN(1),
    )
    start = training.attach(ckpt)
    for step in range(start + 1, 7):
        training.step()
        if step < 6:
            ckpt.save(step)
    ckpt.wait_until_finished()
    report(start=start, steps=ckpt.all_steps(), whole=training.whole(), own=training.own())
"""

KILLED = (
    RUN
    + """
    ckpt.save(6, force=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
)

RESUMED = (
    RUN
    + """
    ckpt.save(6, force=True)
    ckpt.wait_until_finished()
    verified = ckpt.verify()
    ckpt.close()
    # Another run, from its weights.
    fresh = Training(5)
    taken = warm_start(fresh.model, directory, shardings=rule)
    weights = {n: [digest(np.asarray(s.data)) for s in a.addressable_shards]
               for n, a in fresh.arrays().items()}
    original = {n: [digest(np.asarray(s.data)) for s in a.addressable_shards]
                for n, a in training.arrays().items() if n in weights}
    report(verified=verified, step=taken.step, alike=weights == original, count=len(weights))
"""
)


@pytest.fixture
def gcs() -> Iterator[gcs_proxy.FaultProxy]:
    server = gcs_server.GcsServer()
    proxy = gcs_proxy.FaultProxy(server)
    yield proxy
    proxy.stop()
    server.stop()


def test_two_processes_on_a_bucket_resume_bit_for_bit_after_both_were_killed(
    gcs: gcs_proxy.FaultProxy,
) -> None:
    environment = gcs.environment()
    with Running(KILLED, 2, "gs://bucket/run", "0", env=environment) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output(0)[1][-3000:]
        expected = [running.reports(index)[0] for index in range(2)]
    assert [(report["start"], report["steps"]) for report in expected] == [(0, [4])] * 2
    resumed = run_processes(RESUMED, 2, "gs://bucket/run", "77", env=environment)
    for (found, after), before in zip(resumed, expected, strict=True):
        assert found["start"] == 4
        assert found["whole"] == before["whole"]
        assert found["own"] == before["own"]
        assert after == {"verified": 6, "step": 6, "alike": True, "count": 10}
