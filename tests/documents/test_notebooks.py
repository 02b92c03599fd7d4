"""The notebooks: they name what the library has; and, with `make test-long`, they run."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from support import ROOT
from support.processes import COMPILED_ONCE

import torchax_ckpt

sys.path.insert(0, str(ROOT / "notebooks"))

import execute

pytest_plugins = ("s3_fixtures",)

MAX_BYTES = 150_000


@pytest.mark.long
@pytest.mark.parametrize("path", execute.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if path.stem == "7-kaggle":
        request.getfixturevalue("s3")
        monkeypatch.setenv("MIRROR", request.getfixturevalue("s3_url"))
    for name in ("XLA_FLAGS", "PYTHONWARNINGS"):
        monkeypatch.delenv(name, raising=False)  # a notebook sets what it needs
    for name, value in COMPILED_ONCE.items():
        monkeypatch.setenv(name, value)  # its programs compile the same again
    execute.run(path, tmp_path)  # a cell that raises fails; what notebooks promise they assert


def test_a_notebook_uses_what_the_library_has() -> None:
    num_checked = 0
    for path in execute.NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        sources = [cell.source for cell in cells if cell.cell_type == "code"]
        code = "\n".join(re.sub(r"^%.*\n", "", source) for source in sources)
        imported: dict[str, Any] = {}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchax_ckpt"):
                module = importlib.import_module(node.module or "")
                imported |= {alias.name: getattr(module, alias.name) for alias in node.names}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ckpt":
                assert hasattr(torchax_ckpt.TorchaxCheckpointer, node.attr), (path, node.attr)
                num_checked += 1
            if isinstance(node, ast.Call) and ast.unparse(node.func) in imported:
                accepted = inspect.signature(imported[ast.unparse(node.func)]).parameters
                assert {k.arg for k in node.keywords if k.arg} <= accepted.keys(), (path, node)
                num_checked += 1
    assert num_checked > 40


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


def test_a_notebook_says_first_what_it_takes() -> None:
    for path in execute.NOTEBOOKS:
        first, *_ = nbformat.read(path, as_version=4).cells
        said = " ".join(first.source.split())
        assert re.search(
            r"It takes (about )?\S+ (seconds|minutes?), \S+ [GM]B of memory and \S+ MB of disk",
            said,
        ), path


def test_notebooks_are_small_and_say_nothing_of_the_machine() -> None:
    for path in execute.NOTEBOOKS:
        assert len(path.read_text()) <= MAX_BYTES
        cells = nbformat.read(path, as_version=4).cells
        kept = [output for cell in cells for output in cell.get("outputs", [])]
        assert kept, "no outputs are kept"
        for output in kept:
            output.get("data", {}).pop("image/png", None)  # a picture's bytes are no words
        places = (Path.home(), os.getcwd(), "/tmp", "/home", "/root", "site-packages", "stderr")
        shown = json.dumps(kept)
        assert [str(place) for place in places if str(place) in shown] == [], path
        assert not any("execution" in cell.metadata for cell in cells), path  # when it ran
    runs = [set(re.findall(r"runs/[\w{}-]+", path.read_text())) for path in execute.NOTEBOOKS]
    assert sum(map(len, runs)) == len(set().union(*runs)), "two notebooks write to one run"
