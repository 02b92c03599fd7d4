"""Readers of what the steps of a run say of each other, for ``fuzz.py``.

Unchanged arrays that later saves take over, in the manifest of a step and in the folder
``unchanged``; the abandoned steps of many branches, in the summaries of both tiers; and a host's
part of a local step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from etils import epath
from fuzz_files import Fed, replaced
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.layout.manifest import Manifest, array_nodes
from torchax_ckpt.processes.coordination import SINGLE_PROCESS
from torchax_ckpt.processes.per_host import PerHostProcesses
from torchax_ckpt.restoring import host_shards, load, local_tier
from torchax_ckpt.saving.unchanged.division import Division, divided
from torchax_ckpt.saving.unchanged.identities import Kept
from torchax_ckpt.saving.unchanged.reuse import Reuse
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.abandonment import Abandonment
from torchax_ckpt.storage.directory.committed_step import MANIFEST, SUMMARY, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.storage.directory.verified import Verified
from torchax_ckpt.storage.medium import seals
from torchax_ckpt.storage.writing import retained

JSON = "data.json"


class RunReaders:
    """The readers, with runs of their own.

    Args:
      folder: for the runs.
    """

    def __init__(self, folder: Path) -> None:
        self._reusing = folder / "reusing"
        arrays = _save_unchanged(self._reusing)
        self._step = max(RunDirectory(self._reusing).steps(), key=lambda step: step.step)
        manifest = Path(self._step.path) / MANIFEST / JSON
        aside = Path(retained.path_of(epath.Path(self._reusing))) / MANIFEST / JSON
        self._plan = Manifest.from_json(json.loads(manifest.read_bytes()), path="manifest").plan
        self._arrays = {f"state/{name}": array for name, array in arrays.items()}
        assert self._taken_over() == {"state/frozen", "state/other"}
        self._durable, self._local = folder / "branches", folder / "branches-local"
        _save_branches(self._durable, self._local)
        self._summaries = [
            Path(step.path) / SUMMARY / JSON
            for directory in self._tiers()
            for step in directory.found()
        ]
        summaries = [json.loads(path.read_bytes()) for path in self._summaries]
        for summary in summaries:
            summary.pop("xxh3_64")
        # Some that are abandoned, and some that are not there.
        keys = [list(step.key) for directory in self._tiers() for step in directory.found()]
        for number, summary in enumerate(summaries):
            summary["abandons"] = [keys[number // 2], [99, 1], keys[-1 - number // 3]]
        self._leaves = {
            "w": np.arange(24, dtype=np.float32).reshape(4, 6),
            "b": np.arange(6, dtype=np.float32),
        }
        self._host = _save_part(folder / "part", self._leaves)
        part = (Path(self._host.path) / MANIFEST / JSON).read_bytes()
        self.by_name: dict[str, Fed] = {
            "unchanged of a step": Fed(manifest.read_bytes(), self.unchanged_of_step, 0.03),
            "unchanged aside": Fed(aside.read_bytes(), self.unchanged_aside, 0.02),
            "branches": Fed(json.dumps(summaries).encode(), self.branches, 0.02),
            "part of a host": Fed(part, self.part, 0.04),
        }

    # --- unchanged arrays ---

    def unchanged_of_step(self, raw: bytes) -> None:
        """A step's manifest, up to what the next save takes over from the step."""
        with replaced(Path(self._step.path) / MANIFEST / JSON, raw):
            self._taken_over()

    def unchanged_aside(self, raw: bytes) -> None:
        """The manifest in the folder ``unchanged``, up to what the next save takes over."""
        path = retained.path_of(epath.Path(self._reusing)) / MANIFEST / JSON
        with replaced(Path(path), raw):
            self._taken_over()

    def _taken_over(self) -> set[str]:
        """Stored names that a save after a start takes over; never what has other bytes."""
        directory = RunDirectory(self._reusing)
        for searches_only in (False, True):
            reuse = Reuse(
                directory, True, True, directory.steps, lambda *_: None, lambda names: None
            )
            if not searches_only:
                reuse.adopt(self._step, is_verified=False)
            elsewhere = {name: array + 1 for name, array in self._arrays.items()}
            assert not self._taken_by(reuse, elsewhere).linked
            found = self._taken_by(reuse, self._arrays)
            for source, _ in found.links:
                assert source.is_relative_to(self._reusing)
        return set(found.linked)

    def _taken_by(self, reuse: Reuse, arrays: Mapping[str, Any]) -> Division:
        """What a save of these arrays takes over."""
        answer = reuse.answer(reuse.offers(1, {}), self._plan, arrays, Kept())
        decision = reuse.decide(self._plan, arrays, [answer])
        return divided(decision.to_json(), arrays, epath.Path(self._reusing), SINGLE_PROCESS)

    # --- branches ---

    def _tiers(self) -> tuple[RunDirectory, RunDirectory]:
        durable = RunDirectory(self._durable)
        return durable, RunDirectory(self._local, durable=durable)

    def branches(self, raw: bytes) -> None:
        """The summaries of all steps of both tiers, up to the branch that a run goes on with."""
        with ExitStack() as stack:
            for path, content in zip(self._summaries, self._divided(raw), strict=True):
                stack.enter_context(replaced(path, content))
            durable, local = self._tiers()
            for directory in (durable, local):
                found = directory.branches()
                keys = [s.key for s in (*found.committed, *found.abandoned)]
                assert sorted(keys) == sorted(s.key for s in directory.found())
                numbers = [s.step for s in found.committed]
                assert numbers == sorted(set(numbers))
                for step in found.committed:
                    directory.info(step)
                directory.abandonment.certain_among(list(found.abandoned))
            history = RunHistory(durable, SINGLE_PROCESS)
            of_local = RunHistory(local, SINGLE_PROCESS, history)
            for each in (history, of_local):
                each.open()
                each.go_on_from(3)
            assert all(s.step <= 3 for s in history.branches.committed)
            told = durable.abandonment.told(durable.steps())
            local.abandonment.learn(Abandonment.compared([told]))

    def _divided(self, raw: bytes) -> Iterator[bytes]:
        """The content of each summary; of a document that is no list, all are the raw bytes."""
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            document = None
        documents = document if isinstance(document, list) else []
        for number in range(len(self._summaries)):
            if number >= len(documents):
                yield raw
                continue
            summary = documents[number]
            if isinstance(summary, dict):
                summary = seals.seal(summary)
            yield json.dumps(summary).encode("utf-8", "surrogatepass")

    # --- parts of hosts ---

    def part(self, raw: bytes) -> None:
        """The manifest of a host's part, up to the values of its leaves."""
        mesh = Mesh(np.array(jax.devices()).reshape(1, -1), ("replica", "fsdp"))
        placement = NamedSharding(mesh, PartitionSpec())
        abstract = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placement)
            for name, array in self._leaves.items()
        }
        options, processes = CheckpointOptions(), PerHostProcesses(SINGLE_PROCESS)
        with replaced(Path(self._host.path) / MANIFEST / JSON, raw), _spanning():
            source = local_tier.HostSteps(self._host, options, processes, "replica", Verified())
            found = load.load_state(source, abstract, SINGLE_PROCESS)
        for name, array in self._leaves.items():
            assert np.asarray(found[name]).tobytes() == array.tobytes()


