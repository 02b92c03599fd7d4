"""The folder of a run that keeps a copy of unchanged arrays when no step has this copy any more.

    DIRECTORY/unchanged/state/ocdbt.process_unchanged0/   a database of unchanged arrays
    DIRECTORY/unchanged/manifest/                         the manifest of the step that had it

Two steps that are kept one after the other use different copies (``layout/unchanged.py``). If only
one step is kept, the copy that the next step needs would vanish with the last step that has it. The
folder is not a step: its name is not a number, and it has no commit mark. Whoever starts a run
reads all of its arrays before a save takes them over.

A bucket has no renames. There the manifest is copied last and removed first, so that a folder with
a manifest has all databases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from etils import epath

from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.storage.directory.committed_step import MANIFEST, STATE, CommittedStep
from torchax_ckpt.storage.medium import bucket, containment, fsync, links, location, seals

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
    """Replaces the folder by one that has databases of a step, as links or as copies in the bucket.

    Args:
      directory: the directory of the run.
      committed: the step.
      folders: the names of all folders of the databases.
      fence: raises if this program may no longer write to the directory.

    Raises:
      OSError: the files cannot be taken over.
      LeaseError: from ``fence``.
    """
    sources = {f"{STATE}/{folder}": committed.path / STATE / folder for folder in folders}
    sources[MANIFEST] = committed.path / MANIFEST
    if location.is_bucket(directory):
        remove(directory, fence)
        fence()
        for name, source in sources.items():
            links.take_over(source, path_of(directory) / name)
        return
    draft = directory / f"writing-{committed.step}-{NAME}"  # a name that a cleanup knows
    if draft.exists():
        draft.rmtree()
    try:
        for name, source in sources.items():
            links.take_over(source, draft / name, may_copy=False)
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
    if (path := path_of(directory)).exists():
        fence()
        if location.is_bucket(directory):
            bucket.remove(path / MANIFEST)
            bucket.remove(path)
            return
        doomed = directory / f"deleting-0-{NAME}"
        if doomed.exists():
            doomed.rmtree()
        path.rename(doomed)
        doomed.rmtree()


def read_manifest(directory: epath.Path) -> Manifest:
    """Returns the manifest of the step whose databases the folder keeps.

    Raises:
      OSError, ValueError, RecursionError, CorruptCheckpointError: there is none, or it is damaged.
    """
    containment.require_contained(path_of(directory), 0)
    path = path_of(directory) / MANIFEST
    return Manifest.from_json(seals.read_sealed(path), path=str(path))
