"""Runs an example twice; the second time, each training step gets the same random key.

python usual_and_one_key.py EXAMPLE FOLDER
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import jax
import torchax

example, directory = sys.argv[1:]
environment = torchax.tensor.Environment
draw = environment.get_and_rotate_prng_key
keys: list[Any] = []


def draw_the_first(env: Any, generator: Any = None) -> Any:
    key = draw(env, generator)
    if isinstance(key, jax.core.Tracer):
        return key  # drawn within the compiled step
    keys.append(key)
    return keys[0]


for name, drawing in ("usual", draw), ("one_key", draw_the_first):
    environment.get_and_rotate_prng_key = drawing
    sys.argv = [example, "--steps", "3", "--directory", f"{directory}/{name}"]
    runpy.run_path(example, run_name="__main__")
assert len(keys) == 3, keys
