"""The entry point of ``torchax-ckpt``, also as ``python -m torchax_ckpt``; JAX gets CPUs only."""

from __future__ import annotations

import _thread
import importlib.util
import io
import os
import sys
import traceback
from typing import Any

from torchax_ckpt.cli.exit_codes import FAILED, INTERRUPTED, USAGE

_EXTRA = ("jinja2", "rich", "safetensors", "typer")


def main() -> None:
    """Runs the command that the arguments of ``torchax-ckpt`` name."""
    if any(importlib.util.find_spec(library) is None for library in _EXTRA):
        print(
            'torchax-ckpt needs its extra: pip install "torchax-ckpt[cli]"',
            file=sys.stderr,
        )
        sys.exit(USAGE)
    # A training on this host may use the accelerators, and two programs cannot share one TPU. No
    # command computes on a device.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # libtpu, with which `plan --topology` compiles, prints warnings on hosts that do not say which
    # TPUs they have. It compiles for the topology of the option, whatever these variables say.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    sys.unraisablehook = _interrupt_again
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that its encoding lacks are escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        from torchax_ckpt.cli.app import app

        app(prog_name="torchax-ckpt")
    # Raised during the imports; each command handles later ones itself.
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception:
        traceback.print_exc()
        sys.exit(FAILED)


def _interrupt_again(unraisable: Any) -> None:
    """Repeats a Ctrl-C that Python swallowed, as it does in a callback of the garbage collector."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # On another thread, because the interrupt must arrive after this function has ended.
        _thread.start_new_thread(_thread.interrupt_main, ())
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
