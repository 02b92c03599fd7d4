"""The README's Python, run from top to bottom as one program in an empty folder, twice."""

from __future__ import annotations

import re
from pathlib import Path

from support import run_python

README = Path(__file__).parent.parent / "README.md"


def test_every_block_runs_and_runs_again(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 7
    program = f"import os; os.chdir({str(tmp_path)!r})\n" + "\n".join(blocks)
    for _ in range(2):  # the second time everything resumes
        result = run_python(program)
        assert "[18, 19, 20] 20" in result.stdout or " 20 {'loss'" in result.stdout
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [
        "functional",
        "lightning",
        "own-loop",
        "readme",
        "seen",
    ]
