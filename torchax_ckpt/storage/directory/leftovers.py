"""Removes what killed or failed saves and deletes leave in the directory of a run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from etils import epath

from torchax_ckpt.storage.directory import lease, run_identity
from torchax_ckpt.storage.directory.commit_record import PARTS, STEP, is_marked
from torchax_ckpt.storage.medium import medium, permissions, storage_errors

logger = logging.getLogger(__name__)

# Exactly the names that this package and Orbax give: a user's deleting-2-old-plots must stay.
_HEX = "[0-9a-f]{32}"
_DRAFT = rf"({lease.NAME}|{run_identity.NAME}|{permissions.PROBE})-{_HEX}(\.renamed)?"
_LEFTOVER = re.compile(
    rf"deleting-[0-9]+(-[0-9]+)?|deleting-0-unchanged|writing-[0-9]+-({_HEX}(-[0-9]+)*|unchanged)"
    r"|fetching-[0-9]+-[0-9]+"
    rf"|(incoming-)?[0-9]+\.orbax-checkpoint-tmp(-[0-9]+)?"
    rf"|{_DRAFT}{re.escape(permissions.DRAFT_SUFFIX)}"
)
# Names of steps and of steps that were set aside. A folder without a commit mark is neither.
_MARKED = re.compile(r"(incoming-|abandoned-)?\d+(-\d+)?")
# The files in a step of this package, and those of a pytree that Orbax alone wrote.
_FILE = re.compile(
    r"begun|verified|orbax\.checkpoint|_CHECKPOINT_METADATA|(manifest|summary|assets)/data\.json"
    r"|((state|pytree)/)?(_METADATA|_sharding|array_metadatas/process_[0-9]+"
    r"|(ocdbt\.process_\w+/)?(manifest\.ocdbt|d/[0-9a-f]{32}))"
)


def remove_among(children: Iterable[epath.Path]) -> None:
    """Removes the leftovers among a run's files; logs those that cannot be removed, which stay."""
    for child in children:
        if not (
            _LEFTOVER.fullmatch(child.name) or (_MARKED.fullmatch(child.name) and _is_begun(child))
        ):
            continue
        logger.debug("removing %s, left behind by a killed save or delete", child)
        try:
            remove(child)
        except Exception as error:  # bucket clients raise errors of their own
            why = storage_errors.explained(error, child)
            text = "%s, left behind by a killed save or delete, cannot be removed: %s"
            logger.warning(text, child, why)


def _is_begun(path: epath.Path) -> bool:
    """Returns whether a bucket's folder is an unfinished or partly removed step, not a user's."""
    if is_marked(path) or not path.is_dir():
        return False
    names = [file.name for file in medium.of(path).files(path)]
    is_ours = any(name.partition("/")[0] in PARTS for name in names)
    return is_ours and all(map(_FILE.fullmatch, names))


def remove(path: epath.Path) -> None:
    """Removes the files of a failed save, which in a bucket may still be written to."""
    is_named_as_step = STEP.fullmatch(path.name) is not None
    medium.of(path).remove_left(path, is_named_as_step=is_named_as_step)
