"""The folder of a run that keeps a copy of unchanged arrays when no step has this copy any more.

    DIRECTORY/unchanged/state/ocdbt.process_unchanged0/   a database of unchanged arrays

Two steps that are kept one after the other use different copies (``layout/unchanged.py``). If only
one step is kept, the copy that the next step needs would vanish with the last step that has it. The
folder is not a step: its name is not a number, and it has no commit mark. Only the program that
made it takes anything over from it. A bucket has no such folder.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable

from etils import epath

from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.medium import fsync, links, location

NAME = "unchanged"


def path_of(directory: epath.Path) -> epath.Path:
    """Returns the path of the folder in the directory of a run."""
    return directory / NAME


def keep(
    directory: epath.Path,
    committed: CommittedStep,
    folders: Iterable[str],
    fence: Callable[[], None],
) -> None:
    """Replaces the folder by one that has databases of a step, as links.

    Args:
      directory: the directory of the run.
      committed: the step.
      folders: the names of all folders of the databases.
      fence: raises if this program may no longer write to the directory.

    Raises:
      OSError: the files cannot be linked.
      LeaseError: from ``fence``.
    """
    draft = directory / f"writing-{committed.step}-{NAME}"  # a name that a cleanup knows
    if draft.exists():
        draft.rmtree()
    try:
        for name in folders:
            links.link_folder(committed.path / STATE / name, draft / STATE / name, may_copy=False)
        for new in (draft / STATE, draft):
            fsync.sync(new)
    except OSError:
        draft.rmtree(missing_ok=True)
        raise
    remove(directory, fence)
    fence()
    draft.rename(path_of(directory))
    fsync.sync(directory)


def remove(directory: epath.Path, fence: Callable[[], None]) -> None:
    """Removes the folder, if there is one; ``fence`` as for ``keep``."""
    if location.is_bucket(directory):
        return
    path = pathlib.Path(path_of(directory))
    if path.is_symlink() or not path.is_dir():
        return
    if {child.name for child in path.iterdir()} <= {STATE}:  # else it is not ours
        fence()
        doomed = directory / f"deleting-0-{NAME}"
        if doomed.exists():
            doomed.rmtree()
        path.rename(doomed)
        doomed.rmtree()
