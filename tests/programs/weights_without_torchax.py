"""Loads weights with torch alone, in a program that never imports torchax.

python weights_without_torchax.py DIRECTORY
"""

from __future__ import annotations

import sys

import jax
import torch

from torchax_ckpt import load_torch_state_dict

state = load_torch_state_dict(sys.argv[1], 3)
assert state["layers.1.weight"].dtype == torch.bfloat16
model = torch.nn.Linear(8, 8)
model.load_state_dict({k: state[f"layers.0.{k}"] for k in ("weight", "bias")})
print(model(torch.ones(8)).sum().item())
assert "torchax" not in sys.modules
assert not jax._src.xla_bridge.backends_are_initialized()
