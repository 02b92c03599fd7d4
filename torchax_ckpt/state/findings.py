"""Owns what a restore finds before it writes: every difference, collected, then raised once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torchax_ckpt.errors import MismatchError

_MAX_LISTED = 20


@dataclasses.dataclass
class Findings:
    """Differences between a checkpoint and what is attached, by leaf name.

    Attributes:
      missing: attached, but not in the checkpoint.
      unexpected: in the checkpoint, but not attached.
      mismatched: on both sides but different: name -> "expected ..., found ...".
    """

    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: dict[str, str] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def mismatch(self, name: str, expected: object, found: object) -> None:
        """Records that the attached program has ``expected`` and the checkpoint ``found``."""
        self.mismatched[name] = f"expected {expected}, found {found}"

    def error(self, step: int | None, path: str) -> MismatchError:
        """All differences in one error, each with its name; without a step, of files."""
        source = path if step is None else f"The checkpoint at step {step} in {path}"
        lines = [f"{source} does not fit what is attached; nothing was changed."]
        lines += _section("missing from the checkpoint", self.missing)
        lines += _section("in the checkpoint, but not attached", self.unexpected)
        lines += _section(
            "different (expected: attached, found: in the checkpoint)",
            [f"{name}: {text}" for name, text in self.mismatched.items()],
        )
        lines.append(
            "Attach the program that wrote it; or restore(strict=False) to take what matches, or "
            "leave out or rename what differs (exclude=, rename=); or use another directory. For "
            "load, give an abstract_state that fits."
        )
        return MismatchError(
            "\n".join(lines),
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=self.mismatched,
            step=step,
            path=path,
        )


def _section(title: str, entries: Iterable[str]) -> list[str]:
    entries = list(entries)
    if not entries:
        return []
    listed = [f"    {entry}" for entry in entries[:_MAX_LISTED]]
    if len(entries) > _MAX_LISTED:
        listed.append(f"    ... and {len(entries) - _MAX_LISTED} more")
    return [f"  {title}:", *listed]
