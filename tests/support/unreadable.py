"""A place on storage that cannot be read now: its listing, some of its files, or its arrays."""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tensorstore as ts

from torchax_ckpt.storage.arrays import read_arrays


@contextlib.contextmanager
def unreadable(place: Path, what: str, number: int) -> Iterator[None]:
    """Has reads below a folder fail with an error: "listing", "arrays", or files with a name."""

    def failing(function: Any, *, is_meant: Any) -> Any:
        def called(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and is_meant(os.fspath(path)):
                raise OSError(number, os.strerror(number), os.fspath(path))
            return function(path, *args, **kwargs)

        return called

    class FailingArrival(read_arrays.Arrival):
        """Fails as TensorStore does, which does not name the file either."""

        def __init__(self, committed: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(committed, *args, **kwargs)
            if what == "arrays" and Path(committed.path).is_relative_to(place):
                made: Any = ts.Promise.new()
                promise, self._future = made
                text = f"UNKNOWN: Error reading local file [os_error_code='{number}']"
                promise.set_exception(ValueError(text))

        def _first_unreadable(self) -> tuple[int, ...]:
            return tuple(i // n for i, n in zip(self._piece.start, self._chunk, strict=True))

    def is_listed(path: str) -> bool:
        return what == "listing" and Path(path).is_relative_to(place)

    def is_read(path: str) -> bool:
        return path.endswith(what) and Path(path).is_relative_to(place)

    with (
        mock.patch.object(os, "listdir", failing(os.listdir, is_meant=is_listed)),
        mock.patch.object(os, "scandir", failing(os.scandir, is_meant=is_listed)),
        mock.patch.object(builtins, "open", failing(builtins.open, is_meant=is_read)),
        mock.patch.object(read_arrays, "Arrival", FailingArrival),
    ):
        yield
