"""Code that several tests share, and the paths of this repository."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PROGRAMS = TESTS / "programs"
