"""What is swapped in is synced before it has its name: a power cut leaves all of it or none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from torchax_ckpt.storage.directory.compare_and_swap import record_at


@pytest.mark.parametrize("link", ["links", "no-links"])
def test_a_record_is_synced_before_it_has_its_name(
    link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    fsync, link_file, replace = os.fsync, os.link, os.replace

    def synced(opened: int) -> None:
        fsync(opened)
        status = os.fstat(opened)
        assert status.st_size, "synced before it was written"
        calls.append(("synced", status.st_ino))

    def linked(draft: Any, path: Any) -> None:
        if link == "no-links":
            raise PermissionError
        calls.append(("named", os.stat(draft).st_ino))
        link_file(draft, path)

    def replaced(draft: Any, path: Any) -> None:
        calls.append(("named", os.stat(draft).st_ino))
        replace(draft, path)

    for name, wrapped in (("fsync", synced), ("link", linked), ("replace", replaced)):
        monkeypatch.setattr(os, name, wrapped)
    record = record_at(tmp_path / "record")
    first = record.swap(None, b"1")
    record.swap(first, b"2")
    record.close()
    assert [what for what, _ in calls] == ["synced", "named"] * 2
    for synced_call, named in zip(calls[::2], calls[1::2], strict=True):
        assert synced_call[1] == named[1]
