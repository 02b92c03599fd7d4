"""gs://: save, prune, resume, reshard, go back; faults, outages, refusals; killed while saving."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import threading
import time
import types
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import gcs_proxy
import gcs_server
import pytest
import torch
from etils import epath
from etils.epath import backend
from gcsfs.extended_gcsfs import BucketType, ExtendedGcsFileSystem
from google.api_core import exceptions
from jax.sharding import NamedSharding
from support.buckets import give_up_soon, killed_before_the_commit
from support.compare import assert_trees_identical, bits
from support.steps import save, state, two_tiers
from support.training import P, fsdp_mesh
from support.waiting import wait_until

from torchax_ckpt import (
    CheckpointOptions,
    TorchaxCheckpointer,
    policies,
    torchax_backend,
)
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, LeaseError, SaveError
from torchax_ckpt.storage.directory.compare_and_swap import Conflict, record_at
from torchax_ckpt.storage.directory.lease_holder import LeaseHolder
from torchax_ckpt.storage.medium import bucket, location
from torchax_ckpt.storage.writing import array_writer

pytest_plugins = ("gcs_fixtures",)
ROOT = Path(__file__).parent.parent.parent


def names(gcs: gcs_proxy.FaultProxy, run: str) -> set[str]:
    """What is right under the run's prefix."""
    prefix = run.removeprefix("gs://bucket/") + "/"
    return {n.removeprefix(prefix).split("/")[0] for n in gcs.server.names(prefix)} - {
        "lease",
        "events",
    }


def leave(gcs: gcs_proxy.FaultProxy, run: str, step: int, as_names: Sequence[str]) -> None:
    """Copies a step without its mark, as killed saves and moves leave it."""
    prefix = run.removeprefix("gs://bucket/")
    storage = gcs.server.storage
    for name in gcs.server.names(f"{prefix}/{step}/"):
        if not name.endswith("commit_success.txt"):
            found = storage.get_file_obj("bucket", name)
            for left in as_names:
                copy = name.replace(f"{prefix}/{step}/", f"{prefix}/{left}/")
                content = storage.get_file("bucket", name)
                storage.create_file("bucket", copy, content, {**found, "name": copy})


def test_a_run_is_saved_pruned_resumed_resharded_and_goes_back_twice(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    first = torch.nn.Linear(8, 4).to("jax")
    keep = policies.LatestN(2)
    with TorchaxCheckpointer(bucket_run, preservation_policy=keep) as ckpt:
        assert ckpt.all_steps() == []
        assert ckpt.attach(first) == 0
        for step in (1, 2, 3):
            ckpt.save(step, metrics={"loss": step}, force=True)
    assert ckpt.all_steps() == [2, 3]
    assert names(gcs, bucket_run) == {"2", "3"}
    mesh = fsdp_mesh(4)
    second = torch.nn.Linear(8, 4).to("jax")
    with TorchaxCheckpointer(bucket_run) as ckpt:
        rule = lambda name, _: NamedSharding(mesh, P("fsdp") if name == "weight" else P())  # noqa: E731
        assert ckpt.attach(second, shardings=rule) == 3
        assert len(torchax_backend.buffer(second.weight).sharding.device_set) == 4
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert bits(a) == bits(b)
        assert ckpt.metrics(3) == {"loss": 3}
        for _ in range(2):  # a new step takes a number that an abandoned one has
            ckpt.restore(2)
            ckpt.save(3, force=True)
            ckpt.wait_until_finished()
            assert ckpt.all_steps() == [2, 3]
    assert TorchaxCheckpointer(bucket_run).all_steps() == [2, 3]
    assert names(gcs, bucket_run) == {"2", "3", "abandoned-3", "abandoned-3-2"}


@pytest.mark.slow
def test_what_a_killed_save_or_move_leaves_is_no_step_and_goes_with_the_next_save(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1, 2)
    leave(gcs, bucket_run, 2, as_names=("9", "incoming-6", "abandoned-5-2"))
    assert {"9", "incoming-6", "abandoned-5-2"} < names(gcs, bucket_run)
    with TorchaxCheckpointer(bucket_run) as ckpt:
        assert ckpt.all_steps() == [1, 2]
        save(ckpt, 8)
    # Whoever began these may only be stalled: nobody is to use the names again.
    assert names(gcs, bucket_run) == {"1", "2", "9", "8", "incoming-6"}
    prefix = bucket_run.removeprefix("gs://bucket/")
    for name in ("9", "incoming-6"):
        assert gcs.server.names(f"{prefix}/{name}/") == [f"{prefix}/{name}/begun"]
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 9)
        assert ckpt.all_steps() == [2, 8, 9]
    assert "incoming-9" in names(gcs, bucket_run)


