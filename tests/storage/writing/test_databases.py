"""A database in the folders of several processes is read as one, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from etils import epath

from torchax_ckpt.storage.writing import databases

HOST = np.arange(1, 13, dtype=np.float32).reshape(4, 3)


def stored(folder: Path, rows: Sequence[int]) -> epath.Path:
    """A folder with two rows of an array for each chunk; one with row 0 has the metadata too."""
    metadata = {"shape": [4, 3], "chunks": [2, 3], "dtype": "<f4", "compressor": None}
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": "state.w/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}
    kind: dict[str, Any] = (
        {"create": True} if 0 in rows else {"open": True, "assume_metadata": True}
    )
    array = ts.open(spec, **kind).result()
    for row in rows:
        array[row : row + 2] = HOST[row : row + 2]
    return epath.Path(folder)


@pytest.mark.parametrize("rows", [[[0, 2]], [[0], [2]]])
def test_the_folders_together_have_the_array(rows: list[list[int]], tmp_path: Path) -> None:
    folders = [stored(tmp_path / str(i), part) for i, part in enumerate(rows)]
    found = databases.read(folders, "state/w", (4, 3), "float32")
    assert found is not None
    assert found.tobytes() == HOST.tobytes()
    assert databases.read(folders, "state/w", (3, 4), "float32") is None
    assert databases.read(folders, "state/w", (4, 3), "int32") is None
    assert databases.read(folders, "state/v", (4, 3), "float32") is None


@pytest.mark.parametrize("rows", [[[0]], [[0, 2], [2]]])
def test_a_missing_or_second_chunk_is_damage(rows: list[list[int]], tmp_path: Path) -> None:
    folders = [stored(tmp_path / str(i), part) for i, part in enumerate(rows)]
    assert databases.read(folders, "state/w", (4, 3), "float32") is None


def test_a_missing_folder_is_damage(tmp_path: Path) -> None:
    folders = [stored(tmp_path / "0", [0]), epath.Path(tmp_path / "1")]
    assert databases.read(folders, "state/w", (4, 3), "float32") is None
