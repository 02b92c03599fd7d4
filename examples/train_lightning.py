"""Trains a classifier of handwritten digits with Lightning, and survives being killed.

    python examples/train_lightning.py --directory runs/lightning
    python examples/train_lightning.py --check-topology v5e:2x4    # compiles for a TPU, without one

Kill it (or let it kill itself: ``--crash-at 150``) and run the same command again. The run resumes
from the newest checkpoint, within an epoch or at its end, and ends with the same bits as an
uninterrupted run. The directory keeps the latest steps and the best ones by validation accuracy.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
from typing import Any

import jax
import lightning
import numpy as np
import torch
import torchax
from jax.sharding import SingleDeviceSharding
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader
from torchax import interop
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt.errors import PlanError
from torchax_ckpt.integrations.lightning import TorchaxCheckpoint, TorchaxStrategy
from torchax_ckpt.planning import step_on_topology, topology

NUM_TEST_IMAGES, BATCH = 360, 64


class Digits(lightning.LightningModule):
    """Maps images [N, 64] to logits [N, 10]."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False  # torchax has no loss.backward()
        self.crash_at = crash_at
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

        def loss_fn(params: Any, key: Any, images: torch.Tensor, labels: torch.Tensor) -> Any:
            # The key is an argument, because a key drawn while tracing would be a constant of the
            # compiled program.
            with torchax.default_env().override_property(prng=key.jax()):
                logits = torch.func.functional_call(self.net, params, (images,))
            return nn.functional.cross_entropy(logits, labels)

        self.value_and_grad = interop.jax_jit(interop.jax_value_and_grad(loss_fn))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        key = interop.torch_view(torchax.default_env().get_and_rotate_prng_key())
        loss, grads = self.value_and_grad(dict(self.net.named_parameters()), key, *batch)
        for name, parameter in self.net.named_parameters():
            parameter.grad = grads[name]
        optimizer: Any = self.optimizers()
        optimizer.step()
        self.log("loss", loss, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        scheduler: Any = self.lr_schedulers()
        scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]


def digits() -> tuple[Any, Any]:
    """Returns training and test examples: images [64] fp32, labels int32."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    examples = [((images[i] / 16).astype(np.float32), labels[i].astype(np.int32)) for i in order]
    return examples[NUM_TEST_IMAGES:], examples[:NUM_TEST_IMAGES]


def collate(examples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*examples, strict=True)
    return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))


def digest(state: Any) -> str:
    """Returns a hash of every bit of the tensors in a state."""
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(interop.jax_view(state)):
        hashed.update(np.asarray(leaf).tobytes())
    return hashed.hexdigest()[:16]


def check_topology(name: str, module: Digits, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compiles loss and gradients for a chip of a TPU topology, and prints what they need."""
    chip = SingleDeviceSharding(topology.devices(name)[0])
    module.to("jax")
    key = interop.torch_view(torchax.default_env().prng_key)
    inputs = (dict(module.net.named_parameters()), key, *(tensor.to("jax") for tensor in batch))
    # The chip holds no arrays, so abstract arrays stand for them.
    params, *inputs = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=chip),
        interop.jax_view(inputs),
    )
    state = {"model": params, "optimizer": params}  # The momentum has the parameters' shapes.
    print(step_on_topology(name, module.value_and_grad, params, *inputs, state=state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="runs/lightning", help="directory of checkpoints")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="seed of a new run; unused on resume")
    parser.add_argument("--crash-at", type=int, metavar="N", help="die (SIGKILL) after step N")
    parser.add_argument(
        "--check-topology",
        metavar="NAME",
        help="do not train, but compile for a chip of a TPU topology, such as v5e:2x4, and print "
        "what step and saves need there; needs libtpu, but no TPU",
    )
    args = parser.parse_args()
    # Otherwise a SIGKILL would lose the buffered lines.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if args.check_topology:
        jax.config.update("jax_platforms", "cpu")  # TPUs of this machine stay free.

    torchax.enable_globally()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)  # torchax has a random key of its own:
    torchax.default_env().manual_seed(args.seed)

    train, test = digits()
    if args.check_topology:
        check_topology(args.check_topology, Digits(), collate(train[:BATCH]))
        return
    loader = StatefulDataLoader(
        train, batch_size=BATCH, shuffle=True, collate_fn=collate, drop_last=True
    )
    checkpoint = TorchaxCheckpoint(args.directory, monitor="accuracy", mode="max", num_best=2)
    trainer = lightning.Trainer(
        strategy=TorchaxStrategy(),
        callbacks=[checkpoint],
        max_epochs=args.epochs,
        logger=False,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    module = Digits(args.crash_at)
    trainer.fit(module, loader, DataLoader(test, batch_size=120, collate_fn=collate))

    ckpt = checkpoint.checkpointer
    assert ckpt is not None
    print(f"test accuracy: {trainer.callback_metrics['accuracy'].item():.1%}")
    print(f"best step: {ckpt.best_step()} of {ckpt.all_steps()}")
    print(f"final state: {digest((module.state_dict(), trainer.optimizers[0].state_dict()))}")


if __name__ == "__main__":
    try:
        main()
    except PlanError as error:
        sys.exit(f"--check-topology: {error}")