@pytest.mark.slow
@pytest.mark.usefixtures("gcs")
def test_a_mark_that_is_carried_out_late_is_no_step(bucket_run: str) -> None:
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1, 2)
    mark = f"{bucket_run}/incoming-2/commit_success.txt"
    fsspec.filesystem("gcs").pipe_file(mark, b"of a save that was given up and removed")
    with TorchaxCheckpointer(bucket_run) as ckpt:
        assert_trees_identical(ckpt.load(2), state(2))
        save(ckpt, 3)
        assert ckpt.all_steps() == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("gcs")
@pytest.mark.parametrize(
    "content",
    [b"", pytest.param(b"{}", marks=pytest.mark.long), None],
    ids=["empty", "no time", "gone"],
)
def test_a_step_whose_commit_record_is_damaged_is_there_and_the_one_before_is_taken(
    bucket_run: str, content: bytes | None
) -> None:
    model = torch.nn.Linear(2, 2).to("jax")
    with TorchaxCheckpointer(bucket_run, preservation_policy=policies.LatestN(2)) as ckpt:
        ckpt.attach(model)
        for step in (1, 2):
            ckpt.save(step, force=True)
    filesystem, record = fsspec.filesystem("gcs"), f"{bucket_run}/2/_CHECKPOINT_METADATA"
    if content is None:
        filesystem.rm_file(record)
    else:
        filesystem.pipe_file(record, content)
    with TorchaxCheckpointer(bucket_run, preservation_policy=policies.LatestN(2)) as ckpt:
        assert ckpt.all_steps() == [1, 2]
        with pytest.raises(CorruptCheckpointError, match="2/_CHECKPOINT_METADATA"):
            ckpt.load(2)
        with pytest.warns(UserWarning, match="2/_CHECKPOINT_METADATA"):
            assert ckpt.attach(model) == 1
        ckpt.save(2, force=True)
        ckpt.wait_until_finished()
        assert ckpt.verify(2) == 2
        assert ckpt.all_steps() == [1, 2]


@pytest.mark.slow
def test_a_folder_that_merely_has_a_number_for_a_name_is_left_alone(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    notes = {f"{bucket_run}/{name}/notes.txt": name for name in ("2024", "abandoned-7", "5")}
    filesystem = fsspec.filesystem("gcs")
    for path, content in notes.items():
        filesystem.pipe_file(path, content.encode())
    with TorchaxCheckpointer(bucket_run, preservation_policy=policies.LatestN(1)) as ckpt:
        save(ckpt, 4, 5, 6)
        assert ckpt.all_steps() == [6]
    for path, content in notes.items():
        assert filesystem.cat_file(path) == content.encode()


@pytest.mark.slow
def test_a_delete_that_is_carried_out_late_spares_what_was_written_since(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1)
    leave(gcs, bucket_run, 1, as_names=("2",))
    filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
    monkeypatch.setattr(filesystem, "requests_timeout", aiohttp.ClientTimeout(sock_read=2))
    late: list[threading.Thread] = []
    now = threading.Event()

    def hold(request: str) -> None:
        if request.startswith("DELETE") and "2%2Fmanifest%2Fdata.json" in request and not late:
            late.append(threading.current_thread())
            now.wait(60)

    gcs.hook = hold
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 2)
        now.set()
        for thread in late:
            thread.join()
        assert late
    assert_trees_identical(ckpt.load(2), state(2))


