"""Damage to what is stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.compare import entries
from torchax_ckpt import TorchaxCheckpointer, policies


def damage(step: Path, needle: bytes) -> tuple[Path, int]:
    """Flips a bit in the only stored copy of some bytes; the file, and where in it."""
    for path in sorted(step.rglob("*")):
        if path.is_file() and (at := (content := path.read_bytes()).find(needle)) >= 0:
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            return path, at
    raise AssertionError("not stored")


def killed_before_setting_aside(directory: Path) -> None:
    """10, 20, 30, back to 10, and 11; the process ends before 20 and 30 are moved."""
    fill = {"w": np.zeros(2)}
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, state=fill, force=True)
    ckpt = TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll())
    ckpt.attach()
    ckpt.restore(10)
    ckpt._saver._tidy = lambda durable: None  # type: ignore[method-assign]
    ckpt.save(11, state=fill, force=True)
    ckpt.close()
    assert entries(directory) == {"10", "11", "20", "30"}
