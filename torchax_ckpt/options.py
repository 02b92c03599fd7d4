"""The settings of a checkpointer, checked when they are given."""

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
    """How a checkpointer saves and restores. Policies decide when it saves and what it keeps.

    Attributes:
      compression: whether to compress array data with Zstandard. It saves some 8 % of the bytes of
        float32 weights and 22 % of bfloat16, and takes longer than a fast disk takes to write
        them. None: compresses on one process, where saves show that the medium is
        slow. The median write rate of three saves must be below 250 MB/s; a save counts if it
        writes at least 64 MiB in arrays of at least 2 MiB on average.
      layout: which leaves are stored as stacks. A stack is an array with a leading axis of leaves
        whose names differ only in indices. "auto" stacks the many small leaves, "stacked" all
        leaves, "flat" none. Names and values do not depend on the layout, and a checkpointer with
        any layout reads every other.
      snapshot: how a save protects device arrays from later changes. "auto" detects whether the
        program donates buffers. "reference" is for programs that do not donate, "copy" for
        programs that do. "transfer" blocks the training thread until the arrays are on the host.
      restore_in_budget: whether a restore frees the device buffers that it replaces before the new
        ones arrive, part by part, for a state that fills the devices. A failure on the way then
        leaves the program without a usable state: every buffer is deleted, and old and new values
        are never mixed.
      verify: "restore" compares everything that is read with the digests taken when it was saved;
        "never" skips the comparison. A save computes digests in either case.
      read_back: whether to read and compare every step after its commit, before it counts as
        durable. The step then counts as verified. The newest verified step is never deleted, except
        in a local tier. Bytes that were just written usually come back from the host's page cache,
        not from the medium.
      on_save_error: what a failed save does to training. "continue" reports the failure, and the
        next save tries again. "raise" raises it from the next call of ``save``, or in ``steps``.
      read_only: whether the checkpointer only reads. A bucket then need not grant write permission,
        and ``save`` and ``delete`` refuse.
      max_host_bytes: upper bound, in bytes per process, on array data in transit at one time: from
        devices to storage in a save, or back in a restore. None: no bound. An array or a stack that
        is larger than the bound travels alone. A save with a bound takes the arrays in batches, one
        after another. Buffers held by reference must then live until the last batch is fetched,
        and ``snapshot="transfer"`` blocks the training thread for that time. Each batch rewrites a
        few small files, so give a bound of gigabytes. The bound does not count leaves that are host
        arrays, the memory to compress or rearrange an array, and a save to a local tier that runs
        at the same time.
      preemption_grace_secs: how long the process may run after a SIGTERM, from ``attach`` or the
        first ``save`` until ``close``; then the process ends at once. Give the time that the
        scheduler waits before it kills: Kubernetes and Google's spot machines wait 30 s. None
        leaves SIGTERM alone. Without effect under ``jax.distributed``, where JAX handles SIGTERM.
      single_replica_restore: with data-parallel replicas over slices, whether the devices of the
        first replica read from storage and send the values to the others over the device network.
        By default each replica reads from storage. For combinations of state size and slice count
        for which storage is slow.
      process_timeout_secs: how long one process of a run waits for another. It must be at least the
        difference between the slowest and the fastest process in reading or writing their parts.
        After that the call, or the save, fails on all processes and names the missing ones.
      save_timeout_secs: after this time a save in flight is logged, with its current stage and its
        thread's stack; again after twice the time, and so on. Callers that wait for the save get a
        SaveTimeoutError, while the save continues. None: waits as long as the save takes.
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
    """A local tier: a directory close to the program for frequent saves, beside the durable one.

    Attributes:
      path: a directory that each host has for itself, on a ramdisk or a local disk; created if it
        does not exist. Runs that train at the same time need different directories: a run removes
        the steps that another run has left.
      save_decision_policy: when a step is saved there. None: whenever the previous local save is
        durable.
      keep: how many steps stay there. One more must fit while it is written.
      replica_axis: the mesh axis of the arrays along which slices hold equal data. A host gets a
        missing part from its own slice if a host there has it, otherwise from another slice.
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
