"""How array data is compressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from support.compare import assert_trees_identical
from support.training import save_state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.options import Codec
from torchax_ckpt.storage.writing import array_writer


def compressor_of(step: Path, name: str) -> Any:
    """What Zarr's metadata says of an array's compressor; None for none."""
    base = {"driver": "file", "path": f"{step / 'state'}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return json.loads(store.read(f"{name}/.zarray").result().value)["compressor"]


WRITTEN: dict[bool | Codec, Any] = {
    False: None,
    True: {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 2, "blocksize": 0},
    "zstd": {"id": "zstd", "level": 1},
    "blosc-lz4": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 2, "blocksize": 0},
    "blosc-zstd": {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 1 << 20},
}


@pytest.mark.parametrize("asked", WRITTEN)
def test_all_arrays_are_compressed_as_asked_for(asked: bool | Codec, directory: Path) -> None:
    state = {"device": jnp.ones((8, 8)), "host": np.ones(64), "scalar": np.float32(1.5)}
    save_state(directory, state, options=CheckpointOptions(compression=asked))
    found = {name: compressor_of(directory / "1", f"state.{name}") for name in ("device", "host")}
    assert found == dict.fromkeys(found, WRITTEN[asked])


def test_large_chunks_are_left_to_zstandard(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_writer, "_MAX_BLOSC_BYTES", 1600)
    state = {"large": jnp.arange(101.0), "small": jnp.arange(100.0)}
    options = CheckpointOptions(compression="blosc-lz4", layout="flat")
    save_state(directory, state, options=options)
    assert compressor_of(directory / "1", "state.large") == WRITTEN["zstd"]
    assert compressor_of(directory / "1", "state.small") == WRITTEN["blosc-lz4"]
    assert_trees_identical(TorchaxCheckpointer(directory).load(1, state), state)
