"""The medium fails: full, read-only, removed, not permitted. Training and saving go on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import media
import pytest

HERE = Path(__file__).parent

FAILING = """
import logging, os, shutil, sys, threading
from pathlib import Path
import torchax
torchax.enable_globally()
import jax.numpy as jnp
import numpy as np
import media
from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import SaveError

root, kind = Path(sys.argv[1]), sys.argv[2]
disk = media.SmallDisk(root, 12 << 20) if kind == "mounted" else media.LimitedDisk(root)
said = []
class Ear(logging.Handler):
    def emit(self, record):
        said.append((record.levelname, record.getMessage()))
logging.getLogger("torchax_ckpt").addHandler(Ear(logging.WARNING))

def state(step):
    return {"w": jnp.arange(200_000.0) + step, "h": np.full(9, step)}

def check(ckpt, steps):
    assert ckpt.all_steps() == steps, ckpt.all_steps()
    for step in steps:
        loaded = ckpt.load(step)
        for name, value in state(step).items():
            np.testing.assert_array_equal(np.asarray(loaded[name]), np.asarray(value))
    there = set(os.listdir(root / "run")) - {"lease", "events"}
    assert there == set(map(str, steps)), there

def fails(ckpt, steps, advice, before):
    said.clear()
    for step in steps:
        assert ckpt.save(step, state=state(step), force=True)  # training goes on
    ckpt._saver.wait()
    errors = [text for level, text in said if level == "ERROR"]
    assert len(errors) == 1, errors  # said once
    assert f"saving step {steps[0]} to" in errors[0] and advice in errors[0], errors[0]
    try:
        ckpt.check_for_errors()
    except SaveError as error:
        assert error.step == steps[0]
    else:
        raise AssertionError("no error")
    ckpt.check_for_errors()
    if before is not None:
        check(ckpt, before)

def recovers(ckpt, step, steps, num_failed):
    said.clear()
    assert ckpt.save(step, state=state(step), force=True)
    ckpt.wait_until_finished()
    again = [text for level, text in said if "works again" in text]
    assert len(again) == 1 and f"after {num_failed} failed saves" in again[0], said
    check(ckpt, steps)

mounted = kind == "mounted"
ckpt = TorchaxCheckpointer(root / "run")
for step in (1, 2):
    ckpt.save(step, state=state(step), force=True)
ckpt.wait_until_finished()
for start, room in ((3, 300_000), (10, 0)):
    before = ckpt.all_steps()
    disk.leave(room) if room else disk.fill()
    fails(ckpt, [start, start + 1, start + 2],
          "The disk is full: free space" if mounted else "ulimit -f", before)
    disk.free()
    recovers(ckpt, start + 3, [*before, start + 3][-3:], 3)
before = ckpt.all_steps()
disk.set_writable(False)
fails(ckpt, [20, 21], "mount it for writing" if mounted else "check owner and mode", before)
disk.set_writable(True)
recovers(ckpt, 22, [*before, 22][-3:], 2)
def remove():
    while not any("tmp" in path.name for path in (root / "run").iterdir()):
        pass
    (root / "run").rename(root / "gone")  # at once, in the middle of the save
    shutil.rmtree(root / "gone", ignore_errors=True)
thread = threading.Thread(target=remove)
thread.start()
said.clear()
assert ckpt.save(30, state=state(30), force=True)
ckpt._saver.wait()
thread.join()
assert [level for level, _ in said].count("ERROR") == 1, said
try:
    ckpt.check_for_errors()
except SaveError as error:
    assert "removed" in str(error) or "is not committed" in str(error), error
recovers(ckpt, 31, [31], 1)
ckpt.close()
print("all is well")
"""

READING = """
import os, sys, warnings
from pathlib import Path
import torchax
torchax.enable_globally()
import numpy as np, torch
import media
from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError

model = torch.nn.Linear(2, 2).to("jax")  # imports what a lesser user may not be able to read
import torch._dynamo
media.become_nobody()
warnings.simplefilter("error")
os.umask(0)
run = Path(sys.argv[1]) / "run"
with TorchaxCheckpointer(run) as ckpt:
    for step in (1, 2):
        ckpt.save(step, state={"w": np.full(70_000, step)}, force=True)
for path in [run, *run.rglob("*")]:
    assert not path.stat().st_mode & 0o002, f"{path} is writable for everybody"

files = [p for p in (run / "2").rglob("*") if p.is_file()]
used = set()
for path in files:
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        loaded = TorchaxCheckpointer(run).load()  # of the newest step, never of the one before
        np.testing.assert_array_equal(loaded["w"], np.full(70_000, 2))
    except DirectoryError as error:
        assert "Permission denied" in str(error) and "check owner and mode" in str(error), error
        used.add(path.relative_to(run / "2").parts[0])
    path.chmod(mode)
parts = {"_CHECKPOINT_METADATA", "commit_success.txt", "manifest", "state", "summary"}
assert used == parts, used

run.chmod(0)
try:
    TorchaxCheckpointer(run).attach(model)
except DirectoryError as error:
    assert "check owner and mode" in str(error), error
else:
    raise AssertionError("began anew beside a directory that cannot be read")
run.chmod(0o755)

data = max((run / "2").rglob("*"), key=lambda p: p.stat().st_size)
content = data.read_bytes()
data.write_bytes(content[: len(content) // 2])
try:
    TorchaxCheckpointer(run).load(2)
except CorruptCheckpointError as error:
    assert "OUT_OF_RANGE" in str(error), error
warnings.simplefilter("ignore")
np.testing.assert_array_equal(TorchaxCheckpointer(run).load()["w"], np.full(70_000, 1))
print("all is well")
"""


def run(program: str, *args: str, prefix: list[str] | None = None) -> None:
    result = subprocess.run(
        [*(prefix or []), sys.executable, "-c", program, *args],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{HERE}:{HERE.parent}:{HERE.parent.parent}",
        },
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.stdout.endswith("all is well\n"), result.stdout + result.stderr[-4000:]


@pytest.mark.parametrize("kind", ["mounted", "limited"])
def test_training_and_saving_go_on_when_the_medium_fails(kind: str, open_tmp_path: Path) -> None:
    prefix = media.mounting_prefix() if kind == "mounted" else None
    if kind == "mounted" and prefix is None:
        pytest.skip("a file system cannot be mounted here; the limited disk needs no rights")
    run(FAILING, str(open_tmp_path / "disk"), kind, prefix=prefix)


def test_what_cannot_be_read_now_is_no_reason_to_go_back(open_tmp_path: Path) -> None:
    run(READING, str(open_tmp_path))


@pytest.fixture
def open_tmp_path() -> Iterator[Path]:
    """A folder that a user without rights reaches, too, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
