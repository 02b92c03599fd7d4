"""Loaders of the real libraries datasets and grain, resumed within an epoch and over its end."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.training import before_enabling

from torchax_ckpt import TorchaxCheckpointer

pytestmark = pytest.mark.slow

SIZE, BATCH = 40, 4


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    """The libraries' warnings of their own dependencies are not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Epochs:
    """The one in docs/huggingface.md: rows without end, of an IterableDataset of datasets."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.epoch = dataset, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.dataset.set_epoch(self.epoch)
            yield from self.dataset
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.dataset.load_state_dict(state["position"])


class Datasets:
    """An IterableDataset of several shards, made before torchax is enabled and read afterwards.

    It shares its epoch with workers as a tensor, which torchax does not support.
    """

    def __init__(self) -> None:
        import datasets

        with before_enabling():
            rows = datasets.Dataset.from_dict({"x": list(range(SIZE, 0, -1))})
            self.attached: Any = Epochs(rows.to_iterable_dataset(num_shards=4))
        self._drawn: Iterator[Any] | None = None

    def draw(self, count: int) -> list[int]:
        self._drawn = self._drawn or iter(self.attached)
        return [row["x"] for row in itertools.islice(self._drawn, count)]


class GrainDataset:
    """An iterator of ``grain.MapDataset``, shuffled, batched and repeated; its state is a dict."""

    def __init__(self) -> None:
        import grain

        dataset: Any = grain.MapDataset.range(SIZE).seed(3).shuffle().repeat()
        self.attached: Any = iter(dataset.to_iter_dataset().batch(BATCH))

    def draw(self, count: int) -> list[int]:
        return np.concatenate(list(itertools.islice(self.attached, count // BATCH))).tolist()


class GrainLoader(GrainDataset):
    """An iterator of ``grain.DataLoader``; its state is bytes."""

    def __init__(self) -> None:
        import grain

        source: Any = range(SIZE)
        sampler = grain.samplers.IndexSampler(SIZE, shuffle=True, seed=3, num_epochs=None)
        loader: Any = grain.DataLoader(
            data_source=source, sampler=sampler, operations=[grain.transforms.Batch(BATCH)]
        )
        self.attached = iter(loader)


@pytest.mark.parametrize("kind", [Datasets, GrainDataset, GrainLoader])
def test_a_loader_goes_on_with_the_samples_that_come_next(directory: Path, kind: Any) -> None:
    loader = kind()
    loader.draw(SIZE + 12)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(dataloader=loader.attached)
        ckpt.save(1, force=True)
        expected = loader.draw(2 * SIZE)
    fresh = kind()
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.attach(dataloader=fresh.attached) == 1
        found = fresh.draw(2 * SIZE)
    assert found == expected
    assert found != kind().draw(2 * SIZE)
    assert len(set(found)) == SIZE
