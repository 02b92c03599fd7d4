"""Whatever a save or a restore runs on devices is a registered program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.training import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.snapshot import move_shards
from torchax_ckpt.snapshot.sharding import replicas


def compiled_in(messages: list[str]) -> set[str]:
    """The names of the functions that JAX has compiled."""
    found = (re.match(r"Compiling (?:jit\()?([\w<>]+)", message) for message in messages)
    return {match[1] for match in found if match}


@pytest.mark.parametrize("mode", ["copy", "offload", "reference", "transfer"])
def test_saving_and_restoring_compile_nothing_else(
    mode: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Of shapes that nothing else here compiles programs for.
    width = {"copy": 37, "reference": 41, "transfer": 43, "offload": 47}[mode]
    rows = NamedSharding(fsdp_mesh(), P("fsdp"))
    state: dict[str, Any] = {
        f"{dtype}.{i}": jax.device_put(np.zeros((8, width), dtype), rows)
        for dtype in ("float32", "bfloat16", "bool", "int8", "complex64", "float8_e8m0fnu")
        for i in range(2)
    }
    state["scalar"] = jax.device_put(np.float32(1))
    state["key"] = jax.random.split(jax.random.key(0), width)
    options = CheckpointOptions(snapshot=mode)
    onto = {
        **state,
        "float32.0": jax.device_put(state["float32.0"], NamedSharding(fsdp_mesh(), P())),
    }
    torchax_backend.check_internals()  # runs once in a process, when the first checkpointer is made
    jax.config.update("jax_log_compiles", True)  # jax.log_compiles() is for one thread
    try:
        with TorchaxCheckpointer(directory, options=options) as ckpt:
            ckpt.save(1, state=state, metrics={"loss": state["scalar"]})
            ckpt.wait_until_finished()
            ckpt.load(1, onto)
        final = NamedSharding(fsdp_mesh(), P())
        leaves: dict[str, Any] = {"scalar": jax.device_put(np.float32(1), replicas(final)[0])}
        target = jax.ShapeDtypeStruct((), np.float32, sharding=final)
        move_shards.sum_over_replicas(leaves, {"scalar": target})
    finally:
        jax.config.update("jax_log_compiles", False)
    found = compiled_in(caplog.messages)
    assert ("checkpoint_offload" if mode == "offload" else "checkpoint_stack") in found
    assert {name for name in found if not name.startswith("checkpoint_")} == set()
