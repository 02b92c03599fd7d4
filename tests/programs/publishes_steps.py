"""Publishes the steps of a run until it is killed, on a disk that takes its time.

    publishes_steps.py RUN OUT [in-place]

With "in-place", it writes folders under their names in OUT, and no folder appears at once.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchax_ckpt.publishing import follower
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.publishing.published_folders import Published, PublishedFolders
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import fsync

KEEP, GRACE_SECS = 2, 10.0
FORM = FolderForm(format="safetensors", at="model", max_shard_bytes=20_000)


def slow_down() -> None:
    """Makes the moments between two actions long enough for kills to fall into each of them."""
    sync, choose = fsync.sync, random.Random()

    def slowly(path: Any) -> None:
        time.sleep(choose.uniform(0, 0.02))
        sync(path)

    fsync.sync = slowly


@contextlib.contextmanager
def write_in_place(
    self: PublishedFolders, committed: CommittedStep, metrics: dict[str, Any]
) -> Iterator[Path]:
    """Publishes less carefully."""
    step, commit_nsecs = committed.key
    new = Published(self.path / f"step-{step}", step, commit_nsecs, metrics)
    self.published = (*self.published, new)
    self._record(self.published)
    yield Path(new.path)
    self._point_to_newest()


def main() -> None:
    run, out, *weakening = sys.argv[1:]
    slow_down()
    if weakening == ["in-place"]:
        PublishedFolders.writing = write_in_place  # type: ignore[method-assign]
    follower.GRACE_SECS, follower.POLL_SECS = GRACE_SECS, 0.005
    with follower.Follower(run, out, FORM, keep=KEEP) as following:
        for _ in following.follow():
            pass


if __name__ == "__main__":
    main()
