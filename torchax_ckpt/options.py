"""Defines ``CheckpointOptions``, ``LocalTier`` and ``Mirror``, which refuse invalid values."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

from torchax_ckpt.errors import ArgumentError

T = TypeVar("T")

Codec = Literal["zstd", "blosc-lz4", "blosc-zstd"]
Layout = Literal["auto", "flat"]
SnapshotMode = Literal["auto", "reference", "copy", "offload", "transfer"]
Verify = Literal["restore", "never"]
OnSaveError = Literal["continue", "raise"]
OnConflict = Literal["error", "mirror", "local"]
Reuse = bool | Literal["auto"] | Sequence[str]
TierName = Literal["durable", "local"]


def require_kind(argument: str, value: T | None, kind: type[T]) -> T | None:
    """Returns a value of a kind, or None; raises ArgumentError for any other."""
    if value is None or isinstance(value, kind):
        return value
    raise ArgumentError(
        f"{argument}: expected a {kind.__name__} or None, found {value!r:.100}; give "
        f"{argument}={kind.__name__}(...)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Says how a checkpointer saves and restores; policies say when, and which steps it keeps.

    Attributes:
      compression: how array data is compressed. "blosc-lz4" takes the least time; it removes some
        12 % of the bytes of float32 weights, 24 % of bfloat16, and 9 to 17 % of AdamW's moments.
        "blosc-zstd" removes 16 %, 32 %, and 16 to 19 %, and takes two to five times as long. "zstd"
        is what Orbax itself writes; it removes 8 %, 22 %, and 7 to 10 %. True means "blosc-lz4".
        False, the default, suits storage that takes more than some 250 MB/s; slower storage makes a
        save shorter with compression.
      layout: which leaves are stored as stacks. A stack is one array that joins, along a new
        leading axis, leaves whose names differ only in indices. "auto" stacks the many small
        leaves, "flat" none. Names and values do not depend on the layout, and each layout reads
        every other.
      snapshot: how a save protects device arrays from later changes. "auto" detects whether the
        program donates buffers; if it does, a save copies the state on the devices, offloads it to
        the host or transfers it: the first of these for which there is memory. "reference" is for
        programs that do not donate, "copy" for programs that do.
        "offload" is for programs that donate a state which fills the devices: it copies the state
        to memory of the host before the next step, without blocking the training thread. "transfer"
        blocks the training thread until the arrays are on the host.
      restore_in_budget: whether a restore proceeds part by part, and frees the device buffers of a
        part before their replacements arrive. Meant for a state that fills the devices. A failure
        during such a restore leaves no usable state: every buffer is deleted, and old and new
        values are never mixed.
      verify: "restore" compares everything that is read with the digests taken when it was saved;
        "never" skips the comparison. A save computes digests in either case.
      read_back: whether to read and compare every step after its commit, before it counts as
        durable. The step then counts as verified; the newest such step is never deleted, except in
        a local tier. Bytes just written usually come back from the host's page cache, not from the
        medium.
      on_save_error: "continue" reports a failed save, and the next save tries again; "raise" raises
        in the next call of ``save``, also in ``steps``.
      reuse: which leaves are frozen. A save does not write a frozen leaf again that did not change
        since an earlier step, but reuses the files of that step: by hard links or, in a bucket, by
        copies that the storage service makes. True: the parameters with ``requires_grad=False``.
        "auto": the same if they are at least half of the bytes of the state, else none. A list of
        patterns: the leaves whose names match one, of any kind, also in the state of
        ``save(state=)``. The names are those that ``torchax-ckpt show`` prints, and a pattern
        matches as for ``restore(include=)``, but a dot also stands for a slash. The first save
        raises SelectionError for a pattern that matches nothing. False: none.
        Process 0 decides at the first save after ``attach`` or ``restore``, and again after a save
        that found a frozen parameter changed. Each save compares frozen leaves by 128-bit digests
        on all processes, and writes those that changed. Every step stays complete when others are
        deleted. On a disk the newest step shares no files with the step that is kept before it,
        except in a local tier that keeps one step. ``cp -r`` multiplies links; ``torchax-ckpt
        copy``, ``cp -a`` and ``rsync -H`` do not.
      read_only: whether the checkpointer only reads. A bucket then need not grant write permission,
        and ``save`` and ``delete`` refuse.
      max_host_bytes: upper bound, in bytes per process, on array data in transit at one time: from
        devices to storage in a save, or back in a restore. None: no bound. An array or a stack that
        is larger travels alone. With a bound, a save takes arrays in batches, one after another.
        Without, it takes stacks that the host makes (on CPUs, or if devices are full) in batches of
        128 MiB, two at a time. Buffers held by reference must then live until the last is fetched.
        With a bound, ``snapshot="transfer"`` blocks until then as well. Each batch rewrites a few
        small files, so give a bound of gigabytes. The bound does not count leaves that are host
        arrays, what a snapshot by offload holds, the memory to compress or rearrange an array, and
        a save to a local tier that runs at the same time.
      preemption_grace_secs: how long the process may run after a SIGTERM that arrives after
        ``attach`` or the first ``save``, and before ``close``. The process then ends, whatever it
        does. Give the time that the scheduler waits before it kills the process: Kubernetes and
        Google's spot machines wait 30 s. None leaves SIGTERM alone. The option has no effect under
        ``jax.distributed``, where JAX handles SIGTERM.
      deadline: when the session ends: a datetime with a time zone, a Unix time in seconds, or a
        timedelta from the start of this process. The run saves a step in time and ends, see
        ``reached_deadline``. None: it is not known. ``steps(until=)`` takes precedence.
      deadline_margin_secs: the seconds that must be left until the deadline when the last step is
        durable.
      single_replica_restore: with data-parallel replicas over slices, whether the devices of the
        first replica read from storage and send the values over the device network to those of the
        others. By default each replica reads. Meant for state sizes and slice counts for which
        storage is slow.
      process_timeout_secs: how long process 0 waits for the other processes of a run. They wait for
        it up to twice as long, because it may first wait for one of them. The time must be at least
        the difference between the slowest and the fastest process in reading or writing their
        parts. When it is over, the call or the save fails on all processes; the error names the
        processes that are missing. No process waits for one that made another call.
      min_read_bytes_per_sec: the least rate, in bytes per second, of all array reads in this
        process together. If they are slower for 0.9 times ``process_timeout_secs``, a read from a
        bucket fails with a DirectoryError that names the object, and one of a file is logged.
      save_timeout_secs: after this time, and after each doubling of it, the stage of a save in
        flight and the stack of its thread are logged. Callers that wait for the save get a
        SaveTimeoutError, while the save continues. None: callers wait as long as the save takes.
    """

    compression: bool | Codec = False
    layout: Layout = "auto"
    snapshot: SnapshotMode = "auto"
    restore_in_budget: bool = False
    verify: Verify = "restore"
    read_back: bool = False
    on_save_error: OnSaveError = "continue"
    reuse: Reuse = "auto"
    read_only: bool = False
    max_host_bytes: int | None = None
    preemption_grace_secs: float | None = 30.0
    deadline: datetime.datetime | datetime.timedelta | float | None = None
    deadline_margin_secs: float = 30.0
    single_replica_restore: bool = False
    process_timeout_secs: float = 600.0
    min_read_bytes_per_sec: float = 1e6
    save_timeout_secs: float | None = None

    def __post_init__(self) -> None:
        for name in ("restore_in_budget", "read_back", "read_only", "single_replica_restore"):
            if not isinstance(found := getattr(self, name), bool):
                raise TypeError(f"CheckpointOptions: {name}: expected a bool, found {found!r}")
        for name, choices in (
            ("compression", (False, True, *get_args(Codec))),
            ("layout", get_args(Layout)),
            ("snapshot", get_args(SnapshotMode)),
            ("verify", get_args(Verify)),
            ("on_save_error", get_args(OnSaveError)),
        ):
            found = getattr(self, name)
            if not isinstance(found, (bool, str)) or found not in choices:
                raise ValueError(
                    f"CheckpointOptions: {name}: expected one of {', '.join(map(str, choices))}, "
                    f"found {found!r}"
                )
        if not isinstance(self.reuse, bool) and self.reuse != "auto":
            given = self.reuse if isinstance(self.reuse, (list, tuple)) else ()
            if not given or not all(isinstance(p, str) and p for p in given):
                raise ValueError(
                    'CheckpointOptions: reuse: expected True, False, "auto" or a list of patterns '
                    f"for the names of leaves, found {self.reuse!r:.80}"
                )
            object.__setattr__(self, "reuse", tuple(given))
        for name, kinds, expected in (
            ("preemption_grace_secs", (int, float), "None or a positive number of seconds"),
            ("deadline_margin_secs", (int, float), "a positive number of seconds"),
            ("save_timeout_secs", (int, float), "None or a positive number of seconds"),
            ("process_timeout_secs", (int, float), "a positive number of seconds"),
            ("min_read_bytes_per_sec", (int, float), "a positive number of bytes"),
            ("max_host_bytes", (int,), "None or a positive number of bytes"),
        ):
            found = getattr(self, name)
            if found is None and expected.startswith("None"):
                continue
            if isinstance(found, bool) or not isinstance(found, kinds) or not 0 < found < math.inf:
                raise ValueError(f"CheckpointOptions: {name}: expected {expected}, found {found!r}")
        if self.single_replica_restore and self.restore_in_budget:
            raise ValueError(
                "CheckpointOptions: single_replica_restore restores all leaves together, but "
                "restore_in_budget restores parts that differ between processes: set only one of "
                "these two options"
            )


