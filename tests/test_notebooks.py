"""The notebooks run from top to bottom, and what is kept in them is what running them gives."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "notebooks"))

import execute

MAX_BYTES = 150_000


def outputs(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """What each cell printed, with # for numbers, and the kinds of what it drew.

    Numbers are what the notebooks measure; what they promise of them they assert.
    """
    kept = []
    for cell in notebook.cells:
        found = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                text = f"{output.name}: {output.text}"
            else:
                text = " ".join(sorted(output.data))
            # Hashes, and the spaces that align numbers of other lengths, are no words either.
            text = re.sub(r"\b[0-9a-f]{16}\b|\d+(\.\d+)?(e-?\d+)?", "#", text)
            found.append(re.sub(r"\s+", " ", text).strip())
        kept.append(found)
    return kept


@pytest.mark.parametrize("path", execute.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_keeps_what_that_gives(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XLA_FLAGS", "PYTHONWARNINGS"):
        monkeypatch.delenv(name, raising=False)  # a notebook sets what it needs
    kept = nbformat.read(path, as_version=4)
    assert outputs(execute.run(path, tmp_path)) == outputs(kept)


@pytest.mark.parametrize("path", execute.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_says_nothing_of_the_machine(path: Path) -> None:
    text = path.read_text()
    assert len(text) <= MAX_BYTES
    notebook = nbformat.read(path, as_version=4)
    shown = str(outputs(notebook))
    for place in (Path.home(), os.getcwd(), "/tmp", "/home", "/root", "site-packages", "stderr:"):
        assert str(place) not in shown
    assert any(cell.get("outputs") for cell in notebook.cells), "no outputs are kept"
    assert "execution" not in text.partition('"cells"')[2].partition('"metadata"')[0]


def test_there_are_pictures_in_all_but_the_last() -> None:
    drawn = [path.stem for path in execute.NOTEBOOKS if '"image/png"' in path.read_text()]
    assert drawn == ["1-resume", "2-reshard", "3-how-often"]
