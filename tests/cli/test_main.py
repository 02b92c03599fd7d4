"""The ways to start the command line."""

from __future__ import annotations

import runpy
import sys

import pytest


def test_the_package_itself_runs_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m torchax_ckpt``, where no script of the environment is on the PATH."""
    monkeypatch.setattr(sys, "argv", ["torchax_ckpt", "--version"])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # main sets it, for this process too
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torchax_ckpt", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("torchax-ckpt ")
