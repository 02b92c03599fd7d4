"""Schedulers, loaders, users' own objects and random state: whatever keeps a state of its own."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchax
from support.compare import assert_trees_identical, bits, copied, training_state
from support.damage import edit_json
from support.models import Box, WithExtraState
from support.strategies import fingerprint
from support.training import fsdp_mesh, fsdp_rule, mlp, on_cpu, restore, resume, save
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import RandomState, TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt import torch as native
from torchax_ckpt.errors import (
    AttachError,
    CorruptCheckpointError,
    MismatchError,
    UnsupportedLeafError,
)

pytestmark = [
    # DataLoader itself warns under torch 2.12 (set_vital), with torchax (randperm's int64) and with
    # JAX (worker processes that fork).
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    # Schedulers of torch 2.8 warn of their own calls.
    pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning"),
]

# --- schedulers --------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 8]),  # has a Counter
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.8**epoch),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [6]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=0.01),
}


def schedule(optimizer: Any, scheduler: Any, steps: range) -> list[tuple[float, ...]]:
    """Learning rate and momentum as each step uses them."""
    used = []
    for step in steps:
        used.append(tuple((float(g["lr"]), g["momentum"]) for g in optimizer.param_groups))
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step([3.0, 2.0, 2.0, 2.0, 1.0][step % 5])
        else:
            scheduler.step()
    return [value for pairs in used for value in pairs]


def two_group_sgd(model: Any, lr: Any) -> torch.optim.SGD:
    a, b, *rest = model.parameters()
    groups = [{"params": [a, b]}, {"params": rest, "lr": lr / 2}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def test_schedules_go_on_as_if_never_stopped(directory: Path) -> None:
    """All of them in one run, by name."""

    def build(lr: float) -> tuple[Any, Any, Any]:
        models = {name: mlp() for name in SCHEDULERS}
        optimizers = {name: two_group_sgd(model, lr) for name, model in models.items()}
        return models, optimizers, {n: SCHEDULERS[n](o) for n, o in optimizers.items()}

    (models, optimizers, schedulers), (fresh, fresh_optimizers, others) = build(0.1), build(0.7)
    for name, optimizer in optimizers.items():
        schedule(optimizer, schedulers[name], range(7))
    save(directory, models, optimizers, lr_scheduler=schedulers)
    resume(directory, fresh, fresh_optimizers, lr_scheduler=others)
    for name, scheduler in schedulers.items():
        # LambdaLR keeps functions out of its state, so that they stay what the program says.
        want, found = (
            {key: value for key, value in each.state_dict().items() if not callable(value)}
            for each in (scheduler, others[name])
        )
        assert_trees_identical(found, want)
        later = schedule(optimizers[name], scheduler, range(7, 15))
        assert schedule(fresh_optimizers[name], others[name], range(7, 15)) == later, name
        assert len(set(later)) > 2, name


def test_schedules_of_tensor_learning_rates_come_back_by_position(directory: Path) -> None:
    def build(lr: float) -> tuple[Any, Any, Any]:
        on_host = on_cpu(lr)
        rates = {"device": on_host.to("jax"), "host": on_host}
        models = {name: mlp() for name in rates}
        optimizers = {n: torch.optim.SGD(models[n].parameters(), rates[n]) for n in rates}
        return models, optimizers, [lr_scheduler.StepLR(o, 2) for o in optimizers.values()]

    (*saved, schedulers), (*fresh, others) = build(1.0), build(5.0)
    for count, scheduler in enumerate(schedulers, 3):
        schedule(scheduler.optimizer, scheduler, range(count))
    save(directory, *saved, lr_scheduler=schedulers)
    resume(directory, *fresh, lr_scheduler=others)
    for scheduler, other in zip(schedulers, others, strict=True):
        assert_trees_identical(other.state_dict(), scheduler.state_dict())
        later = schedule(scheduler.optimizer, scheduler, range(3, 7))
        assert schedule(other.optimizer, other, range(3, 7)) == later


def scheduled(build: Callable[[Any], Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its optimizer, and schedulers as ``attach`` takes them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, {"lr_scheduler": build(optimizer)}


def sequence(*names: str) -> Callable[[Any], Any]:
    return lambda o: lr_scheduler.SequentialLR(
        o, [getattr(lr_scheduler, name)(o) for name in names], milestones=[2]
    )


@pytest.mark.parametrize(
    ("saved", "live", "said"),
    [
        (lambda o: lr_scheduler.StepLR(o, 2), lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
         "lr_scheduler: expected CosineAnnealingLR, found StepLR"),
        (lambda o: [lr_scheduler.StepLR(o, 2)], lambda o: [lr_scheduler.ConstantLR(o)],
         "lr_scheduler/0: expected ConstantLR, found StepLR"),
        (sequence("LinearLR", "ConstantLR"), sequence("LinearLR", "PolynomialLR"),
         r"expected SequentialLR\(LinearLR, PolynomialLR\), "
         r"found SequentialLR\(LinearLR, ConstantLR\)"),
    ],
    ids=["one", "list", "sequence"],
)  # fmt: skip
def test_a_scheduler_of_another_class_is_refused_and_left_as_it_is(
    directory: Path, saved: Any, live: Any, said: str
) -> None:
    model, optimizer, schedulers = scheduled(saved)
    save(directory, model, optimizer, **schedulers)
    model, optimizer, schedulers = scheduled(live)
    scheduler = schedulers["lr_scheduler"]
    only = scheduler[0] if isinstance(scheduler, list) else scheduler
    before = fingerprint(only.state_dict())
    with pytest.raises(MismatchError, match=said) as caught:
        resume(directory, model, optimizer, **schedulers)
    assert "Attach a scheduler of the stored class." in str(caught.value)
    report = restore(directory, model, optimizer, strict=False, **schedulers)
    assert len(report.mismatched) == 1
    assert fingerprint(only.state_dict()) == before


def test_a_scheduler_that_was_renamed_or_subclassed_goes_on_with_strict_off(
    directory: Path,
) -> None:
    class Renamed(lr_scheduler.StepLR):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer, 2)
            self.new = 7

    model, optimizer, schedulers = scheduled(lambda o: lr_scheduler.StepLR(o, 3))
    schedulers["lr_scheduler"].last_epoch = 4
    save(directory, model, optimizer, **schedulers)
    model, optimizer, schedulers = scheduled(Renamed)
    report = restore(directory, model, optimizer, strict=False, **schedulers)
    assert [*report.mismatched] == ["lr_scheduler"]
    state = schedulers["lr_scheduler"].state_dict()
    assert (state["last_epoch"], state["step_size"], state["new"]) == (4, 3, 7)


def test_schedulers_among_other_objects_are_compared_and_steps_without_classes_are_not(
    directory: Path,
) -> None:
    def attached(build: Callable[[Any], Any]) -> tuple[Any, Any, dict[str, Any]]:
        model, optimizer, schedulers = scheduled(build)
        return model, optimizer, {"stateful": {"s": schedulers["lr_scheduler"], "b": Box(3)}}

    model, optimizer, objects = attached(lambda o: lr_scheduler.StepLR(o, 2))
    save(directory, model, optimizer, **objects)
    model, optimizer, objects = attached(lambda o: lr_scheduler.ExponentialLR(o, 0.5))
    with pytest.raises(MismatchError, match="stateful/s: expected ExponentialLR, found StepLR"):
        resume(directory, model, optimizer, **objects)

    def as_older_releases_wrote(manifest: Any) -> None:
        (_, node), _ = manifest["document"]["stateful"]["dict"]
        assert node.pop("scheduler") == "StepLR"

    edit_json(directory / "1" / "manifest" / "data.json", as_older_releases_wrote)
    assert resume(directory, model, optimizer, **objects) == 1
    assert objects["stateful"]["s"].step_size == 2


# --- loaders -----------------------------------------------------------------------------------


def shuffled(num_workers: int = 0, generator_seed: int | None = None) -> StatefulDataLoader[int]:
    """Four batches per epoch."""
    generator = None
    if generator_seed is not None:
        generator = torch.Generator().manual_seed(generator_seed)
    return StatefulDataLoader(
        list(range(10)),
        batch_size=3,
        shuffle=True,
        num_workers=num_workers,
        generator=generator,
        collate_fn=list,
    )


def stream(loader: Any) -> Iterator[tuple[list[int], list[float]]]:
    """Batches epoch after epoch, and the random draws that a step makes beside them."""
    while True:
        for batch in loader:
            draws = [float(torch.rand(1)), float(np.random.rand()), random.random()]
            yield batch, [*draws, float(torch.rand(1).to("jax"))]


@pytest.mark.slow
@pytest.mark.parametrize("with_generator", [False, True], ids=["default", "generator"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_batches_after_resuming_are_those_of_the_uninterrupted_run(
    tmp_path: Path, num_workers: int, with_generator: bool
) -> None:
    def loader(seed: int) -> StatefulDataLoader[int]:
        return shuffled(num_workers, seed if with_generator else None)

    total, steps = 11, (2, 4, 5, 8)  # four batches are an epoch
    seed_all(0)
    want = list(itertools.islice(stream(loader(0)), total))
    epochs = [[n for batch, _ in want[i : i + 4] for n in batch] for i in (0, 4)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2

    seed_all(0)
    watched = loader(0)
    batches = stream(watched)
    for step in range(1, total + 1):
        assert next(batches) == want[step - 1], "saving changed the run"
        if step in steps:
            save(tmp_path / str(step), dataloader=watched, step=step)

    for step in steps:
        seed_all(step + 100)
        fresh = loader(step + 100)
        assert resume(tmp_path / str(step), dataloader=fresh) == step
        assert list(itertools.islice(stream(fresh), total - step)) == want[step:]


def test_a_loader_goes_back_in_the_middle_of_a_run(directory: Path) -> None:
    loader = shuffled()
    batches = stream(loader)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(dataloader=loader)
        next(batches)
        ckpt.save(1, force=True)
        want = list(itertools.islice(batches, 6))
        ckpt.restore(1)
        assert list(itertools.islice(stream(loader), 6)) == want


def test_a_step_on_an_epochs_last_batch_resumes_with_an_empty_epoch(directory: Path) -> None:
    loader = shuffled()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(dataloader=loader)
        for step, _ in enumerate(loader, start=1):
            if step == 4:
                ckpt.save(step, force=True)
    fresh = shuffled()
    assert resume(directory, dataloader=fresh) == 4
    assert [len(list(fresh)), len(list(fresh))] == [0, 4]


def drawn_from(loader: Any, count: int) -> Any:
    """The loader, of which so many batches were drawn, epoch after epoch."""
    list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), count))
    return loader


class Stream(torch.utils.data.IterableDataset[int]):
    """Says that it has four batches, which torch does not rely on either."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(15))

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_that_comes_back_at_the_end_of_its_epoch_is_warned_of(
    num_workers: int, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By its name; no other loader is: one within an epoch, after its loop, or of a stream."""
    ended = drawn_from(shuffled(num_workers), 3)
    list(ended)
    exhausted = iter(grain.MapDataset.source([1, 2]).to_iter_dataset())
    list(exhausted)
    loaders = {
        "first": drawn_from(shuffled(num_workers), 4),
        "second": drawn_from(shuffled(num_workers), 8),
        "within": drawn_from(shuffled(num_workers), 5),
        "ended": ended,
        "stream": drawn_from(StatefulDataLoader(Stream(), 3, collate_fn=list), 4),
        "grain": exhausted,
    }
    save(directory, dataloader=loaders)
    fresh = {name: shuffled(num_workers) for name in ("first", "second", "within", "ended")}
    fresh["stream"] = StatefulDataLoader(Stream(), 3, collate_fn=list)
    fresh["grain"] = iter(grain.MapDataset.source([1, 2]).to_iter_dataset())
    assert "last batch" not in caplog.text
    with TorchaxCheckpointer(directory) as ckpt:
        for restores in (
            lambda: ckpt.attach(dataloader=fresh),
            ckpt.restore,
            lambda: native.restore(directory, None, dataloader=fresh),
        ):
            caplog.clear()
            restores()
            said = [text for text in caplog.messages if "last batch of an epoch" in text]
            assert [text.split(": ")[0] for text in said] == [
                "dataloader/first",
                "dataloader/second",
            ]
            assert "the next loop over this loader yields no batch" in said[0]
            assert "range(max(start - 1, 0) // len(loader), num_epochs)" in said[0]
    assert [len(list(fresh[name])) for name in ("first", "within", "ended")] == [0, 3, 4]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("before", "after", "is_at_end"), [(2, 4, False), (4, 2, True)])
def test_the_end_of_an_epoch_is_told_by_samples_if_the_batch_size_has_changed(
    before: int,
    after: int,
    is_at_end: bool,
    num_workers: int,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def batches_of(size: int) -> Any:
        return StatefulDataLoader(
            range(16), batch_size=size, collate_fn=list, num_workers=num_workers
        )

    save(directory, dataloader=drawn_from(batches_of(before), 4))
    fresh = batches_of(after)
    assert resume(directory, dataloader=fresh) == 1
    assert ("last batch of an epoch" in caplog.text) is is_at_end
    assert list(fresh) == ([] if is_at_end else [[8, 9, 10, 11], [12, 13, 14, 15]])


class Endless(torch.utils.data.Sampler[int]):
    """A sampler that goes on after the length that it tells."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()

    def __len__(self) -> int:
        return 16


def test_a_sampler_that_goes_on_after_its_length_has_no_end(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def endless() -> Any:
        data = {n: n for n in range(100)}
        return StatefulDataLoader(data, batch_size=4, sampler=Endless(), collate_fn=list)

    save(directory, dataloader=drawn_from(endless(), 5))
    assert resume(directory, dataloader=endless()) == 1
    assert "last batch" not in caplog.text


class Unsized(StatefulDataLoader[Any]):
    """Its sampler knows no length, and says so by an error of its own."""

    def __len__(self) -> int:
        raise RuntimeError("how long the epoch is depends on the buckets")


def test_a_loader_whose_length_raises_resumes(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def unsized() -> Any:
        return Unsized(range(8), batch_size=2, collate_fn=list)

    save(directory, dataloader=drawn_from(unsized(), 2))
    fresh = unsized()
    assert resume(directory, dataloader=fresh) == 1
    assert list(iter(fresh)) == [[4, 5], [6, 7]]
    assert "last batch" not in caplog.text


def test_an_iterator_that_was_made_before_attach_and_is_held_is_warned_of(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first start too, before it costs anything."""
    loader = shuffled()
    next(iter(loader))
    for _ in loader:
        break
    save(directory, dataloader={"train": loader, "other": shuffled()})
    assert "before attach" not in caplog.text
    for hold in (iter, stream):
        for resumes in (True, False):
            held: Any = hold(loader)
            next(held)
            caplog.clear()
            with TorchaxCheckpointer(directory) as ckpt:
                ckpt.attach(dataloader={"train": loader, "other": shuffled()}, resume=resumes)
            (said,) = [text for text in caplog.messages if "made before attach" in text]
            assert said.startswith("dataloader/train: ")
            assert said.endswith("Call iter(loader) after attach.")
            del held


# --- users' own objects ------------------------------------------------------------------------


class Refusing(Box):
    """Can be told to refuse a new state."""

    def __init__(self, state: Any, refuse: Callable[[Any], bool]) -> None:
        super().__init__(state)
        self.refuse = refuse

    def load_state_dict(self, state: Any) -> None:
        if self.refuse(state):
            self.state = "half loaded"
            raise RuntimeError("no thanks")
        self.state = state


class InPlaceBox(Box):
    """Gives away its own dict and writes into it."""

    def load_state_dict(self, state: Any) -> None:
        self.state.clear()
        self.state.update(state)


def test_an_objects_state_comes_back_as_it_was_and_may_be_changed_in_place(directory: Path) -> None:
    state = {
        "seen": 3,
        "loss": [0.5, float("nan"), float("inf"), -0.0],
        "running": torch.randn(4).to("jax"),
        "count": on_cpu(2**40),
        "table": np.arange(6, dtype=np.int8).reshape(2, 3),
        "scalars": [np.array(1.0), np.array(2.0)],
        "keys": {1: "int", "1": "str", (2, None): "tuple"},
        "set": {"a", "b"},
        "raw": b"\x00\xff",
        "nothing": [None, {}, [], ()],
    }
    box = Box(None)
    save(directory, stateful={"stats": Box(state)})
    resume(directory, stateful={"stats": box})
    assert_trees_identical(box.state, state)
    box.state["table"][1] = 5
    box.state["scalars"][0][()] = 6.0
    with torchax_backend.native_torch():
        box.state["count"].fill_(7)
        assert int(box.state["count"]) == 7
    assert box.state["table"].tolist() == [[0, 1, 2], [5, 5, 5]]
    assert [float(array) for array in box.state["scalars"]] == [6.0, 2.0]


def test_an_objects_device_tensors_go_to_where_its_live_ones_are(directory: Path) -> None:
    def averages(num_devices: int, value: float) -> dict[str, Any]:
        array = jnp.full((8, 3), value)
        where = fsdp_rule(fsdp_mesh(num_devices))("", array)
        return {"sharded": torchax_backend.wrap(jax.device_put(array, where)), "plain": array}

    box = Box(averages(4, 0.0))
    save(directory, stateful={"average": Box(averages(8, 5.0))})
    resume(directory, stateful={"average": box})
    assert_trees_identical(box.state, averages(4, 5.0))


def test_an_object_whose_array_was_donated_is_restored(directory: Path) -> None:
    """A step that failed amid a donation leaves such an object behind."""
    box = Box({"w": jnp.arange(4.0)})
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={"s": box})
        assert ckpt.save(1, force=True)
        ckpt.wait_until_finished()
        jax.jit(lambda w: w + 1, donate_argnums=0)(box.state["w"])
        assert box.state["w"].is_deleted()
        ckpt.restore(1)
    assert np.asarray(box.state["w"]).tolist() == [0, 1, 2, 3]


def test_every_save_holds_the_state_as_it_was_then(directory: Path) -> None:
    """Whatever was saved before, and at the second save of a state, whose form may be reused."""
    counts = collections.Counter
    states: list[Any] = [
        *(None, [], {}, 7, "text"),  # a state need not be a dict
        *({"n": value} for value in (1, 2, 2.0, True, 2**40, 2**40 + 1, 0.0, -0.0, 1 - 0.0j)),
        *({"n": value} for value in (float("nan"), 1.0, "a", {1}, {True}, [1], (1,), [1, 1])),
        *({"n": value} for value in (counts(a=1), counts(a=1, b=0), None, np.float32(1))),
        *({"n": value} for value in (jnp.ones(2), jnp.zeros(2), np.zeros(2, np.float32))),
        *({"n": jnp.zeros(2), "m": None}, {"m": None, "n": jnp.zeros(2)}, {"n": [jnp.zeros(2)]}),
        *({"n": jax.random.key(0)}, {"n": jax.random.key(0, impl="rbg")}),
        {"n": torchax_backend.wrap(jnp.ones(3))},
    ]
    box = Box(None)
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        ckpt.attach(stateful={"it": box})
        for step, state in enumerate(states):
            box.state = state
            ckpt.save(2 * step, force=True)
            if step % 5 == 0:
                box.state = {"n": [1, {"f": lambda: 0}]}
                with pytest.raises(UnsupportedLeafError) as caught:
                    ckpt.save(2 * step + 1, force=True)
                assert caught.value.key_path == "stateful/it/n/1/f"
                box.state = state
            ckpt.save(2 * step + 1, force=True)
        for step, state in enumerate(states):
            ckpt.restore(2 * step + 1)
            assert fingerprint(box.state) == fingerprint(state)


def test_what_has_no_state_dict_is_refused_by_name(directory: Path) -> None:
    things: list[Any] = [Box, 3, {"a": 1}, object()]
    for thing in things:
        with TorchaxCheckpointer(directory) as ckpt, pytest.raises(AttachError) as caught:
            ckpt.attach(stateful={"my thing": thing})
        assert "stateful/my thing: expected an object with state_dict()" in str(caught.value)


# --- all or nothing ----------------------------------------------------------------------------


def everything(seed: int) -> tuple[Any, torch.optim.SGD, Any]:
    seed_all(seed)
    model = WithExtraState(3, 2).to("jax")
    model.extra = seed
    optimizer = torch.optim.SGD(model.parameters(), lr=float(seed), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to("jax")
    scheduler = lr_scheduler.StepLR(optimizer, seed)
    optimizer.step()
    return model, optimizer, scheduler


def state_of(model: Any, optimizer: Any, scheduler: Any, boxes: dict[str, Box]) -> Any:
    with torchax_backend.native_torch():
        generator = torch.get_rng_state()
    draws = [torchax_backend.prng_key(), generator, random.getstate()]
    draws.append(np.random.get_state(legacy=False)["state"]["key"])
    states = [box.state for box in boxes.values()]
    live = training_state(model, optimizer)
    return copied([live, model.extra, scheduler.state_dict(), states, draws])


@pytest.mark.parametrize("refused", ["a state", "any state", "extra state"])
def test_what_refuses_a_state_leaves_everything_as_it_was(
    directory: Path,
    refused: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also one before it that gives away its own dict; and also if it refuses its old state.

    And a loader that would have come back at the end of its epoch is not warned of.
    """
    stored = {name: Box({"seen": seen}) for seen, name in enumerate("abc", 5)}
    model, optimizer, scheduler = everything(5)
    loader = drawn_from(shuffled(), 4)
    save(directory, model, optimizer, lr_scheduler=scheduler, stateful=stored, dataloader=loader)

    loader = shuffled()
    model, optimizer, scheduler = everything(3)
    boxes = {"a": InPlaceBox({"seen": 1, "list": [1, 2]}), "c": Box({"seen": 3})}
    attached = {"a": boxes["a"], "b": Box({"seen": 2}), "c": boxes["c"]}
    if refused == "extra state":

        def refuse(self: Any, state: Any) -> None:
            self.extra = state
            raise RuntimeError("no thanks")

        monkeypatch.setattr(WithExtraState, "set_extra_state", refuse)
    else:
        is_always = refused == "any state"
        attached["b"] = Refusing({"seen": 2}, lambda state: is_always or state["seen"] == 6)
    kept = boxes if refused == "any state" else attached
    before = state_of(model, optimizer, scheduler, kept)
    text = "refused the stored state.*no thanks"
    given: dict[str, Any] = {"lr_scheduler": scheduler, "stateful": attached, "dataloader": loader}
    with pytest.raises(MismatchError, match=text) as caught:
        resume(directory, model, optimizer, **given)
    assert "last batch" not in caplog.text
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.step == 1
    assert_trees_identical(state_of(model, optimizer, scheduler, kept), before)


# --- random state ---

KEYS = {
    "typed": lambda seed: jax.random.key(seed),
    "typed-rbg": lambda seed: jax.random.key(seed, impl="rbg"),
    "raw": lambda seed: jax.random.PRNGKey(seed),
}


@pytest.fixture(autouse=True)
def _raw_key_afterwards() -> Iterator[None]:
    yield
    torchax.default_env().manual_seed(0)


def seed_all(seed: int, key: str = "raw") -> None:
    torch.manual_seed(seed)
    torchax_backend.set_prng_key(KEYS[key](seed))
    np.random.seed(seed)
    random.seed(seed)


def drawn() -> list[Any]:
    """Draws from every source; an odd number of normals leaves half a pair in the generators."""
    with torchax_backend.native_torch():
        native = torch.randn(3).tolist()
    return [
        native,
        bits(torch.rand(3, device="jax")),
        np.random.standard_normal(3).tolist(),
        [random.gauss(0, 1), random.random(), random.getrandbits(70)],
    ]


def test_draws_after_restoring_are_the_draws_after_saving(directory: Path) -> None:
    """Whatever kind of key there was at the save before, and at the restore."""
    wants: list[Any] = []
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        for step, kind in enumerate(KEYS):
            seed_all(step, kind)
            drawn()
            ckpt.save(step, force=True)
            wants.append((torchax_backend.prng_key(), [drawn() for _ in range(3)]))
    for step, live in enumerate([*reversed(KEYS)]):
        seed_all(9, live)
        drawn()
        restore(directory, mlp(), step=step)
        assert_trees_identical(torchax_backend.prng_key(), wants[step][0])
        assert [drawn() for _ in range(3)] == wants[step][1]


def test_attaching_and_saving_draw_nothing(directory: Path) -> None:
    model = mlp()
    seed_all(1)
    want = [drawn(), drawn()]
    seed_all(1)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model)
        assert drawn() == want[0]
        ckpt.save(1, force=True)
        assert drawn() == want[1]


@pytest.mark.parametrize("with_loader", [False, True])
def test_without_rng_the_live_random_state_is_left_alone(
    directory: Path, with_loader: bool
) -> None:
    def loader() -> Any:
        return StatefulDataLoader(list(range(4)), shuffle=True, collate_fn=list)

    save(directory, mlp(), dataloader=loader() if with_loader else None)
    fresh = loader() if with_loader else None  # draws a seed
    seed_all(2)
    mlp()  # as the resumed run makes one
    want = drawn()
    seed_all(2)
    resume(directory, mlp(), dataloader=fresh, rng=False)
    assert drawn() == want


def test_without_rng_none_is_saved_and_a_run_that_wants_it_is_told(directory: Path) -> None:
    save(directory, mlp(), rng=False)
    with TorchaxCheckpointer(directory) as ckpt:
        assert list(ckpt.load()) == ["model"]
        with pytest.raises(MismatchError) as caught:
            ckpt.attach(mlp())
    assert caught.value.missing == ("rng",)


@pytest.mark.parametrize("key", KEYS)
def test_random_state_can_be_put_back_at_any_time(key: str) -> None:
    seed_all(3, key)
    drawn()
    before = RandomState().state_dict()
    first = drawn()
    assert drawn() != first
    RandomState().load_state_dict(before)
    assert drawn() == first
    RandomState().load_state_dict(before)  # what was drawn has not changed it
    assert drawn() == first


def test_random_state_that_a_generator_refuses_changes_nothing() -> None:
    before = RandomState().state_dict()
    seed_all(4)
    now = RandomState().state_dict()
    with pytest.raises(CorruptCheckpointError, match="rng/python"):
        RandomState().load_state_dict({**before, "python": (3, (1, 2), None)})
    assert_trees_identical(RandomState().state_dict(), now)
