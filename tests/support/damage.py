"""Functions that damage stored files or make saves fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from etils import epath

from support.compare import entries
from support.stages import fail_at
from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.saving.save import Save
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.medium import seals


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    """Flips one bit of the byte at position ``at`` of a file; negative counts from the end."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def damage(step: Path, needle: bytes, at: int = 0) -> tuple[Path, int]:
    """Flips a bit of byte ``at`` of the only stored copy of some bytes; returns file and place."""
    files = [path for path in sorted(step.rglob("*")) if path.is_file()]
    found = [(path, path.read_bytes().find(needle)) for path in files]
    ((path, first),) = [(path, first) for path, first in found if first >= 0]
    flip_bit(path, first + at)
    return path, first


def flip_arrays(step: Path) -> None:
    """Flips a bit near the end of each file that stores a step's arrays."""
    for path in (step / "state").rglob("d/*"):
        flip_bit(path, -20)


def halve(path: Path) -> None:
    """Truncates a file to half its size."""
    os.truncate(path, path.stat().st_size // 2)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Changes a JSON file, and renews its seal if it has one, as a deliberate change would."""
    document = json.loads(path.read_text())
    is_sealed = path.name == "data.json"  # Orbax's name for a JSON checkpointable.
    if is_sealed:
        document = seals.unseal(document)
    change(document)
    path.write_text(json.dumps(seals.seal(document) if is_sealed else document))


def fill_disk() -> Callable[[], None]:
    """Makes every save fail with a full disk; returns a function that ends that."""
    return fail_at("write the arrays", OSError(28, "No space left on device"))


def killed_before_setting_aside(directory: Path) -> None:
    """Writes the directory of a process that was killed before it set steps aside.

    The process saved steps 10, 20 and 30, restored step 10 and saved step 11. It ended before it
    set steps 20 and 30 aside.
    """
    fill = {"w": np.zeros(2)}
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, state=fill, force=True)
    ckpt = TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll())
    ckpt.attach()
    ckpt.restore(10)
    with mock.patch.object(Save, "_tidy"):
        ckpt.save(11, state=fill, force=True)
        ckpt.close()
    assert entries(directory) == {"10", "11", "20", "30"}


def set_commit_time(step: Path, commit_timestamp_nsecs: int) -> None:
    """Changes the commit time of a step."""
    record = step / commit_record.RECORD
    content = json.loads(record.read_text()) | {"commit_timestamp_nsecs": commit_timestamp_nsecs}
    record.write_text(json.dumps(content))
    (step / commit_record.MARK).write_text(commit_record.sealing(epath.Path(step), "committed"))
