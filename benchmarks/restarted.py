"""The programs of ``starting.py --restarts``: each restores what there is, and trains one step.

    python benchmarks/restarted.py STYLE DIRECTORY [--cache FOLDER] [--compiling] [--slow] [--alone]

``eager`` is a GPT of 12 layers whose gradients are jitted, and whose AdamW steps eagerly.
``jitted`` is the same GPT with the whole step jitted and donated. ``large`` is ``jitted`` with 2 GB
more in its state. Prints the seconds from the start of the process until the first step has ended,
those of the restore, those of the longest compilation, and the number of programs that were
compiled and not taken from the cache. A program that finds no step saves its own. With ``--alone``
it neither restores nor imports the package, and sets JAX's cache by JAX's own options, so that its
time is what no package can improve.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
import torchax
from torch import nn
from torchax import interop
from torchax.train import make_train_step

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 12, 128, 4, 256, 64, 8
LARGE_BYTES = 2_000_000_000
BYTES_PER_SEC = 100_000_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            part.reshape(heads).transpose(1, 2) for part in self.qkv(self.before(x)).split(WIDTH, 2)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(at))))


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.reshape(-1, VOCABULARY), labels.reshape(-1))


class Nothing:
    """Takes the place of a checkpointer in a program that has none."""

    def attach(self, *_: Any) -> None:
        pass

    def latest_step(self) -> None:
        return None


def cache_alone(folder: str) -> None:
    """Has JAX keep every compiled program in ``folder``."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def eager(ckpt: Any, ahead: Callable[..., Any]) -> Any:
    """Restores and trains a step; returns the arrays to wait for, and what ``save`` takes."""
    model = GPT().to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    params = dict(model.named_parameters())
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64).to("jax")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return cross_entropy(torch.func.functional_call(model, params, (x,)), x)

    loss_and_grads = interop.jax_jit(interop.jax_value_and_grad(loss))
    with ahead(loss_and_grads, params, tokens):
        ckpt.attach(model, optimizer)
    _, grads = loss_and_grads(params, tokens)
    for name, parameter in params.items():
        parameter.grad = grads[name]
    optimizer.step()
    return interop.jax_view(params), {}


def jitted(ckpt: Any, ahead: Callable[..., Any], more: int = 0) -> Any:
    """Restores and trains a step; returns the arrays to wait for, and what ``save`` takes."""
    model = interop.JittableModule(GPT().to("jax"))
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64).to("jax")
    adamw = optax.adamw(1e-3)

    def forward(weights: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return model.functional_call("forward", weights, buffers, x)

    step = interop.jax_jit(
        make_train_step(forward, cross_entropy, adamw), {"donate_argnums": (0, 2)}
    )
    opt_state = interop.torch_view(jax.jit(adamw.init)(interop.jax_view(dict(model.params))))
    state = {"weights": dict(model.params), "opt_state": opt_state}
    if more:
        rows = more // 4_000_000  # arrays of 4 MB, which no step takes
        state["more"] = [jax.device_put(np.full(1_000_000, i, np.float32)) for i in range(rows)]
    buffers = dict(model.buffers)
    with ahead(step, state["weights"], buffers, state["opt_state"], tokens, tokens):
        ckpt.attach()
        if ckpt.latest_step() is not None:
            state = ckpt.load(abstract_state=state)
    _, weights, opt_state = step(state["weights"], buffers, state["opt_state"], tokens, tokens)
    state.update(weights=weights, opt_state=opt_state)
    return interop.jax_view(weights), {"state": state}


def large(ckpt: Any, ahead: Callable[..., Any]) -> Any:
    return jitted(ckpt, ahead, LARGE_BYTES)


STYLES = {f.__name__: f for f in (eager, jitted, large)}


def read_slowly() -> None:
    """Has reads of arrays take the time of ``BYTES_PER_SEC``, as from a bucket."""
    from torchax_ckpt.storage.arrays import read_arrays

    fetch = read_arrays.Arrival.fetch
    began = 0.0
    total = 0

    def slowly(self: Any) -> Any:
        nonlocal began, total
        began = began or time.monotonic()
        array = fetch(self)
        total += array.nbytes
        time.sleep(max(0.0, began + total / BYTES_PER_SEC - time.monotonic()))
        return array

    setattr(read_arrays.Arrival, "fetch", slowly)  # noqa: B010


def age_secs() -> float:
    """Returns the seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("style", choices=STYLES)
    parser.add_argument("directory")
    parser.add_argument("--cache")
    parser.add_argument("--compiling", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args()
    compiled: list[float] = []
    hits: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    def hit(event: str, **_: Any) -> None:
        if event.endswith("compilation_cache/cache_hits"):
            hits.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    jax.monitoring.register_event_listener(hit)
    if args.alone:
        cache_alone(args.cache)
        torchax.enable_globally()
        arrays, _ = STYLES[args.style](Nothing(), lambda *_: contextlib.nullcontext())
        jax.block_until_ready(arrays)
        print("AT", age_secs(), 0.0, max(compiled), len(compiled) - len(hits), flush=True)
        return
    import torchax_ckpt

    if args.cache:
        torchax_ckpt.compilation_cache(args.cache)
    if args.slow:
        read_slowly()
    torchax.enable_globally()
    block: list[float] = []

    @contextlib.contextmanager
    def ahead(step: Any, *arguments: Any) -> Iterator[None]:
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            if args.compiling:
                stack.enter_context(torchax_ckpt.compiling(step, *arguments))
            yield
        block.append(time.monotonic() - began)

    with torchax_ckpt.TorchaxCheckpointer(args.directory) as ckpt:
        arrays, saved = STYLES[args.style](ckpt, ahead)
        jax.block_until_ready(arrays)
        print("AT", age_secs(), block[0], max(compiled), len(compiled) - len(hits), flush=True)
        if ckpt.latest_step() is None:
            ckpt.save(1, force=True, **saved)


if __name__ == "__main__":
    main()
