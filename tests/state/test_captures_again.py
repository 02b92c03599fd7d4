"""A capture that reuses what an earlier one found equals the capture of newly attached objects."""

from __future__ import annotations

import json
import random
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.compare import bits
from support.models import Box
from support.training import on_cpu

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.state.functional import PytreeCapture
from torchax_ckpt.state.stateful import StatefulComponent
from torchax_ckpt.state.training_state import TrainingState


def on_device(parameter: torch.Tensor, value: float, dtype: Any = jnp.float32) -> torch.Tensor:
    return torchax_backend.wrap(jnp.full(tuple(parameter.shape), value, dtype))


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return on_cpu(value, dtype)


class Program:
    """A model and its optimizer, which changes at random as programs may change theirs."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.model: Any = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to("jax")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.parameters:
            self.add_state(parameter)

    @property
    def attached(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def add_state(self, parameter: torch.Tensor) -> None:
        self.optimizer.state[parameter] = {
            "step": scalar(self.choose.randrange(1 << 16)),
            "exp_avg": on_device(parameter, self.choose.randrange(1 << 16)),
            "exp_avg_sq": on_device(parameter, self.choose.randrange(1 << 16)),
        }

    def change(self, *kinds: str) -> str:
        """Makes one change of these kinds, or of any kind; returns its kind."""
        kind = self.choose.choice(kinds or CHANGES)
        parameter, value = self.choose.choice(self.parameters), self.choose.randrange(1 << 16)
        state, groups = self.optimizer.state, self.optimizer.param_groups
        if kind.startswith("state: "):
            self.add_state(parameter)
        match kind:
            case "step":
                for each in self.parameters:
                    self.add_state(each)
            case "write":
                parameter._elem += value
            case "drop state":
                state.pop(parameter, None)
            case "move state to the end":
                state.pop(parameter, None)
                self.add_state(parameter)
            case "empty state":
                state[parameter] = {}
            case "state: odd entry":
                key, entry = self.choose.choice(self.odd_entries(parameter, value))
                state[parameter][key] = entry
            case "state: other keys":
                key = self.choose.choice(["max_exp_avg_sq", "extra"])
                state[parameter][key] = state[parameter].pop("exp_avg_sq")
            case "reorder":
                self.choose.shuffle(self.choose.choice(groups)["params"])
            case "regroup" if len(groups) == 1:
                if len(groups[0]["params"]) > 1:
                    taken = groups[0]["params"].pop()
                    self.optimizer.add_param_group({"params": [taken], "lr": 0.5})
            case "regroup":
                groups[0]["params"] += groups.pop()["params"]
            case "swap":
                self.swap(parameter)
            case "exchange layers":
                self.model[0], self.model[1] = self.model[1], self.model[0]
        return kind

    def odd_entries(self, parameter: torch.Tensor, value: float) -> list[tuple[str, Any]]:
        """Entries of other dtypes and kinds than AdamW's."""
        shape = tuple(parameter.shape)
        weak = jax.jit(lambda: jnp.broadcast_to(jnp.asarray(1.5), shape))()
        with torchax_backend.native_torch():
            vector = torch.arange(self.choose.randrange(1, 4), dtype=torch.float32)
        narrow = on_device(parameter, value, jnp.bfloat16)
        moments = [("exp_avg", narrow), ("exp_avg", torchax_backend.wrap(weak))]
        counters = [("step", scalar(value, torch.float64)), ("step", value)]
        return [*moments, *counters, ("exp_avg_sq", vector)]

    def swap(self, old: torch.Tensor) -> None:
        """Replaces a parameter by another one, also in the optimizer."""
        new = torch.nn.Parameter(on_device(old, self.choose.randrange(1 << 16)))
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is old:
                    module._parameters[name] = new
        for group in self.optimizer.param_groups:
            group["params"][:] = [new if p is old else p for p in group["params"]]
        self.optimizer.state.pop(old, None)
        if self.choose.random() < 0.5:
            self.add_state(new)


