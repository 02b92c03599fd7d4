"""The folder in which a step is written, from its first file to its commit.

    STEP/orbax.checkpoint                  empty; says that the folder is a checkpoint of Orbax
    STEP/commit_success.txt                the commit mark

``writing/step_writer.py`` says what else is in it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from etils import epath

from torchax_ckpt.errors import LeaseError, SaveError
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.storage.directory import commit_record, leftovers
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import medium, storage_errors

logger = logging.getLogger(__name__)

INDICATOR = "orbax.checkpoint"
# The name that TensorStore gives to folders that hold files of array data, which it syncs itself.
_DATA = "d"


class StepFolder:
    """The folder of one step of a run, from its first file to its commit.

    Before ``commit`` returns, the folder counts as no step. All processes of a save write arrays
    below ``path``. Process 0 makes the folder, and completes and commits it when all have written::

        folder = StepFolder.begin(directory, step)
        array_writer.write_arrays(folder.path / STATE, ...)
        step_writer.complete(folder.path, ...)
        committed = folder.commit()
    """

    def __init__(self, directory: RunDirectory, step: int, path: epath.Path) -> None:
        self.directory, self.step, self.path = directory, step, path

    @classmethod
    def begin(cls, directory: RunDirectory, step: int) -> StepFolder:
        """Creates the folder, which other users cannot enter until ``commit``."""
        folder = cls(directory, step, directory.path_for(step))
        storage = medium.of(folder.path)
        storage.make_closed_folder(folder.path)
        storage.make_inner_folder(folder.path / STATE)
        (folder.path / INDICATOR).write_bytes(b"")
        return folder

    def commit(self, mark: bytes | None = None) -> CommittedStep:
        """Makes a complete folder a step, durable and visible, under the lease.

        On a disk: asks the lease, writes the mark, syncs all but the files that TensorStore has
        synced, asks the lease again, renames the folder, and syncs the directory. From then on, it
        is durable. In a bucket, the mark alone makes it a step.

        ``mark`` is the commit mark of the step of which this is a copy; None makes a new mark.
        If storage reports an error, the step is taken back, now or else by the next ``recover``.
        Raises LeaseError if the lease is lost; SaveError if the folder was removed meanwhile.
        """
        self.directory.fence()
        try:
            self._mark(mark)
            return self.directory.publish(self.step, self.path)
        except Exception:
            with contextlib.suppress(Exception):  # the error of the commit is the one to report
                self.directory.take_back()
            raise

    @stage("mark the step")
    def _mark(self, mark: bytes | None) -> None:
        """Writes the commit mark, and makes everything durable except the folder's name."""
        storage = medium.of(self.path)
        if storage.is_missing(self.path / INDICATOR):
            raise SaveError(
                f"{self.path}: the folder was removed while the step was written, so the step is "
                "not committed. Another program changes files of this run; keep it out of the "
                "directory"
            )
        synced = ""
        if mark is None:
            mark, synced = commit_record.sealing(self.path, "committed").encode(), _DATA
        (self.path / commit_record.MARK).write_bytes(mark)
        storage.finish(self.path, synced=synced)


@contextlib.contextmanager
def claimed(directory: RunDirectory) -> Iterator[None]:
    """Takes the lease of a directory and cleans it, for a block that writes steps by itself."""
    try:
        directory.claim()
        directory.recover()
        yield
    finally:
        directory.release()


@contextlib.contextmanager
def writing(directory: RunDirectory, step: int) -> Iterator[StepFolder]:
    """Yields the folder of a step that the block writes and commits, in one process.

    If the block fails, the folder is removed at once. (That of a failed save on several processes
    may stay until the next save, because other processes may still write to it.)
    """
    folder = StepFolder.begin(directory, step)
    try:
        yield folder
    except LeaseError:
        raise  # in a bucket, the files may be those of the lease's new holder
    except BaseException:
        try:
            leftovers.remove(folder.path)
        except Exception as error:  # bucket clients raise errors of their own
            text = "%s: what was written cannot be removed (%s); the next write there removes it"
            logger.warning(text, folder.path, storage_errors.said(error))
        raise
