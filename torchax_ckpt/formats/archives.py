"""Reads the zip archives of ``torch.save`` with torch, after checks of what torch believes.

An archive contains a pickle, which describes the tensors, and a file for each storage of elements.
``torch.load(weights_only=True)`` runs no code of the pickle, but torch believes the sizes that an
archive states, and maps a compressed storage as if it were none.
"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.formats.state_dict import native_torch

_LOCAL_HEADER = struct.Struct("<26xHH")  # the lengths of the name and of the extra field


class Section(io.RawIOBase):
    """A section of a file, as a file of its own; refuses a read of more bytes than ``max_bytes``.

    zipfile and torch read an archive's list of files at once, into as much memory as it states.
    """

    def __init__(self, file: Any, offset: int, length: int, max_bytes: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0
        self.max_bytes = max_bytes

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position within the section, and returns it."""
        self._position = max(0, offset + (0, self._position, self._length)[whence])
        return self._position

    def tell(self) -> int:
        """Returns the position within the section."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads bytes from the position into the buffer; returns their number."""
        if len(buffer) > self.max_bytes:
            raise ValueError(
                f"expected an archive that lists its files in at most {self.max_bytes} bytes, "
                f"found a list of files of {len(buffer)} bytes"
            )
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        data: bytes = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def begin_of(self, info: zipfile.ZipInfo) -> int:
        """Returns where in the section the content of a file of its archive begins."""
        self.seek(info.header_offset)
        header = _LOCAL_HEADER.unpack(self.read(_LOCAL_HEADER.size))
        return info.header_offset + _LOCAL_HEADER.size + sum(header)


def members(section: Section) -> dict[str, zipfile.ZipInfo]:
    """Returns the files inside an archive, by their names in it, such as ``data/0``.

    Raises ValueError if one is compressed, if one without a tensor is larger than ``max_bytes``, or
    if the tensors are big-endian; and zipfile's errors.
    """
    found = {}
    with zipfile.ZipFile(section) as archive:
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            is_large = info.file_size > section.max_bytes and not name.startswith("data/")
            if info.compress_type != zipfile.ZIP_STORED or is_large:
                raise ValueError(
                    f"{name:.80}: expected an uncompressed file of at most {section.max_bytes} "
                    f"bytes inside the archive, found a file of {info.file_size} bytes that is "
                    "compressed or too large"
                )
            found[name] = info
        if "byteorder" in found and archive.read(found["byteorder"]) != b"little":
            raise ValueError("expected little-endian tensors")
    section.seek(0)
    return found


def load(file: Any, path: Path, **how: Any) -> Any:
    """Returns what ``torch.save`` saved, after ``members`` has checked the archive.

    ``file`` is ``path``, or a ``Section`` of it. Raises UnsupportedLeafError for objects that are
    neither tensors nor plain values, and torch's many errors.
    """
    with native_torch():
        # Asked before, because torch searches its message about such a class in quadratic time.
        if classes := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            raise UnsupportedLeafError(
                f"{path}: expected plain tensors, numbers and texts, in lists and dicts, found "
                f"objects of {', '.join(sorted(classes)):.200}. torch makes them only by running "
                "code that the file names. If you trust the file, load it with "
                "torch.load(weights_only=False), and save its tensors alone"
            )
        if isinstance(file, Section):
            file.seek(0)
        return torch.load(file, weights_only=True, **how)