CHANGES = (
    "step", "write", "drop state", "move state to the end", "empty state",
    *["state: odd entry"] * 5, "state: other keys", "reorder", "regroup", "swap", "exchange layers",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_a_capture_after_any_changes_equals_one_that_knows_nothing(seed: int) -> None:
    program = Program(seed)
    attached = TrainingState(program.attached, rng=False)
    attached.capture()
    history = []
    for _ in range(60):
        for _ in range(program.choose.choice((0, 1, 1, 2))):
            history.append(program.change())
        found = attached.capture()
        expected = TrainingState(program.attached, rng=False).capture()
        for name, want in expected.items():
            assert json.dumps(found[name].form.node) == json.dumps(want.form.node), history
            assert found[name].form.names == want.form.names, history
            assert list(map(bits, found[name].arrays)) == list(map(bits, want.arrays)), history


def test_a_form_is_reused_while_only_values_change() -> None:
    program = Program(0)
    attached = TrainingState(program.attached, rng=False)
    first = attached.capture()
    for _ in range(3):
        for kind in ("write", "step", "move state to the end"):
            program.change(kind)
        found = attached.capture()
        assert found["model"].form is first["model"].form
        assert found["optimizer"].form.names == first["optimizer"].form.names
    program.change("step")
    known = attached.capture()["optimizer"].form
    program.change("step")
    assert attached.capture()["optimizer"].form is known


def recursion_left(depth: int = 0) -> int:
    try:
        return recursion_left(depth + 1)
    except RecursionError:
        return depth


def test_keys_that_cannot_be_sorted_cost_no_recursion_depth() -> None:
    """An error of JAX's flatten shortens what Python allows, which kills long runs."""
    state = {"seen": [{1: 0, "1": 0}, {(1, None): 0, "a": jnp.zeros(2)}]}
    component = StatefulComponent(Box(state), ("stateful", "box"))
    before = recursion_left()
    for _ in range(50):
        assert component.capture().form.names == ("stateful/box/seen/1/a",)
        PytreeCapture().capture(state)
    assert recursion_left() == before


@pytest.mark.parametrize("kind", ["deep", "contains itself", "becomes deep"])
def test_a_state_that_is_too_deep_is_refused_and_the_program_goes_on(kind: str) -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    own: list[Any] = [1]
    own.append(own)
    box = Box({"mean": jnp.zeros(3), "inner": 0})
    component = StatefulComponent(box, ("stateful", "box"))
    if kind == "becomes deep":
        component.capture()
        component.capture()
    box.state["inner"] = own if kind == "contains itself" else deep
    before = recursion_left()
    with pytest.raises(UnsupportedLeafError, match="deeper than 100 levels, or contains itself"):
        component.capture()
    assert recursion_left() == before


def test_a_long_list_of_numbers_is_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box({"permutation": list(range(100_000)), "at": 3})
    monkeypatch.setattr(jax.tree_util, "tree_flatten", Mock(side_effect=AssertionError))
    StatefulComponent(box, ("stateful", "box")).capture()


@jax.tree_util.register_pytree_node_class
class Incomparable:
    """A node whose metadata has no truth value when compared."""

    def __init__(self, child: Any) -> None:
        self.child = child

    def tree_flatten(self) -> Any:
        return (self.child,), np.arange(2)

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Incomparable:
        return cls(*children)


def test_nodes_that_cannot_be_compared_are_described_at_each_save() -> None:
    capture = PytreeCapture()
    for value in range(3):
        captured = capture.capture({"a": Incomparable(jnp.full(2, value))})
        assert np.asarray(captured.arrays[0]).tolist() == [value, value]


def test_keys_of_equal_value_and_other_types_are_told_apart() -> None:
    capture = PytreeCapture()
    for key in (1, 1, 1, True, True, True, 1.0, 1):
        state = {key: jnp.zeros(2)}
        found, want = (each.capture(state).form.node for each in (capture, PytreeCapture()))
        assert json.dumps(found) == json.dumps(want)


def test_the_form_of_a_state_is_reused_while_only_arrays_change() -> None:
    box = Box({"mean": jnp.zeros(3), "inner": {"b": [scalar(0)]}})
    component = StatefulComponent(box, ("stateful", "box"))
    component.capture()
    known = component.capture()
    for value in range(3):
        box.state["mean"] = jnp.full(3, value, jnp.float32)
        box.state["inner"]["b"][0].fill_(value)
        found = component.capture()
        assert found.form is known.form
        assert [np.asarray(array).tolist() for array in found.arrays] == [[value] * 3, value]


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_leaf_that_was_donated_or_traced_since_the_last_capture_is_named(part: str) -> None:
    program = Program(0)
    attached = TrainingState(program.attached, rng=False)
    attached.capture()
    tensor = program.parameters[0]
    if part == "optimizer":
        tensor = program.optimizer.state[tensor]["exp_avg"]
    before = tensor._elem

    def traced(array: jax.Array) -> jax.Array:
        tensor._elem = array
        return array

    jax.jit(traced)(before)
    with pytest.raises(UnsupportedLeafError, match=f"{part}/.*tracer"):
        attached.capture()
    tensor._elem = before + 1
    attached.capture()
    tensor._elem.delete()
    with pytest.raises(UnsupportedLeafError, match=f"{part}/.*donated"):
        attached.capture()
