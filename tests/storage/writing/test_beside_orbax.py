"""Saves beside a program's own use of Orbax, and without Orbax's private modules."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import run_processes, run_python

BESIDE = """
    import collections, pathlib, sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from orbax import checkpoint as v0
    from processes_program import INDEX, report
    from support.own_orbax import assert_came_back, save_and_load
    from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, errors, policies

    folder = pathlib.Path(sys.argv[4])
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    def spread(seed):
        host = np.random.default_rng(seed).standard_normal((16, 8)).astype(np.float32)
        return jax.make_array_from_callback(
            host.shape, NamedSharding(mesh, P("fsdp")), lambda index: host[index])
    state = {"n": np.arange(5), "v": spread(2), "w": spread(1)}
    alone = v0.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="own")

    def use_orbax_alone(step):
        host = {"n": np.arange(step)}
        with v0.StandardCheckpointer(multiprocessing_options=alone) as own:
            own.save(folder / f"alone-{step}", host)
            own.wait_until_finished()
            assert own.restore(folder / f"alone-{step}")["n"].tolist() == host["n"].tolist()

    events = collections.Counter()  # of the durable tier
    every = policies.FixedIntervalPolicy(1)
    ckpt = TorchaxCheckpointer(
        folder / "run", save_decision_policy=every, on_event=lambda e: events.update([e.name]),
        options=CheckpointOptions(process_timeout_secs=100, on_save_error="continue"),
        local=LocalTier(folder / f"local{INDEX}", save_decision_policy=every))
    refused = []
    for step in range(1, 201):
        odd = {"odd": object()} if (INDEX, step) == (1, 100) else {}
        try:
            ckpt.save(step, state=state | {"step": step} | odd)
        except errors.UnsupportedLeafError:
            refused.append(step)
        if step % 20 == 0 and INDEX == 0:
            use_orbax_alone(step)                 # while the saves of both tiers are in flight
        if step == 10:  # later ones would hang, as each alone moves Orbax's counter on one process
            save_and_load("v1", folder / f"v1-{step}", 1, state)
            save_and_load("v0", folder / f"v0-{step}", 1, state)
    failed = []
    try:
        ckpt.wait_until_finished()
    except errors.SaveError as error:             # of the refused save
        failed.append("a builtins.object cannot be stored" in str(error))
    for tier in ("durable", "local"):
        found = ckpt.load(200, state | {"step": 0}, tier=tier)
        assert_came_back(found, state | {"step": 200})
    ckpt.close()
    saves = [events["saving"], events["durable"], events["failed"]]
    report(refused=refused, failed=failed, steps=ckpt.all_steps(), saves=saves)
"""


@pytest.mark.slow
def test_on_several_processes_neither_is_a_programs_own_orbax(tmp_path: Path) -> None:
    """Saves go to two tiers at once, beside Orbax on both processes and on one; one is refused."""
    for refused, [told] in zip(([], [100]), run_processes(BESIDE, 2, str(tmp_path)), strict=True):
        assert (told["refused"], told["failed"]) == (refused, [True])
        assert told["saves"] == [200 - len(refused), 199, 1]
        assert told["steps"] == [198, 199, 200]


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
