"""What the README shows, run in an empty folder: its Python twice, then its commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ROOT
from support.commands import BLOCK, run_commands
from support.processes import run_python

README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"


def blocks(page: Path, kind: str) -> str:
    """The blocks of this kind, one after the other."""
    return "\n".join(b["body"] for b in BLOCK.finditer(page.read_text()) if b["kind"] == kind)


def program(page: Path, folder: Path) -> str:
    """The Python of a page, as a program that works in this folder."""
    return f"import os; os.chdir({str(folder)!r})\n{blocks(page, 'python')}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is, on purpose
def test_every_block_runs_and_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (0, 200):  # the second time everything resumes
        result = run_python(program(README, tmp_path), fresh=True)
        assert f"completed steps: {start}\n" in result.stdout
        assert ", 200] 200 {'loss'" in result.stdout
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"readme"}

    monkeypatch.chdir(tmp_path)
    run_commands(blocks(README, "sh"))
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"readme", "kept", "imported"}
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "out", "out.pt", "report.html"}


@pytest.mark.slow
def test_the_programs_of_the_quickstart_run_and_run_again(tmp_path: Path) -> None:
    for start in (0, 20):  # the second time everything resumes
        result = run_python(program(QUICKSTART, tmp_path), fresh=True)
        assert f"completed steps: {start}\n" in result.stdout
    made = {"functional", "more", "own-loop", "quickstart"}
    assert {p.name for p in (tmp_path / "runs").iterdir()} == made
