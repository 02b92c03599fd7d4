"""The Ray example, with a real Ray: two workers, one of them killed, then a preemption notice."""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from pathlib import Path

import pytest
from support import PROGRAMS, ROOT
from support.processes import COMPILED_ONCE, run_python
from support.waiting import wait_until

from torchax_ckpt import TorchaxCheckpointer, policies

EXAMPLE = ROOT / "examples" / "ray_train.py"
SETTINGS = {
    **COMPILED_ONCE,
    "RAY_AUTH_MODE": "token",  # else Ray writes a token into the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else other tests leave Ray's processes hardly any time
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2",
    "JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S": "1",  # the survivor waits in vain for the killed one
}


def processes_with(text: str) -> list[str]:
    """The command lines of the processes whose environment or command line has the text."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if text.encode() in command + (process / "environ").read_bytes():
                found.append(command.replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is another user's
            pass
    return found


@pytest.mark.slow
@pytest.mark.timeout(540)  # a minute alone
def test_workers_of_ray_are_connected_resume_to_the_bit_and_heed_a_notice(tmp_path: Path) -> None:
    token, common = secrets.token_hex(32), f"--storage {tmp_path} --steps 60 --report-every 4"
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:
        # Paths of sockets may have 107 bytes, and Ray's are 65 longer than this one.
        sessions = Path(short, "s")
        sessions.symlink_to(tmp_path)
        output = run_python(
            PROGRAMS / "on_ray.py",
            *(str(EXAMPLE), str(sessions), str(tmp_path / "attempts")),
            f"{common} --name alone --workers 0",
            f"{common} --name killed --crash-at 6",
            devices=1,
            env={**SETTINGS, "RAY_AUTH_TOKEN": token},
            timeout_secs=500,
            fresh=True,
        ).stdout
    alone, killed = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    # Two workers, of which one was killed, end as one process of two devices that ran through.
    assert killed["final_state"] == alone["final_state"]
    assert alone["started_from"] == 0 < killed["started_from"] <= 6
    attempts = [line.split() for line in (tmp_path / "attempts").read_text().splitlines()]
    assert [number for number, _ in attempts] == ["2", "2"]
    assert attempts[0][1] != attempts[1][1]  # a port of its own for each start

    # Ray has files that name steps, and kept the last of them; the steps are the library's.
    steps = tmp_path / "killed" / "steps"
    with TorchaxCheckpointer(steps, preservation_policy=policies.PreserveAll()) as ckpt:
        assert ckpt.latest_step() == 60
        ckpt.verify(60)
    pointers = sorted((tmp_path / "killed").glob("checkpoint_2*"))
    assert len(pointers) == 3
    assert [path.name for folder in pointers for path in folder.iterdir()] == ["step.json"] * 3
    newest = json.loads((pointers[-1] / "step.json").read_text())
    assert newest == {"path": str(steps / "60"), "step": 60}

    # After the notice, the step was durable when it was reported. Others are before they are saved.
    logs = tmp_path.glob("session_2*/logs/train/ray-train-app-worker-*.log")
    reports = [re.findall(r"'step': (\d+), .*'durable_step': (\d+)", p.read_text()) for p in logs]
    noticed = {int(step) for found in reports for step, durable in found if step == durable}
    assert len(noticed - {60}) == 1
    wait_until(lambda: not processes_with(token))
