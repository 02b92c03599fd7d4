"""Names in a run's directory that only look like those of the run."""

from __future__ import annotations

import os
from pathlib import Path

from support.training import mlp, save

# --- names that look like those of a run ---

OF_A_USER = [
    *("deleting-2-old-plots", "deleting-old", "writing-1-a-paper", "writing-2024-11-notes"),
    *("1.orbax-checkpoint-tmp.zip", "lease-of-my-flat.draft", "run-notes.draft", "probe-1.draft"),
    *("incoming-mail", "abandoned-ideas", "moving-3", "deleting-1-unchanged", "notes.partial"),
]
LEFT = [
    *("deleting-3", "deleting-0-unchanged", "writing-4-unchanged", "7.orbax-checkpoint-tmp"),
    *("incoming-6.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp-1700000000"),
    *(f"writing-5-{'0a' * 16}-65024-7-12", f"writing-5-{'0a' * 16}-1"),
    *(f"{kind}-{'0a' * 16}.draft" for kind in ("lease", "run", "probe")),
    f"probe-{'0a' * 16}.renamed.draft",
]


def test_a_cleanup_removes_exactly_what_a_save_may_leave(directory: Path) -> None:
    for name in (*OF_A_USER, *LEFT):
        (directory / name).mkdir(parents=True)
        (directory / name / "precious").touch()
    (directory / "unchanged" / "state" / "mine").mkdir(parents=True)
    for step in (1, 2):
        save(directory, mlp(), step=step)
    left = {"unchanged", "events", "2", "abandoned-1"}
    assert set(os.listdir(directory)) - {"lease"} == {*OF_A_USER, *left}
    assert (directory / "unchanged" / "state" / "mine").exists()
