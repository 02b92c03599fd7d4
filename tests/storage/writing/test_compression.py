"""How array data is compressed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from support.compare import assert_trees_identical

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.options import Codec
from torchax_ckpt.storage.writing import array_writer


@pytest.mark.parametrize("bad", ["Zstd", "", "blosc", None, 1])
def test_what_is_no_codec_is_refused_by_name(bad: Any) -> None:
    said = f"compression: expected one of .*zstd, blosc-lz4, blosc-zstd, found {bad!r}"
    with pytest.raises(ValueError, match=re.escape(said).replace(r"\.\*", ".*")):
        CheckpointOptions(compression=bad)


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
    with TorchaxCheckpointer(directory, options=CheckpointOptions(compression=asked)) as ckpt:
        ckpt.save(1, state=state)
    found = {name: compressor_of(directory / "1", f"state.{name}") for name in ("device", "host")}
    assert found == dict.fromkeys(found, WRITTEN[asked])


def test_large_chunks_are_left_to_zstandard(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_writer, "_MAX_BLOSC_BYTES", 1600)
    state = {"large": jnp.arange(101.0), "small": jnp.arange(100.0)}
    options = CheckpointOptions(compression="blosc-lz4", layout="flat")
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state=state)
    assert compressor_of(directory / "1", "state.large") == WRITTEN["zstd"]
    assert compressor_of(directory / "1", "state.small") == WRITTEN["blosc-lz4"]
    assert_trees_identical(TorchaxCheckpointer(directory).load(1, state), state)