@dataclasses.dataclass(frozen=True)
class LocalTier:
    """A directory on each host for frequent saves, in addition to the durable directory.

    Attributes:
      path: a directory on a ramdisk or a local disk of each host, not shared between hosts; created
        if it does not exist. Runs that train at the same time need different directories, because a
        run removes the steps that another run has left in its local directory.
      save_decision_policy: when a step is saved to the local tier. None: whenever the previous
        local save is durable.
      keep: how many steps the local tier keeps; there must be space for one more.
      replica_axis: the mesh axis of the arrays along which slices hold equal data. In a restore, a
        host that lacks a part gets it from a host of its own slice if one has it, else of another
        slice.
    """

    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    save_decision_policy: Any = None
    keep: int = 2
    replica_axis: str = "replica"

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
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


@dataclasses.dataclass(frozen=True)
class Mirror:
    """A second place for a run, to which a thread copies durable steps while training goes on.

    Attributes:
      url: a path on another disk, ``gs://bucket/prefix``, ``s3://bucket/prefix``, or a plain store
        (``az://``, ``sftp://``), one per run; created if necessary. A URL with user information,
        a query or a chain (``::``) is refused.
      preservation_policy: which steps the mirror keeps; None: the latest two. The newest stays in
        any case.
      max_bytes: the most bytes of all steps in the mirror together. Older steps are deleted before
        a copy begins, but not the newest one that is not known to be damaged. Steps of abandoned
        branches do not count, and stay.
      on_conflict: what ``attach`` does if the run's directory and the mirror both have steps that
        do not lead to those of the other. "mirror" continues from the mirror's newest step, "local"
        from the newest in the run's directory; the steps of the other become abandoned, and stay on
        storage. "mirror" is refused if the newest step is in a local tier only, which keeps no
        abandoned steps. "error" raises MirrorError.
      close_timeout_secs: how long ``close`` waits until the newest step is in the mirror.
    """

    url: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    preservation_policy: Any = None
    max_bytes: int | None = None
    on_conflict: OnConflict = "error"
    close_timeout_secs: float = 600.0

    def __post_init__(self) -> None:
        if not isinstance(self.url, (str, os.PathLike)):
            raise TypeError(f"Mirror: url: expected a URL or a path, found {self.url!r:.100}")
        if self.on_conflict not in get_args(OnConflict):
            raise ValueError(
                f"Mirror: on_conflict: expected one of {', '.join(get_args(OnConflict))}, found "
                f"{self.on_conflict!r:.40}"
            )
        for name, kinds in (("max_bytes", (int,)), ("close_timeout_secs", (int, float))):
            found = getattr(self, name)
            if found is None and name == "max_bytes":
                continue
            if isinstance(found, bool) or not isinstance(found, kinds) or not 0 < found < math.inf:
                raise ValueError(f"Mirror: {name}: expected a positive number, found {found!r:.40}")
