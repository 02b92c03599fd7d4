"""Orbax from inside: what of it is replaced, for how long, and the check that it is as expected."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import os
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.futures import future, synchronization
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.serialization import (
    jax_array_handlers,
    replica_slices,
    tensorstore_utils,
    type_handlers,
)
from orbax.checkpoint.experimental.v1._src.saving import execution
from orbax.checkpoint.experimental.v1._src.serialization import registry
from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import ArrayLeafHandler
from orbax.checkpoint.experimental.v1._src.synchronization import multihost, thread_utils
from support import ROOT
from support.compare import assert_trees_identical
from support.own_orbax import REPLACED, replaced, save_and_load
from support.processes import run_processes, run_python
from support.training import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer
from torchax_ckpt.errors import BackendError, SaveError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.storage.arrays import orbax_context, orbax_internals

# --- how long attributes are replaced ------------------------------------------------------------


@pytest.fixture(autouse=True)
def _all_is_put_back() -> Iterator[None]:
    before = replaced()
    yield
    assert replaced() == before


def test_all_that_is_replaced_is_known_to_these_tests() -> None:
    found = {(patch.module, patch.path) for patch in orbax_internals._patches.registered}
    assert found == set(REPLACED)


def test_orbax_is_patched_until_the_last_of_several_operations_ends() -> None:
    before = replaced()
    is_begun, may_end = threading.Event(), threading.Event()

    def operate() -> None:
        with orbax_context.operation():
            is_begun.set()
            may_end.wait(60)

    with ThreadPoolExecutor(1) as pool:
        with orbax_context.operation():
            during = replaced()
            assert not any(a is b for a, b in zip(before, during, strict=True))
            other = pool.submit(operate)
            is_begun.wait(60)
        assert replaced() == during
        may_end.set()
        other.result()
    assert replaced() == before


def test_an_operation_that_fails_puts_all_back() -> None:
    before = replaced()
    with pytest.raises(KeyError), orbax_context.operation():
        raise KeyError
    assert replaced() == before


def test_what_somebody_else_replaces_meanwhile_stays_and_works(directory: Path) -> None:
    original, met = multihost.sync_global_processes, []
    try:
        with orbax_context.operation():
            ours = multihost.sync_global_processes

            async def theirs(key: str, **settings: Any) -> None:
                met.append(key)
                await ours(key, **settings)

            multihost.sync_global_processes = theirs
        assert multihost.sync_global_processes is theirs
        with TorchaxCheckpointer(directory) as ckpt:
            ckpt.save(1, state={"x": jax.numpy.ones(4)}, force=True)
        assert multihost.sync_global_processes is theirs
        assert not met
        ocp.save(directory / "theirs", {"x": np.ones(4)})
        assert met
    finally:
        multihost.sync_global_processes = original


def test_a_save_meets_at_those_barriers_of_orbax_that_no_other_one_replaces(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[str] = []
    monkeypatch.setattr(Processes, "meet", lambda self, key: met.append(key))
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"x": jax.numpy.ones(4)}, force=True)
    ends = (
        "operation_id:sync",
        "maybe_overwrite_existing:post",
        "create_directory:post",
        "_commit_complete",
        "_finalize_complete",  # in a bucket, the last look at the others before the commit mark
        ":finalize",
    )
    assert [key.endswith(end) for key, end in zip(met, ends, strict=True)] == [True] * 6


def test_operations_have_names_of_their_own_and_leave_orbaxs_counter_alone() -> None:
    generator = synchronization.OperationIdGenerator
    before = generator.get_current_operation_id()
    found: list[str] = []

    def look() -> None:
        with orbax_context.operation():
            barrier.wait(60)
            generator.next_operation_id()
            ours = generator.get_current_operation_id()
            barrier.wait(60)
            found.append(generator.get_current_operation_id())
            assert found[-1] == ours

    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(look) for _ in range(2)]:
            each.result()
    assert len(set(found)) == 2
    assert all(name.startswith("torchax_ckpt-") for name in found)
    assert generator.get_current_operation_id() == before


def test_threads_of_orbax_know_for_which_operation_they_work() -> None:
    found: list[Any] = []

    async def look() -> None:
        found.append(synchronization.OperationIdGenerator.get_current_operation_id())
        found.append(jax_array_handlers.jax.process_count())
        if len(found) == 2:
            future.CommitFuture(look()).result()  # one that starts another

    before = synchronization.OperationIdGenerator.get_current_operation_id()
    with orbax_context.operation():
        future.CommitFuture(look()).result()
        ours = synchronization.OperationIdGenerator.get_current_operation_id()
    assert found == [ours, 1, ours, 1]
    future.CommitFuture(look()).result()
    assert found[4:] == [before, 1]


@pytest.mark.parametrize(("name", "number"), [("process_0", errno.ENOSPC), ("state", errno.EIO)])
def test_what_cannot_be_looked_up_is_not_called_missing(
    name: str, number: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(f"/{name}") and "/writing-" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, *args, **kwargs)

    ckpt = TorchaxCheckpointer(directory)
    ckpt.save(1, state={"w": np.arange(3), "device": jax.numpy.ones(3)}, force=True)
    ckpt.wait_until_finished()
    with monkeypatch.context() as failing:
        failing.setattr(os, "stat", refuse)
        ckpt.save(2, state={"w": np.arange(3), "device": jax.numpy.ones(3)}, force=True)
        with pytest.raises(SaveError, match=f"OSError: .*{os.strerror(number)}.*/{name}"):
            ckpt.wait_until_finished()
    ckpt.save(3, state={"w": np.arange(3)}, force=True)
    ckpt.close()
    assert ckpt.all_steps() == [1, 3]


def test_orbaxs_own_saves_are_compressed_as_orbax_does_it() -> None:
    with orbax_context.operation():
        build = tensorstore_utils._build_zarr2_metadata
        assert build((4,), (2,), True)["compressor"] == {"id": "zstd", "level": 1}
        assert build((4,), (2,), False)["compressor"] is None
        chosen = build((4,), (2,), lambda chunk: {"of": chunk})
    assert chosen == {"shape": (4,), "chunks": (2,), "compressor": {"of": (2,)}}


# --- beside a program's own use of Orbax ---------------------------------------------------------


@pytest.mark.slow
def test_a_programs_own_orbax_is_not_disturbed(directory: Path, tmp_path: Path) -> None:
    """Both of Orbax's APIs, while other threads save to two tiers, and load both ways."""
    before = replaced()
    is_over = threading.Event()
    where = NamedSharding(fsdp_mesh(), P("fsdp"))
    state = {"n": np.arange(7), "x": jax.device_put(np.arange(4096.0, dtype=np.float32), where)}
    foreign = tmp_path / "foreign"
    ocp.save(foreign / "1", {"w": np.arange(3)})
    options = CheckpointOptions(max_host_bytes=4 << 10)

    def train(index: int) -> int:
        local = LocalTier(tmp_path / f"local{index}")
        step = 0
        with (
            TorchaxCheckpointer(directory / str(index), local=local, options=options) as ckpt,
            TorchaxCheckpointer(foreign, options=CheckpointOptions(read_only=True)) as others,
        ):
            while not is_over.is_set() or step < 3:
                step += 1
                ckpt.save(step, state={"i": step, **state}, force=True)
                assert others.load(1)["w"].tolist() == [0, 1, 2]
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
    assert replaced() == before


