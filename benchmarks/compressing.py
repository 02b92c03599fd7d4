"""Measures size and speed of codecs, alone and in saves and restores, to see where each pays.

    python benchmarks/compressing.py [DIRECTORY] [--mbytes 256] [--repeats 5] [--train-steps 400]

DIRECTORY should be in memory (/dev/shm, the default), so that no medium hides the codecs. Prints
two tables in Markdown. The first measures TensorStore alone, which writes chunks of 4 MiB to memory
and reads them. Its contents are normal random numbers in the place of weights, and the weights and
both moments of AdamW of a small language model, which the program trains before. The line "limit"
is the order-0 entropy: the fewest bytes for a code that encodes each byte on its own, with a table
of frequencies for each byte of the dtype. The second table measures saves and restores of this
package.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import argparse
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorstore as ts
from states import mesh, sharding

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.options import Codec

ROWS = 1 << 10
CHUNK_BYTES = 4 << 20
CONTEXT, WIDTH, BATCH = 16, 1536, 512


def blosc(name: str, level: int, shuffle: str, block_kib: int = 0) -> dict[str, Any]:
    return {
        "id": "blosc",
        "cname": name,
        "clevel": level,
        "shuffle": ("none", "byte", "bit").index(shuffle),
        "blocksize": block_kib << 10,
    }


COMPRESSORS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "zstd 1 (Orbax)": {"id": "zstd", "level": 1},
    "blosc lz4 1, bytes": blosc("lz4", 1, "byte"),
    "blosc lz4 5, bytes": blosc("lz4", 5, "byte"),
    "blosc lz4 1, bits (blosc-lz4)": blosc("lz4", 1, "bit"),
    "blosc lz4 5, bits": blosc("lz4", 5, "bit"),
    **{f"blosc zstd {level}, bytes": blosc("zstd", level, "byte") for level in range(1, 6)},
    "blosc zstd 1, bytes, 256 KiB blocks": blosc("zstd", 1, "byte", 256),
    "blosc zstd 1, bytes, 512 KiB blocks": blosc("zstd", 1, "byte", 512),
    "blosc zstd 1, bytes, 1 MiB blocks (blosc-zstd)": blosc("zstd", 1, "byte", 1024),
    "blosc zstd 3, bytes, 1 MiB blocks": blosc("zstd", 3, "byte", 1024),
    "blosc zstd 1, bits": blosc("zstd", 1, "bit"),
    "blosc zstd 1, bits, 1 MiB blocks": blosc("zstd", 1, "bit", 1024),
}


# --- contents ------------------------------------------------------------------------------------


def trained(num_steps: int) -> dict[str, np.ndarray]:
    """Trains a model that predicts the next byte of source code; returns its values, by kind.

    The model has 4.3 million parameters: an embedding of the latest 16 bytes and three layers.
    """
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    source = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    draw = np.random.default_rng(0)

    def layer(rows: int, columns: int) -> jax.Array:
        values = draw.standard_normal((rows, columns), dtype=np.float32)
        return jnp.asarray(values / np.float32(rows) ** 0.5)

    params = {
        "embedding": layer(256, 64),
        "layers": [layer(CONTEXT * 64, WIDTH), layer(WIDTH, WIDTH), layer(WIDTH, 256)],
        "biases": [jnp.zeros(WIDTH), jnp.zeros(WIDTH), jnp.zeros(256)],
    }
    first = second = jax.tree.map(jnp.zeros_like, params)

    def loss(params: Any, window: jax.Array) -> jax.Array:
        x = params["embedding"][window[:, :-1]].reshape(len(window), -1) * 16
        for i, (weight, bias) in enumerate(zip(params["layers"], params["biases"], strict=True)):
            x = (jax.nn.gelu(x) if i else x) @ weight + bias
        return -jnp.take_along_axis(jax.nn.log_softmax(x), window[:, -1:], 1).mean()

    @jax.jit
    def adamw(count: int, params: Any, first: Any, second: Any, window: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, window)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)

        def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            m, v = m / (1 - 0.9**count), v / (1 - 0.999**count)
            return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 1e-4 * p)

        return value, jax.tree.map(updated, params, first, second), first, second

    began = time.perf_counter()
    for count in range(1, num_steps + 1):
        start = draw.integers(len(source) - CONTEXT, size=(BATCH, 1))
        window = source[start + np.arange(CONTEXT + 1)]
        value, params, first, second = adamw(count, params, first, second, window)
    print(
        f"trained {num_steps} steps in {time.perf_counter() - began:.0f} s, to a loss of "
        f"{value:.2f} (no training: 5.55)",
        flush=True,
    )

    def flat(tree: Any) -> np.ndarray:
        return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])

    weights = flat(params)
    return {
        "float32 weights, trained": weights,
        "bfloat16 weights, trained": weights.astype(ml_dtypes.bfloat16),
        "AdamW's first moments, trained": flat(first),
        "AdamW's second moments, trained": flat(second),
    }


def random(nbytes: int) -> dict[str, np.ndarray]:
    """Returns normal random numbers as weights, by kind; at most ``nbytes`` bytes each."""
    draw = np.random.default_rng(0)
    weights = draw.standard_normal(nbytes // 4, dtype=np.float32) * np.float32(0.02)
    return {
        "float32 weights, normal": weights,
        "bfloat16 weights, normal": weights.astype(ml_dtypes.bfloat16),
        "AdamW's second moments, squares": np.square(weights) * np.float32(1e-6),
    }


# --- measurements --------------------------------------------------------------------------------


def entropy_limit(values: np.ndarray) -> float:
    """Returns the order-0 entropy of the bytes of each significance, as a fraction of all bits."""
    planes = values.view(np.uint8).reshape(len(values), -1)
    bits = 0.0
    for plane in planes.T:
        frequencies = np.bincount(plane, minlength=256) / len(plane)
        bits -= sum(p * np.log2(p) for p in frequencies[frequencies > 0])
    return bits / (8 * planes.shape[1])


def rates(nbytes: int, secs: Sequence[float]) -> str:
    """Returns the median rate, and the range, in MB/s."""
    found = sorted(nbytes / 1e6 / each for each in secs)
    return f"{statistics.median(found):,.0f} ({found[0]:,.0f} - {found[-1]:,.0f})"


def measure_compressor(
    values: np.ndarray, compressor: dict[str, Any] | None, repeats: int
) -> tuple[float, str, str]:
    """Returns the remaining fraction of bytes, and the rates of writing and of reading."""
    chunk = CHUNK_BYTES // values.itemsize
    # Whole chunks: TensorStore would fill up the last one.
    values = np.resize(values, max(1, len(values) // chunk) * chunk)
    metadata = {"shape": values.shape, "chunks": [chunk], "compressor": compressor}
    writing, reading = [], []
    for _ in range(repeats + 1):
        spec = {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": metadata}
        store: Any = ts.open(
            spec, dtype=ts.dtype(values.dtype), create=True, context=ts.Context()
        ).result()
        began = time.perf_counter()
        store.write(values).result()
        writing.append(time.perf_counter() - began)
        began = time.perf_counter()
        found = store.read().result()
        reading.append(time.perf_counter() - began)
    assert found.tobytes() == values.tobytes()
    keys = [key for key in store.kvstore.list().result() if not key.endswith(b".zarray")]
    stored = sum(len(store.kvstore[key]) for key in keys)
    return (
        stored / values.nbytes,
        rates(values.nbytes, writing[1:]),
        rates(values.nbytes, reading[1:]),
    )


def measure_saves(
    values: np.ndarray, compression: bool | Codec, directory: str, repeats: int
) -> tuple[float, str, str]:
    """Returns the remaining fraction of bytes, and the rates of saves and of restores."""
    whole = values[: len(values) // (16 * ROWS) * 16 * ROWS].reshape(16, ROWS, -1)
    state = {
        f"w{i}": jax.device_put(part, sharding(part.shape, mesh())) for i, part in enumerate(whole)
    }
    root = Path(tempfile.mkdtemp(dir=directory))
    options = CheckpointOptions(compression=compression, snapshot="reference")
    writing, reading = [], []
    try:
        with TorchaxCheckpointer(root, options=options) as ckpt:
            for step in range(repeats + 1):
                began = time.perf_counter()
                ckpt.save(step, state=state, force=True)
                ckpt.wait_until_finished()
                writing.append(time.perf_counter() - began)
                began = time.perf_counter()
                found = ckpt.load(step, state)
                jax.block_until_ready(found)
                reading.append(time.perf_counter() - began)
        assert all(
            np.asarray(found[name]).tobytes() == np.asarray(array).tobytes()
            for name, array in state.items()
        )
        files = (root / str(repeats)).rglob("*")
        stored = sum(file.stat().st_size for file in files if file.is_file())
    finally:
        shutil.rmtree(root)
    return stored / whole.nbytes, rates(whole.nbytes, writing[1:]), rates(whole.nbytes, reading[1:])


def print_row(content: str, codec: str, row: tuple[float, str, str]) -> None:
    print(f"| {content} | {codec} | {row[0]:.1%} | {row[1]} | {row[2]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", nargs="?", default="/dev/shm")
    parser.add_argument("--mbytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train-steps", type=int, default=400)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(f"{os.cpu_count()} cores; MB/s of uncompressed bytes, medians of {args.repeats} (range)")
    contents = {**random(64 << 20), **trained(args.train_steps)}
    print("\n| content | compressor | remaining bytes | write | read |\n|---|---|---|---|---|")
    for content, values in contents.items():
        print(f"| {content} | limit | {entropy_limit(values):.1%} | | |")
        for name, compressor in COMPRESSORS.items():
            print_row(content, name, measure_compressor(values, compressor, args.repeats))
    print("\n| content | compression | remaining bytes | save | restore |\n|---|---|---|---|---|")
    choices: tuple[Any, ...] = (False, *get_args(Codec))
    for content, values in random(args.mbytes << 20).items():
        for choice in choices:
            row = measure_saves(values, choice, args.directory, args.repeats)
            print_row(content, str(choice), row)


if __name__ == "__main__":
    main()
