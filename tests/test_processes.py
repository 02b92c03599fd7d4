"""Several processes: one state, saved and restored together, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_processes

RUN = """
    import sys
    from processes_program import Training, report
    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
    directory, first, last, seed = sys.argv[4], *map(int, sys.argv[5:8])
    training = Training(seed)
    options = CheckpointOptions(process_timeout_secs=30)
    policy = policies.FixedIntervalPolicy(2)
    if directory == "-":
        start = 0
        from torchax_ckpt.state.attached import Attached
        from processes_program import init, rule
        fresh = Attached(training.model, training.optimizer, dataloader=training.loader,
                         shardings=rule, init=init)
        fresh.prepare_fresh().apply({})
    else:
        ckpt = TorchaxCheckpointer(directory, options=options, save_decision_policy=policy)
        start = training.attach(ckpt)
    assert start == first, start
    for step in range(start + 1, last + 1):
        loss = training.step()
        if directory != "-":
            ckpt.save(step, metrics={"loss": loss})
    if directory != "-":
        ckpt.close()
        assert ckpt.latest_step() == last
    report(own=training.own(), seen=training.seen, whole=training.whole())
"""


@pytest.mark.parametrize("count", [2, 4])
def test_a_run_is_resumed_bit_for_bit(directory: Path, count: int) -> None:
    straight = run_processes(RUN, count, "-", "0", "8", "0")
    run_processes(RUN, count, str(directory), "0", "4", "0")
    # Other seeds: whatever is not restored differs.
    resumed = run_processes(RUN, count, str(directory), "4", "8", "77")
    for (whole,), (rest,) in zip(straight, resumed, strict=True):
        assert rest["whole"] == whole["whole"]
        assert rest["own"] == whole["own"]
        assert rest["seen"] == whole["seen"][4:]
    # Each process has a state of its own, which would otherwise show nothing.
    own = [rest["own"]["torch"] for (rest,) in resumed]
    assert len(set(own)) == count