BESIDE = """
    import pathlib, sys, threading
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from processes_program import COUNT, INDEX, report
    from support.own_orbax import assert_came_back, replaced, save_and_load
    from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer

    before = replaced()
    folder = pathlib.Path(sys.argv[4])
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    def spread(seed):
        host = np.random.default_rng(seed).standard_normal((16, 8)).astype(np.float32)
        return jax.make_array_from_callback(
            host.shape, NamedSharding(mesh, P("fsdp")), lambda index: host[index])
    state = {"n": np.arange(5), "v": spread(2), "w": spread(1)}

    failures, num_saves = [], 0
    def use_orbax():
        try:
            for step in range(3):
                for api in ("v1", "v0"):
                    save_and_load(api, folder / f"{api}-{step}", 2, state)
        except BaseException as error:
            failures.append(repr(error))
    own = threading.Thread(target=use_orbax, daemon=True)
    ckpt = TorchaxCheckpointer(
        folder / "run", options=CheckpointOptions(process_timeout_secs=100),
        local=LocalTier(folder / f"local{INDEX}"))
    own.start()
    while num_saves < 9:                          # as many on every process
        num_saves += 1
        assert ckpt.save(num_saves, state=state, force=True)
        ckpt.wait_until_finished()
        assert_came_back(ckpt.load(num_saves, state), state)
    own.join(150)
    assert not own.is_alive(), "it hangs"
    ckpt.close()
    report(failures=failures, is_put_back=replaced() == before, steps=ckpt.all_steps())
"""


