"""Reads published weights in another program, such as an engine that serves the model."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from etils import epath

from torchax_ckpt import plain_torch
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.publishing import digests
from torchax_ckpt.publishing.published_folders import LATEST, folder_name
from torchax_ckpt.storage.medium import location, medium, storage_errors


class Reader:
    """Returns the tensors that changed since it looked last::

        reader = Reader("published")
        while serving:
            if changed := reader.poll():
                load_into_the_engine(changed)

    It opens whole publications only, compares each tensor with its digest, and unpickles nothing.

    Args:
      out: the folder, or the ``gs://`` or ``s3://`` URL, to which steps are published; it need
        not exist yet.

    Attributes:
      step: the step of the publication that was read last; None before the first.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.step: int | None = None
        self._path = location.resolve(out)
        self._medium = medium.of(self._path)
        self._medium.use(self)
        self._seen: object = None  # what ``latest`` said, and when
        self._known: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Reader of {str(self._path)!r}: step {self.step}>"

    def poll(self) -> dict[str, torch.Tensor]:
        """Returns the tensors whose values, dtype or shape differ from those returned before.

        These are all tensors at the first publication, and ``{}`` as long as there is no other, or
        if the next one only lacks some. A call that finds no other takes microseconds on a local
        disk, and one request to a bucket.

        Returns:
          Plain CPU tensors, in memory of their own, by their names in the folder's files. Before
          the names of an adapter that is not ``default`` stands its subfolder: FOLDER/NAME.

        Raises:
          CorruptCheckpointError: the publication is damaged.
          DirectoryError: it cannot be read now, or has no digests. The next call tries again.
        """
        missing = None
        with storage_errors.translated("read", self._path):
            while (found := self._latest()) is not None and found != self._seen:
                name = found[0]
                try:
                    tensors = self._read(self._path / folder_name(name))
                except FileNotFoundError:
                    if found == missing:
                        raise
                    missing = found  # deleted meanwhile: now latest names another one
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    text = f"{self._path}: {name!s:.80} is damaged: {error!s:.200}"
                    raise CorruptCheckpointError(text, path=self._path) from error
                else:
                    self._seen = found
                    return tensors
        return {}

    def _latest(self) -> tuple[str, object] | None:
        """Returns the name of the newest folder, and its time; None if nothing is published."""
        path = self._path / LATEST
        with (
            contextlib.suppress(FileNotFoundError),
            contextlib.closing(self._medium.record(path)) as record,
        ):
            if (found := record.read()) is not None:
                return found.content.decode(errors="replace").strip(), found.changed
        return None

    def _read(self, folder: epath.Path) -> dict[str, torch.Tensor]:
        step = int(folder.name.split("-")[1])
        values: dict[str, Any] = {}
        wanted: dict[str, dict[str, Any]] = collections.defaultdict(dict)  # by file
        for file, entry in digests.read(folder).items():
            place = PurePosixPath(file)
            if place.is_absolute() or ".." in place.parts:
                raise ValueError(f"{file!r:.80} is no file in the folder")
            for name, (begin, *value) in entry["tensors"].items():
                key = f"{place.parent}/{name}" if place.parent.name else name
                values[key] = value
                if self._known.get(key) != value:
                    wanted[file][key] = (begin, *value)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = pool.map(_tensors, [folder / file for file in wanted], wanted.values())
            tensors = {key: tensor for part in found for key, tensor in part.items()}
        self.step, self._known = step, values
        return tensors


def _tensors(path: epath.Path, wanted: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Reads tensors from a file, in the order of storage, and compares them with their digests."""
    found = {}
    with path.open("rb") as file:
        nbytes = file.seek(0, os.SEEK_END)
        for key, (begin, dtype, shape, digest) in sorted(wanted.items(), key=lambda kv: kv[1][0]):
            if begin + math.prod(shape) * np.dtype(dtype).itemsize > nbytes:
                raise ValueError(f"{path.name}: {key!r:.80} is not in the file")
            array = np.empty(shape, np.dtype(dtype))
            octets: Any = array.reshape(-1).view(np.uint8)
            file.seek(begin)
            file.readinto(octets)
            if digests.of(array) != digest:
                raise ValueError(f"{path.name}: {key!r:.80} differs from what was published")
            found[key] = plain_torch.tensor_of(array, getattr(torch, array.dtype.name))
    return found
