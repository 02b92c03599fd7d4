"""Which leaves are frozen: parameters without gradients, or what the user's patterns name."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.compare import entries
from support.group import Group
from support.linked import databases, files
from support.models import Tuned
from support.steps import save

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SelectionError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.reuse.frozen_leaves import FrozenLeaves

HALF = 1024  # outputs of a model half of whose bytes are frozen


def saved(directory: Path, model: Tuned, *steps: int, rng: bool = False, **settings: Any) -> None:
    settings = {"preservation_policy": policies.PreserveAll(), **settings}
    with TorchaxCheckpointer(directory, **settings) as ckpt:
        ckpt.attach(model, rng=rng)
        for step in steps:
            with torch.no_grad():
                model.head.weight.add_(step)
            save(ckpt, step, of=None)


def frozen(directory: Path, step: int = 1) -> set[str]:
    """The leaves that a step has in databases of their own."""
    return set().union(*(leaves for leaves, _ in databases(directory, step)))


BASE = {"model/base.weight", "model/base.bias"}


@pytest.mark.parametrize(
    ("num_outputs", "rng", "reuse", "expected"),
    [
        (4, True, "auto", BASE),
        (HALF, False, "auto", BASE),
        (HALF, True, "auto", set()),  # random state counts as what changes
        (2 * HALF, False, "auto", set()),
        (2 * HALF, True, True, BASE),
        (4, True, False, set()),
    ],
)
def test_they_are_parameters_without_gradients_for_auto_of_half_the_bytes(
    num_outputs: int, rng: bool, reuse: Any, expected: set[str], directory: Path
) -> None:
    options = CheckpointOptions(reuse=reuse)
    saved(directory, Tuned(num_outputs).to("jax"), 1, 2, 3, rng=rng, options=options)
    assert frozen(directory, 3) == expected
    assert bool(files(directory, 3) & files(directory, 1)) == bool(expected)


class Table:
    """State on the host."""

    def state_dict(self) -> dict[str, Any]:
        return {"rows": np.ones((4, 8), np.float32), "num": 3}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["model/base"], BASE),
        (["model.base.weight", "model/head.weight"], {"model/base.weight", "model/head.weight"}),
        (["model*.bias"], {"model/base.bias", "model/head.bias"}),
        (["model/running"], {"model/running"}),  # a buffer
        (("optimizer/head.bias",), {f"optimizer/head.bias/{n}" for n in ("exp_avg", "exp_avg_sq")}),
        (["optimizer/*/exp_avg"], {f"optimizer/head.{n}/exp_avg" for n in ("bias", "weight")}),
        (["stateful.table.rows"], {"stateful/table/rows"}),
    ],
)
def test_patterns_name_leaves_of_any_kind(
    patterns: Any, expected: set[str], directory: Path
) -> None:
    """As ``include=``, by the names that ``torchax-ckpt show`` prints."""
    model = Tuned().to("jax")
    model.register_buffer("running", torch.ones(8, device="jax"))
    optimizer = torch.optim.AdamW(model.head.parameters())
    for parameter in model.head.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    options = CheckpointOptions(reuse=patterns)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.attach(model, optimizer, stateful={"table": Table()})
        save(ckpt, 1, 2, 3, of=None)
    found = {name for name in frozen(directory, 3) if not name.endswith("/step")}
    assert found == expected
    assert files(directory, 3) & files(directory, 1)


def functional(step: int) -> Any:
    base = {"w": jnp.ones((64, 64)), "b": np.ones(64)}
    return {"params": {"base": base, "baseline": jnp.zeros(9), "head": jnp.full(9, step)}}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("state/params/base", {"base/w", "base/b"}),
        ("state.params.base*", {"base/w", "base/b", "baseline"}),
        ("state", {"base/w", "base/b", "baseline", "head"}),
    ],
)
def test_patterns_name_leaves_of_functional_state(
    pattern: str, expected: set[str], directory: Path
) -> None:
    with TorchaxCheckpointer(directory, options=CheckpointOptions(reuse=[pattern])) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, of=functional(step))
    assert frozen(directory, 3) == {f"state/params/{name}" for name in expected}
    assert files(directory, 3) & files(directory, 1)


def test_a_pattern_that_matches_nothing_is_refused_by_the_save(directory: Path) -> None:
    options = CheckpointOptions(reuse=["state/params/base", "bsae", "params"])
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        for _ in range(2):
            said = (
                r"nothing in the state matches 'bsae', 'params'. .* such as state/params/base/w, "
            )
            with pytest.raises(SelectionError, match=said):
                ckpt.save(1, state=functional(1), force=True)
        assert ckpt.all_steps() == []


@pytest.mark.parametrize("reuse", ["base", "", [], [""], [1], None, 3, {"base": 1}])
def test_options_that_name_no_leaves_are_refused(reuse: Any) -> None:
    found = re.escape(f"a list of patterns for the names of leaves, found {reuse!r}")
    with pytest.raises(ValueError, match=found):
        CheckpointOptions(reuse=reuse)


def test_where_nothing_is_frozen_one_warning_says_so(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory, options=CheckpointOptions(reuse=True)) as ckpt:
        ckpt.attach()
        for step in (1, 2, 3):
            save(ckpt, step, of=functional(step))
        ckpt.restore(3, strict=False)
        save(ckpt, 4, of=functional(4))
    (said,) = (r for r in caplog.records if "nothing is reused" in r.message)
    assert said.levelno == logging.WARNING
    assert 'CheckpointOptions(reuse=["state/params/base"])' in said.message
    for name, reuse in (("auto", "auto"), ("off", False), ("named", ["state"])):
        caplog.clear()
        options = CheckpointOptions(reuse=reuse)
        with TorchaxCheckpointer(directory.with_name(name), options=options) as ckpt:
            save(ckpt, 1, of=functional(1))
        assert not caplog.records


LATEST = policies.LatestN(1)
BEST = policies.AnyPreservationPolicy([LATEST, policies.BestN(metric="loss")])


@pytest.mark.parametrize(
    ("policy", "options", "is_warned"),
    [
        (LATEST, {}, True),
        (policies.AnyPreservationPolicy([LATEST]), {"reuse": ["model/base"]}, True),
        (LATEST, {"reuse": False}, False),
        (LATEST, {"read_back": True}, False),
        (policies.LatestN(2), {}, False),
        (BEST, {}, False),
    ],
)
def test_a_policy_that_keeps_one_step_is_warned_of(
    policy: Any, options: Any, is_warned: bool, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"preservation_policy": policy, "options": CheckpointOptions(**options)}
    local = LocalTier(directory.with_name("local"), keep=1)
    saved(directory, Tuned().to("jax"), 1, 2, 3, 4, local=local, **settings)
    said = [r.message for r in caplog.records if "keeps one step" in r.message]
    assert len(said) == is_warned
    assert all(text.startswith(f"{directory}: ") and "\n" not in text for text in said)


def test_without_frozen_leaves_it_is_not(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(directory, Tuned(2 * HALF).to("jax"), 1, 2, 3, preservation_policy=LATEST)
    assert "keeps one step" not in caplog.text
    assert "unchanged" not in entries(directory)


def test_a_linked_save_says_how_to_copy(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torchax_ckpt"):
        saved(directory, Tuned().to("jax"), 1, 2, 3, 4, 5)
    (said,) = (text for text in caplog.messages if "cp -r" in text)
    assert said.startswith(f"step 3 of {directory} has ")
    assert "cp -a, rsync -H and torchax-ckpt copy keep the links" in said


def test_who_interrupts_a_save_does_not_wait_for_process_0() -> None:
    """None of the processes knows an answer then, so the next save asks again."""
    has_left = threading.Event()

    def act(member: Processes) -> list[frozenset[str]]:
        frozen, found = FrozenLeaves(["*"], member), []
        for number in range(2):
            if (member.index, number) == (1, 0):
                frozen.refuse(KeyboardInterrupt(), is_durable=True)
                has_left.set()
                continue
            assert has_left.wait(20)
            found.append(frozen.of_state(["w"], [np.zeros(1)], frozenset, is_durable=True).leaves)
        return found

    none, all_leaves = frozenset[str](), frozenset({"w"})
    assert Group()(act) == [[none, all_leaves], [all_leaves], [none, all_leaves]]
