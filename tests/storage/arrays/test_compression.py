"""How array data is compressed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from support.compare import assert_trees_identical

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.options import Codec
from torchax_ckpt.storage.arrays import compression


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


def test_blosc_removes_more_than_zstandard_alone(directory: Path) -> None:
    """In shares of the bytes; 0.83 and 0.66 are the least for a code of single bytes."""
    weights = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * np.float32(0.02)
    stored = {}
    for codec in get_args(Codec):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            values = jnp.asarray(weights.astype(dtype))
            path = directory / f"{codec}-{values.dtype}"
            with TorchaxCheckpointer(path, options=CheckpointOptions(compression=codec)) as ckpt:
                ckpt.save(1, state={"w": values})
            size = sum(file.stat().st_size for file in path.rglob("d/*"))
            stored[codec, values.dtype.name] = size / values.nbytes
    for dtype, most in (
        ("float32", (0.93, 0.885, 0.85)),
        ("bfloat16", (0.79, 0.765, 0.69)),
    ):
        found = [stored[codec, dtype] for codec in ("zstd", "blosc-lz4", "blosc-zstd")]
        assert found == sorted(found, reverse=True)
        assert all(share < limit for share, limit in zip(found, most, strict=True)), found


def test_large_chunks_are_left_to_zstandard(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_MAX_BLOSC_BYTES", 1600)
    state = {"large": jnp.arange(101.0), "small": jnp.arange(100.0)}
    options = CheckpointOptions(compression="blosc-lz4", layout="flat")
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state=state)
    assert compressor_of(directory / "1", "state.large") == WRITTEN["zstd"]
    assert compressor_of(directory / "1", "state.small") == WRITTEN["blosc-lz4"]
    assert_trees_identical(TorchaxCheckpointer(directory).load(1, state), state)
