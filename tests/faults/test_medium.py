"""The medium fails: full, read-only, removed, not permitted. Training and saving go on."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import PROGRAMS
from support.processes import environment


def run(*args: str | Path, prefix: list[str]) -> None:
    command = [*prefix, sys.executable, PROGRAMS / "failing_media.py", *args]
    result = subprocess.run(
        command, env=environment(1, {}), capture_output=True, text=True, timeout=150, check=False
    )
    assert result.stdout.endswith("all is well\n"), result.stdout + result.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("mounted", marks=pytest.mark.long), "limited"])
def test_training_and_saving_go_on_when_the_medium_fails(kind: str, open_tmp_path: Path) -> None:
    prefix = mounting_prefix() if kind == "mounted" else []
    run("saves", open_tmp_path / "disk", kind, prefix=prefix)


def mounting_prefix() -> list[str]:
    """What to put before a command so that it may mount; its mounts end with it."""
    for prefix in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        probe = [*prefix, "sh", "-c", "mount -t tmpfs tmpfs /mnt && umount /mnt"]
        if shutil.which(probe[0]) and subprocess.run(probe, capture_output=True).returncode == 0:
            return prefix
    pytest.skip("a file system cannot be mounted here; the limited disk needs no rights")


@pytest.mark.slow
def test_what_cannot_be_read_now_is_no_reason_to_go_back(open_tmp_path: Path) -> None:
    run("reads", open_tmp_path, prefix=[])


@pytest.fixture
def open_tmp_path() -> Iterator[Path]:
    """A folder that a user without rights reaches, too, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
