"""The command ``diff``, which compares two steps and prints the leaves that differ."""

from __future__ import annotations

import fnmatch
import math
from typing import Any

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import FOUND, OK
from torchax_ckpt.cli.step_arguments import chosen
from torchax_ckpt.runtime import progress
from torchax_ckpt.stored.compare import Difference, StepComparison, compare
from torchax_ckpt.stored.stored_step import StoredStep

_IN_WORDS = {
    "only_in_a": "only in A",
    "only_in_b": "only in B",
    "form": "kind, dtype or shape",
    "bits": "equal values, other bits",
    "content": "content",
}


def diff(a: str, b: str, pattern: str | None, *, as_json: bool) -> int:
    """Runs ``torchax-ckpt diff``; returns the exit code."""
    steps = [StoredStep(chosen(text)[1]) for text in (a, b)]
    left, right = steps
    with progress.bar("comparing", lambda: left.stored_bytes) as on_bytes:
        result = compare(
            left,
            right,
            is_wanted=lambda name: pattern is None or fnmatch.fnmatchcase(name, pattern),
            on_bytes=on_bytes,
        )
    if as_json:
        output.print_json(
            {
                **{
                    side: {"path": str(step.committed.path), "step": step.committed.step}
                    for side, step in zip("ab", steps, strict=True)
                },
                "identical": result.is_identical,
                "num_identical": result.num_identical,
                "leaves": [_as_json(difference) for difference in result.leaves],
                "values": [_as_json(difference) for difference in result.values],
            }
        )
    else:
        _print(result)
    return OK if result.is_identical else FOUND


def _as_json(difference: Difference) -> dict[str, Any]:
    is_infinite = difference.max_abs is not None and math.isinf(difference.max_abs)
    return {
        **vars(difference),
        "max_abs": "inf" if is_infinite else difference.max_abs,  # JSON has no infinity
    }


def _print(result: StepComparison) -> None:
    if rows := [(d.name, _IN_WORDS[d.what], _detail(d)) for d in (*result.leaves, *result.values)]:
        output.print_table(("name", "difference", ""), rows)
    if result.is_identical:
        output.print_line(f"identical to the bit: {result.num_identical} leaves, and all values")
    else:
        output.print_line(
            f"{result.num_identical} leaves are identical to the bit; {len(result.leaves)} leaves "
            f"and {len(result.values)} values differ"
        )


def _detail(difference: Difference) -> str:
    if difference.what == "bits":
        return ""
    if difference.num_elements is None:
        return " -> ".join(text for text in (difference.a, difference.b) if text is not None)
    parts = [f"{difference.num_elements} elements"]
    if difference.max_abs is not None:
        parts.append(f"by at most {difference.max_abs:.6g}")
    if difference.num_nan:
        parts.append(f"{difference.num_nan} NaN on one side")
    return ", ".join(parts)
