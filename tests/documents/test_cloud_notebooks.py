"""The notebooks for Colab and Kaggle run as programs, also with the packages of these platforms.

`make test-versions` runs them with each set of tests/versions.toml, in which there is no Jupyter.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import ROOT
from support.processes import run_python

MAGIC = "%%writefile "


def program(notebook: Path) -> str:
    """Returns the code of a notebook, whose only magic writes a file."""
    cells = json.loads(notebook.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lines = []
    for source in sources:
        if source.startswith(MAGIC):
            first, _, text = source.partition("\n")
            source = f"open({first.removeprefix(MAGIC)!r}, 'w').write({text!r})"
        lines.append(source)
    return "\n".join(lines)


@pytest.mark.long
@pytest.mark.timeout(540)  # a minute alone
@pytest.mark.parametrize("name", ["6-colab", "7-kaggle"])
def test_a_run_outlives_its_sessions(name: str, tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r})\n{program(ROOT / f'notebooks/{name}.ipynb')}"
    result = run_python(code, devices=1, env={"MIRROR": "mirror"}, timeout_secs=500, fresh=True)
    killed, ended, anew = result.stdout.split("first step after ")[1:]
    assert "killed" in killed
    assert "the session ends soon" in ended
    assert "all steps are done" in anew
    (run,) = (tmp_path / "mirror" / "runs").iterdir()
    assert run.name == name[2:]
