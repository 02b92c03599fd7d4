"""A step of the local tier is restored while a sound copy of each process's state is left."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.group import Group

from torchax_ckpt import CheckpointOptions
from torchax_ckpt.devices.sharding import Local
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout.manifest import array_nodes
from torchax_ckpt.layout.names import of_process
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.restoring import local_tier
from torchax_ckpt.state import per_process_state
from torchax_ckpt.state.component import LeafRead
from torchax_ckpt.state.leaf import Spec
from torchax_ckpt.state.per_process_state import PerProcessState
from torchax_ckpt.storage.directory.committed_step import CommittedStep, Verified

LEAF = "rng/torch"
NODE = {"array": LEAF, "kind": "numpy", "dtype": "uint8", "shape": [4]}


def state_of(index: int) -> bytes:
    host = np.full(4, index, np.uint8)
    return PerProcessState({"rng": {"dict": [["torch", NODE]]}}, {LEAF: host}).to_bytes()


class Copy:
    """A host's copy of a step; its host keeps the states of all processes."""

    attached = None

    def __init__(self, committed: Any, *args: Any, **settings: Any) -> None:
        index, damaged = committed.path.index, committed.path.damaged
        others = {i: state_of(i) for i in range(3) if i != index}
        nodes, self._leaves = per_process_state.joined(state_of(index), others, (3, index))
        self.document: Mapping[str, Any] = {"model": {"dict": []}, **nodes}
        self._damaged = {LEAF if i == index else of_process(i, LEAF) for i in damaged}

    def require_plausible(self, reads: Mapping[str, LeafRead]) -> None:
        pass

    def read_leaves(self, reads: Mapping[str, LeafRead]) -> dict[str, Any]:
        if wrong := self._damaged & reads.keys():
            raise CorruptCheckpointError(f"{wrong} is damaged", path="a copy")
        return {name: self._leaves[name] for name in reads}


def restored(
    monkeypatch: pytest.MonkeyPatch, lost: Set[int], damaged: Mapping[int, Set[int]]
) -> list[Any]:
    """Returns what each of three processes has restored: its state, or the error.

    Args:
      lost: the hosts without a copy.
      damaged: host -> the processes whose states are damaged in its copy.
    """
    monkeypatch.setattr(local_tier, "StoredStep", Copy)
    monkeypatch.setattr(local_tier, "RestorableStep", lambda copy: copy)

    def act(member: Processes) -> list[int]:
        path: Any = SimpleNamespace(
            exists=lambda: member.index not in lost,
            parent="a local tier",
            index=member.index,
            damaged=damaged.get(member.index, ()),
        )
        options = CheckpointOptions()
        verified = Verified()
        with member.round("reading step 1"):
            step = local_tier.HostSteps(
                CommittedStep(1, path, 1), options, member, "replica", verified
            )
            # In the message of another host, the leaf has the name that it has in that host's copy.
            (node,) = array_nodes(step.document["rng"])
            name = node["array"]
            found = step.read_leaves({name: LeafRead(name, Spec.of_node(node), Local.HOST)})
            return found[name].tolist()

    return Group()(act)


@pytest.mark.parametrize(
    ("lost", "damaged"),
    [
        ({2}, {0: {2}}),
        ({2}, {1: {2}}),
        (set(), {0: {0, 2}, 2: {2}}),
        ({1}, {0: {1}, 2: {0}}),  # host 2 alone has the state of process 1
        ({0, 1}, {}),
    ],
)
def test_the_next_host_is_asked_if_the_copy_of_one_is_damaged_in_a_state(
    lost: set[int], damaged: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert restored(monkeypatch, lost, damaged) == [[index] * 4 for index in range(3)]


def test_without_a_sound_copy_of_a_state_its_process_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in restored(monkeypatch, {2}, {0: {2}, 1: {2}}):
        assert isinstance(error, CorruptCheckpointError)
        assert "no host has an undamaged copy of the random state and the loader" in str(error)
        assert "positions of process 2; restore another step" in str(error)