@pytest.mark.slow
def test_on_several_processes_neither_is_a_programs_own_orbax(tmp_path: Path) -> None:
    for [told] in run_processes(BESIDE, 2, str(tmp_path)):
        assert told == {"failures": [], "is_put_back": True, "steps": [7, 8, 9]}


# --- the check -----------------------------------------------------------------------------------


@pytest.fixture
def _check_again() -> Iterator[None]:
    orbax_internals.check_internals.cache_clear()
    yield
    orbax_internals.check_internals.cache_clear()


@pytest.mark.usefixtures("_check_again")
def test_the_installed_orbax_passes_the_check_once() -> None:
    before = replaced()
    orbax_internals.check_internals()
    assert orbax_internals.check_internals.cache_info().currsize == 1
    assert replaced() == before


@pytest.mark.usefixtures("_check_again")
def test_the_check_passes_while_another_thread_saves() -> None:
    with orbax_internals._patches:  # is the same for all threads
        orbax_internals.check_internals()


@pytest.mark.usefixtures("_check_again")
def test_the_check_leaves_the_event_loop_of_the_program() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        orbax_internals.check_internals()
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_the_release_to_install_is_the_one_that_is_depended_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert orbax_internals.REQUIREMENT.partition(",")[0] in project["dependencies"]


GENERATOR = synchronization.OperationIdGenerator
BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no barrier": lambda patch: patch.delattr(multihost, "sync_global_processes"),
    "another barrier": lambda patch: patch.setattr(
        orbax_internals.numbering, "multihost", _Elsewhere(multihost)
    ),
    "no numbers": lambda patch: patch.delattr(GENERATOR, "get_current_operation_id"),
    "another generator": lambda patch: patch.setattr(
        orbax_internals.numbering, "OperationIdGenerator", type("_Other", (_Counter,), {})
    ),
    "no comparison": lambda patch: patch.delattr(execution, "_check_directory_consistency"),
    "no thread": lambda patch: patch.delattr(future, "_SignalingThread"),
    "no compressor": lambda patch: patch.delattr(tensorstore_utils, "_build_zarr2_metadata"),
    "another compressor": lambda patch: patch.setattr(
        tensorstore_utils, "_build_zarr_shard_and_chunk_metadata", lambda **settings: ({}, "", 0)
    ),
    "no metrics": lambda patch: patch.delattr(tensorstore_utils, "get_tensorstore_raw_bytes"),
    "metrics elsewhere": lambda patch: patch.setattr(
        jax_array_handlers, "ts_utils", _Elsewhere(tensorstore_utils)
    ),
    "no lookups": lambda patch: patch.delattr(array_metadata_store, "async_path"),
    "no modules": lambda patch: patch.delattr(type_handlers, "multihost"),
    "another save": lambda patch: patch.setattr(
        execution, "save_checkpointables_impl", lambda path: None
    ),
    "another response": lambda patch: patch.setattr(
        execution._SaveResponse, "__init__", lambda self: None
    ),
    "another runner": lambda patch: patch.setattr(
        thread_utils, "BackgroundThreadRunner", _WithoutFuture
    ),
    "no parts": lambda patch: patch.delattr(replica_slices, "ReplicaSlices"),
    "other parts": lambda patch: patch.delattr(replica_slices.ReplicaSlice, "data"),
    "another transfer": lambda patch: patch.setattr(
        jax_array_handlers, "_serialize_arrays_batches_without_dispatcher", lambda: None
    ),
    "another registry": lambda patch: patch.setattr(
        registry, "STANDARD_TYPE_AND_ABSTRACT_TYPE_AND_TYPESTR_TO_HANDLER", [(jax.Array, None)]
    ),
    "no context": lambda patch: patch.setattr(
        ArrayLeafHandler, "__init__", lambda self, context=None: None
    ),
    "other names": lambda patch: patch.setattr(
        orbax_internals, "typestr", lambda handler: repr(id(handler))
    ),
}