@pytest.mark.slow
def test_nothing_is_deleted_but_what_was_looked_at(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    requests: list[str] = []
    with TorchaxCheckpointer(bucket_run, preservation_policy=policies.LatestN(1)) as ckpt:
        save(ckpt, 1)
        gcs.hook = requests.append
        save(ckpt, 2, 3)
    deletes = [r for r in requests if r.startswith("DELETE")]
    assert len(deletes) > 10
    assert [r for r in deletes if "ifGenerationMatch=" not in r] == []
    assert names(gcs, bucket_run) == {"3"}


def test_a_refused_delete_spares_what_was_written_since_the_listing(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
    prefix = bucket_run.removeprefix("gs://bucket/")
    storage = gcs.server.storage
    for name in ("a", "b/changed", "b/c"):
        filesystem.pipe_file(f"{bucket_run}/{name}", b"old")

    def write_meanwhile(request: str) -> None:
        if request.startswith("DELETE") and not storage.objects["bucket"].get(f"{prefix}/b/new"):
            found = storage.get_file_obj("bucket", f"{prefix}/b/changed")
            for name in ("changed", "new"):
                name = f"{prefix}/b/{name}"
                generation = str(int(found["generation"]) + 1)
                written = {**found, "name": name, "generation": generation}
                storage.create_file("bucket", name, b"new", written)

    gcs.hook = write_meanwhile
    bucket.remove(epath.Path(bucket_run))
    gcs.hook = None
    assert gcs.server.names(f"{prefix}/") == [f"{prefix}/b/changed", f"{prefix}/b/new"]
    assert filesystem.cat_file(f"{bucket_run}/b/changed") == b"new"
    bucket.remove(epath.Path(bucket_run))
    assert gcs.server.names(f"{prefix}/") == []


class FoldersOfTheService:
    """Folder resources of a hierarchical namespace, as the storage control API serves them."""

    def __init__(self, server: gcs_server.GcsServer, folders: Sequence[str]) -> None:
        self.server = server
        self.folders = set(folders)

    async def list_folders(self, request: Any, **kwargs: Any) -> Any:
        async def listed() -> AsyncIterator[Any]:
            for folder in sorted(self.folders):
                if f"{folder}/".startswith(request.prefix):
                    yield types.SimpleNamespace(
                        name=f"projects/_/buckets/bucket/folders/{folder}/",
                        create_time=None,
                        update_time=None,
                        metageneration=1,
                    )

        return listed()

    async def delete_folder(self, name: str, **kwargs: Any) -> None:
        folder = name.removeprefix("projects/_/buckets/bucket/folders/").rstrip("/")
        if folder not in self.folders:
            raise exceptions.NotFound(folder)
        inside = [f for f in self.folders if f.startswith(f"{folder}/")]
        if inside or self.server.names(f"{folder}/"):
            raise exceptions.FailedPrecondition(f"{folder} is not empty")
        self.folders.remove(folder)


def test_only_empty_folders_of_a_hierarchical_namespace_go_with_their_objects(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = bucket_run.removeprefix("gs://bucket/")
    folders = (f"{prefix}/1", f"{prefix}/1/empty", f"{prefix}/1/a", f"{prefix}/1/a/b", f"{prefix}")
    service = FoldersOfTheService(gcs.server, folders)
    filesystem = ExtendedGcsFileSystem(
        endpoint_url=gcs.url, token="anon", finalize_on_close=True, skip_instance_cache=True
    )
    filesystem._storage_layout_cache["bucket"] = BucketType.HIERARCHICAL
    filesystem._storage_control_client = service
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: filesystem)
    plain = fsspec.filesystem("gcs")
    for name in ("1/x", "1/a/b/y"):
        plain.pipe_file(f"{bucket_run}/{name}", b"old")

    def write_meanwhile(request: str) -> None:
        name = f"{prefix}/1/a/new"
        if request.startswith("DELETE") and not gcs.server.storage.objects["bucket"].get(name):
            found = gcs.server.storage.get_file_obj("bucket", f"{prefix}/1/a/b/y")
            gcs.server.storage.create_file("bucket", name, b"new", {**found, "name": name})

    gcs.hook = write_meanwhile
    bucket.remove(epath.Path(f"{bucket_run}/1"))
    gcs.hook = None
    assert gcs.server.names(f"{prefix}/") == [f"{prefix}/1/a/new"]
    assert service.folders == {prefix, f"{prefix}/1", f"{prefix}/1/a"}
    bucket.remove(epath.Path(f"{bucket_run}/1"))
    assert gcs.server.names(f"{prefix}/") == []
    assert service.folders == {prefix}


@pytest.mark.slow
def test_a_write_of_a_failed_save_that_is_carried_out_late_spares_the_step_when_saved_anew(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
    monkeypatch.setattr(filesystem, "requests_timeout", aiohttp.ClientTimeout(sock_read=2))
    late: list[threading.Thread] = []
    now = threading.Event()

    def hold(request: str) -> None:
        if "/2/manifest/data.json" in request and "upload_id" in request and not late:
            late.append(threading.current_thread())
            gcs.allows_writes = False  # so that the save fails
            now.wait(60)

    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1)
        gcs.hook = hold
        ckpt.save(2, state=state(7), metrics={"loss": 7}, force=True)
        with pytest.raises(SaveError, match="saving step 2"):
            ckpt.wait_until_finished()
        gcs.allows_writes = True
        save(ckpt, 2)
        now.set()
        for thread in late:
            thread.join()
        assert late
        assert_trees_identical(ckpt.load(2), state(2))
    assert_trees_identical(TorchaxCheckpointer(bucket_run).load(2), state(2))


def test_settings_that_the_program_shares_are_as_before_once_nobody_needs_them(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    gc.collect()  # those of earlier tests
    filesystem = fsspec.filesystem("gcs", finalize_on_close=True)

    def settings() -> list[Any]:
        instances = dict(type(filesystem)._cache)
        cache = filesystem.dircache.use_listings_cache
        return [dict(os.environ), instances, cache, filesystem.requests_timeout]

    before = settings()
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1)
        assert not filesystem.dircache.use_listings_cache
        assert (
            filesystem.requests_timeout.total == 600
        )  # a trickle never reaches a limit on silence
        assert dict(os.environ) == before[0]
    assert ckpt.all_steps() == [1]
    del ckpt

    def are_back() -> bool:
        gc.collect()
        return settings() == before

    wait_until(are_back)  # a request that has just ended may keep its user for a moment


@pytest.mark.slow
def test_another_process_sees_new_steps(gcs: gcs_proxy.FaultProxy, bucket_run: str) -> None:
    reader = TorchaxCheckpointer(bucket_run)
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1)
        assert reader.all_steps() == [1]
        save(ckpt, 2)
    gcs.server.storage.delete_file(
        "bucket", f"{bucket_run.removeprefix('gs://bucket/')}/1/commit_success.txt"
    )
    assert reader.all_steps() == [2]


@pytest.mark.slow
def test_faults_at_a_tenth_of_the_requests_lose_nothing(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    gcs.rate, gcs.slow_secs = 0.1, 0.3
    ckpt = TorchaxCheckpointer(bucket_run)  # keeps the latest three
    durable = []
    for step in (1, 2, 3):
        # A write whose answer was lost is sent again, and may find itself there: that save fails,
        # with an error, and is no step. What fails after the commit says that the step is durable.
        try:
            save(ckpt, step)
            durable.append(step)
        except SaveError as error:
            durable += [step] if "is durable" in str(error) else []
    assert durable
    assert set(durable) <= set(ckpt.all_steps())
    for step in ckpt.all_steps():
        assert_trees_identical(ckpt.load(step), state(step))
    with contextlib.suppress(SaveError):
        ckpt.close()
    assert sum(gcs.counts[kind] for kind in gcs_proxy.KINDS) > 5


@pytest.mark.slow
def test_an_outage_in_the_middle_of_a_save_is_sat_out(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1)
        gcs.is_out = "refuse"
        threading.Timer(4, gcs.calm).start()
        began = time.monotonic()
        save(ckpt, 2)
        assert time.monotonic() - began > 4
    assert_trees_identical(ckpt.load(2), state(2))


@pytest.mark.slow
def test_past_the_limit_a_save_fails_clearly_and_saving_resumes(
    gcs: gcs_proxy.FaultProxy,
    bucket_run: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    give_up_soon(monkeypatch)
    ckpt = TorchaxCheckpointer(bucket_run)
    save(ckpt, 1)
    for step, outage in ((2, "refuse"), (3, "down")):
        gcs.is_out = outage
        assert ckpt.save(step, state=state(step), force=True)  # training goes on
        with pytest.raises(SaveError, match=rf"(?s)saving step {step} .*check the network"):
            ckpt.wait_until_finished()
        with pytest.raises(DirectoryError, match="cannot read gs://.*check the network"):
            ckpt.latest_step()
        with pytest.raises(DirectoryError, match=r"cannot be listed.*check the network"):
            TorchaxCheckpointer(bucket_run)
        gcs.calm()
        with caplog.at_level(logging.WARNING, logger="torchax_ckpt"):
            save(ckpt, step)
        assert "works again after 1 failed save" in caplog.text
    ckpt.close()
    assert names(gcs, bucket_run) == {"1", "2", "3"}
    assert_trees_identical(ckpt.load(2), state(2))


@pytest.mark.slow
def test_a_step_that_got_its_mark_although_its_save_failed_is_taken_back(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(monkeypatch)
    prefix = bucket_run.removeprefix("gs://bucket/")
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1)
        for step, outage in ((2, ""), (3, "refuse")):
            mark = f"{prefix}/{step}/commit_success.txt"

            def lose_answer(request: str, mark: str = mark, outage: str = outage) -> None:
                if gcs.server.names(mark):  # what is done about it may fail as well
                    gcs.is_out, gcs.concerned = outage, gcs.concerned * (not outage)

            gcs.rate, gcs.kinds, gcs.concerned = 1, ("reset after",), f"POST .*{mark}.*upload_id"
            gcs.hook = lose_answer
            with pytest.raises(SaveError, match=f"saving step {step}"):
                save(ckpt, step)
            gcs.calm()
            assert bool(gcs.server.names(mark)) == bool(outage)
            assert ckpt.all_steps() == [1]
        assert TorchaxCheckpointer(bucket_run).all_steps() == [1, 3]  # by a restart before
        save(ckpt, 4)
        assert ckpt.all_steps() == [1, 4]
    for step in (2, 3):
        assert gcs.server.names(f"{prefix}/{step}/") == [f"{prefix}/{step}/begun"]


@pytest.mark.slow
def test_arrays_that_cannot_be_read_now_are_given_up_with_a_clear_error(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1)
    for retries in (1, 2):
        monkeypatch.setattr(location, "_RETRIES", retries)
        gcs.counts.clear()
        gcs.is_out, gcs.concerned = "refuse", "%2Fstate%2Fd%2F"
        message = f"cannot be read now.*All {retries} retry attempts failed.*check the network"
        with pytest.raises(DirectoryError, match=message):
            ckpt.load(1)
        requests = len(gcs.server.names(f"{bucket_run.removeprefix('gs://bucket/')}/1/state/d/"))
        assert gcs.counts["refuse"] == (retries + 1) * requests
        gcs.calm()
    assert_trees_identical(ckpt.load(1), state(1))


@pytest.mark.slow
def test_a_step_that_the_network_hides_is_not_passed_over(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(monkeypatch)
    model = torch.nn.Linear(2, 2).to("jax")
    with TorchaxCheckpointer(bucket_run) as ckpt:
        ckpt.attach(model)
        for step in (1, 2):
            ckpt.save(step, force=True)
    for part in ("2%2F_CHECKPOINT_METADATA", "2%2Fcommit_success", "2%2Fsummary", "2%2Fmanifest"):
        reader = TorchaxCheckpointer(bucket_run)
        gcs.is_out, gcs.concerned = "refuse", part
        with pytest.raises(DirectoryError, match="check the network"):
            reader.attach(model)
        gcs.calm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("bucket", r"there is no bucket 'other'.*buckets create gs://other"),
        ("credentials", r"cannot be listed.*gcloud auth application-default login"),
        ("reading", r"cannot be listed.*roles/storage.objectUser"),
        ("writing", r"lacks storage.objects.create, storage.objects.delete.*read_only=True"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused_at_construction(
    missing: str, message: str, gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    with TorchaxCheckpointer(bucket_run) as ckpt:
        save(ckpt, 1)
    gcs.needs_credentials = missing == "credentials"
    gcs.allows_reads = missing != "reading"
    gcs.allows_writes = missing != "writing"
    run = "gs://other/run" if missing == "bucket" else bucket_run
    began = time.monotonic()
    with pytest.raises(DirectoryError, match=message):
        TorchaxCheckpointer(run)
    assert time.monotonic() - began < 30
    if missing == "writing":
        reader = TorchaxCheckpointer(run, options=CheckpointOptions(read_only=True))
        assert_trees_identical(reader.load(), state(1))
        with pytest.raises(DirectoryError, match="cannot be written: .*read_only=True"):
            reader.save(2, state=state(2))
        with pytest.raises(DirectoryError, match="cannot be written: .*read_only=True"):
            reader.delete(1)


@pytest.mark.parametrize("url", ["s3://bucket/run", "az://x/run", "gcs://x/run", "ftp://x/run"])
def test_other_schemes_are_refused_with_what_is_supported(url: str) -> None:
    with pytest.raises(DirectoryError, match=r"not supported\. Give a local path.*gs://"):
        TorchaxCheckpointer(url)


KILLED = """
    import sys
    import torchax
    torchax.enable_globally()
    from support.steps import save
    from torchax_ckpt import TorchaxCheckpointer
    with TorchaxCheckpointer(sys.argv[1]) as ckpt:
        for step in range(1, 9):
            save(ckpt, step)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_saves_loses_at_most_that_save(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    killed_before_the_commit(gcs, KILLED, bucket_run, 2, [ROOT, ROOT / "tests"])
    assert "2" in names(gcs, bucket_run)
    with TorchaxCheckpointer(bucket_run) as ckpt:
        assert ckpt.all_steps() == [1]
        assert_trees_identical(ckpt.load(), state(1), shardings=False)
        save(ckpt, 3)
    prefix = bucket_run.removeprefix("gs://bucket/")
    assert gcs.server.names(f"{prefix}/2/") == [f"{prefix}/2/begun"]
    assert names(gcs, bucket_run) == {"1", "2", "3"}


@pytest.mark.slow
def test_a_run_on_a_bucket_is_named_anew_and_what_missed_it_does_not_count(
    bucket_run: str, tmp_path: Path, gcs: gcs_proxy.FaultProxy
) -> None:
    for ramdisk, steps, there in (
        ("here", (1, 2, 3), []),
        ("here", (4,), [1, 2, 3]),
        ("elsewhere", (2,), [1]),
        ("here", (), [1]),
        ("elsewhere", (), [1, 2]),
    ):
        with two_tiers(bucket_run, tmp_path / ramdisk, durable=(1,), keep=2) as ckpt:
            assert ckpt.all_steps() == there
            for step in steps:
                assert ckpt.save(step, state=state(step))
                ckpt.wait_until_finished()
    with TorchaxCheckpointer(bucket_run) as alone:
        save(alone, 5)
    with two_tiers(bucket_run, tmp_path / "elsewhere", durable=(1,), keep=2) as ckpt:
        assert ckpt.all_steps() == [1, 5]


# --- who writes ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("gcs")
def test_of_two_that_saw_the_same_record_one_replaces_it(bucket_run: str) -> None:
    record = record_at(f"{bucket_run}/record")
    assert record.read() is None
    first = record.swap(None, b"1")
    with pytest.raises(Conflict):
        record.swap(None, b"2")
    second = record.swap(first, b"2")
    with pytest.raises(Conflict):
        record.swap(first, b"3")
    record.remove(first)
    assert record.read() == second
    assert record.swap(first, b"2") == second  # sent again after its answer was lost
    record.remove(second)
    assert record.read() is None


@pytest.mark.slow
@pytest.mark.usefixtures("gcs")
def test_a_lost_lease_commits_nothing_and_one_of_a_dead_host_is_taken_over(
    bucket_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = TorchaxCheckpointer(bucket_run), TorchaxCheckpointer(bucket_run)
    save(first, 1)
    with pytest.raises(LeaseError, match="this very process"):
        second.save(2, state=state(2), force=True)
    first._directory._lease.renew()
    lease = epath.Path(bucket_run) / "lease"
    other = LeaseHolder("t", "tpu-vm-7", 4711, "another kernel", 1, 0.0, time.time())
    write = array_writer.write_arrays

    def lose(*args: Any, **kwargs: Any) -> Any:
        lease.write_bytes(other.to_bytes())
        return write(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(array_writer, "write_arrays", lose)
        with pytest.raises(SaveError, match="held by host tpu-vm-7"):
            save(first, 2)
        assert (epath.Path(bucket_run) / "2" / "state").exists()
        assert first.all_steps() == [1]
        with pytest.raises(LeaseError):
            first.save(3, state=state(3), force=True)
    with pytest.raises(SaveError):
        first.close()
    second.close()
    lease.write_bytes(dataclasses.replace(other, renewed_secs=time.time() - 58).to_bytes())
    with TorchaxCheckpointer(bucket_run) as third:
        began = time.monotonic()
        save(third, 2)
        assert time.monotonic() - began < 40
        assert third.all_steps() == [1, 2]
    assert not lease.exists()
