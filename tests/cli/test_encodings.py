"""What commands print where standard output is not UTF-8, and JSON that any parser reads."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import run
from support.processes import run_python

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.__main__ import main
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
    directory = tmp_path_factory.mktemp("saved") / "run"
    with TorchaxCheckpointer(directory) as ckpt:
        for step in (1, 2):
            state = {"größe": np.full(3, step), "名": "größer" * step, "n": np.nan}
            metrics = {"größe": step, "nan": np.nan, "inf": -np.inf}
            ckpt.save(step, state=state, metrics=metrics, force=True)
            ckpt.wait_until_finished()
    return directory


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_characters_that_the_output_lacks_are_escaped(
    words: tuple[str, ...],
    encoding: str,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = io.BytesIO()
    arguments = [word.format(run=saved, out=tmp_path) for word in words]
    monkeypatch.setattr(sys, "argv", ["torchax-ckpt", *arguments])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which main replaces
    for name in ("JAX_PLATFORMS", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.setenv(name, "cpu")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (exit_codes.OK, exit_codes.FOUND if words[0] == "diff" else 0)
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
    published = run(
        "follow",
        saved,
        tmp_path / "out",
        "--format",
        "safetensors",
        "--at",
        "state",
        "--once",
        "--json",
    )
    assert strict(published)["metrics"]["inf"] == "-Infinity"
