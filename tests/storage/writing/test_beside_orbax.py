"""Saves beside a program's own use of Orbax, and without Orbax's private modules."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.compare import assert_trees_identical
from support.own_orbax import save_and_load
from support.processes import run_python
from support.training import P, fsdp_mesh

from torchax_ckpt import LocalTier, TorchaxCheckpointer


@pytest.mark.slow
def test_a_programs_own_orbax_is_not_disturbed(directory: Path, tmp_path: Path) -> None:
    """Both of Orbax's APIs, while other threads save to two tiers, and load."""
    is_over = threading.Event()
    where = NamedSharding(fsdp_mesh(), P("fsdp"))
    state = {"n": np.arange(7), "x": jax.device_put(np.arange(4096.0, dtype=np.float32), where)}

    def train(index: int) -> int:
        local = LocalTier(tmp_path / f"local{index}")
        step = 0
        with TorchaxCheckpointer(directory / str(index), local=local) as ckpt:
            while not is_over.is_set() or step < 3:
                step += 1
                ckpt.save(step, state={"i": step, **state}, force=True)
                ckpt.wait_until_finished()
                assert_trees_identical(ckpt.load(step, {"i": 0, **state}), {"i": step, **state})
        return step

    with ThreadPoolExecutor(2) as pool:
        ours = [pool.submit(train, index) for index in range(2)]
        try:
            # Not on two threads, which Orbax itself does not bear.
            for step in range(8):
                for api in ("v0", "v1"):
                    save_and_load(api, tmp_path / f"{api}-{step}", 2, state)
        finally:
            is_over.set()
        assert all(each.result(60) >= 3 for each in ours)


@pytest.mark.slow
def test_saves_and_restores_need_only_the_policies_of_orbax(directory: Path) -> None:
    told = run_python(
        """
        import sys
        import numpy as np
        from torchax_ckpt import TorchaxCheckpointer, policies
        policies.LatestN  # loads Orbax's policies
        loaded = {name for name in sys.modules if name.startswith("orbax.checkpoint")}
        for name in loaded:  # whatever is imported from now on
            if "._src" in name:
                sys.modules[name] = None
        with TorchaxCheckpointer(sys.argv[1]) as ckpt:
            ckpt.save(3, state={"w": np.arange(4)})
            ckpt.wait_until_finished()
            print(ckpt.verify(3), ckpt.load(3)["w"].tolist())
        """,
        str(directory),
        fresh=True,
    ).stdout
    assert told == "3 [0, 1, 2, 3]\n"
