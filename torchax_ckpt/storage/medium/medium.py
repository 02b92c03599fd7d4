"""Storage of a kind: a disk, or a bucket of an object store.

What must differ between them is in their implementations, ``LocalMedium`` and ``BucketMedium``:
how a folder becomes a step, how files of one step get into another, how a file grows. Callers ask a
medium to do things, and never of which kind it is. Another kind of store is one more class.

A file system renames a folder at once. A bucket has objects only; its clients rename one by one. So
on a disk a save writes a folder of any name, whose later name makes it a step; in a bucket it
writes objects under their final names, and the commit mark, the object that is written last, makes
them a step. A bucket's server may carry out a request long after the client gave up on the answer,
and a stalled writer that lost its lease may go on writing. There a deletion therefore removes only
the exact object that was examined, and a program writes no two saves under one name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Protocol

from etils import epath

from torchax_ckpt.storage.medium import location
from torchax_ckpt.storage.medium.bucket_medium import BucketMedium
from torchax_ckpt.storage.medium.local_medium import LocalMedium
from torchax_ckpt.storage.medium.stored_file import Log, StoredFile


class Medium(Protocol):
    """The storage in which one folder lies, such as the directory of a run.

    The methods that begin, commit and take back steps do so in this folder; the others take paths
    anywhere on the same storage. All raise OSError, or an error of a bucket's client, if storage
    fails.
    """

    append_secs: float
    """Seconds between two appends to one file; a service limits the writes of one object."""
    watch_secs: float
    """Seconds between two looks of somebody who watches a run."""
    streamed_share: float
    """The share of the bytes in flight that keep this storage busy. A disk needs less of them than
    a bucket, and memory that was freed lately is faster."""
    has_links: bool
    """Whether files of two steps may be one file, which damage would hit at once."""
    answers_at_once: bool
    """Whether a look at a file costs no request to a service."""
    gives_up_slow_reads: bool
    """Whether a read that stalls fails; else it is waited for, as for a disk that must spin up."""

    # --- files and folders ---

    def use(self, user: object) -> None:
        """Gives the clients of the storage this package's settings while ``user`` exists."""
        ...

    def require_usable(self, *, for_writing: bool, name: str = "") -> bool:
        """Raises DirectoryError if the storage cannot be reached, or lacks permissions.

        Returns whether the folder has a file of this ``name``, if no other request is needed.
        """
        ...

    def is_missing(self, path: epath.Path) -> bool:
        """Returns whether a look at once shows that nothing is there; a bucket may not tell."""
        ...

    def names_in(self, folder: epath.Path) -> set[str]:
        """Returns the names in a folder; none if it is a link, no folder, or does not exist."""
        ...

    def files(self, folder: epath.Path, prefix: str = "") -> list[StoredFile]:
        """Lists the files below a folder whose names below it begin with ``prefix``.

        Returns none if there is no folder, or if another program removes it meanwhile.
        """
        ...

    def num_bytes(self, path: epath.Path) -> int:
        """Returns the size of a file, without reading it; 0 if there is none."""
        ...

    def read(self, path: epath.Path) -> bytes:
        """Returns the content of a file."""
        ...

    def beginning(self, path: epath.Path, max_bytes: int) -> bytes:
        """Returns the first bytes of a file of any origin; b"" unless it is a regular file."""
        ...

    def remove_file(self, path: epath.Path) -> None:
        """Removes a file; does nothing if there is none."""
        ...

    def new_log(self, path: epath.Path) -> Log:
        """Returns a file that grows; its folder is created, but none above."""
        ...

    def remove_left(self, path: epath.Path, *, is_named_as_step: bool) -> None:
        """Removes what a killed or failed save left, which in a bucket may still grow."""
        ...

    def sync_open(self, file: IO[bytes]) -> None:
        """Makes durable what was written to a file that is still open."""
        ...

    def take_over(self, source: epath.Path, target: epath.Path) -> None:
        """Creates a folder that has the files of another one at any depth, without writing them."""
        ...

    def how_taken_over(self, folder: epath.Path) -> str:
        """Says in words how the files of such a folder are those of another."""
        ...

    def database_to_read(self, folder: epath.Path) -> dict[str, Any]:
        """Returns TensorStore's spec of the OCDBT database in a folder, for reading."""
        ...

    def database_to_write(self, folder: epath.Path) -> dict[str, Any]:
        """Returns the parts of the spec of an OCDBT database that say where its files are."""
        ...

    # --- folders that are published whole ---

    def draft(self, path: epath.Path) -> AbstractContextManager[Path]:
        """Yields the path on this host where a folder is prepared, and removes it at the end."""
        ...

    def remove_drafts(self, folder: epath.Path, names: re.Pattern[str]) -> None:
        """Removes what killed programs left in a folder; a failure is only logged."""
        ...

    def put_folder(
        self,
        draft: Path,
        target: epath.Path,
        before: epath.Path,
        shared: Sequence[str],
        *,
        begun: Callable[[], None],
        send: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        """Puts a prepared folder at ``target``, at once, or by sending it file by file.

        The folder that was put ``before`` has equal files of the names ``shared``, which are not
        stored again if the storage allows it. ``begun`` is called before the first file appears,
        if they appear one by one, and ``ended`` when the folder may be named.
        """
        ...

    def unname(self, path: epath.Path, doomed: epath.Path) -> bool:
        """Deletes a folder by renaming it to ``doomed``, if folders can be renamed at once.

        Returns whether it is gone. Else ``remove_unfinished`` removes it, once nothing names it.
        """
        ...

    def remove_unfinished(self, path: epath.Path) -> None:
        """Deletes a folder whose files appeared, or are to vanish, one by one."""
        ...

    def replace_file(self, path: epath.Path, content: bytes, draft: epath.Path) -> None:
        """Replaces a small file: readers, and a loss of power, find the old content or the new.

        Raises Conflict if another program has replaced it meanwhile, and the storage can tell.
        """
        ...

    # --- steps ---

    def around(self, path: epath.Path) -> Iterator[epath.Path]:
        """Yields the folders, from a path upwards, of which one may be a step that was given."""
        ...

    def has_run(self, folder: epath.Path, is_step: Callable[[epath.Path], bool]) -> bool:
        """Returns whether a folder is a run's directory, by few requests."""
        ...

    def command_to_move(self, new: str) -> str:
        """Returns the shell command, to which names are added, that moves files to ``new``."""
        ...

    def is_complete(self, step: epath.Path) -> bool:
        """Returns whether a folder with the name of a step is whole, if it was ever committed."""
        ...

    def was_committed(self, names: Collection[str], parts: Collection[str]) -> bool:
        """Returns whether a folder with these names in it was a step; ``parts`` only steps have."""
        ...

    def is_puzzling(self, folder: epath.Path) -> bool:
        """Returns whether a folder named as a step is none, and not what a killed save leaves."""
        ...

    def begin(self, step: int, token: str) -> epath.Path:
        """Returns the path at which a save by the holder of a lease's token writes a step."""
        ...

    def publish(self, step: int, written: epath.Path, fence: Callable[[], None]) -> epath.Path:
        """Gives a written folder the name of a step; ``fence`` checks the lease before."""
        ...

    def keep(self, path: epath.Path) -> None:
        """Notes that a published step is committed, so that nothing takes it back."""
        ...

    def take_back(self, fence: Callable[[], None]) -> None:
        """Makes what was begun or published, and not kept, no step, from now on also on storage."""
        ...

    def let_go(self) -> None:
        """Forgets what is to be taken back, because other programs may write there now."""
        ...

    def settle(
        self,
        path: epath.Path,
        final: epath.Path,
        set_aside: Callable[[], OSError | None],
        fence: Callable[[], None],
    ) -> bool:
        """Gives a step its final name, which ``set_aside`` takes from another step.

        Returns whether the step has the name now.
        """
        ...

    def set_aside(
        self, path: epath.Path, target: epath.Path, fence: Callable[[], None]
    ) -> OSError | None:
        """Renames a step to a name that is none of a step; returns the system's refusal."""
        ...

    def delete(self, path: epath.Path, step: int, fence: Callable[[], None]) -> OSError | None:
        """Makes a step none, and removes its files; returns the system's refusal to do so."""
        ...


def of(folder: epath.Path) -> Medium:
    """Returns the storage in which a folder lies, or would lie."""
    return BucketMedium(folder) if location.is_url(folder) else LocalMedium(folder)
