"""What several tests need, and where things lie."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PROGRAMS = TESTS / "programs"
