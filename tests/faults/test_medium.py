"""The medium fails: full, read-only, removed, not permitted. Training and saving go on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import media
import pytest
from support import PROGRAMS

HERE = Path(__file__).parent


def run(program: Path, *args: str, prefix: list[str] | None = None) -> None:
    result = subprocess.run(
        [*(prefix or []), sys.executable, str(program), *args],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{HERE}:{HERE.parent}:{HERE.parent.parent}",
        },
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.stdout.endswith("all is well\n"), result.stdout + result.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("mounted", marks=pytest.mark.long), "limited"])
def test_training_and_saving_go_on_when_the_medium_fails(kind: str, open_tmp_path: Path) -> None:
    prefix = media.mounting_prefix() if kind == "mounted" else None
    if kind == "mounted" and prefix is None:
        pytest.skip("a file system cannot be mounted here; the limited disk needs no rights")
    run(PROGRAMS / "failing_medium.py", str(open_tmp_path / "disk"), kind, prefix=prefix)


@pytest.mark.slow
def test_what_cannot_be_read_now_is_no_reason_to_go_back(open_tmp_path: Path) -> None:
    run(PROGRAMS / "unreadable_files.py", str(open_tmp_path))


@pytest.fixture
def open_tmp_path() -> Iterator[Path]:
    """A folder that a user without rights reaches, too, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
