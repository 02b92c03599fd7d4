"""Loaders by their protocols, and their samples when the number of processes changes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training import before_enabling, resume
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import AttachError, MismatchError
from torchax_ckpt.state import per_process_state, training_state
from torchax_ckpt.state.training_state import TrainingState


class Samples:
    """Draws the numbers ``index``, ``index + count``, ... from ``start`` on, as shards of data."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count
        self.start = self.read = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.read += 1
        return self.start + self.index + self.count * (self.read - 1)

    def position(self) -> dict[str, Any]:
        return {"start": self.start, "read": self.read, "mark": np.full(2, self.read)}

    def go_to(self, position: Any) -> None:
        self.start, self.read = position["start"], position["read"]


class Torchdata(Samples):
    """Also HF datasets' and Mosaic's loaders."""

    state_dict, load_state_dict = Samples.position, Samples.go_to


class GrainIterator(Samples):
    """``DatasetIterator``, whose state is a dict."""

    get_state, set_state = Samples.position, Samples.go_to


class GrainLoaderIterator(Samples):
    """``DataLoaderIterator``, whose state is bytes."""

    def get_state(self) -> bytes:
        return json.dumps([self.start, self.read]).encode()

    def set_state(self, state: bytes) -> None:
        self.start, self.read = json.loads(state)


class FlexState(dict):
    """Energon's states are of a subclass of dict."""


class Energon(Samples):
    def save_state_rank(self) -> Any:
        return FlexState(loader=[FlexState(self.position())], unused=None)

    def restore_state_rank(self, state: Any) -> None:
        self.go_to(state["loader"][0])


class Elastic(Samples):
    """Grain's ``ElasticIterator``: every process has the same state, the position of all."""

    def get_state(self) -> dict[str, int]:
        return {"global_next_index": self.start + self.read * self.count}

    def set_state(self, state: dict[str, int]) -> None:
        self.start, self.read = state["global_next_index"], 0


@pytest.mark.parametrize("kind", [Torchdata, GrainIterator, GrainLoaderIterator, Energon, Elastic])
def test_a_loader_of_each_protocol_goes_on_where_it_was(
    directory: Path, kind: Callable[[], Samples]
) -> None:
    loader, other = kind(), kind()
    list(itertools.islice(loader, 5))
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(dataloader={"train": loader, "other": other})
        ckpt.save(1, force=True)
        want = list(itertools.islice(loader, 3))
    fresh = {"train": kind(), "other": kind()}
    assert resume(directory, dataloader=fresh) == 1
    assert list(itertools.islice(fresh["train"], 3)) == want == [5, 6, 7]
    assert next(fresh["other"]) == 0


def test_what_is_no_loader_or_rule_is_refused_with_the_protocol_that_helps(directory: Path) -> None:
    grain = type("DataLoader", (), {"__module__": "grain.python"})
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dataloader": grain()}, "iterator = iter(loader)"),
        ({"dataloader": object()}, "get_state() and set"),
        (
            {"dataloader": torch.utils.data.DataLoader([1, 2, 3])},  # type: ignore[arg-type]
            "torchdata.stateful_dataloader.StatefulDataLoader",
        ),
        ({"stateful": {"it": GrainIterator()}}, "state_dict"),
        ({"dataloader": GrainIterator(), "redistribute": {"train": 1}}, "found a dict"),
    ]
    for attached, says in wrong:
        with TorchaxCheckpointer(directory) as ckpt, pytest.raises(AttachError) as caught:
            ckpt.attach(**attached)
        assert says in str(caught.value)
        is_torchs = says == "torchdata.stateful_dataloader.StatefulDataLoader"
        assert ("torchdata" in str(caught.value)) == is_torchs
        assert not is_torchs or caught.value.key_path == "dataloader"


Document = tuple[dict[str, Any], dict[str, np.ndarray]]


def saved(loaders: Sequence[Any]) -> Document:
    """What the processes of these loaders store together."""
    parts = [TrainingState({"dataloader": loader}, rng=False).capture() for loader in loaders]
    sent = [training_state.split(part)[2].to_bytes() for part in parts]
    return per_process_state.joined(sent[0], dict(enumerate(sent[1:], 1)))


def resumed(document: Document, loaders: Sequence[Any], redistribute: Any = None) -> None:
    """Restores every process of another number of processes."""
    nodes, leaves = document
    for index, loader in enumerate(loaders):
        attached = TrainingState({"dataloader": loader}, rng=False, redistribute=redistribute)
        of_process = per_process_state.document_of(
            nodes, index, len(loaders), "step 1", redistributes=attached.redistributes
        )
        restoration = attached.prepare(of_process, None)
        assert not restoration.findings
        restoration.apply({name: leaves[name] for name in restoration.reads})


def redistribute(states: list[Any], count: int) -> list[Any]:
    """All processes have read equally many samples; the next begin after all of these."""
    (state, *others) = states
    assert all(other["read"] == state["read"] for other in others)
    start = state["start"] + len(states) * state["read"]
    return [{"start": start, "read": 0} for _ in range(count)]


