"""Owns the settings of a checkpointer; knows nothing of how they are carried out."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How a checkpointer saves and restores. When it saves and what it keeps are policies.

    Attributes:
      compression: compress array data with Zstandard. Off by default: on float32 weights it
        halves the write speed of a local disk and saves some 8 % of the bytes.
      max_host_bytes: upper bound, in bytes and per process, on array data that is on its way
        between devices and storage at one time; None for no bound.
    """

    compression: bool = False
    max_host_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.compression, bool):
            raise TypeError(f"compression: expected a bool, found {self.compression!r}")
        if self.max_host_bytes is not None and (
            isinstance(self.max_host_bytes, bool)
            or not isinstance(self.max_host_bytes, int)
            or self.max_host_bytes <= 0
        ):
            raise ValueError(
                "max_host_bytes: expected None or a positive number of bytes, found "
                f"{self.max_host_bytes!r}"
            )