@contextmanager
def _spanning() -> Iterator[None]:
    """Has every leaf on a mesh count as one that spans hosts."""

    def spans(placement: Any) -> bool:
        return isinstance(placement, NamedSharding)

    with (
        mock.patch.object(host_shards, "spans_hosts", spans),
        mock.patch.object(local_tier, "spans_hosts", spans),
    ):
        yield


def _save_unchanged(directory: Path) -> Mapping[str, jax.Array]:
    """Saves four steps of arrays that do not change, of which one is kept; returns the arrays."""
    random = np.random.default_rng(0)
    arrays = {
        name: jax.device_put(random.standard_normal(size).astype(np.float32))
        for name, size in {"frozen": 300_000, "other": 2_000}.items()
    }
    with TorchaxCheckpointer(
        directory,
        preservation_policy=policies.LatestN(1),
        options=CheckpointOptions(reuse=True, layout="flat"),
    ) as ckpt:
        ckpt.attach(rng=False)
        for step in (1, 2, 3, 4):
            ckpt.save(step, state={**arrays, "step": jax.numpy.float32(step)}, force=True)
            ckpt.wait_until_finished()
    return arrays


def _save_branches(directory: Path, local: Path) -> None:
    """Saves steps to two tiers, of which the later ones are of another branch."""
    every = policies.FixedIntervalPolicy(1)
    for steps in ((1, 2, 3, 4, 5), (3, 4, 6)):
        with TorchaxCheckpointer(
            directory,
            save_decision_policy=every,
            preservation_policy=policies.PreserveAll(),
            local=LocalTier(local, save_decision_policy=every, keep=9),
        ) as ckpt:
            ckpt.attach(resume=False, rng=False)
            for step in steps:
                ckpt.save(step, state={"w": np.arange(4)}, metrics={"loss": float(step)})
                ckpt.wait_until_finished()


def _save_part(directory: Path, leaves: Mapping[str, np.ndarray]) -> CommittedStep:
    """Saves leaves, and has the manifest say that each is the part of one host, on one device."""
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(rng=False)
        ckpt.save(1, state={name: jax.device_put(array) for name, array in leaves.items()})
    committed = RunDirectory(directory).find(1)
    path = Path(committed.path) / MANIFEST / JSON
    manifest = json.loads(path.read_bytes())
    manifest.pop("xxh3_64")
    for node in array_nodes(manifest["document"]["state"]):
        rank = len(node["shape"])
        node["spec"] = ["fsdp", *[None] * (rank - 1)]
        node["whole"], node["starts"] = list(node["shape"]), [[0] * rank]
    path.write_text(json.dumps(seals.seal(manifest)))
    # Without it nothing says that the manifest is another one than the one saved.
    (Path(committed.path) / commit_record.MARK).write_text("committed")
    return committed
