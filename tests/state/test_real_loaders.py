"""Loaders of the real libraries datasets and grain, resumed within an epoch and over its end."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchax_ckpt import TorchaxCheckpointer

pytestmark = pytest.mark.slow

SIZE, BATCH = 40, 4


@pytest.fixture(autouse=True)
def _absl_keeps_its_flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither library's warnings of its own dependencies are what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Datasets:
    """An IterableDataset of Hugging Face's datasets, of several shards, shuffled."""

    def __init__(self) -> None:
        import datasets

        rows = datasets.Dataset.from_dict({"x": list(range(SIZE))})
        self.attached: Any = rows.to_iterable_dataset(num_shards=4)
        self._drawn: Iterator[Any] | None = None

    def draw(self, count: int) -> list[int]:
        if self._drawn is None:
            self._drawn = itertools.chain.from_iterable(itertools.repeat(self.attached))
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

        sampler = grain.samplers.IndexSampler(SIZE, shuffle=True, seed=3, num_epochs=None)
        loader: Any = grain.DataLoader(
            data_source=range(SIZE),  # type: ignore[arg-type]
            sampler=sampler,
            operations=[grain.transforms.Batch(BATCH)],
        )
        self.attached = iter(loader)


@pytest.mark.parametrize("kind", [Datasets, GrainDataset, GrainLoader])
def test_a_loader_goes_on_with_the_samples_that_come_next(directory: Path, kind: Any) -> None:
    loader = kind()
    loader.draw(12)
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
    assert set(found) == set(range(SIZE))
