"""Measures how long a program takes from its start to the end of its first step, with a restore.

    python benchmarks/starting.py [--models digits,gpt2] [--rounds 5]
    python benchmarks/starting.py --restarts [--rounds 3]

Starts a program that trains a model with AdamW on one CPU device in three ways, in turn, each in a
process of its own: ``without`` checkpoints; with an ``empty`` directory, so that nothing is
restored; and with a directory from which it ``restores`` parameters and optimizer state. The time
counts from the start of the process: imports, building the model, compiling the step, the restore,
the first step. The target for ``restores`` is 1.3 x the time of ``without``, plus the time to read
as many bytes from one file, which like the checkpoint comes from the page cache.

``--restarts`` prints how long the programs of ``restarted.py`` take from a checkpoint, in the ways
of ``RESTARTS``, and what installing the package would change in Colab's image.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

WAYS = ("without", "empty", "restores")
TARGET = 1.3

# How the programs of restarted.py start, and their target as a share of the time of the first way.
# The last way is a program without checkpoints; the target does not apply to it.
RESTARTS = {
    "nothing": [],
    "warm cache": ["--cache", "CACHE"],
    "warm cache, compiling beside the restore": ["--cache", "CACHE", "--compiling"],
    "warm cache, without the package": ["--cache", "CACHE-alone", "--alone"],
}
RESTART_TARGET = 0.35
# With 2 GB at 100 MB/s: the target is the longer of reading and compiling, and as many seconds.
LARGE_TARGET_SECS = 2.0


# --- the program ---------------------------------------------------------------------------------


def digits() -> tuple[Any, Any]:
    """Returns a small classifier, and its input."""
    import torch
    from torch import nn

    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.zeros(32, 64)


def gpt2() -> tuple[Any, Any]:
    """Returns a transformer of the size of GPT-2 124M (1.5 GB with AdamW), and its input."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", True, norm_first=True)
    layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(50257, 768), layers), torch.zeros(1, 32, dtype=torch.int64)


MODELS = {"digits": digits, "gpt2": gpt2}


def train(model: str, directory: str, saves: bool) -> None:
    """Trains for one step; prints when it has ended. With ``saves``, saves its state then."""
    import jax
    import optax
    import torchax
    from torchax import interop

    torchax.enable_globally()
    module, inputs = MODELS[model]()
    jitted = interop.JittableModule(module.to("jax"))
    params, inputs = interop.jax_view(dict(jitted.params)), interop.jax_view(inputs.to("jax"))
    optimizer = optax.adamw(1e-3)
    opt_state = jax.jit(optimizer.init)(params)
    ckpt = None
    if directory:
        from torchax_ckpt import TorchaxCheckpointer

        ckpt = TorchaxCheckpointer(directory)
        ckpt.attach()
        if ckpt.latest_step() is not None:
            state = ckpt.load(abstract_state={"params": params, "opt_state": opt_state})
            params, opt_state = state["params"], state["opt_state"]

    def loss(params: Any) -> Any:
        given = interop.torch_view(params)
        output = jitted.functional_call("forward", given, dict(jitted.buffers), inputs_view)
        return (interop.jax_view(output) ** 2).mean()

    def step(params: Any, opt_state: Any) -> Any:
        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    inputs_view = interop.torch_view(inputs)
    jitted_step = jax.jit(step, donate_argnums=(0, 1))
    params, opt_state = jax.block_until_ready(jitted_step(params, opt_state))
    print(f"AT {time.time()}", flush=True)
    if ckpt is not None:
        if saves:
            ckpt.save(1, state={"params": params, "opt_state": opt_state}, force=True)
        ckpt.close()


# --- the measurement ---------------------------------------------------------------------------


