"""Reading a step or a part of it, and steps named in words."""

from __future__ import annotations

import collections
import glob
import logging
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from etils import epath
from support.compare import assert_trees_identical
from support.damage import flip_arrays
from support.steps import save_states
from support.training import adamw, mlp, train_step

import torchax_ckpt
from torchax_ckpt import (
    CheckpointOptions,
    TorchaxCheckpointer,
    load_torch_state_dict,
    policies,
)
from torchax_ckpt.cli.step_arguments import step_named
from torchax_ckpt.errors import (
    ArgumentError,
    CorruptCheckpointError,
    MismatchError,
    SelectionError,
    StepError,
    StepNotFoundError,
    StepTypeError,
)
from torchax_ckpt.layout import nodes
from torchax_ckpt.restoring.fallback import newest_readable
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.compare import plain_values
from torchax_ckpt.stored.copy import copy_steps
from torchax_ckpt.stored.stored_step import StoredStep

STATE = {
    "params": {"w": np.arange(4.0), "b": np.zeros(2)},
    "opt": [np.ones(3), {"count": 7, "lr": 0.5}, (np.ones(1), 2)],
    "betas": [0.9, 0.99],
}
Point = collections.namedtuple("Point", ["x", "y"])
LOSSES = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.2}


@pytest.fixture
def run(directory: Path) -> Path:
    states = {step: {**STATE, "n": step} for step in LOSSES}
    metrics = {step: {"loss": loss, "top": loss, "nan": "?"} for step, loss in LOSSES.items()}
    return save_states(directory, states, metrics, preservation_policy=policies.PreserveAll())


def test_a_filter_reads_the_values_that_it_matches_and_nothing_else(run: Path) -> None:
    for pattern, expected in (
        ("state/params/*", {"params": STATE["params"]}),
        ("*/b", {"params": {"b": np.zeros(2)}}),
        ("state/opt/1/*", {"opt": [None, {"count": 7, "lr": 0.5}, None]}),
        ("state/opt/2/0", {"opt": [None, None, (np.ones(1), None)]}),
        ("state/betas", {"betas": [0.9, 0.99]}),
        ("*", {**STATE, "n": 4}),
    ):
        assert_trees_identical(torchax_ckpt.load(run, filter=pattern), expected)
        with TorchaxCheckpointer(run) as ckpt:
            assert_trees_identical(ckpt.load(4, filter=pattern), expected)
    # What the filter leaves out is not read, so that damage of it does no harm.
    for path in (run / "4").rglob("d/*"):
        path.write_bytes(b"")
    assert torchax_ckpt.load(run, 4, filter="state/opt/1/*")["opt"][1]["count"] == 7


def test_a_filter_that_matches_nothing_or_meets_an_abstract_state_is_refused(run: Path) -> None:
    with pytest.raises(SelectionError, match=r"found 'model/\*', which matches none"):
        torchax_ckpt.load(run, filter="model/*")
    with TorchaxCheckpointer(run) as ckpt:
        with pytest.raises(ArgumentError, match=r"give a pattern as filter='state/\*'"):
            ckpt.load(4, "state/*")
        with pytest.raises(ArgumentError, match="expected abstract_state or filter, found both"):
            ckpt.load(4, STATE, filter="*")
        with pytest.raises(ArgumentError, match="filter: expected a pattern"):
            ckpt.load(4, filter=["*"])  # type: ignore[arg-type]


def test_a_filter_takes_every_name_that_show_prints(directory: Path) -> None:
    state = {
        "mixed": [1.0, float("inf"), 10**40],
        "nested": [[1, 2], [3, 4]],
        "tuples": ((1, 2), (3, 4)),
        "bytes": b"x",
        "complex": 1j,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "parts": [{}, {"w": np.ones(2)}],
        "some": [{}, 1, b"x"],
        "sets": [{1}, 2],
        "default": collections.defaultdict(int, a=1),
        "keys": {("a", 1): 1, b"k": 2, 10**40: 3},
        "point": Point(1, 2),
    }
    save_states(directory, {1: state})
    step = StoredStep(RunDirectory(directory).steps()[-1])
    found = {*plain_values(step), *step.manifest.leaves}
    names = {name for name in found if name.startswith("state/")}
    assert {"state/some/1", "state/sets", "state/default/a", "state/point/x"} <= names
    assert len(names) == 15
    for name in names:
        assert torchax_ckpt.load(directory, filter=glob.escape(name))
    whole = torchax_ckpt.load(directory, filter="*")
    assert_trees_identical(whole, torchax_ckpt.load(directory))
    assert torchax_ckpt.load(directory, filter="state/empty/dict") == {"empty": {"dict": {}}}


