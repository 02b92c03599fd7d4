"""Ranks of plain PyTorch load steps from a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.native import run_ranks, save_net

pytest_plugins = ("gcs_fixtures",)


@pytest.mark.slow
@pytest.mark.usefixtures("gcs")
def test_ranks_load_from_a_bucket_to_the_bit(url: str, tmp_path: Path) -> None:
    save_net(tmp_path, run=url)
    assert run_ranks("adamw-fsdp", 2, tmp_path, RUN=url) == ["", ""]
