"""Schedulers, loaders and users' own objects: whatever has state_dict and load_state_dict."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchax
from support.compare import assert_trees_identical, copied, training_state
from support.strategies import fingerprint
from support.training import fsdp_mesh, fsdp_rule, mlp, resume, save
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import AttachError, MismatchError, UnsupportedLeafError

# --- schedulers --------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 8]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
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


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_as_if_never_stopped(directory: Path, name: str) -> None:
    model, fresh = mlp(), mlp()
    optimizer = two_group_sgd(model, 0.1)
    scheduler = SCHEDULERS[name](optimizer)
    schedule(optimizer, scheduler, range(7))
    save(directory, model, optimizer, lr_scheduler=scheduler)
    fresh_optimizer = two_group_sgd(fresh, 0.7)
    fresh_scheduler = SCHEDULERS[name](fresh_optimizer)
    resume(directory, fresh, fresh_optimizer, lr_scheduler=fresh_scheduler)
    assert_trees_identical(
        comparable(fresh_scheduler.state_dict()), comparable(scheduler.state_dict())
    )
    later = schedule(optimizer, scheduler, range(7, 15))
    assert schedule(fresh_optimizer, fresh_scheduler, range(7, 15)) == later
    assert len(set(later)) > 2


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Functions stay what the program says: LambdaLR keeps them out of its state."""
    return {key: value for key, value in state.items() if not callable(value)}


@pytest.mark.parametrize("on_device", [True, False], ids=["torchax", "cpu"])
def test_a_schedule_of_a_tensor_learning_rate_goes_on(directory: Path, on_device: bool) -> None:
    def build(lr: float) -> tuple[Any, Any, Any]:
        with torchax_backend.native_torch():
            rate = torch.tensor(lr)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), rate.to("jax") if on_device else rate)
        return model, optimizer, lr_scheduler.StepLR(optimizer, 2)

    (*saved, scheduler), (*fresh, fresh_scheduler) = build(1.0), build(5.0)
    schedule(saved[1], scheduler, range(3))
    save(directory, *saved, lr_scheduler=scheduler)
    resume(directory, *fresh, lr_scheduler=fresh_scheduler)
    assert_trees_identical(fresh_scheduler.state_dict(), scheduler.state_dict())
    later = schedule(saved[1], scheduler, range(3, 7))
    assert schedule(fresh[1], fresh_scheduler, range(3, 7)) == later


def test_a_list_of_schedulers_comes_back_by_position(directory: Path) -> None:
    def build() -> tuple[Any, list[Any]]:
        models = {"a": mlp(), "b": mlp()}
        optimizers = {name: two_group_sgd(model, 0.1) for name, model in models.items()}
        schedulers = [
            lr_scheduler.StepLR(optimizers["a"], 2),
            lr_scheduler.ExponentialLR(optimizers["b"], 0.5),
        ]
        return (models, optimizers), schedulers

    (attached, schedulers), (fresh, fresh_schedulers) = build(), build()
    for count, scheduler in enumerate(schedulers, start=2):
        schedule(scheduler.optimizer, scheduler, range(count))
    save(directory, *attached, lr_scheduler=schedulers)
    resume(directory, *fresh, lr_scheduler=fresh_schedulers)
    assert [s.last_epoch for s in fresh_schedulers] == [2, 3]
    assert [s.get_last_lr() for s in fresh_schedulers] == [s.get_last_lr() for s in schedulers]


# --- loaders -----------------------------------------------------------------------------------

# What DataLoader itself warns about under torch 2.12 (set_vital), torchax (randperm's int64) and
# JAX (worker processes that fork).
loader_warnings = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]


def with_loaders(test: Callable[..., None]) -> Callable[..., None]:
    for mark in loader_warnings:
        test = mark(test)
    return test


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    torchax.default_env().manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


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
@with_loaders
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


@with_loaders
def test_a_loader_saved_before_its_first_batch_begins_as_it_would_have(directory: Path) -> None:
    seed_all(0)
    loader = shuffled()
    save(directory, dataloader=loader, step=0)
    want = list(itertools.islice(stream(loader), 6))
    seed_all(1)
    fresh = shuffled()
    resume(directory, dataloader=fresh)
    assert list(itertools.islice(stream(fresh), 6)) == want


