"""A forked program cannot detect the fork, except in the ways that ``forked.py`` names."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support import PROGRAMS, TESTS, forked
from support.processes import COMPILED_ONCE, run_python
from support.waiting import wait_until


def report(program: str | Path, *args: str, **kwargs: Any) -> Any:
    return json.loads(run_python(program, *args, **kwargs).stdout)


@pytest.mark.slow
def test_it_finds_what_a_fresh_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = {**COMPILED_ONCE, "TESTED": "1"}
    found, expected = (
        report(PROGRAMS / "looks_around.py", "one", "", devices=2, env=env, fresh=fresh)
        for fresh in (False, True)
    )
    assert expected["devices"] == 2
    # A fresh interpreter has OpenBLAS's thread, which a forked one starts at its first product.
    assert found.pop("threads") == [1, 1]
    assert expected.pop("threads")[1] == 1
    assert found == expected


@pytest.mark.slow
def test_what_is_left_to_chance_differs() -> None:
    source = """
        import json, random, uuid
        import numpy as np
        import torch

        drawn = [torch.rand(()).item(), random.random(), np.random.random(), str(uuid.uuid4())]
        print(json.dumps([*drawn, np.random.default_rng().random(), hash("word")]))
    """
    one, two, three = (report(source) for _ in range(3))
    assert not set(one) & set(two)
    assert set(one) & set(three) == {one[-1]}  # two servers take turns


@pytest.mark.slow
def test_another_process_of_the_run_uses_the_same_servers() -> None:
    source = "import os; print(os.getppid())"
    worker = f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from support.processes import run_python
        print(run_python({source!r}).stdout)
    """
    path = os.environ.get("PYTHONPATH", "")
    env = {"PYTHONPATH": path, "PYTEST_XDIST_WORKER": "another"}
    here = {run_python(source).stdout.strip() for _ in range(2)}
    assert len(here) == 2
    assert run_python(worker, env=env, fresh=True).stdout.strip() in here


@pytest.mark.slow
def test_server_and_programs_end_with_who_started_them() -> None:
    tester = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
from support import forked
program = "import time; print('ready', flush=True); time.sleep(600)"
started = forked.start(["-c", program], env=dict(os.environ), stdout=sys.stdout, stderr=sys.stderr)
time.sleep(600)
"""
    with tempfile.TemporaryFile("w+") as told:
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        del env[forked.OWNER]
        with subprocess.Popen([sys.executable, "-c", tester], stdout=told, env=env) as process:
            try:
                wait_until(lambda: os.pread(told.fileno(), 9, 0) == b"ready\n", timeout_secs=120)
                children = f"/proc/{process.pid}/task/{process.pid}/children"
                (server,) = Path(children).read_text().split()
                (program,) = Path(f"/proc/{server}/task/{server}/children").read_text().split()
                started = int(server), int(program)
            finally:
                process.kill()
        try:
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
        finally:
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
