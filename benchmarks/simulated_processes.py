"""Calls of many processes in one process: the real agreement, without devices and storage.

Each simulated process has a client of a coordination service and runs the code of this package that
speaks to other processes. What touches devices, Orbax or storage is replaced: arrays are not there,
and a step is neither written nor read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from etils import epath

from torchax_ckpt import CheckpointOptions
from torchax_ckpt.devices.sharding import Local
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.policies import PreserveAll
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.decision_windows import DecisionWindows
from torchax_ckpt.processes.per_host import PerHostProcesses, keeper_distances
from torchax_ckpt.restoring import local_tier
from torchax_ckpt.saving.capture import Capture
from torchax_ckpt.saving.claim import Claim
from torchax_ckpt.saving.failures import Failures
from torchax_ckpt.saving.reuse.frozen_leaves import FrozenLeaves
from torchax_ckpt.saving.reuse.reuse import Reuse
from torchax_ckpt.saving.save import Save
from torchax_ckpt.saving.tier import Tier
from torchax_ckpt.state import per_process_state
from torchax_ckpt.state.component import LeafRead
from torchax_ckpt.state.leaf import Spec
from torchax_ckpt.state.per_process_state import PerProcessState
from torchax_ckpt.storage.directory.abandonment import Abandonment
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lineage import Start
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.step_folder import StepFolder
from torchax_ckpt.storage.writing import array_writer, reused_files, step_writer

# A path on which nothing is read, written or synced.
_PATH: Any = epath.Path("gs://simulated/run")
# What a process saves for itself: about the size of the random state of torch, numpy and Python.
STATE_BYTES = 15_000
NUM_LEAVES = 100
_TIMEOUT_SECS = 600
_KEEPING_ALL: Any = SimpleNamespace(
    policy=PreserveAll(), kept=lambda steps: [True] * len(steps), is_local=False
)


class Simulated:
    """One process of the run.

    Args:
      client: the client of the coordination service.
      index, count: the index of the process, and the number of processes.
      has_local_tier: whether saves and restores concern the local tier.
    """

    def __init__(self, client: Any, index: int, count: int, *, has_local_tier: bool) -> None:
        def channel(name: str) -> Processes:
            found = Processes(f"{name} {index}", _TIMEOUT_SECS, client, index=index, count=count)
            found._place = f"torchax_ckpt/{name}"
            return found

        self._index, self._count = index, count
        self._calls = channel("calls")
        saves: Processes = channel("saves")
        self._hosts = PerHostProcesses(self._calls)
        decisions = channel("decisions")
        self._decisions = DecisionWindows(decisions, lambda step, coming: False)
        calls: Processes = self._hosts if has_local_tier else self._calls
        saves = PerHostProcesses(saves) if has_local_tier else saves
        directory, history = _directory(), _history()
        none = FrozenLeaves(False, saves)
        self._tier = Tier(
            name="local" if has_local_tier else "durable",
            directory=directory,
            save_policy=_IGNORING,
            options=CheckpointOptions(),
            telemetry=_IGNORING,
            calls_channel=calls,
            saves_channel=saves,
            decisions_channel=decisions,
            history=history,
            claim=Claim(directory, history, _IGNORING, calls),
            preserving=_KEEPING_ALL,
            mirroring=_IGNORING,
            reuse=Reuse(directory, history, _KEEPING_ALL, saves, none, has_two_copies=True),
            failures=Failures(_PATH, _IGNORING, is_local=has_local_tier),
            on_donated=lambda: None,
        )

    def save(self, step: int, *, changes: bool = True) -> None:
        """Saves a step: what the thread of a save does.

        Args:
          step: the step.
          changes: whether the process's own state has changed since the save before.
        """
        state = np.random.default_rng((self._index, step * changes)).bytes(STATE_BYTES)
        capture = Capture(step, _SNAPSHOT, _DOCUMENT, _state(state), lambda: ({}, None), 0.0)
        save = Save(self._tier, None, capture)
        save.handed_over.set()
        save.run(capture)
        if self._tier.failures.newest is not None:
            raise self._tier.failures.newest

    def decline(self, count: int) -> None:
        """Asks for decisions on ``count`` steps that are not to be saved."""
        for step in range(count):
            assert not self._decisions.ask(step)

    def restore(self) -> None:
        """Restores a step of the durable tier."""
        with self._calls.round("looking for steps"):
            self._calls.first(list)
        with self._calls.round("reading step 1"):
            self._calls.meet()

    def restore_locally(self, num_lost: int) -> None:
        """Restores a step of the local tier, which the last ``num_lost`` hosts have lost."""
        is_lost = self._index >= self._count - num_lost
        report = b"[[], []]" if is_lost else b"[[[1, 1]], []]"
        with self._calls.round("comparing local steps"):
            self._calls.combine(report, Abandonment.joined)
        path: Any = SimpleNamespace(exists=lambda: not is_lost, parent="a local tier")
        with self._calls.round("reading step 1"):
            step = CommittedStep(1, path, 1)
            options, verified = CheckpointOptions(), _IGNORING
            source = local_tier.HostSteps(step, options, self._calls, "replica", verified)
            source.require_plausible(_READS)
            assert source.read_leaves(_READS).keys() == _READS.keys()
            self._calls.meet()

    def close(self) -> None:
        """Ends the thread that reads decisions."""
        self._decisions.close()


class _Copy:
    """A host's copy of a step, as ``RestorableStep``; the state is that of its process."""

    def __init__(self, index: int, count: int) -> None:
        state = _state(bytes(STATE_BYTES)).to_bytes()
        kept = {(index - far) % count: state for far in keeper_distances(count)}
        nodes, _ = per_process_state.joined(state, kept, (count, index))
        self.document = {**_DOCUMENT, **nodes}
        self.attached: None = None

    def require_plausible(self, reads: Any) -> None:
        pass

    def read_leaves(self, reads: Any) -> Any:
        return {n: np.zeros(read.spec.shape, read.spec.dtype) for n, read in reads.items()}