def test_weights_alone_are_read_beside_a_program_that_saves(directory: Path) -> None:
    model = mlp()
    optimizer = adamw(model)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer)
        for step in ckpt.steps(2):
            train_step(model, optimizer, step)
        ckpt.wait_until_finished()
        lease = (directory / "lease").read_bytes()
        loaded = torchax_ckpt.load(directory, filter="model/*")
        assert_trees_identical(loaded, {"model": dict(model.state_dict())})
        assert_trees_identical(torchax_ckpt.load(directory / "2"), ckpt.load(2))
        assert (directory / "lease").read_bytes() == lease


def test_attaching_the_model_alone_says_how_to_read_weights_only(directory: Path) -> None:
    model = mlp()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, adamw(model), stateful={"n": torch.nn.Linear(1, 1)})
        ckpt.save(1, force=True)
    said = "leaves out what the run trains too: {}. .* call torchax_ckpt.warm_start"
    for attached, has_advice in ((model, True), (torch.nn.Linear(3, 3).to("jax"), False)):
        with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError) as caught:
            ckpt.attach(attached)
        assert bool(re.search(said.format("optimizer, stateful"), str(caught.value))) is has_advice


@pytest.mark.parametrize(
    ("name", "step"), [("latest", 4), ("best:loss", 2), ("best:loss:min", 2), ("best:top:max", 1)]
)
def test_a_step_has_a_name_where_a_step_is_read(run: Path, name: str, step: int) -> None:
    with TorchaxCheckpointer(run, options=CheckpointOptions(read_only=True)) as ckpt:
        assert ckpt.load(name)["n"] == step
        assert torchax_ckpt.load(run, name)["n"] == step
        assert ckpt.verify(name) == step


def test_a_metric_is_ranked_as_the_run_ranks_it(directory: Path) -> None:
    best = policies.BestN(metric="top", mode="max", n=9)
    model = mlp()
    with TorchaxCheckpointer(directory, preservation_policy=best) as ckpt:
        ckpt.attach(model, stateful={"n": Counter()})
        for step, top in ((1, 0.5), (2, 0.1)):
            ckpt.save(step, metrics={"top": top}, force=True)
        ckpt.wait_until_finished()
        assert ckpt.best_step() == 1
        assert ckpt.restore("best:top").step == 1
    assert torchax_ckpt.load(directory, "best:top")["stateful"]["n"]["n"] == 1
    assert torchax_ckpt.load(directory, "best:top:min")["stateful"]["n"]["n"] == 2
    assert step_named(RunDirectory(directory), "best:top").step == 1
    assert torchax_ckpt.warm_start(mlp(), directory, step="best:top").step == 1
    assert load_torch_state_dict(directory, "best:top").keys() == model.state_dict().keys()
    copied = directory.with_name("copied")
    copy_steps(RunDirectory(directory).steps(), RunDirectory(copied))
    assert torchax_ckpt.load(copied, "best:top")["stateful"]["n"]["n"] == 1
    with TorchaxCheckpointer(directory, keep=9) as ckpt:  # a program without such a rule
        ckpt.attach(model, stateful={"n": Counter()}, resume=False)
        ckpt.restore(2)
        ckpt.save(3, metrics={"top": 0.3}, force=True)
    assert torchax_ckpt.load(directory, "best:top")["stateful"]["n"]["n"] == 1
    # A rule of this program is nearer than that of the last one.
    smallest = policies.BestN(metric="top", mode="min")
    with TorchaxCheckpointer(directory, preservation_policy=smallest) as ckpt:
        assert ckpt.load("best:top")["stateful"]["n"]["n"] == 2


