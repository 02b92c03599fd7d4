"""A model, and its optimizers, that programs of torchax and of plain PyTorch build alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Loader:
    """A loader that counts."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Net(nn.Module):
    """Tied weights, equal layers that are stored as stacks, buffers, and two dtypes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        self.small = nn.Linear(width, 12, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.head(self.norm(x)) + self.small(x.to(torch.bfloat16)).float().sum()


def optimizer_of(model: Any, kind: str) -> torch.optim.Optimizer:
    if kind == "muon":
        return torch.optim.Muon([layer.weight for layer in model.layers], lr=0.125)
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": rest, "lr": 0.25}, {"params": [first]}], lr=0.125)


def state_of(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Returns state dicts, with the optimizer's parameters by name."""
    names = {p: n for n, p in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    moments = optimizer.state_dict()
    moments["state"] = {order[i]: state for i, state in moments["state"].items()}
    for group in moments["param_groups"]:
        group["params"] = [order[i] for i in group["params"]]
    weights, schedule = dict(model.state_dict()), scheduler.state_dict()
    return {"model": weights, "optimizer": moments, "lr_scheduler": schedule}
