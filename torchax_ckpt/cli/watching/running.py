"""Finds out whether a program writes to a run's directory at the moment."""

from __future__ import annotations

import contextlib
import time

from torchax_ckpt.storage.directory import lease
from torchax_ckpt.storage.directory.compare_and_swap import record_at
from torchax_ckpt.storage.directory.lease_holder import LeaseHolder
from torchax_ckpt.storage.directory.run_directory import RunDirectory


def is_held(run: RunDirectory) -> bool:
    """Returns whether a running program holds the lease of the run's directory.

    If the lease names a program on this host, ``is_held`` checks whether its process is alive. A
    program on another host counts as running for ``LEASE_SECS`` after it last renewed the lease.
    """
    with contextlib.suppress(OSError):
        record = record_at(run.path / lease.NAME)
        try:
            seen = record.read()
        finally:
            record.close()
        holder = LeaseHolder.of(seen.content) if seen is not None else None
        if holder is not None:
            is_alive = holder.is_alive()
            is_fresh = time.time() - holder.renewed_secs < lease.LEASE_SECS
            return is_fresh if is_alive is None else is_alive
    return False
