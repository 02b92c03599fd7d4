"""Publishes the steps of a run until it is killed, on a disk that takes its time.

    publishes_steps.py RUN OUT [WEAKENING]

WEAKENING leaves out a part of what makes a folder appear at once: "in-place" writes it under its
name in OUT; "latest-first" replaces ``latest`` before.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchax_ckpt.publishing import Every, FolderForm, Follower
from torchax_ckpt.publishing.published_folders import Published, PublishedFolders
from torchax_ckpt.storage.medium import fsync

KEEP, GRACE_SECS = 2, 10.0


def slow_down() -> None:
    """Makes the moments between two actions long enough for kills to fall into each of them."""
    sync, choose = fsync.sync, random.Random()

    def slowly(path: Any) -> None:
        time.sleep(choose.uniform(0, 0.02))
        sync(path)

    fsync.sync = slowly


def weaken(weakening: str) -> None:
    """Makes the program publish less carefully."""

    @contextlib.contextmanager
    def writing(
        self: PublishedFolders, step: int, commit_timestamp_nsecs: int, metrics: dict[str, Any]
    ) -> Iterator[Path]:
        new = Published(self.path / f"step-{step}", step, commit_timestamp_nsecs, metrics)
        self.published = (*self.published, new)
        self._record(self.published)
        if weakening == "latest-first":
            self._point_to_newest()
        yield new.path
        self._point_to_newest()

    PublishedFolders.writing = writing  # type: ignore[method-assign]


def main() -> None:
    run, out, *weakenings = sys.argv[1:]
    slow_down()
    for weakening in weakenings:
        weaken(weakening)
    form = FolderForm(format="hf")
    with Follower(run, out, Every(), form, keep=KEEP, grace_secs=GRACE_SECS) as follower:
        while True:
            follower.publish_due()
            time.sleep(0.005)


if __name__ == "__main__":
    main()