@with_loaders
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


@with_loaders
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


@with_loaders
def test_several_loaders_come_back_by_name(directory: Path) -> None:
    loaders = {"train": shuffled(generator_seed=1), "replay": shuffled(generator_seed=2)}
    streams = {name: stream(loader) for name, loader in loaders.items()}
    next(streams["train"])
    save(directory, dataloader=loaders)
    want = {name: [next(s)[0] for _ in range(5)] for name, s in streams.items()}
    fresh = {"replay": shuffled(generator_seed=3), "train": shuffled(generator_seed=4)}
    resume(directory, dataloader=fresh)
    got = {name: [b for b, _ in itertools.islice(stream(fresh[name]), 5)] for name in want}
    assert got == want


@with_loaders
def test_torchs_own_loader_is_refused_with_the_name_of_the_one_that_works(directory: Path) -> None:
    dataset: Any = [1, 2, 3]
    loader: Any = torch.utils.data.DataLoader(dataset)
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(AttachError) as caught:
        ckpt.attach(dataloader=loader)
    assert "torchdata.stateful_dataloader.StatefulDataLoader" in str(caught.value)
    assert caught.value.key_path == "dataloader"


@with_loaders
def test_a_refused_restore_draws_no_random_numbers(directory: Path) -> None:
    save(directory, mlp(), dataloader=shuffled())
    fresh, loader = mlp(width=3), shuffled()
    with torchax_backend.native_torch():
        before = torch.get_rng_state()
    key = torchax_backend.prng_key()
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(MismatchError):
        ckpt.attach(fresh, dataloader=loader)
    with torchax_backend.native_torch():
        assert_trees_identical(torch.get_rng_state(), before)
    assert_trees_identical(torchax_backend.prng_key(), key)


# --- users' own objects ------------------------------------------------------------------------


class Box:
    """Holds a state, and can be told to refuse a new one."""

    def __init__(self, state: Any, refuse: Callable[[Any], bool] = lambda state: False) -> None:
        self.state = state
        self.refuse = refuse

    def state_dict(self) -> Any:
        return self.state

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


def test_an_objects_state_comes_back_as_it_was(directory: Path) -> None:
    with torchax_backend.native_torch():
        count = torch.tensor(2**40)
    state = {
        "seen": 3,
        "loss": [0.5, float("nan"), float("inf"), -0.0],
        "running": torch.randn(4).to("jax"),
        "count": count,
        "table": np.arange(6, dtype=np.int8).reshape(2, 3),
        "keys": {1: "int", "1": "str", (2, None): "tuple"},
        "set": {"a", "b"},
        "raw": b"\x00\xff",
        "nothing": [None, {}, [], ()],
    }
    box = Box(None)
    save(directory, stateful={"stats": Box(state)})
    resume(directory, stateful={"stats": box})
    assert_trees_identical(box.state, state)


def test_restored_arrays_and_tensors_may_be_changed_in_place(directory: Path) -> None:
    with torchax_backend.native_torch():
        tensor = torch.zeros(3)
    state = {"array": np.zeros(3), "a": np.array(1.0), "b": np.array(2.0), "tensor": tensor}
    box = Box(None)
    save(directory, stateful={"it": Box(state)})
    resume(directory, stateful={"it": box})
    box.state["array"][1] = 5.0
    box.state["a"][()] = 6.0
    with torchax_backend.native_torch():
        box.state["tensor"][1] = 7.0
        assert box.state["tensor"].tolist() == [0.0, 7.0, 0.0]
    assert box.state["array"].tolist() == [0.0, 5.0, 0.0]
    assert (float(box.state["a"]), float(box.state["b"])) == (6.0, 2.0)


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
        {"n": jnp.zeros(2), "m": None},
        {"n": [jnp.zeros(2)]},
        {"n": jax.random.key(0)},
        {"n": jax.random.key(0, impl="rbg")},
        {"n": torchax_backend.wrap(jnp.ones(3))},
    ]
    box = Box(None)
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        ckpt.attach(stateful={"it": box})
        for step, state in enumerate(states):
            box.state = state
            ckpt.save(2 * step, force=True)
            ckpt.save(2 * step + 1, force=True)
        for step, state in enumerate(states):
            ckpt.restore(2 * step + 1)
            assert fingerprint(box.state) == fingerprint(state)


