"""Measures the cost of ``TorchaxCheckpoint`` in a step that is not saved.

    python benchmarks/holding.py [--steps 500] [--repeats 5] [--layers 1 32]

At each step the callback records the Trainer's position. The program fits a module of linear layers
with AdamW and a StatefulDataLoader, alternately with and without the callback. It prints the median
CPU times of the training thread between two batches, and the median of their differences. CPU time
does not include other programs. The model is small, so that a step consists of the work of
Lightning and the optimizer.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import argparse
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning
import torch
import torchax
from torchax import interop
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import policies
from torchax_ckpt.integrations.lightning import TorchaxCheckpoint, TorchaxStrategy

WIDTH = 16


class Module(lightning.LightningModule):
    automatic_optimization = False

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
        self.loss_and_grads = interop.jax_jit(interop.jax_value_and_grad(self.loss))

    def loss(self, params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(self.net, params, (x,)) ** 2).mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        _, grads = self.loss_and_grads(dict(self.net.named_parameters()), batch)
        for name, parameter in self.net.named_parameters():
            parameter.grad = grads[name]
        self.optimizers().step()  # type: ignore[union-attr]  # one is configured

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(lightning.Callback):
    """Records the CPU time of the thread at each batch."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.began.append(time.thread_time())

    @property
    def median_secs(self) -> float:
        """The median time from batch to batch, without the first ones, which compile."""
        began = self.began[10:]
        return statistics.median(b - a for a, b in itertools.pairwise(began))


def fit(num_layers: int, num_steps: int, *more: lightning.Callback) -> tuple[float, int]:
    """Returns the seconds of a step, and the number of tensors of module and optimizer."""
    clock, module = Clock(), Module(num_layers)
    trainer = lightning.Trainer(
        strategy=TorchaxStrategy(),
        callbacks=[*more, clock],
        max_epochs=1,
        logger=False,
        enable_checkpointing=bool(more),  # Otherwise Lightning adds its own ModelCheckpoint.
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, StatefulDataLoader(torch.randn(num_steps, WIDTH), batch_size=1))
    (optimizer,) = trainer.optimizers
    of_optimizer = [value for state in optimizer.state.values() for value in state.values()]
    return clock.median_secs, len(list(module.parameters())) + len(of_optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 32])
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torchax.enable_globally()
    seldom = policies.FixedIntervalPolicy(10**9)
    print("| layers | tensors | step without | with | the callback |\n|---|---|---|---|---|")
    for num_layers in asked.layers:
        without, with_callback = [], []
        for _ in range(asked.repeats):
            without.append(fit(num_layers, asked.steps)[0])
            with tempfile.TemporaryDirectory() as folder:
                callback = TorchaxCheckpoint(folder, save_decision_policy=seldom)
                secs, num_tensors = fit(num_layers, asked.steps, callback)
            with_callback.append(secs)
        cost = statistics.median(b - a for a, b in zip(without, with_callback, strict=True))
        times = (statistics.median(without), statistics.median(with_callback), cost)
        print(f"| {num_layers} | {num_tensors} |", *(f"{secs * 1e3:.2f} ms |" for secs in times))


if __name__ == "__main__":
    main()
