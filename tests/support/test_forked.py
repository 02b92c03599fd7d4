"""A forked program cannot detect the fork, except in the ways that ``forked.py`` names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support import PROGRAMS, TESTS, forked
from support.processes import COMPILED_ONCE, Started, run_python
from support.waiting import wait_until


def report(program: str | Path, *args: str, **kwargs: Any) -> Any:
    return json.loads(run_python(program, *args, **kwargs).stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "env"),
    [(8, {}), (2, {"TESTED": "1"}), (None, {"JAX_ENABLE_X64": "1", "PYTHONHASHSEED": "5"})],
)
def test_it_finds_what_a_fresh_one_finds(
    devices: int | None, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {**COMPILED_ONCE, **env}
    found, expected = (
        report(PROGRAMS / "looks_around.py", "one", "", devices=devices, env=variables, fresh=fresh)
        for fresh in (False, True)
    )
    assert expected["devices"] == (devices or 1)
    # A fresh interpreter has OpenBLAS's thread, which a forked one starts at its first product.
    assert found.pop("threads") == [1, 1]
    assert expected.pop("threads")[1] == 1
    assert found == expected


ENDINGS = [
    "pass",
    "sys.exit(7)",
    "raise ZeroDivisionError('here')",
    "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "r, w = os.pipe(); os.close(r); os.write(w, b'x')",  # BrokenPipeError, not SIGPIPE
]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_as_a_fresh_one_does(ending: str) -> None:
    found, expected = (
        run_python(PROGRAMS / "ends_variously.py", ending, check=False, fresh=fresh)
        for fresh in (False, True)
    )
    assert found.returncode == expected.returncode
    assert found.stdout == expected.stdout
    # The server's call adds one line to the traceback.
    told = re.sub(r'  File "<string>", line 1, in <module>\n', "", found.stderr, count=1)
    assert told == expected.stderr


def test_a_signal_from_outside_reaches_it() -> None:
    source = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
time.sleep(60)
"""
    with Started("-c", source) as program:
        wait_until(lambda: program.output()[0])
        assert program.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.process.wait(0.01)
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(60) == 5
        assert program.process.poll() == 5
        program.process.kill()  # Must do nothing, because another process may have the pid now.


def descendants(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children}.union(*(descendants(int(c)) for c in children))


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
        with subprocess.Popen([sys.executable, "-c", tester], stdout=told, env=env) as process:
            try:
                wait_until(lambda: os.pread(told.fileno(), 9, 0) == b"ready\n", timeout_secs=120)
                started = descendants(process.pid)
                assert len(started) == 2  # the server and the program
                process.kill()
                process.wait(60)
            finally:
                process.kill()
        try:
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
        finally:
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_server_that_cannot_import_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryFile("w+") as file, pytest.raises(RuntimeError, match="stderr says why"):
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        forked.start(["-c", ""], env=env, stdout=file, stderr=file, modules=("not_there",))
    assert "No module named 'not_there'" in capfd.readouterr().err