class Counter:
    """How often its state was asked for, which is how often a step was saved."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        self.n += 1
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def test_the_best_step_that_can_be_read_is_the_best(run: Path) -> None:
    flip_arrays(run / "2")
    with pytest.warns(UserWarning, match="skipping an unreadable checkpoint: step 2"):
        assert torchax_ckpt.load(run, "best:loss")["n"] == 4
    with TorchaxCheckpointer(run) as ckpt:
        with pytest.raises(CorruptCheckpointError):
            ckpt.verify(2)
        assert ckpt.load("best:loss")["n"] == 4  # without a warning


def test_steps_that_a_program_deletes_while_they_are_read_are_looked_for_again() -> None:
    old, new = (CommittedStep(n, epath.Path(f"/{n}"), n) for n in (1, 2))
    listings = [[old], [new]]

    def attempt(committed: CommittedStep) -> int:
        if committed is old:
            raise StepNotFoundError("gone")
        return committed.step

    assert newest_readable(lambda: listings.pop(0), attempt) == (2, ())
    with pytest.raises(StepNotFoundError, match="gone"):
        newest_readable(lambda: [old], attempt)


def test_a_step_that_was_replaced_while_it_was_looked_for_is_looked_for_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = RunDirectory(run).steps()
    gone = CommittedStep(2, epath.Path(run / "gone"), 9)
    listings: list[Any] = [[], [], steps, [gone], steps]
    monkeypatch.setattr(RunDirectory, "steps", lambda self: listings.pop(0))
    assert torchax_ckpt.load(run)["n"] == 4
    assert torchax_ckpt.load(run, "best:loss")["n"] == 2
    listings += [[], [], []]
    with pytest.raises(StepNotFoundError, match="there are no checkpoints"):
        torchax_ckpt.load(run)
    assert not listings


def test_a_best_step_whose_metrics_are_damaged_is_named(run: Path) -> None:
    shutil.rmtree(run / "3" / "manifest")  # as in a step that Orbax alone wrote
    for step in ("2", "3"):
        (run / step / "summary" / "data.json").write_text("{}")
    said = "the metrics of step 2 are damaged, so it is not known whether best:loss"
    with pytest.warns(UserWarning, match=said):
        assert torchax_ckpt.load(run, "best:loss")["n"] == 4
    with pytest.warns(UserWarning, match=said):
        assert step_named(RunDirectory(run), "best:loss").step == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torchax_ckpt.load(run, "latest")["n"] == 4


def test_a_model_is_loaded_as_its_state_dict(directory: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

        def get_extra_state(self) -> dict[str, Any]:
            return {"seen": 5}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            assert state == {"seen": 5}

    model = Tied().to("jax")
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model)
        ckpt.save(1, force=True)
    weights = torchax_ckpt.load(directory)["model"]
    assert weights.keys() == model.state_dict().keys()
    Tied().to("jax").load_state_dict(weights)
    alias = torchax_ckpt.load(directory, filter="model/head.weight")["model"]
    assert_trees_identical(alias, {"head.weight": model.head.weight.detach()})


def test_a_filter_means_the_values_of_each_process() -> None:
    node = {"dict": [["key", {"array": "processes/1/rng/key"}]]}
    assert nodes.selected(node, ("rng",), lambda name: name == "rng/key") == (node,)


def test_going_back_to_the_best_step_says_what_is_abandoned(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchax_ckpt")
    with TorchaxCheckpointer(directory, save_every=1, keep=9) as ckpt:
        ckpt.attach(mlp())
        for step in ckpt.steps(4):
            ckpt.record(loss=LOSSES[step])
        ckpt.wait_until_finished()
        assert ckpt.restore("best:loss").step == 2
        assert next(iter(ckpt.steps(9))) == 3
    (line,) = [message for message in caplog.messages if "abandons" in message]
    assert "goes on from step 2; its next durable save abandons steps [3, 4]" in line


def test_a_name_that_means_no_step_is_refused(run: Path) -> None:
    with TorchaxCheckpointer(run) as ckpt:
        ckpt.attach()
        uses: list[Callable[[Any], Any]] = [ckpt.restore, ckpt.load]
        for use in (*uses, lambda name: torchax_ckpt.load(run, name)):
            with pytest.raises(StepNotFoundError, match="no step has the metric 'lss'; there are"):
                use("best:lss")
            with pytest.raises(StepNotFoundError, match="ranked by 'nan': each value is NaN or no"):
                use("best:nan")
            for name in ("best:", "best:loss:avg"):
                with pytest.raises(SelectionError, match="expected best:METRIC"):
                    use(name)
            with pytest.raises(StepTypeError, match="'best:METRIC:max', found 'newest'"):
                use("newest")
            for odd in (torch.tensor(True), np.array([2]), 2.0):
                with pytest.raises(StepTypeError, match="expected an int, found"):
                    use(odd)
            with pytest.raises(StepError, match="expected 0 or more"):
                use(-1)
        others: list[Callable[[Any], Any]] = [ckpt.save, ckpt.delete, ckpt.metrics]
        for other in others:
            with pytest.raises(StepTypeError, match="expected an int, found 'latest'"):
                other("latest")
