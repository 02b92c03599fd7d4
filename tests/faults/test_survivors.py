"""Who survives another process keeps the step that both may have: it may be the newest there is.

Real processes, and a real SIGKILL of one after the step was committed, while the other asks it how
that went. Where process 0 dies JAX ends the other as soon as it notices, which leaves it a moment
to do wrong; where another one does, process 0 waits for it, and has all the time.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.processes import Running

PROGRAM = """
    import os, pathlib, signal, sys, time
    from processes_program import INDEX, Training, report
    from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, errors, policies
    from torchax_ckpt.storage.directory.run_directory import StepDirectory
    from torchax_ckpt.stored.stored_step import StoredStep

    directory, ramdisks, tier, fatal = sys.argv[4], *map(str, sys.argv[5:7]), int(sys.argv[7])
    places = [pathlib.Path(ramdisks, str(index)) for index in range(2)]
    training = Training()
    ckpt = TorchaxCheckpointer(
        directory,
        save_decision_policy=policies.FixedIntervalPolicy(1 if tier == "durable" else 99),
        local=LocalTier(places[INDEX], save_decision_policy=policies.FixedIntervalPolicy(1))
        if tier == "local" else None,
        options=CheckpointOptions(process_timeout_secs=10, read_back=tier == "durable"),
    )
    start = training.attach(ckpt)
    report(start=start, whole=training.whole(), own=training.own())
    there = (
        [place / str(fatal) for place in places]
        if tier == "local"
        else [pathlib.Path(directory, str(fatal))]
    )

    def die():
        while not all(path.exists() for path in there):
            time.sleep(0.01)
        time.sleep(float(os.environ["DIES_AFTER_SECS"]))  # the other asks for this one meanwhile
        os.kill(os.getpid(), signal.SIGKILL)

    commit, verify = StepDirectory.commit, StoredStep.verify

    def fatal_commit(self, step, *args):
        durable = commit(self, step, *args)
        if step == fatal and durable.path in there:
            die()
        return durable

    def fatal_verify(self, *args, **kwargs):
        if self.committed.step == fatal:
            die()
        return verify(self, *args, **kwargs)

    if INDEX == 0 and tier == "local":
        StepDirectory.commit = fatal_commit
    if INDEX == 1 and tier == "durable":
        StoredStep.verify = fatal_verify
    for step in range(start + 1, fatal + 1):
        training.step()
        if step == fatal:
            report(saving=step, whole=training.whole(), own=training.own())
        ckpt.save(step)
        try:
            ckpt.wait_until_finished()
        except errors.SaveError:
            os._exit(3)                                   # JAX would wait for the dead one
    ckpt.close()
"""


@pytest.mark.parametrize(
    ("tier", "victim"), [("local", 0), ("durable", 1)], ids=["part", "read_back"]
)
def test_a_step_that_all_have_outlives_a_process(tier: str, victim: int, tmp_path: Path) -> None:
    directory, ramdisks = tmp_path / "run", tmp_path / "ramdisks"
    places = str(directory), str(ramdisks), tier
    with Running(PROGRAM, 2, *places, "2", env={"DIES_AFTER_SECS": "1"}) as running:
        codes = running.wait()
        assert codes.pop(victim) == -signal.SIGKILL
        # By JAX, or before it could by this package.
        assert codes[0] in (-signal.SIGABRT, 3), running.output(1 - victim)[1][-3000:]
        saved = [next(r for r in running.reports(i) if "saving" in r) for i in range(2)]
    parts = [ramdisks / "0", ramdisks / "1"] if tier == "local" else [directory]
    assert [(part / "2").is_dir() for part in parts] == [True] * len(parts)

    with Running(PROGRAM, 2, *places, "0") as running:
        assert running.wait() == [0, 0], running.output(0)[1][-3000:]
        for index in range(2):
            (found,) = running.reports(index)
            assert found["start"] == 2
            assert (found["whole"], found["own"]) == (saved[index]["whole"], saved[index]["own"])
