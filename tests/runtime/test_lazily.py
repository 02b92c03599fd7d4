"""Reading steps with programs that have neither JAX, Orbax nor torchax."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import safetensors.numpy
from support import ROOT
from support.processes import run_python

from torchax_ckpt import load_torch_state_dict

PROGRAM = """
    import hashlib, json, runpy, sys

    for name in ("jax", "jaxlib", "orbax", "torchax"):
        sys.modules[name] = None
    from torchax_ckpt import load_torch_state_dict

    run, out = sys.argv[1:]
    for words in (
        ["ls", run], ["show", run], ["verify", run], ["diff", run, run],
        ["export", run, f"{out}.safetensors"], ["report", run, f"{out}.html"],
    ):
        sys.argv[1:] = words
        try:
            runpy.run_module("torchax_ckpt", run_name="__main__")
        except SystemExit as end:
            assert end.code == 0, words
    weights = load_torch_state_dict(run)
    print(json.dumps({n: hashlib.sha256(t.numpy()).hexdigest() for n, t in weights.items()}))
"""


@pytest.mark.slow  # tests/cli/test_show.py shows it of one command
def test_steps_are_read_without_jax_orbax_and_torchax(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests/golden/v1/attached", run)
    told = run_python(PROGRAM, str(run), str(tmp_path / "out"), fresh=True).stdout
    expected = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in load_torch_state_dict(run).items()
    }
    assert json.loads(told.splitlines()[-1]) == expected
    exported = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    assert {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in exported.items()} == expected
