"""Single flipped bits: a short form of ``torture_flips.py``, and that it can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import run_torture

PROGRAM = Path(__file__).parent / "torture_flips.py"


def outcomes(*args: str) -> tuple[int, dict[str, int], str]:
    """Exit code, outcomes of all checkpoints together, and output."""
    code, _, output = run_torture(PROGRAM, *args)
    rows = re.findall(r"^(?:stacked|flat|shared).*? +(\d+) +(\d+) .*?(\d+)$", output, re.MULTILINE)
    assert len(rows) == (8 if "orbax" in args else 12), output
    sums = (sum(map(int, column)) for column in zip(*rows, strict=True))
    return code, dict(zip(("detected", "harmless", "wrong"), sums, strict=True)), output


@pytest.mark.long
@pytest.mark.slow
def test_flipped_bits_are_detected_or_harmless() -> None:
    code, found, output = outcomes("--flips", "24", "--seed", "1")
    assert code == 0, output
    assert found["wrong"] == 0, output
    assert found["detected"] >= 2, output
    assert sum(found.values()) == 24, output


@pytest.mark.slow
@pytest.mark.long
def test_flips_that_come_back_wrong_are_found() -> None:
    code, found, output = outcomes("--flips", "32", "--seed", "1", "--reader", "orbax")
    assert code == 1, output
    assert found["wrong"] >= 1, output
