"""Reads steps although Orbax, JAX and torchax show this package nothing private.

python reads_without_internals.py GOLDEN FOREIGN ...

GOLDEN is the directory of a run of tests/golden; each FOREIGN has one step of bare Orbax. Prints
what was read, and what was refused, as JSON.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import json
import re
import runpy
import sys
from typing import Any

# Of torchax. Its public names stay.
PRIVATE = (b"_elem", b"_property", b"_model", b"RuntimeProperty", b"call_jax", b"View")
import_module = builtins.__import__


def refuse(name: str, globals: Any = None, *args: Any, **settings: Any) -> Any:
    """Imports a module; other packages show this one no private modules."""
    if "_src" in name.split(".") and (globals or {}).get("__name__", "").startswith("torchax_ckpt"):
        raise ImportError(f"no module named {name}", name=name)
    return import_module(name, globals, *args, **settings)


class Renamed(importlib.machinery.SourceFileLoader):
    """Loads a module of torchax with other private names."""

    def get_code(self, fullname: str) -> Any:
        source = self.get_data(self.path)
        for name in PRIVATE:
            source = re.sub(rb"\b%s\b" % name, name + b"_elsewhere", source)
        return compile(source, self.path, "exec")


class Finder(importlib.machinery.PathFinder):
    """Finds the modules of torchax."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        spec = super().find_spec(fullname, path) if fullname.split(".")[0] == "torchax" else None
        if spec is not None:
            spec.loader = Renamed(fullname, str(spec.origin))
        return spec


def command(*words: str) -> None:
    """Runs torchax-ckpt, which must end well."""
    sys.argv[1:] = words
    try:
        runpy.run_module("torchax_ckpt", run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, words


def main(golden: str, *foreign: str) -> None:
    builtins.__import__ = refuse
    sys.meta_path.insert(0, Finder)
    import torchax
    from make_golden import STEP, fingerprint, model

    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, errors, load_torch_state_dict

    def refused(call: Any, *args: Any) -> str:
        try:
            call(*args)
        except errors.CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError(f"{call} raised nothing")

    torchax.enable_globally()
    told: dict[str, Any] = {"saving": refused(TorchaxCheckpointer, golden), "loaded": {}}
    for directory in (golden, *foreign):
        with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as ckpt:
            told["loaded"][directory] = fingerprint(ckpt.load())
            told["metrics"] = ckpt.metrics(ckpt.all_steps()[-1])
            if directory == golden:
                assert ckpt.verify() == STEP
                told["attaching"] = refused(ckpt.attach, model())
            else:
                assert refused(ckpt.verify).startswith("ForeignCheckpointError")
                assert refused(load_torch_state_dict, directory).startswith("ForeignCheckpoint")
        command("ls", directory)
    command("show", golden)
    command("verify", golden)
    command("export", golden, f"{foreign[0]}.safetensors")
    told["weights"] = fingerprint(dict(load_torch_state_dict(golden)))
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
