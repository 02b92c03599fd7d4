"""What the README shows, run in an empty folder: its Python twice, then its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import run_python
from test_docs import run_commands

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is, on purpose
def test_every_block_runs_and_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = dict.fromkeys(("python", "sh"), "")
    for kind, body in re.findall(r"```(python|sh)\n(.*?)```", README.read_text(), re.DOTALL):
        blocks[kind] += f"\n{body}"
    program = f"import os; os.chdir({str(tmp_path)!r})\n{blocks['python']}"
    for _ in range(2):  # the second time everything resumes
        result = run_python(program, fresh=True)
        assert "[18, 19, 20] 20" in result.stdout or " 20 {'loss'" in result.stdout
    made = {"functional", "lightning", "own-loop", "readme"}
    assert {p.name for p in (tmp_path / "runs").iterdir()} == made

    monkeypatch.chdir(tmp_path)
    run_commands(blocks["sh"])
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {*made, "kept", "imported"}
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "out", "out.pt", "report.html"}