class _Ignoring:
    """Does nothing, whatever is called."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: contextlib.nullcontext()


_IGNORING: Any = _Ignoring()


def _state(content: bytes) -> PerProcessState:
    node = {"dict": [["torch", _node("rng/torch", STATE_BYTES)]]}
    return PerProcessState({"rng": node}, {"rng/torch": np.frombuffer(content, np.uint8)})


def _node(name: str, length: int) -> dict[str, Any]:
    return {"array": name, "kind": "numpy", "dtype": "uint8", "shape": [length]}


def _directory() -> Any:
    def commit(step: int, path: Any, at: int | None = None) -> CommittedStep:
        return CommittedStep(step, _PATH / str(step), at or time.time_ns())

    return SimpleNamespace(
        path=_PATH,
        path_for=lambda step: _PATH / f"writing-{step}",
        run_name=SimpleNamespace(for_summary=dict),
        publish=commit,
        branches=lambda: SimpleNamespace(in_place=()),
        metrics=lambda committed: {},
        verified=_Ignoring(),
        failed=set(),
        staying=set(),
        **dict.fromkeys(("recover", "fence", "delete", "warn_of_staying"), lambda *args: None),
        **dict.fromkeys(("set_aside", "prune"), lambda *args: []),
    )


def _history() -> Any:
    branches = SimpleNamespace(in_place=(), committed=(), unwanted=())
    names = ("refresh", "succeed", "fail", "clear_unwanted", "forget")
    ignored = dict.fromkeys(names, lambda *args: None)
    return SimpleNamespace(branches=branches, abandons=list, start=Start(), **ignored)


_SNAPSHOT: Any = SimpleNamespace(way="copy", to_store=lambda: (Plan(), {}))
_LEAVES = {f"model/layers.{i}.weight": _node(f"model/layers.{i}.weight", 64) for i in range(100)}
_DOCUMENT: Any = {"model": {"dict": [list(pair) for pair in _LEAVES.items()]}, "rng": {"dict": []}}
_READS = {
    name: LeafRead(name, Spec.of_node(node), Local.HOST)
    for name, node in {**_LEAVES, "rng/torch": _node("rng/torch", STATE_BYTES)}.items()
}


@contextlib.contextmanager
def processes(
    clients: Sequence[Any], *, has_local_tier: bool
) -> Iterator[Callable[[Callable[[Simulated], Any]], None]]:
    """Yields a function that calls its argument with each simulated process, on threads."""
    before = threading.stack_size(512 << 10)
    count = len(clients)
    members = [
        Simulated(client, index, count, has_local_tier=has_local_tier)
        for index, client in enumerate(clients)
    ]

    def begun(directory: RunDirectory, step: int) -> StepFolder:
        return StepFolder(directory, step, directory.path_for(step))

    def opened(committed: Any, *args: Any, **settings: Any) -> _Copy:
        return _Copy(local.index, count)

    local = threading.local()

    def at(index: int, act: Callable[[Simulated], Any]) -> None:
        local.index = index
        act(members[index])

    try:
        with (
            ThreadPoolExecutor(count) as pool,
            mock.patch.object(array_writer, "write_arrays", return_value={}),
            mock.patch.multiple(StepFolder, begin=begun, _mark=mock.DEFAULT),
            mock.patch.object(step_writer, "complete"),
            mock.patch.object(reused_files, "remove_retained"),
            mock.patch.object(local_tier, "StoredStep", opened),
            mock.patch.object(local_tier, "RestorableStep", lambda copy: copy),
        ):

            def on_all(act: Callable[[Simulated], Any]) -> None:
                list(pool.map(lambda index: at(index, act), range(count)))

            yield on_all
            list(pool.map(Simulated.close, members))
    finally:
        threading.stack_size(before)
