"""Runs commands of torchax-ckpt in this process."""

from __future__ import annotations

import json
import re
import shlex
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from torchax_ckpt.__main__ import main
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app
from torchax_ckpt.cli.exit_codes import FOUND


def run(*args: Any, code: int = 0) -> str:
    """Runs a command; returns stdout, or stderr if it fails.

    Asserts that the command exits with ``code`` and fails without a traceback.
    """
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    if code and result.stderr:
        assert "Traceback" not in result.stderr
    return result.stdout if code in (0, exit_codes.FOUND) else result.stderr


def run_json(*args: Any, code: int = 0) -> Any:
    return json.loads(run(*args, "--json", code=code))


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Runs the program ``torchax-ckpt`` with whatever ``sys.stdout`` is; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["torchax-ckpt", *arguments])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which main replaces
    for name in ("JAX_PLATFORMS", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.setenv(name, "cpu")
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


WITHOUT_TORCH_AND_JAX = """
import sys
for library in ("torch", "jax", "jaxlib", "orbax", "torchax"):
    sys.modules[library] = None  # importing it raises
"""
"""The beginning of a program for a fresh process, in which these libraries cannot be imported."""

BLOCK = re.compile(r"^(```|<!-- )(?P<kind>[a-z{}-]*)\n(?P<body>.*?)^(```|-->)$", re.M | re.S)


def run_commands(body: str) -> None:
    """Runs the lines of a shell script of torchax-ckpt commands, one after the other.

    Asserts that each exits with 0, or with ``FOUND`` if the line has a `` || ``.
    """
    for line in filter(None, body.replace("\\\n", "").splitlines()):
        command, *otherwise = line.split(" || ")
        name, *args = shlex.split(command, comments=True)
        assert name == "torchax-ckpt"
        result = CliRunner().invoke(app, args)
        assert result.exit_code == (FOUND if otherwise else 0), f"{line}: {result.output}"
