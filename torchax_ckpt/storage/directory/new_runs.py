"""Says that a run is new, and whether the name of its directory may be a typing mistake."""

from __future__ import annotations

import logging

from etils import epath

from torchax_ckpt.layout import names
from torchax_ckpt.runtime.user_messages import fields, tell
from torchax_ckpt.storage.directory import commit_record

logger = logging.getLogger(__name__)


def announce(path: epath.Path) -> None:
    """Logs that a new run begins, as a warning if a run with nearly its name is beside it."""
    text = f"new run in {path}: it has no step to resume from"
    about = fields(step=0, path=path)
    try:
        for sibling in path.parent.iterdir():
            if not names.may_be_mistyped(path.name, sibling.name):
                continue
            if (step := commit_record.newest_in(sibling)) is not None:
                logger.warning(
                    "%s. The run %s, whose name differs by one letter, has step %d: if this run "
                    "was to continue that one, end the program and give it that directory",
                    text,
                    sibling,
                    step,
                    extra=about,
                )
                return
    except Exception as error:  # bucket clients raise errors of their own
        logger.debug("%s: the runs beside it cannot be listed: %s", path, error)
    tell(logger, text, about)
