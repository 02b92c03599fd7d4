"""What commands print where standard output is not UTF-8, and JSON that any parser reads."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import run, run_main
from support.processes import run_python
from support.steps import save_states

from torchax_ckpt.cli import exit_codes

NAME = "größe/名"
COMMANDS = (
    ("ls", "{run}"),
    ("show", "{run}"),
    ("show", "{run}", "--filter", "*größe*"),
    ("verify", "{run}", "--all"),
    ("diff", "{run}/1", "{run}/2"),
    ("report", "{run}", "{out}/ü.html"),
    ("export", "{run}", "{out}/ä.safetensors", "--at", "state"),
    ("copy", "{run}/2", "{out}/kopie-ö"),
    ("prune", "{run}", "--policy", "BestN(größe, min)"),
    ("--help",),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    states = {
        step: {"größe": np.full(3, step), "名": "größer" * step, "n": np.nan} for step in (1, 2)
    }
    metrics = {step: {"größe": step, "nan": np.nan, "inf": -np.inf} for step in (1, 2)}
    return save_states(tmp_path_factory.mktemp("saved") / "run", states, metrics)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_characters_that_the_output_lacks_are_escaped(
    words: tuple[str, ...], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for encoding in ("ascii", "cp1252"):
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
        out = tmp_path / encoding
        out.mkdir()
        code = run_main(monkeypatch, *(word.format(run=saved, out=out) for word in words))
        assert code == (exit_codes.FOUND if words[0] == "diff" else exit_codes.OK)
        sys.stdout.flush()
        assert printed.getvalue().decode(encoding)


@pytest.mark.slow
def test_no_command_reads_files_in_the_encoding_of_the_locale(saved: Path, tmp_path: Path) -> None:
    commands = [[word.format(run=saved, out=tmp_path) for word in c] for c in COMMANDS]
    commands = [words for words in commands if "".join(words).isascii()]
    program = f"""
        import sys
        from torchax_ckpt.__main__ import main
        for words in {commands!r}:
            sys.argv[1:] = words
            try:
                main()
            except SystemExit as end:
                print("ends:", words[0], end.code)
    """
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = run_python(program, env=env, fresh=True)
    ends = [line for line in result.stdout.splitlines() if line.startswith("ends:")]
    names = ("ls", "show", "verify", "diff", "--help")
    assert ends == [f"ends: {name} {int(name == 'diff')}" for name in names], result


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_has_no_nan(saved: Path, tmp_path: Path) -> None:
    for step in strict(run("ls", saved, "--json"))["steps"]:
        assert (step["metrics"]["nan"], step["metrics"]["inf"]) == ("NaN", "-Infinity")
    assert strict(run("show", saved, "--json"))["metrics"]["nan"] == "NaN"
    weights = ("--format", "safetensors", "--at", "state")
    published = run("follow", saved, tmp_path / "out", *weights, "--once", "--json")
    assert strict(published)["metrics"]["inf"] == "-Infinity"
