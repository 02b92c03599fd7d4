"""Plain PyTorch loads steps from a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.native import run_native, run_ranks, save_net

pytest_plugins = ("gcs_fixtures",)


@pytest.mark.slow
@pytest.mark.usefixtures("gcs")
def test_ranks_and_one_process_load_from_a_bucket_to_the_bit(url: str, tmp_path: Path) -> None:
    save_net(tmp_path, run=url)
    assert run_ranks("adamw-fsdp", 2, tmp_path, RUN=url) == ["", ""]
    source = "assert restore(sys.argv[2], *(objects := built())).step == 2"
    run_native(source + "\nrequire_equal(state_of(*objects), expected)", tmp_path, url)
