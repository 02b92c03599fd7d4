"""A program of plain torch: builds a model, loads it twice, and shows what it has then.

python plain_torch.py TORCH_FILE DCP_FOLDER
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

warnings.simplefilter("ignore")


def build() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    return model, torch.optim.AdamW([{"params": second}, {"params": first}], lr=9.0)


def show(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        print(group["lr"], group["betas"])
        for p in group["params"]:
            state = optimizer.state[p]
            for tensor in (p, state["step"], state["exp_avg"], state["exp_avg_sq"]):
                print(tensor.detach().numpy().tobytes().hex())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    print(optimizer.state[p]["step"].item())


model, optimizer = build()
saved = torch.load(sys.argv[1], weights_only=True)
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
show(model, optimizer)

model, optimizer = build()
weights, state = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optimizer": state}, checkpoint_id=sys.argv[2])
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
show(model, optimizer)
assert "torchax" not in sys.modules
