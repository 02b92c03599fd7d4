"""A run's claim to the directory of a tier: its lease, and whether what is left there is gone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Literal

from torchax_ckpt.errors import LeaseError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.telemetry.recorder import Telemetry


class Claim:
    """Whether this run holds a directory's lease, as far as it knows, and what is left there.

    ``processes`` is the channel between training threads.
    """

    def __init__(
        self,
        directory: RunDirectory,
        history: RunHistory,
        telemetry: Telemetry,
        processes: Processes,
    ) -> None:
        self._directory, self._history = directory, history
        self._telemetry, self._processes = telemetry, processes
        self.is_held = self.was_tried = False
        # Whether the directory may have leftovers; of a failed save, which may have lost the lease.
        self._leftovers: Literal["none", "perhaps", "of a failed save"] = "perhaps"
        self._releasing = threading.Lock()

    def acquire(self, step: int | None, close_others: Callable[[], None]) -> None:
        """Acquires the lease, unless held; raises LeaseError if others write to the directory."""
        # On the training thread, once. After a failed save, ``clean_up`` takes the lease on the
        # thread of the next save, because a slow medium would block the training.
        if not self.is_held:
            self.was_tried = True
            with self._processes.round("taking the directory"):
                close_others()
                self._processes.first(functools.partial(self._take, step))
            self.is_held = True
            self._history.open()
            self._telemetry.open(self._history.branches.committed)

    def _take(self, step: int | None) -> None:
        """Acquires the lease; raises LeaseError if others saved ``step`` or newer in this run."""
        self._directory.claim()
        if unknown := self._history.unknown(step):
            self._directory.release()
            path = self._directory.path
            raise LeaseError(
                f"{path}: since this program listed the directory, another program has saved steps "
                f"{', '.join(str(s.step) for s in unknown)} there, or they could not be listed "
                "then. They do not belong to the run of this program, so nothing was written. "
                "Start this program again, or restore() one of the steps there; newer steps are "
                "then set aside. Or use another directory.",
                path=path,
            )

    def clean_up(self) -> None:
        """Removes what failed or killed saves left, if any did; call it on process 0 only."""
        if self._leftovers == "none":
            return
        if self._leftovers == "of a failed save":
            self._directory.claim()
        self._directory.recover()
        self._history.refresh(self._directory.branches().in_place)
        self._leftovers = "none"

    def clean_up_later(self, *, has_failed: bool) -> None:
        """Makes the next save or delete begin with ``clean_up``."""
        self._leftovers = "of a failed save" if has_failed else "perhaps"

    def lose(self) -> None:
        """Records that another program has the lease; the next save tries to acquire it again."""
        self._telemetry.lost()
        self._directory.let_go()
        self.is_held = False

    def release(self) -> None:
        """Releases the lease, if held."""
        with self._releasing:
            self._directory.release()
            self.is_held = False
