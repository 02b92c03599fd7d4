"""What docs/concepts.md says of each type of value is what a save and a restore make of it."""

from __future__ import annotations

import collections
import enum
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support import ROOT
from support.models import Box, Node
from support.strategies import fingerprint

from torchax_ckpt import TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import UnsupportedLeafError


class Point(NamedTuple):
    x: Any
    y: Any


class Color(enum.Enum):
    RED = 1


NAMES = vars(collections) | {
    "np": np, "jnp": jnp, "jax": jax, "torch": torch, "Point": Point, "Color": Color, "Node": Node
}  # fmt: skip


def evaluated(cell: str) -> list[Any]:
    """The values of the expressions in a cell; names such as ``jax`` are passed over."""
    texts = [
        text for text in re.findall(r"`([^`]+)`", cell) if re.search(r"\W|^None|^True|^7", text)
    ]
    with torchax_backend.native_torch():
        return [eval(text, dict(NAMES)) for text in texts]


TABLE = re.search(
    r"^\| in the state .*?\n\|---\|---\|\n(.*?)\n\n",
    (ROOT / "docs/concepts.md").read_text(),
    re.S | re.M,
)
assert TABLE
ROWS = [line.strip("| ").split(" | ") for line in TABLE[1].splitlines()]
KEPT = [value for cell, result in ROWS if "itself" in result for value in evaluated(cell)]
CHANGED = [
    pair
    for cell, result in ROWS
    if "with a warning" in result
    for pair in zip(evaluated(cell), evaluated(result), strict=False)
]
REFUSED = [value for cell, result in ROWS if "refused" in result for value in evaluated(cell)[:5]]


def come_back(directory: Path, state: Any) -> Any:
    """The state of an object, after two saves, and a restore into a fresh object."""
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={"box": Box(state)})
        ckpt.save(1, force=True)
        ckpt.save(2, force=True)
    fresh = Box(None)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={"box": fresh})
    return fresh.state


def test_what_the_table_says_is_kept_comes_back_with_its_type(directory: Path) -> None:
    on_device = torchax_backend.wrap(jnp.arange(3))
    factories: list[Any] = [None, bool, dict, float, int, set, str, tuple]
    defaults = [collections.defaultdict(f, {1: 2}) for f in factories]
    state = [*KEPT, on_device, *defaults]
    assert len(KEPT) > 15
    found = come_back(directory, state)
    assert fingerprint(found) == fingerprint(state)
    is_default = [value for value in found if type(value) is collections.defaultdict]
    assert [value.default_factory for value in is_default] == [list, *factories]


def test_what_comes_back_as_another_type_is_said_once_at_the_first_save(directory: Path) -> None:
    assert len(CHANGED) == 7
    for number, (value, expected) in enumerate(CHANGED):
        with pytest.warns(UserWarning, match="comes back as a") as said:
            found = come_back(directory / f"{number}", {"deep": [value]})
        assert [str(w.message).partition(":")[0][:19] for w in said] == ["stateful/box/deep/0"]
        assert fingerprint(found) == fingerprint({"deep": [expected]})


def test_a_functional_state_has_the_same_types_without_a_warning(directory: Path) -> None:
    state = dict(enumerate([*KEPT, *(value for value, _ in CHANGED)]))
    with warnings.catch_warnings(), TorchaxCheckpointer(directory) as ckpt:
        warnings.simplefilter("error")
        ckpt.save(1, state=state, force=True)
        ckpt.wait_until_finished()
        found = ckpt.load(1)
    expected = dict(enumerate([*KEPT, *(value for _, value in CHANGED)]))
    assert fingerprint(found) == fingerprint(expected)


def test_what_the_table_says_is_refused_is_refused_by_name(directory: Path) -> None:
    assert len(REFUSED) == 5
    for number, value in enumerate(REFUSED):
        with TorchaxCheckpointer(directory / f"{number}") as ckpt:
            ckpt.attach(stateful={"box": Box([value])})
            with pytest.raises(UnsupportedLeafError, match="stateful/box/0: a .* cannot be stored"):
                ckpt.save(1, force=True)


def test_optimizers_and_extra_state_say_it_too_and_parameters_of_modules_do_not(
    directory: Path,
) -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return Point(1, 2)

        def set_extra_state(self, state: Any) -> None:
            pass

    model = Extra(2, 2).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["shape"] = torch.Size([2])
    optimizer.state[model.weight] = collections.OrderedDict(m=torch.ones_like(model.weight))
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer)
        with pytest.warns(UserWarning, match="comes back as a") as said:
            ckpt.save(1, force=True)
    assert [str(warning.message).partition(" comes")[0] for warning in said] == [
        "model/%/_extra_state: a value of the type Point",
        "optimizer/param_groups/0/shape: a value of the type Size",
        "optimizer/weight: a value of the type OrderedDict",
    ]
