"""Restoring in budget: what is replaced is freed before the new arrives, part by part."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from support.compare import bits
from support.damage import damage
from support.training import adamw, mlp, train_and_save

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.errors import MismatchError, UnsupportedLeafError, UnusableStateError
from torchax_ckpt.options import Layout
from torchax_ckpt.restoring import restore
from torchax_ckpt.storage.arrays import onto_devices

IN_BUDGET = CheckpointOptions(restore_in_budget=True, layout="flat")
LAYOUTS = ["auto", pytest.param("flat", marks=pytest.mark.long)]


def deep() -> torch.nn.Module:
    """Layers that are alike, which are stored as stacks."""
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6))).to("jax")


def trained(
    directory: Path, model: torch.nn.Module | None = None, layout: Layout = "flat"
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = model or mlp(width=64)
    optimizer = adamw(model)
    train_and_save(directory, model, optimizer, options=CheckpointOptions(layout=layout))
    return model, optimizer


def content(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The bytes of everything: the arrays themselves are going to be deleted."""
    moments = [optimizer.state[p] for p in model.parameters()]
    return [bits(t) for t in [*model.parameters(), *(m[k] for m in moments for k in sorted(m))]]


def leave_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """Has every device say that it has no more left over than this."""
    monkeypatch.setattr(restore, "free_device_bytes", lambda device: free_bytes)
    monkeypatch.setattr(restore, "_MIN_PART_BYTES", 1)


def live_bytes() -> int:
    gc.collect()  # what earlier tests left could go at any time
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_budget", "layout"),
    [
        (True, "auto"),
        (False, "flat"),
        pytest.param(True, "flat", marks=pytest.mark.long),
        pytest.param(False, "auto", marks=pytest.mark.long),
    ],
)
def test_old_buffers_are_freed_as_new_ones_arrive(
    in_budget: bool, layout: Layout, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(directory, deep(), layout)
    expected = content(model, optimizer)
    for parameter in model.parameters():
        torchax_backend.set_buffer(parameter, torchax_backend.buffer(parameter) * 0)
        parameter.grad = None
    size = sum(torchax_backend.buffer(p).nbytes for p in model.parameters()) * 3
    expected_bytes = live_bytes()
    leave_free(monkeypatch, size // 3)
    peak = 0
    read = onto_devices.read_leaves

    def probe(*args: Any, **kwargs: Any) -> Any:
        nonlocal peak
        result = read(*args, **kwargs)
        peak = max(peak, live_bytes() if result else 0)
        return result

    monkeypatch.setattr(onto_devices, "read_leaves", probe)
    options = CheckpointOptions(restore_in_budget=in_budget)
    ckpt = TorchaxCheckpointer(directory, options=options)
    ckpt.attach(model, optimizer)
    assert content(model, optimizer) == expected
    if in_budget:
        # The random key is read, and tried, before anything is freed.
        assert peak <= expected_bytes + torchax_backend.prng_key().nbytes
    else:
        assert peak >= expected_bytes + size


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failure_on_the_way_leaves_no_mix_of_old_and_new(
    layout: Layout, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(directory, deep(), layout)
    expected = content(model, optimizer)
    leave_free(monkeypatch, 0)
    reads = 0
    read = onto_devices.read_leaves

    def fail_later(*args: Any, **kwargs: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads > 3:
            raise OSError("the medium is gone")
        return read(*args, **kwargs)

    ckpt = TorchaxCheckpointer(directory, options=IN_BUDGET)
    ckpt.attach(model, optimizer, rng=True)
    monkeypatch.setattr(onto_devices, "read_leaves", fail_later)
    with pytest.raises(UnusableStateError, match=r"step 2 .* hold no state any more"):
        ckpt.restore(2)
    for parameter in model.parameters():
        assert torchax_backend.buffer(parameter).is_deleted()
        assert torchax_backend.buffer(optimizer.state[parameter]["exp_avg"]).is_deleted()
    with pytest.raises(UnsupportedLeafError, match="is gone"):
        ckpt.save(3, force=True)
    monkeypatch.setattr(onto_devices, "read_leaves", read)
    ckpt.restore(2)  # and it can be tried again
    assert content(model, optimizer) == expected


@pytest.mark.slow
def test_attach_goes_on_to_an_older_step_when_the_newest_is_damaged(directory: Path) -> None:
    model, optimizer = trained(directory)
    with TorchaxCheckpointer(directory, options=IN_BUDGET) as ckpt:
        ckpt.attach(model, optimizer)
        ckpt.save(3, force=True)
    needle = np.asarray(torchax_backend.buffer(next(model.parameters()))).tobytes()[:64]
    damage(directory / "3", needle)
    with (
        TorchaxCheckpointer(directory, options=IN_BUDGET) as ckpt,
        pytest.warns(UserWarning, match="skipping an unreadable checkpoint.*step 3"),
    ):
        assert ckpt.attach(model, optimizer) == 2
    assert not any(
        torchax_backend.buffer(parameter).is_deleted() for parameter in model.parameters()
    )


def test_parts_of_padded_leaves_are_smaller(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = TorchaxCheckpointer(directory, options=IN_BUDGET)
    ckpt.attach(mlp(width=64))
    ckpt.save(1, force=True)
    ckpt.wait_until_finished()
    leave_free(monkeypatch, 2 * live_bytes())  # half of this is one part
    reads: list[int] = []
    read = onto_devices.read_leaves

    def counting(*args: Any, **kwargs: Any) -> Any:
        result = read(*args, **kwargs)
        reads.append(len(result))
        return result

    monkeypatch.setattr(onto_devices, "read_leaves", counting)

    def largest_part() -> int:
        reads.clear()
        ckpt.restore(1)
        return max(reads)

    whole, sizes = largest_part(), restore.shard_bytes
    # As on a TPU, where the tiles of a layout can make an array take many times its elements.
    monkeypatch.setattr(
        restore, "shard_bytes", lambda targets: {n: s << 20 for n, s in sizes(targets).items()}
    )
    assert largest_part() < whole


def test_what_does_not_fit_is_refused_before_anything_is_freed(directory: Path) -> None:
    trained(directory)
    other = mlp(width=32)
    before = [torchax_backend.buffer(p) for p in other.parameters()]
    with pytest.raises(MismatchError):
        TorchaxCheckpointer(directory, options=IN_BUDGET).attach(other)
    assert not any(array.is_deleted() for array in before)
