"""Owns the settings of a checkpointer; knows nothing of how they are carried out."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, Literal, get_args

Layout = Literal["auto", "stacked", "flat"]
SnapshotMode = Literal["auto", "reference", "copy", "transfer"]
Verify = Literal["restore", "never"]
OnSaveError = Literal["continue", "raise"]
TierName = Literal["durable", "local"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How a checkpointer saves and restores. When it saves and what it keeps are policies.

    Attributes:
      compression: compress array data with Zstandard. On float32 weights it saves some 8 % of the
        bytes, of bfloat16 22 %, and takes longer than a fast disk takes to write them. None, on
        one process, compresses once of three saves of at least 64 MiB, in arrays of at least 2
        MiB on average, the median has shown that the medium takes less than 250 MB/s.
      layout: which leaves are stored as stacks, arrays with a leading axis of leaves whose names
        differ only in indices: "auto" the many small ones, "stacked" all, "flat" none. Names and
        values are the same whatever it is, and any reads what any other wrote.
      snapshot: how device arrays are held while they are saved: "auto" finds out whether the
        program donates them; "reference" is for programs that do not, "copy" for those that do,
        "transfer" holds the training thread until they are on the host.
      restore_in_budget: free the device buffers that a restore replaces before the new ones
        arrive, part by part, for a state that fills the devices. A failure on the way then leaves
        the program without a usable state (every buffer deleted, never a mix of old and new).
      verify: "restore" compares everything that is read with the digests taken when it was saved;
        "never" does not. Digests are taken in any case.
      read_back: read every step once it is committed, and compare it, before it counts as
        durable. It then counts as verified, and the newest verified step is never deleted, but in
        a local tier. What was just written usually comes from the host's page cache, not from the
        medium.
      on_save_error: what a failed save does to training: "continue" reports it and tries again with
        the next save; "raise" raises it from the next call of ``save``, or in ``steps``.
      read_only: the checkpointer only reads, so a bucket need not grant it permission to write;
        ``save`` and ``delete`` refuse.
      max_host_bytes: upper bound, in bytes and per process, on array data that is on its way at
        one time, from devices to storage in a save or back in a restore; None for no bound. An
        array, or a stack, that is larger goes by itself. A save then takes the arrays in batches,
        one after the other, so buffers held by reference must live until the last is fetched, and
        ``snapshot="transfer"`` holds the training as long. Each batch rewrites a few small files:
        give it gigabytes. Not counted are leaves that are host arrays, what compressing or turning
        an array takes, and a second save, to a local tier, that goes on at the same time.
      preemption_grace_secs: how long the process may go on after a SIGTERM, from ``attach`` or
        the first ``save`` on until ``close``; then it ends at once. State what the scheduler
        gives before it kills: 30 s is what Kubernetes and Google's spot machines give. None
        leaves SIGTERM alone. Without effect under ``jax.distributed``, where JAX has SIGTERM.
      single_replica_restore: with data-parallel replicas over slices, have the devices of the first
        replica read, and the others receive what it read over the device network, in place of each
        reading it from storage. For states and numbers of slices that storage is slow for.
      process_timeout_secs: how long one process of a run waits for another that is behind: at least
        what the slowest takes longer than the fastest to read or write its part. Then the call, or
        the save, fails on all of them, and names those that have not come.
      save_timeout_secs: a save in flight for longer is logged, with where it stands and its
        thread's stack, again at twice that and so on; and whoever waits for it gets a
        SaveTimeoutError, while the save goes on. None waits for as long as it takes.
    """

    compression: bool | None = None
    layout: Layout = "auto"
    snapshot: SnapshotMode = "auto"
    restore_in_budget: bool = False
    verify: Verify = "restore"
    read_back: bool = False
    on_save_error: OnSaveError = "continue"
    read_only: bool = False
    max_host_bytes: int | None = None
    preemption_grace_secs: float | None = 30.0
    single_replica_restore: bool = False
    process_timeout_secs: float = 600.0
    save_timeout_secs: float | None = None

    def __post_init__(self) -> None:
        if self.compression is not None and not isinstance(self.compression, bool):
            raise TypeError(f"compression: expected a bool or None, found {self.compression!r}")
        for name in (
            "restore_in_budget",
            "read_back",
            "read_only",
            "single_replica_restore",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, found {getattr(self, name)!r}")
        if self.single_replica_restore and self.restore_in_budget:
            raise ValueError(
                "single_replica_restore receives all leaves together, and restore_in_budget takes "
                "them in parts that differ between processes: give one of the two"
            )
        for name, choices in (
            ("layout", get_args(Layout)),
            ("snapshot", get_args(SnapshotMode)),
            ("verify", get_args(Verify)),
            ("on_save_error", get_args(OnSaveError)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}: expected one of {', '.join(choices)}, found {getattr(self, name)!r}"
                )
        for name, or_none in (
            ("preemption_grace_secs", "None or "),
            ("save_timeout_secs", "None or "),
            ("process_timeout_secs", ""),
        ):
            secs = getattr(self, name)
            is_number = isinstance(secs, (int, float)) and not isinstance(secs, bool)
            if not (is_number and 0 < secs < math.inf) and not (or_none and secs is None):
                raise ValueError(
                    f"{name}: expected {or_none}a positive number of seconds, found {secs!r}"
                )
        if self.max_host_bytes is not None and (
            isinstance(self.max_host_bytes, bool)
            or not isinstance(self.max_host_bytes, int)
            or self.max_host_bytes <= 0
        ):
            raise ValueError(
                "max_host_bytes: expected None or a positive number of bytes, found "
                f"{self.max_host_bytes!r}"
            )


@dataclasses.dataclass(frozen=True)
class LocalTier:
    """A second place for steps, close to the program: frequent saves go there, rare ones far away.

    Attributes:
      path: a directory of each host's own, on a ramdisk or a local disk; created if it is not
        there. One for every run that goes on at the same time: what another run has left there is
        removed.
      save_decision_policy: when a step is saved there; None for whenever the last one is.
      keep: how many steps stay there; one more has to fit while it is being written.
      replica_axis: the axis of the arrays' mesh along which slices hold the same. What a host lacks
        comes from its own slice, if a host there has it; from another otherwise.
    """

    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    save_decision_policy: Any = None
    keep: int = 2
    replica_axis: str = "replica"

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or "://" in str(self.path):
            raise ValueError(
                f"LocalTier: path: expected a path on this host, found {self.path!r:.100}"
            )
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise ValueError(f"LocalTier: keep: expected a positive int, found {self.keep!r}")
        if not isinstance(self.replica_axis, str) or not self.replica_axis:
            raise ValueError(
                "LocalTier: replica_axis: expected the name of a mesh axis, found "
                f"{self.replica_axis!r}"
            )
