"""Owns how the command starts: without an accelerator, and with what it needs installed."""

from __future__ import annotations

import importlib.util
import os
import sys

from torchax_ckpt.cli.exit_codes import INTERRUPTED, USAGE

_EXTRA = ("jinja2", "rich", "safetensors", "typer")


def main() -> None:
    """Runs the command that the program's arguments name."""
    if any(importlib.util.find_spec(library) is None for library in _EXTRA):
        print(
            'torchax-ckpt needs its extra: pip install "torchax-ckpt[cli]"',
            file=sys.stderr,
        )
        sys.exit(USAGE)
    # The accelerators belong to the training that may run on this host, and two programs cannot
    # have one TPU. Nothing here computes on a device.
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        from torchax_ckpt.cli.app import app

        app(prog_name="torchax-ckpt")
    except KeyboardInterrupt:  # before a command runs: the imports take a moment
        sys.exit(INTERRUPTED)
