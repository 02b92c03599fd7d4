"""Owns the settings of a checkpointer; knows nothing of how they are carried out."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

Layout = Literal["auto", "stacked", "flat"]
SnapshotMode = Literal["auto", "reference", "copy", "transfer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How a checkpointer saves and restores. When it saves and what it keeps are policies.

    Attributes:
      compression: compress array data with Zstandard. Off by default: on float32 weights it
        halves the write speed of a local disk and saves some 8 % of the bytes.
      layout: which leaves are stored as stacks, arrays with a leading axis of leaves whose names
        differ only in indices: "auto" the many small ones, "stacked" all, "flat" none. Names and
        values are the same whatever it is, and any reads what any other wrote.
      snapshot: how device arrays are held while they are saved: "auto" finds out whether the
        program donates them; "reference" is for programs that do not, "copy" for those that do,
        "transfer" holds the training thread until they are on the host.
      restore_in_budget: free the device buffers that a restore replaces before the new ones
        arrive, part by part, for a state that fills the devices. A failure on the way then leaves
        the program without a usable state (every buffer deleted, never a mix of old and new).
      max_host_bytes: upper bound, in bytes and per process, on array data that is on its way
        between devices and storage at one time; None for no bound.
    """

    compression: bool = False
    layout: Layout = "auto"
    snapshot: SnapshotMode = "auto"
    restore_in_budget: bool = False
    max_host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("compression", "restore_in_budget"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, found {getattr(self, name)!r}")
        for name, choices in (("layout", get_args(Layout)), ("snapshot", get_args(SnapshotMode))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}: expected one of {', '.join(choices)}, found {getattr(self, name)!r}"
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
