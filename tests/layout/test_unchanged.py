"""The manifest's list of databases of unchanged arrays, and the names of their folders."""

from __future__ import annotations

from typing import Any

import pytest

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.layout.unchanged import Database

DIGESTS = {"model/w": Digests((2,), bytes(16), bytes(range(32)))}


@pytest.mark.parametrize("processes", [None, (0,), (0, 3, 12)])
def test_a_database_is_read_as_it_was_described(processes: tuple[int, ...] | None) -> None:
    known = {"unchanged0": Database(1, ("model/w",), processes)}
    raw = unchanged.to_json(known, DIGESTS)["unchanged"]
    short = {name: Digests(d.block, d.values) for name, d in DIGESTS.items()}
    assert unchanged.from_json(raw, short, path="manifest") == (known, DIGESTS)


@pytest.mark.parametrize("processes", [[], [1, 0], [0, 0], [-1], [True], ["0"], [0.0], 1, {}, "01"])
def test_a_wrong_list_of_processes_is_refused(processes: Any) -> None:
    raw = unchanged.to_json({"unchanged0": Database(0, ("model/w",))}, DIGESTS)["unchanged"]
    raw["unchanged0"]["processes"] = processes
    with pytest.raises(CorruptCheckpointError, match="'unchanged' to list databases"):
        unchanged.from_json(raw, DIGESTS, path="manifest")


def test_each_process_has_a_folder_of_its_own() -> None:
    assert unchanged.folders_of("unchanged1", None) == ["ocdbt.process_unchanged1"]
    folders = [f for n in (1, 11) for f in unchanged.folders_of(f"unchanged{n}", [1, 11, 111])]
    assert len({*folders, "ocdbt.process_unchanged1"}) == 7
    for folder in folders:
        assert unchanged.is_folder(folder)
        assert folder.removeprefix("ocdbt.process_").isalnum()  # else Orbax would not merge it
    for other in ("ocdbt.process_0", "ocdbt.process_unchanged", "ocdbt.process_unchanged0x"):
        assert not unchanged.is_folder(other)
