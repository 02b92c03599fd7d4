"""Matches names of a checkpoint and of a model that differ by wrappers around the module.

``torch.compile`` and parallel modules keep the module that they wrap in an attribute, which becomes
a part of all its names: ``_orig_mod.weight``, ``module.weight``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import jax

from torchax_ckpt.layout import names
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.state.stored_entries import StoredModule, extra_state_key

logger = logging.getLogger(__name__)


def match_wrapped(
    live: Iterable[str], stored: StoredModule, selection: Selection, key_path: tuple[str, ...]
) -> None:
    """Lets the selection match names that differ by wrappers; process 0 logs it once."""
    known = [*stored.tensors, *stored.ties, *map(extra_state_key, stored.extra_state or ())]

    def named(fqns: Iterable[str]) -> list[str]:
        return [names.join((*key_path[1:], fqn)) for fqn in fqns]

    matched = selection.match_wrapped(named(known), named(live))
    if matched and jax.process_index() == 0:
        logger.warning(
            "%s: %d names of the checkpoint are matched with names of the model that differ by a "
            "wrapper, such as torch.compile's _orig_mod: %s with %s",
            *(names.join(key_path), len(matched), *next(iter(matched.items()))),
        )