def started(model: str, directory: Path | None, *, saves: bool = False) -> float:
    """Runs the program; returns the seconds from its start to the end of its first step."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, __file__, "--train", model, str(directory or ""), str(int(saves))],
        env={**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("AT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{model} failed:\n{done.stderr[-3000:]}")
    return float(lines[0].removeprefix("AT ")) - began


def reading(folder: Path, scratch: Path) -> float:
    """Returns the seconds to read a file as large as the folder, from the page cache."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    block = bytearray(os.urandom(16 << 20))
    with open(scratch, "wb", buffering=0) as file:
        left = size
        while left:
            left -= file.write(memoryview(block)[: min(left, len(block))])
    began = time.perf_counter()
    with open(scratch, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
    secs = time.perf_counter() - began
    scratch.unlink()
    return secs


def brief(secs: list[float]) -> str:
    return f"{statistics.median(secs):.2f} s ({min(secs):.2f} - {max(secs):.2f})"


def restarted(style: str, directory: Path, *flags: str) -> tuple[float, ...]:
    """Runs a program of restarted.py; returns the numbers that it prints."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("restarted.py")), style, directory, *flags],
        env={**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("AT ")]
    if done.returncode or not lines or "WARNING" in done.stderr:
        raise RuntimeError(f"{style} failed:\n{done.stderr[-3000:]}")
    return tuple(map(float, lines[0].split()[1:]))


def restarts(rounds: int, root: Path) -> None:
    """Prints the table of the programs that restart from a checkpoint."""
    print("| program | way | end of the first step | compiled | share of the first way |")
    print("|---|---|---|---|---|", flush=True)
    for style in ("eager", "jitted"):
        ways = {
            way: [flag.replace("CACHE", str(root / f"{style}-cache")) for flag in flags]
            for way, flags in RESTARTS.items()
        }
        restarted(style, root / style)  # saves
        for way in ("warm cache", "warm cache, without the package"):
            restarted(style, root / style, *ways[way])  # fills the cache
        found: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, flags in ways.items():
                found[way].append(restarted(style, root / style, *flags))
        first = statistics.median(secs for secs, *_ in found["nothing"])
        for way, runs in found.items():
            secs = [secs for secs, *_ in runs]
            share = statistics.median(secs) / first
            verdict = "met" if share <= RESTART_TARGET else "missed"
            has_target = "--cache" in ways[way] and "--alone" not in ways[way]
            against = f" (x {RESTART_TARGET}: {verdict})" if has_target else ""
            columns = [style, way, brief(secs), f"{runs[0][3]:.0f}", f"x {share:.2f}{against}"]
            print(f"| {' | '.join(columns)} |")
    sys.stdout.flush()
    restarted("large", root / "large")
    sums, besides = [], []
    for _ in range(rounds):
        sums.append(restarted("large", root / "large", "--slow"))
        besides.append(restarted("large", root / "large", "--slow", "--compiling"))
    reading = statistics.median(read for _, read, *_ in sums)
    compiling = statistics.median(secs for _, _, secs, _ in sums)
    last = statistics.median(secs for secs, *_ in sums)
    target = last - min(reading, compiling) + LARGE_TARGET_SECS
    beside = statistics.median(secs for secs, *_ in besides)
    print()
    print("| 2 GB at 100 MB/s | reading | compiling | one after the other | beside | target |")
    print("|---|---|---|---|---|---|")
    columns = [
        brief([read for _, read, *_ in sums]),
        brief([secs for _, _, secs, _ in sums]),
        brief([secs for secs, *_ in sums]),
        brief([secs for secs, *_ in besides]),
        f"{target:.2f} s: {'met' if beside <= target else 'missed'}",
    ]
    print(f"| large | {' | '.join(columns)} |", flush=True)


def in_colab(root: Path) -> None:
    """Prints what installing the package would add to, or replace in, the packages of Colab.

    The packages of Colab's set in tests/versions.toml only seem to be installed.
    """
    repository = Path(__file__).parent.parent
    colab = tomllib.loads((repository / "tests/versions.toml").read_text())["sets"]["colab"]
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", str(root)], check=True)
    (packages,) = (root / "lib").glob("python*/site-packages")
    for pin in (f"torch=={colab['torch']}", *colab["pins"]):
        name, _, version = pin.partition("==")
        described = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (described / "RECORD").touch()
        (described / "INSTALLER").write_text("pip")
    command = [*uv, "pip", "install", "--dry-run", "--python-version", colab["python"]]
    told = subprocess.run(
        [*command, "--python", str(root), str(repository)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = told.stderr.splitlines()
    changes = [line.strip() for line in lines if line[:3] in (" + ", " - ", " ~ ")]
    print(f"\nInstalling into Colab's list: {', '.join(changes) or told.stderr[-1000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--restarts", action="store_true")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        model, directory, saves = args.train
        train(model, directory, saves == "1")
        return
    if args.restarts:
        with tempfile.TemporaryDirectory() as temporary:
            restarts(args.rounds, Path(temporary))
            in_colab(Path(temporary, "colab"))
        return
    print("| model | without | empty | restores | reading the bytes | restores, less reading |")
    print("|---|---|---|---|---|---|")
    for model in args.models.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            started(model, root / "run", saves=True)
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            read = []
            for _ in range(args.rounds):
                found["without"].append(started(model, None))
                found["empty"].append(started(model, root / "empty"))
                shutil.rmtree(root / "empty", ignore_errors=True)
                found["restores"].append(started(model, root / "run"))
                read.append(reading(root / "run" / "1", root / "raw"))
        rest = [r - b for r, b in zip(found["restores"], read, strict=True)]
        ratio = statistics.median(rest) / statistics.median(found["without"])
        verdict = "met" if ratio <= TARGET else "missed"
        columns = [*(brief(found[way]) for way in WAYS), brief(read)]
        print(f"| {model} | {' | '.join(columns)} | x {ratio:.2f} (x {TARGET}: {verdict}) |")


if __name__ == "__main__":
    main()
