"""Models with tied parameters, equal layers and extra state, a stateful object, a node of JAX."""

from __future__ import annotations

from typing import Any

import jax
import torch

from support.compare import bits
from support.training import before_enabling


class Plain(torch.nn.Module):
    """An embedding tied to the head, equal layers that are stored as stacks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((), 0.5))


class Tuned(torch.nn.Module):
    """A frozen layer of 4 MiB, and a trained one of 4 KiB for each of its outputs."""

    def __init__(self, num_outputs: int = 4) -> None:
        super().__init__()
        self.base = torch.nn.Linear(1024, 1024)
        self.head = torch.nn.Linear(1024, num_outputs)
        self.base.requires_grad_(False)


class Tied(Plain):
    """``Plain`` with extra state, which safetensors' own ``load_model`` rejects."""

    def get_extra_state(self) -> Any:
        return {"calls": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        pass


class WithExtraState(torch.nn.Linear):
    """A layer whose extra state is the value last set."""

    extra: Any = "live"

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Box:
    """A stateful object that takes any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Counter:
    """A user's stateful object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def values(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the dtype, shape and bytes of each tensor by name, without extra state."""
    found = {}
    for name, tensor in state.items():
        if not name.endswith("_extra_state"):
            found[name] = bits(tensor)[1:]
    return found


def plain() -> torch.nn.Module:
    with before_enabling():
        torch.manual_seed(3)
        model = Plain()
        model.layers[1].bfloat16()
        return model


def live() -> Any:
    model = Plain()
    model.layers[1].bfloat16()
    model.to("jax")
    model.head.weight = model.embed.weight
    return model


@jax.tree_util.register_pytree_with_keys_class
class Node:
    """A class of a user, registered with JAX."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey
        return ((key("left"), self.left), (key("right"), self.right)), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)
