"""Saves to a medium that becomes full, read-only and removed, and works again each time.

    python failing_medium.py FOLDER mounted|limited

The medium is a small file system mounted at FOLDER, or FOLDER under limits of this process; see
``media.py``. Prints "all is well" at its end.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import media
import numpy as np
import torchax

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import SaveError

torchax.enable_globally()

root, kind = Path(sys.argv[1]), sys.argv[2]
disk = media.SmallDisk(root, 12 << 20) if kind == "mounted" else media.LimitedDisk(root)
said: list[tuple[str, str]] = []


class Ear(logging.Handler):
    def emit(self, record: Any) -> None:
        said.append((record.levelname, record.getMessage()))


logging.getLogger("torchax_ckpt").addHandler(Ear(logging.WARNING))


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(200_000.0) + step, "h": np.full(9, step)}


def check(ckpt: Any, steps: Any) -> None:
    assert ckpt.all_steps() == steps, ckpt.all_steps()
    for step in steps:
        loaded = ckpt.load(step)
        for name, value in state(step).items():
            np.testing.assert_array_equal(np.asarray(loaded[name]), np.asarray(value))
    there = set(os.listdir(root / "run")) - {"lease", "events"}
    assert there == set(map(str, steps)), there


def fails(ckpt: Any, steps: Any, advice: Any, before: Any) -> None:
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


def recovers(ckpt: Any, step: Any, steps: Any, num_failed: Any) -> None:
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
    fails(
        ckpt,
        [start, start + 1, start + 2],
        "The disk is full: free space" if mounted else "ulimit -f",
        before,
    )
    disk.free()
    recovers(ckpt, start + 3, [*before, start + 3][-3:], 3)
before = ckpt.all_steps()
disk.set_writable(False)
fails(ckpt, [20, 21], "mount it for writing" if mounted else "check owner and mode", before)
disk.set_writable(True)
recovers(ckpt, 22, [*before, 22][-3:], 2)


def remove() -> None:
    while not any(path.name.startswith("writing-") for path in (root / "run").iterdir()):
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
