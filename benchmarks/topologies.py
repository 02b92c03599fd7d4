"""Plans the saves of three models on four TPU topologies, and writes the table into docs/tpu.md.

    python benchmarks/topologies.py

This program measures nothing, and needs no TPU, but libtpu, the TPU's compiler (the extra
``tpu-check``). What it calls compiled was reported by the compiler; what it calls computed follows
from compiled sizes.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import states

from torchax_ckpt import planning

PAGE = Path(__file__).parents[1] / "docs" / "tpu.md"
TOPOLOGIES = {
    "v5e:4x4": "v5e-16",
    "v5e:16x16": "v5e-256",
    "v5p:4x4x4": "v5p-128",
    "v6e:8x8": "v6e-64",
}
COLUMNS = (
    "model, topology",
    "state on a chip (compiled)",
    "of that, replicated (compiled)",
    "copies beside it (compiled)",
    "`auto` copies if training takes at most (computed)",
    "else a host needs at most, to offload it (compiled)",
    "programs (compiled)",
)


def llama(num_layers: int, d: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The parameters of a Llama 3 with eight heads of keys and values, of 128 elements each."""
    vocabulary, d_kv = 128_256, 8 * 128
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocabulary, d)}
    for i in range(num_layers):
        for name, shape in (
            ("attention.wq", (d, d)), ("attention.wk", (d_kv, d)),
            ("attention.wv", (d_kv, d)), ("attention.wo", (d, d)),
            ("feed_forward.w1", (hidden, d)), ("feed_forward.w2", (d, hidden)),
            ("feed_forward.w3", (hidden, d)),
            ("attention_norm", (d,)), ("ffn_norm", (d,)),
        ):  # fmt: skip
            shapes[f"layers.{i}.{name}.weight"] = shape
    return {**shapes, "norm.weight": (d,), "output.weight": (vocabulary, d)}


MODELS = {
    "GPT-2 1.5B": states.gpt2_xl(),
    "Llama 3 8B": llama(32, 4096, 14_336),
    "Llama 3 70B": llama(80, 8192, 28_672),
}


def adamw(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns float32 parameters with both moments of AdamW: 12 bytes per parameter."""
    return {
        f"{part}/{name}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in shapes.items()
        for part in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    }


def row(model: str, name: str) -> list[str]:
    """Plans a model on a topology, sharded over all chips as FSDP; returns the cells of its row."""
    jax.clear_caches()  # so that the compile time does not depend on other rows
    plan = planning.on_topology(adamw(MODELS[model]), name)
    cells = [f"{model}, {name}", gb(plan.chip_bytes), gb(plan.replicated_bytes)]
    if not plan.fits:
        lacking = f"does not fit in {gb(plan.usable_bytes)}; {plan.advice}"
        return [*cells, lacking, *["-"] * (len(COLUMNS) - len(cells) - 1)]
    assert plan.copy_bytes is not None
    assert plan.wanted_bytes is not None
    room_bytes = plan.free_bytes - plan.wanted_bytes
    full = planning.on_topology(adamw(MODELS[model]), name, training_bytes=plan.free_bytes)
    assert full.snapshot == "offload"
    assert full.offload_host_bytes is not None
    return [
        *cells,
        gb(plan.copy_bytes),
        gb(room_bytes) if plan.snapshot == "copy" else f"never: it takes a {plan.snapshot}",
        gb(full.offload_host_bytes),
        f"{plan.num_programs}, in {plan.compile_secs:.1f} s",
    ]


def gb(num_bytes: int) -> str:
    """Formats bytes in GB, powers of ten."""
    return f"{num_bytes / 1e9:.2f} GB"


def table() -> str:
    """Returns the table and the line below it, in Markdown."""
    rows = [row(model, name) for model in MODELS for name in TOPOLOGIES]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    versions = f"jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}"
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in lines)
        + f"\n\nCompiled on {today} with {versions}.\n"
    )


def main() -> None:
    """Prints the table and writes it into the page."""
    found = table()
    print(found)
    marked = re.compile(r"(<!-- topologies -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = marked.subn(lambda m: f"{m[1]}\n{found}\n{m[2]}", PAGE.read_text())
    assert count == 1, f"{PAGE}: no place for the table"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
