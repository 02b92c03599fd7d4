"""The report of a restore: what was restored, and what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torchax_ckpt.options import TierName


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """The result of a restore.

    Attributes:
      step: the restored step; None for weights from files.
      missing: names that are attached but not in the checkpoint; what they name stays unchanged.
      unexpected: names in the checkpoint that no attached object takes.
      mismatched: name of a leaf that differs -> "expected ..., found ..."; the attached leaf stays
        unchanged. Optimizer state is listed under the name of its parameter, for example
        ``optimizer/head.weight``.
      left_out: names of the model's tensors, in the program or the checkpoint, that ``include`` and
        ``exclude`` do not select; and names of the checkpoint's optimizer state for these tensors,
        or for parameters that were in no group of the optimizer.
      skipped_steps: steps newer than ``step`` that could not be read.
      is_verified: whether every stored byte of the step was read and compared with its digest.
      tier: the tier from which the step was read, "durable" or "local".
    """

    step: int | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    skipped_steps: tuple[int, ...] = ()
    is_verified: bool = False
    tier: TierName = "durable"