class _Elsewhere:
    """A module whose functions are copies, which nobody replaces."""

    def __init__(self, module: Any) -> None:
        self.__dict__.update(vars(module))


class _Counter:
    """Numbers operations, too."""

    @classmethod
    def next_operation_id(cls) -> int:
        return 1

    @classmethod
    def get_current_operation_id(cls) -> str:
        return "1"


class _WithoutFuture:
    """Runs a coroutine, and keeps to itself how it ends."""

    def __init__(self, target: Any) -> None:
        target.close()


@pytest.mark.usefixtures("_check_again")
@pytest.mark.parametrize("broken", BREAKAGES)
def test_an_orbax_without_an_internal_is_refused_with_its_version(
    broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        BREAKAGES[broken](patch)
        before = replaced()
        with pytest.raises(BackendError) as caught:
            TorchaxCheckpointer(tmp_path)
        assert replaced() == before
    found = importlib.metadata.version("orbax-checkpoint")
    assert f"orbax-checkpoint {found} does not work as torchax_ckpt expects: " in str(caught.value)
    assert f"pip install '{orbax_internals.REQUIREMENT}'" in str(caught.value)
    TorchaxCheckpointer(tmp_path).close()  # a failed check is not remembered


@pytest.mark.slow
def test_a_torchax_without_a_private_name_is_refused_with_what_to_install() -> None:
    told = run_python(
        """
        import torchax.tensor
        del torchax.tensor.RuntimeProperty
        from torchax_ckpt import errors
        try:
            from torchax_ckpt import TorchaxCheckpointer
        except errors.BackendError as error:
            print(error)
        """,
        fresh=True,
    ).stdout
    assert "cannot import name 'RuntimeProperty'" in told
    assert "pip install 'torchax>=0.0.12,<=0.0.13'" in told


@pytest.mark.slow
def test_an_orbax_without_a_private_module_reads_but_says_that_it_cannot_save(
    directory: Path,
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(3, state={"w": np.arange(4)})
    told = run_python(
        """
        import sys
        from orbax.checkpoint.experimental.v1._src import saving
        sys.modules["orbax.checkpoint.experimental.v1._src.saving.execution"] = None
        del saving.execution
        from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, errors
        try:
            TorchaxCheckpointer(sys.argv[1])
        except errors.BackendError as error:
            print(error)
        with TorchaxCheckpointer(sys.argv[1], options=CheckpointOptions(read_only=True)) as ckpt:
            ckpt.verify()
            print(ckpt.load()["w"].tolist())
        """,
        str(directory),
        fresh=True,
    ).stdout
    assert "does not work as torchax_ckpt expects: " in told
    assert f"pip install '{orbax_internals.REQUIREMENT}'" in told
    assert told.endswith("\n[0, 1, 2, 3]\n")
