"""The notebooks run from top to bottom, and what is kept in them is what running them gives."""

from __future__ import annotations

import collections
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from support import ROOT
from support.processes import COMPILED_ONCE

sys.path.insert(0, str(ROOT / "notebooks"))

import execute

pytest_plugins = ("gcs_fixtures",)

MAX_BYTES = 150_000
OF_EVERY_CHANGE = ("4-inspect",)


def outputs(notebook: nbformat.NotebookNode) -> list[dict[str, str]]:
    """What each cell printed, with # for numbers, and the kinds of what it drew.

    Numbers are what the notebooks measure; what they promise of them they assert.
    """
    kept = []
    for cell in notebook.cells:
        found: collections.defaultdict[str, str] = collections.defaultdict(str)
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                found[output.name] += output.text  # which comes in pieces, as time would have it
            else:
                found[" ".join(sorted(output.data))] += "#"
        # Hashes, and the spaces that align numbers of other lengths, are no words either.
        number = r"\b[0-9a-f]{16}\b|\d+(\.\d+)?(e-?\d+)?"
        kept.append(
            {name: " ".join(re.sub(number, "#", text).split()) for name, text in found.items()}
        )
    return kept


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            marks=[pytest.mark.slow, *([] if path.stem in OF_EVERY_CHANGE else [pytest.mark.long])],
            id=path.stem,
        )
        for path in execute.NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_keeps_what_that_gives(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    kept = nbformat.read(path, as_version=4)
    if any("BUCKET" in cell.source for cell in kept.cells):
        request.getfixturevalue("gcs")
        monkeypatch.setenv("BUCKET", request.getfixturevalue("url"))
    for name in ("XLA_FLAGS", "PYTHONWARNINGS"):
        monkeypatch.delenv(name, raising=False)  # a notebook sets what it needs
    for name, value in COMPILED_ONCE.items():
        monkeypatch.setenv(name, value)  # its programs compile the same again
    assert outputs(execute.run(path, tmp_path)) == outputs(kept)


def test_a_program_of_a_notebook_that_fails_shows_its_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name, program in (("1-resume", "train.py"), ("5-finetune", "finetune.py")):
        (tmp_path / program).write_text("raise SystemExit('no such base')")
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        (cell,) = (c for c in notebook.cells if "undisturbed = " in c.source)
        with pytest.raises(RuntimeError, match="no such base"):
            exec(cell.source, {})


def test_notebooks_are_small_and_say_nothing_of_the_machine() -> None:
    for path in execute.NOTEBOOKS:
        assert len(path.read_text()) <= MAX_BYTES
        notebook = nbformat.read(path, as_version=4)
        assert any(cell.get("outputs") for cell in notebook.cells), "no outputs are kept"
        assert said_of_the_machine(notebook) == [], path
    runs = [set(re.findall(r"runs/[\w{}-]+", path.read_text())) for path in execute.NOTEBOOKS]
    assert sum(map(len, runs)) == len(set().union(*runs)), "two notebooks write to one run"


def said_of_the_machine(notebook: nbformat.NotebookNode) -> list[str]:
    """Paths, warnings and times of execution: what another machine would not keep."""
    kept = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    # Whatever it is shown as; a picture's bytes are no words.
    shown = [str({**output, "data": texts_of(output)}) for output in kept]
    places = (Path.home(), os.getcwd(), "/tmp", "/home", "/root", "site-packages", "stderr")
    found = [str(place) for place in places if any(str(place) in text for text in shown)]
    timed = [cell.id for cell in notebook.cells if "execution" in cell.metadata]
    return found + timed


def texts_of(output: nbformat.NotebookNode) -> dict[str, str]:
    data = output.get("data", {})
    return {kind: content for kind, content in data.items() if not kind.startswith("image/png")}


def test_what_a_notebook_says_of_the_machine_is_found() -> None:
    notebook = nbformat.read(execute.NOTEBOOKS[0], as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    cell.outputs = [nbformat.v4.new_output("display_data", {"text/html": "<b>/tmp/run</b>"})]
    assert said_of_the_machine(notebook) == ["/tmp"]
    cell.outputs = [nbformat.v4.new_output("stream", name="stderr", text="warned")]
    cell.metadata["execution"] = {"iopub.execute_input": "2026-11-21T23:00:00Z"}
    assert said_of_the_machine(notebook) == ["stderr", cell.id]