def test_an_object_that_cannot_be_saved_makes_save_raise_and_the_next_one_works(
    directory: Path,
) -> None:
    box = Box({"n": [1, {"f": lambda: 0}]})
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={"box": box})
        with pytest.raises(UnsupportedLeafError) as caught:
            ckpt.save(1, force=True)
        assert caught.value.key_path == "stateful/box/n/1/f"
        box.state = {"n": 1}
        assert ckpt.save(1, force=True)
    assert resume(directory, stateful={"box": box}) == 1


@pytest.mark.parametrize("thing", [Box, 3, {"a": 1}, object()], ids=["class", "int", "dict", "obj"])
def test_what_has_no_state_dict_is_refused_by_name(directory: Path, thing: Any) -> None:
    with TorchaxCheckpointer(directory) as ckpt, pytest.raises(AttachError) as caught:
        ckpt.attach(stateful={"my thing": thing})
    assert "stateful/my thing: expected an object with state_dict()" in str(caught.value)


# --- all or nothing ----------------------------------------------------------------------------


class Picky(torch.nn.Linear):
    """Extra state that may be refused."""

    refuse = False
    extra: Any = 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state
        if self.refuse:
            raise RuntimeError("no thanks")


def everything(seed: int) -> tuple[Picky, torch.optim.SGD, Any, Box]:
    seed_all(seed)
    model = Picky(3, 2).to("jax")
    model.extra = seed
    optimizer = torch.optim.SGD(model.parameters(), lr=float(seed), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to("jax")
    scheduler = lr_scheduler.StepLR(optimizer, seed)
    optimizer.step()
    return model, optimizer, scheduler, Box({"seen": seed})


def state_of(model: Picky, optimizer: Any, scheduler: Any, *boxes: Box) -> Any:
    with torchax_backend.native_torch():
        generator = torch.get_rng_state()
    return copied(
        [
            training_state(model, optimizer),
            model.extra,
            scheduler.state_dict(),
            [box.state for box in boxes],
            [
                torchax_backend.prng_key(),
                generator,
                random.getstate(),
                np.random.get_state(legacy=False)["state"]["key"],
            ],
        ]
    )


def assert_nothing_changes(directory: Path, refusing: Box | None, **boxes: Box) -> None:
    model, optimizer, scheduler, _ = everything(3)
    model.refuse = refusing is None
    everyone = [box for box in boxes.values() if box is not refusing]
    before = state_of(model, optimizer, scheduler, *everyone)
    refused = pytest.raises(MismatchError, match="refused the stored state.*no thanks")
    with TorchaxCheckpointer(directory) as ckpt, refused as caught:
        ckpt.attach(model, optimizer, lr_scheduler=scheduler, stateful=boxes)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.step == 1
    assert_trees_identical(state_of(model, optimizer, scheduler, *everyone), before)


def save_everything(directory: Path) -> None:
    model, optimizer, scheduler, box = everything(5)
    boxes = {"a": box, "b": Box({"seen": 6}), "c": Box({"seen": 7})}
    save(directory, model, optimizer, lr_scheduler=scheduler, stateful=boxes)


@pytest.mark.parametrize("is_always", [False, True])
def test_an_object_that_refuses_a_state_leaves_everything_as_it_was(
    directory: Path, is_always: bool
) -> None:
    """Also one before it that gives away its own dict; and also if it refuses its old state."""
    save_everything(directory)
    refusing = Box({"seen": 2}, lambda state: is_always or state["seen"] == 6)
    shared = InPlaceBox({"seen": 1, "list": [1, 2]})
    assert_nothing_changes(directory, refusing, a=shared, b=refusing, c=Box({"seen": 3}))
    assert shared.state == {"seen": 1, "list": [1, 2]}
    assert is_always or refusing.state == {"seen": 2}


def test_extra_state_that_is_refused_leaves_everything_as_it_was(directory: Path) -> None:
    save_everything(directory)
    boxes = {name: Box({"seen": 1}) for name in "abc"}
    assert_nothing_changes(directory, None, **boxes)
