"""Random state: torchax's key, and the generators of torch, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torchax
from support.compare import assert_trees_identical, bits
from support.training import mlp, resume, save
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import RandomState, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import CorruptCheckpointError, MismatchError

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


def draws() -> list[Any]:
    """Draws from every source; an odd number of normals leaves half a pair in the generators."""
    with torchax_backend.native_torch():
        native = torch.randn(3).tolist()
    return [
        native,
        bits(torch.rand(3, device="jax")),
        np.random.standard_normal(3).tolist(),
        [random.gauss(0, 1), random.random(), random.getrandbits(70)],
    ]


@pytest.mark.parametrize(
    ("saved", "live"), [("typed", "raw"), ("typed-rbg", "typed"), ("raw", "typed-rbg")]
)
def test_draws_after_restoring_are_the_draws_after_saving(
    directory: Path, saved: str, live: str
) -> None:
    seed_all(1, saved)
    draws()
    save(directory, mlp())
    key, want = torchax_backend.prng_key(), [draws() for _ in range(3)]
    seed_all(2, live)
    draws()
    resume(directory, mlp())
    assert_trees_identical(torchax_backend.prng_key(), key)
    assert [draws() for _ in range(3)] == want


def test_attaching_and_saving_draw_nothing(directory: Path) -> None:
    model = mlp()
    seed_all(1)
    want = [draws(), draws()]
    seed_all(1)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model)
        assert draws() == want[0]
        ckpt.save(1, force=True)
        assert draws() == want[1]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torch's DataLoader
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")  # torchax
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
    want = draws()
    seed_all(2)
    resume(directory, mlp(), dataloader=fresh, rng=False)
    assert draws() == want


def test_without_rng_none_is_saved_and_a_run_that_wants_it_is_told(directory: Path) -> None:
    save(directory, mlp(), rng=False)
    with TorchaxCheckpointer(directory) as ckpt:
        assert list(ckpt.load()) == ["model"]
        with pytest.raises(MismatchError) as caught:
            ckpt.attach(mlp())
    assert caught.value.missing == ("rng",)


def test_every_save_holds_the_kind_of_key_there_was_then(directory: Path) -> None:
    wants: list[Any] = []
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        for step, kind in enumerate(KEYS):
            torchax_backend.set_prng_key(KEYS[kind](step))
            wants.append(torchax_backend.prng_key())
            ckpt.save(step, force=True)
        for step, key in enumerate(wants):
            ckpt.restore(step)
            assert_trees_identical(torchax_backend.prng_key(), key)


@pytest.mark.parametrize("key", KEYS)
def test_random_state_can_be_put_back_at_any_time(key: str) -> None:
    seed_all(3, key)
    draws()
    before = RandomState().state_dict()
    first = draws()
    assert draws() != first
    RandomState().load_state_dict(before)
    assert draws() == first
    RandomState().load_state_dict(before)  # what was drawn has not changed it
    assert draws() == first


def test_random_state_that_a_generator_refuses_changes_nothing() -> None:
    before = RandomState().state_dict()
    seed_all(4)
    now = RandomState().state_dict()
    with pytest.raises(CorruptCheckpointError, match="rng/python"):
        RandomState().load_state_dict({**before, "python": (3, (1, 2), None)})
    assert_trees_identical(RandomState().state_dict(), now)
