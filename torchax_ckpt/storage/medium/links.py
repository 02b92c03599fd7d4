"""Takes the files of a folder over into another folder, without writing their bytes again.

On a file system, the new files are hard links. In a bucket, the service copies the objects, and
each copy is an object of its own.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat

from etils import epath

from torchax_ckpt.storage.medium import bucket, fsync, location

logger = logging.getLogger(__name__)

# What file systems answer that have no hard links, allow none here, or too few for one file.
_REFUSALS = {
    *(errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK),
    *(errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL),
}
_has_warned = False


def take_over(source: epath.Path, target: epath.Path) -> None:
    """Creates a folder that has the files of another folder on the same medium, at any depth."""
    if location.is_bucket(source):
        bucket.copy(source, target)
    else:
        link_folder(source, target)


def link_folder(source: epath.Path, target: epath.Path, *, may_copy: bool = True) -> None:
    """Creates a folder whose files are hard links to another folder's files, at any depth.

    The names of the new files are durable then, but not that of ``target`` in the folder above.
    """
    for folder, _, files in os.walk(source, onerror=fsync.raise_error):
        new = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(new, exist_ok=True)
        for name in files:
            link_file(os.path.join(folder, name), os.path.join(new, name), may_copy=may_copy)
        fsync.sync(new)


def link_file(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, may_copy: bool = True
) -> None:
    """Gives a file a second name, not yet durable; copies it if the file system refuses links."""
    if not stat.S_ISREG(os.lstat(source).st_mode):
        raise OSError(errno.ELOOP, "expected a regular file", os.fspath(source))
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _REFUSALS or not may_copy:
            raise
        global _has_warned
        if not _has_warned:
            _has_warned = True
            logger.warning(
                "%s: cannot be linked from %s (%s). Unchanged arrays are copied from step to step "
                "in place of links, which takes time and space",
                os.fspath(target),
                os.fspath(source),
                error.strerror,
            )
        shutil.copyfile(source, target, follow_symlinks=False)
        fsync.sync(epath.Path(target))
