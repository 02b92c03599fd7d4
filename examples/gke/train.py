"""Trains a byte model over slices of TPUs, with steps often on each host's ramdisk and rarely in a
bucket.

    python examples/gke/train.py --directory gs://bucket/run --local /local --distributed

On a machine without TPUs it plays two slices of four devices in one process:

    python examples/gke/train.py --directory runs/gke --local /dev/shm/gke --steps 60 --crash-at 30

Every process runs this same program. The mesh has the axis ``replica`` for the slices, which hold
the same parameters, and ``fsdp`` for the chips of a slice, which share them.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal
import sys
from typing import Any

# Without an accelerator, JAX plays one with eight devices; it reads this when it is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import torch
import torchax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn
from torch.nn import functional
from torchax import interop

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies, shardings

VOCABULARY, CONTEXT = 256, 32


class ByteModel(nn.Module):
    """The bytes before it [batch, CONTEXT] -> logits of the next one [batch, VOCABULARY]."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.inner = nn.Linear(CONTEXT * width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(self.bytes(tokens).flatten(1)))
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return self.head(x)


def slices_by_chips(num_slices: int | None) -> Mesh:
    """All devices, one row for each slice."""
    devices = jax.devices()
    if num_slices is None:  # only devices of several slices say which one they are of
        num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    devices = sorted(devices, key=lambda d: (getattr(d, "slice_index", 0), d.id))
    # Not jax.make_mesh, whose axes have a type that torchax's operations do not accept.
    return Mesh(np.array(devices).reshape(num_slices, -1), ("replica", "fsdp"))


def digest(model: nn.Module) -> str:
    """A hash of every parameter, whatever its sharding; the same on every process."""
    hashed = hashlib.sha256()
    for name, parameter in model.named_parameters():
        array = parameter.jax()  # type: ignore[attr-defined]
        everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
        whole = jax.jit(lambda x: x, out_shardings=everywhere)(array)
        hashed.update(name.encode() + np.asarray(whole.addressable_data(0)).tobytes())
    return f"sha256:{hashed.hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--directory", required=True, help="durable: gs://bucket/run")
    parser.add_argument("--local", required=True, help="the ramdisk of this host")
    parser.add_argument("--local-period", type=int, default=10, help="steps between local saves")
    parser.add_argument("--period", type=int, default=500, help="steps between durable saves")
    parser.add_argument("--steps", type=int, default=10_000, help="optimizer steps in all")
    parser.add_argument("--slices", type=int, help="default: as many as the devices say")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="over all chips")
    parser.add_argument("--distributed", action="store_true", help="one of several processes")
    parser.add_argument("--crash-at", type=int, metavar="N", help="die (SIGKILL) after step N")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # die, but keep the log
    if args.distributed:
        jax.distributed.initialize()  # finds the others by what GKE has put in the environment
    torchax.enable_globally()
    torch.manual_seed(0)

    mesh = slices_by_chips(args.slices or (2 if jax.default_backend() == "cpu" else None))
    model = ByteModel(args.width, args.layers).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, params, (tokens,))
        return functional.cross_entropy(logits, targets)

    loss_and_grads = interop.jax_jit(interop.jax_value_and_grad(loss_fn))
    by_example = NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))

    def batch(step: int) -> Any:
        """The same on every process, which takes of it what its chips need."""
        begin = np.random.default_rng(step).integers(0, 1 << 20, (args.batch, 1))
        window = (begin + np.arange(CONTEXT + 1)) ** 2 // 7 % VOCABULARY
        parts = (window[:, :-1].astype(np.int32), window[:, -1].astype(np.int32))
        return interop.torch_view(
            tuple(
                jax.make_array_from_callback(part.shape, by_example, part.__getitem__)
                for part in parts
            )
        )

    local_policy = policies.FixedIntervalPolicy(args.local_period)
    with TorchaxCheckpointer(
        args.directory,
        save_decision_policy=policies.FixedIntervalPolicy(args.period),
        local=LocalTier(args.local, save_decision_policy=local_policy),
    ) as ckpt:
        start = ckpt.attach(model, optimizer, shardings=shardings.fsdp(mesh, "fsdp"))
        print(f"resumed: step {start}" if start else "started: no checkpoint")
        for step in ckpt.steps(args.steps):
            loss, grads = loss_and_grads(dict(model.named_parameters()), *batch(step))
            for name, parameter in model.named_parameters():
                parameter.grad = grads[name]
            optimizer.step()
            ckpt.record(loss=loss)
            if step % 100 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
            if step == args.crash_at:
                ckpt.wait_until_finished()
                os.kill(os.getpid(), signal.SIGKILL)
    ckpt.exit_if_preempted()  # with code 143, a failure, so that JobSet starts all of it again
    print(f"final state: {digest(model)}")


if __name__ == "__main__":
    main()
