"""Fits a module with a Trainer in a program that does not enable torchax itself."""

from __future__ import annotations

import warnings
from typing import Any, cast

import lightning
import torch
from torch.utils.data import DataLoader

from torchax_ckpt.integrations.lightning import TorchaxStrategy

warnings.simplefilter("ignore")


class Module(lightning.LightningModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: Any) -> None:
        self.weight.grad = self.weight * batch
        cast(Any, self.optimizers()).step()
        self.log("sum", self.weight.sum(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=0.5)


module = Module()
trainer = lightning.Trainer(
    strategy=TorchaxStrategy(), max_epochs=1, enable_checkpointing=False, logger=False
)
trainer.fit(module, DataLoader(cast(Any, [1.0, 1.0])))
print(module.weight.device, module.weight.tolist(), trainer.callback_metrics)
