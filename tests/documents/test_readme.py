"""What the README shows, run in an empty folder: its Python twice, then its commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ROOT
from support.commands import BLOCK, run_commands
from support.processes import run_python

README = ROOT / "README.md"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is, on purpose
def test_every_block_runs_and_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = dict.fromkeys(("python", "sh"), "")
    for block in BLOCK.finditer(README.read_text()):
        if block["kind"] in blocks:
            blocks[block["kind"]] += f"\n{block['body']}"
    program = f"import os; os.chdir({str(tmp_path)!r})\n{blocks['python']}"
    for start in (0, 200):  # the second time everything resumes
        result = run_python(program, fresh=True)
        assert f"completed steps: {start}\n" in result.stdout
        assert ", 200] 200 {'loss'" in result.stdout
    made = {"functional", "lightning", "own-loop", "readme"}
    assert {p.name for p in (tmp_path / "runs").iterdir()} == made

    monkeypatch.chdir(tmp_path)
    run_commands(blocks["sh"])
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {*made, "kept", "imported"}
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "out", "out.pt", "report.html"}