def redistribute_energon(states: list[Any], count: int) -> list[Any]:
    return [{"loader": [s]} for s in redistribute([s["loader"][0] for s in states], count)]


@pytest.mark.parametrize("counts", [(1, 2, 4), (4, 1, 2), (2, 4, 1)], ids=str)
@pytest.mark.parametrize(
    ("kind", "flexible"),
    [(Elastic, None), (GrainIterator, redistribute), (Energon, redistribute_energon)],
)
def test_no_sample_is_lost_or_seen_twice_over_changing_numbers_of_processes(
    kind: Any, flexible: Any, counts: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    document: Document | None = None
    for count in (*counts, counts[0]):
        loaders = [{"train": kind(index, count)} for index in range(count)]
        if document is not None:
            resumed(document, loaders, flexible)
        for loader in loaders:
            seen += itertools.islice(loader["train"], 8 // count)
        document = saved(loaders)
    assert sorted(seen) == list(range(8 * 4))
    assert "was saved by" not in caplog.text


def redistribute_torchdata(states: list[Any], count: int) -> list[Any]:
    """The one in docs/multihost.md."""
    positions = [state["_sampler_iter_state"]["sampler_state"]["yielded"] for state in states]
    each, rest = divmod(sum(positions), count)
    assert rest == 0
    position = {"samples_yielded": each, "sampler_state": {"yielded": each}}
    return [{**states[0], "_sampler_iter_state": position} for _ in range(count)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
@pytest.mark.parametrize("counts", [(2, 4, 1, 2), (4, 1, 2, 4)], ids=str)
def test_torchdatas_loader_with_its_distributed_sampler_can_be_redistributed(
    counts: tuple[int, ...],
) -> None:
    dataset: Any = list(range(64))
    seen: list[int] = []
    document: Document | None = None
    for count in counts:
        loaders = [
            StatefulDataLoader(
                dataset,
                batch_size=8 // count,
                sampler=StatefulDistributedSampler(dataset, count, index, shuffle=False),
                collate_fn=list,
            )
            for index in range(count)
        ]
        if document is not None:
            resumed(document, loaders, redistribute_torchdata)
        for loader in loaders:
            for batch in itertools.islice(loader, 2):
                seen += batch
        document = saved(loaders)
    assert sorted(seen) == dataset


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (1, 2)])
def test_without_redistribute_the_loss_is_said_with_the_choices(
    before: int, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    document = saved([GrainIterator(i, before) for i in range(before)])
    resumed(document, [GrainIterator(i, after) for i in range(after)])
    (said,) = [text for text in caplog.messages if "was saved by" in text]
    processes = "1 process" if before == 1 else f"{before} processes"
    assert f"step 1 was saved by {processes} and is restored by {after}." in said
    assert "per-process state (dataloader)" in said
    assert "pass attach(redistribute=f)" in said
    assert "ElasticIterator" in said


def test_a_wrong_number_of_states_is_refused_and_an_equal_number_is_not_redistributed() -> None:
    loaders = [GrainIterator(index, 2) for index in range(2)]
    for reads, loader in enumerate(loaders):
        list(itertools.islice(loader, reads))
    document = saved(loaders)
    other = GrainIterator()
    next(other)
    with pytest.raises(MismatchError, match="returned 2 states, expected 1, one for each process"):
        resumed(document, [other], lambda states, count: states)
    assert other.read == 1
    fresh = [GrainIterator(index, 2) for index in range(2)]
    resumed(document, fresh, lambda states, count: 1 / 0)
    assert [loader.read for loader in fresh] == [0, 1]


def test_workers_in_which_torchax_is_enabled_are_warned_of(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils.data import default_collate

    class WithWorkers(Torchdata):
        num_workers = 2
        collate_fn: Any = staticmethod(default_collate)
        worker_init_fn: Any = None

    class Prepared(WithWorkers):
        worker_init_fn: Any = staticmethod(lambda worker: None)

    for kind, says in ((Prepared, False), (WithWorkers, True)):
        resume(directory, dataloader=kind())
        assert ("worker_init_fn=lambda worker: torchax.disable_globally()" in caplog.text) == says


def test_the_failure_of_a_worker_gets_the_remedy_as_a_note(directory: Path) -> None:
    text = "Caught NotImplementedError in DataLoader worker process 0. aten::set_.source_Storage"
    for message, count in ((text, 1), ("something else", 0)):
        with pytest.raises(RuntimeError) as caught, TorchaxCheckpointer(directory):
            raise RuntimeError(message)
        notes = getattr(caught.value, "__notes__", [])
        assert [n.count("worker_init_fn") for n in notes] == [1] * count


# --- loaders of the real libraries ---

SIZE, BATCH = 40, 4


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the libraries warn of their own dependencies
@pytest.mark.parametrize("kind", [Datasets, GrainDataset, GrainLoader])
def test_a_loader_of_a_real_library_goes_on_with_the_samples_that_come_next(
    directory: Path, kind: Any
) -> None:
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
