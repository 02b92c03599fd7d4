"""gs://: save, prune, resume, reshard, go back; faults, outages, refusals; who writes."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import re
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import numpy as np
import pytest
import torch
from etils import epath
from etils.epath import backend
from gcs_server import Emulator, FaultyServer
from gcsfs.extended_gcsfs import BucketType, ExtendedGcsFileSystem
from google.api_core import exceptions
from support import commands
from support.compare import assert_trees_identical
from support.processes import Started
from support.stages import at
from support.steps import save, state
from support.waiting import wait_until

from torchax_ckpt import (
    CheckpointOptions,
    TorchaxCheckpointer,
    load_torch_state_dict,
    policies,
)
from torchax_ckpt.errors import DirectoryError, LeaseError, SaveError, StepNotFoundError
from torchax_ckpt.storage.arrays import tensorstore_context
from torchax_ckpt.storage.directory.lease import LeaseHolder
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import bucket
from torchax_ckpt.storage.medium.bucket_medium import BucketMedium
from torchax_ckpt.stored.copy import copy_steps

pytest_plugins = ("gcs_fixtures",)


def names(gcs: FaultyServer, run: str) -> set[str]:
    """What is right under the run's prefix."""
    return {name.split("/")[0] for name in gcs.names(run)} - {"lease", "events"}


def leave(gcs: FaultyServer, run: str, step: int, as_names: Sequence[str]) -> None:
    """Copies a step without its mark, as killed saves and moves leave it."""
    there = [name for name in gcs.names(f"{run}/{step}") if name != "commit_success.txt"]
    for left in as_names:
        bucket.copy(epath.Path(run) / str(step), epath.Path(run) / left, there)


def hold_back(
    gcs: FaultyServer, monkeypatch: pytest.MonkeyPatch, pattern: str, fails: bool = False
) -> Callable[[], None]:
    """Holds the first such request back until the result is called; may fail all later writes."""
    filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
    monkeypatch.setattr(filesystem, "requests_timeout", aiohttp.ClientTimeout(sock_read=2))
    late: list[threading.Thread] = []
    now = threading.Event()

    def hold(request: str) -> None:
        if re.search(pattern, request) and not late:
            late.append(threading.current_thread())
            gcs.allows_writes = not fails
            now.wait(60)

    def carry_out() -> None:
        now.set()
        (thread,) = late
        thread.join()

    gcs.hook = hold
    return carry_out


def write_at_a_delete(gcs: FaultyServer, new: str, *changed: str) -> None:
    """Writes an object, and others anew, when the first delete arrives."""

    def write(request: str) -> None:
        if request.startswith("DELETE") and new not in gcs.store.names():
            for name in (new, *changed):
                gcs.store.put(name, b"new")

    gcs.hook = write


def test_a_save_goes_on_if_only_the_answer_to_its_first_commit_was_lost(
    gcs: FaultyServer, url: str
) -> None:
    commits: list[str] = []

    def count(request: str) -> None:
        if re.search(gcs.concerned, request):
            commits.append(request)
            gcs.rate = 1.0 if len(commits) == 1 else 0.0

    gcs.kinds, gcs.concerned = ("reset after",), r"^POST .*ocdbt\.process_0%2Fmanifest\.ocdbt"
    gcs.hook = count
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 1)
    assert len(commits) > 1  # it was sent again
    assert gcs.counts["reset after"] == 1
    assert_trees_identical(ckpt.load(1), state(1))


@pytest.mark.slow
def test_what_a_killed_save_or_move_leaves_is_no_step_and_goes_with_the_next_save(
    gcs: FaultyServer, url: str
) -> None:
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 1, 2)
    leave(gcs, url, 2, as_names=("9", "incoming-6", "abandoned-5-2"))
    # The mark of a save that was given up and removed is carried out late.
    (epath.Path(url) / "incoming-2" / "commit_success.txt").write_text("committed")
    assert {"9", "incoming-6", "incoming-2", "abandoned-5-2"} < names(gcs, url)
    with TorchaxCheckpointer(url) as ckpt:
        assert ckpt.all_steps() == [1, 2]
        assert_trees_identical(ckpt.load(2), state(2))
        save(ckpt, 8)
    # Whoever began these may only be stalled: nobody is to use the names again.
    assert names(gcs, url) == {"1", "2", "9", "8", "incoming-6", "incoming-2"}
    for name in ("9", "incoming-6"):
        assert gcs.names(f"{url}/{name}") == ["begun"]
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 9)
        assert ckpt.all_steps() == [2, 8, 9]
    assert "incoming-9" in names(gcs, url)


@pytest.mark.slow
@pytest.mark.usefixtures("gcs")
def test_a_save_removes_no_folder_of_a_user_and_proves_where_its_arrays_lie(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = "2024/assets/logo.png", "2024/state/notes", "2024/orbax.checkpoint", "abandoned-7/x"
    notes = [epath.Path(url) / name for name in (*theirs, "5/notes.txt")]
    for path in notes:
        path.write_text(str(path))
    with TorchaxCheckpointer(url, preservation_policy=policies.LatestN(1)) as ckpt:
        with monkeypatch.context() as context:
            kvstore = BucketMedium.kvstore
            elsewhere = lambda self, at: {**kvstore(self, at), "path": "elsewhere/"}  # noqa: E731
            context.setattr(BucketMedium, "kvstore", elsewhere)
            with pytest.raises(SaveError, match=r"expected the database.*found none"):
                save(ckpt, 1)
        assert ckpt.all_steps() == []
        save(ckpt, 4, 5, 6)
        assert ckpt.all_steps() == [6]
    assert [path.read_text() for path in notes] == [str(path) for path in notes]


@pytest.mark.slow
def test_a_delete_that_is_carried_out_late_spares_what_was_written_since(
    gcs: FaultyServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 1)
    leave(gcs, url, 1, as_names=("2",))
    carry_out = hold_back(gcs, monkeypatch, r"^DELETE.*2%2Fmanifest%2Fdata\.json")
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 2)
        carry_out()
    assert_trees_identical(ckpt.load(2), state(2))


def test_a_refused_delete_spares_what_was_written_since_the_listing(
    gcs: FaultyServer, url: str
) -> None:
    filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
    prefix = url.removeprefix("gs://bucket/")
    for name in ("a", "b/changed", "b/c"):
        filesystem.pipe_file(f"{url}/{name}", b"old")
    changed = f"{prefix}/b/changed"
    write_at_a_delete(gcs, f"{prefix}/b/new", changed)
    bucket.remove(epath.Path(url))
    gcs.hook = None
    assert gcs.names(url) == ["b/changed", "b/new"]
    assert filesystem.cat_file(f"{url}/b/changed") == b"new"
    bucket.remove(epath.Path(url))
    assert gcs.names(url) == []


def with_layouts(gcs: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has buckets read through a filesystem that knows their layouts, which is returned."""
    filesystem = ExtendedGcsFileSystem(
        endpoint_url=gcs.url, token="anon", finalize_on_close=True, skip_instance_cache=True
    )
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: filesystem)
    return filesystem


class FoldersOfTheService:
    """Folder resources of a hierarchical namespace, as the storage control API serves them."""

    def __init__(self, store: Emulator, folders: Sequence[str]) -> None:
        self.store = store
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
        if inside or self.store.names(f"{folder}/"):
            raise exceptions.FailedPrecondition(f"{folder} is not empty")
        self.folders.remove(folder)


def test_only_empty_folders_of_a_hierarchical_namespace_go_with_their_objects(
    gcs: FaultyServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = url.removeprefix("gs://bucket/")
    folders = (f"{prefix}/1", f"{prefix}/1/empty", f"{prefix}/1/a", f"{prefix}/1/a/b", f"{prefix}")
    service = FoldersOfTheService(gcs.store, folders)
    filesystem = with_layouts(gcs, monkeypatch)
    filesystem._storage_layout_cache["bucket"] = BucketType.HIERARCHICAL
    filesystem._storage_control_client = service
    plain = fsspec.filesystem("gcs")
    for name in ("1/x", "1/a/b/y"):
        plain.pipe_file(f"{url}/{name}", b"old")
    write_at_a_delete(gcs, f"{prefix}/1/a/new")
    bucket.remove(epath.Path(f"{url}/1"))
    gcs.hook = None
    assert gcs.names(url) == ["1/a/new"]
    assert service.folders == {prefix, f"{prefix}/1", f"{prefix}/1/a"}
    bucket.remove(epath.Path(f"{url}/1"))
    assert gcs.names(url) == []
    assert service.folders == {prefix}


@pytest.mark.slow
def test_an_account_that_may_only_use_objects_saves_to_an_empty_bucket_and_resumes(
    gcs: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = with_layouts(gcs, monkeypatch)
    # The second run has a bucket to itself.
    for run, last in (("gs://empty/run", 2), ("gs://bare", 1)):
        bucket_name = run.split("/")[2]
        filesystem._storage_layout_cache[bucket_name] = BucketType.NON_HIERARCHICAL
        gcs.store.create_bucket(bucket_name, {"name": bucket_name})
        model = torch.nn.Linear(2, 2).to("jax")
        with TorchaxCheckpointer(run) as ckpt:
            ckpt.attach(model)
            ckpt.save(1, force=True)
            if last > 1:
                ckpt.save(2, force=True)
                ckpt.restore(1)
                ckpt.save(2, force=True)
                ckpt.delete(1)
        with TorchaxCheckpointer(run) as ckpt:
            assert ckpt.attach(torch.nn.Linear(2, 2).to("jax")) == last


@pytest.mark.slow
def test_a_write_of_a_failed_save_that_is_carried_out_late_spares_the_step_when_saved_anew(
    gcs: FaultyServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 1)
        request = r"/2/manifest/data\.json.*upload_id"
        carry_out = hold_back(gcs, monkeypatch, request, fails=True)
        ckpt.save(2, state=state(7), metrics={"loss": 7}, force=True)
        with pytest.raises(SaveError, match="saving step 2"):
            ckpt.wait_until_finished()
        gcs.allows_writes = True
        save(ckpt, 2)
        carry_out()
        assert_trees_identical(ckpt.load(2), state(2))
    assert_trees_identical(TorchaxCheckpointer(url).load(2), state(2))


def test_settings_that_the_program_shares_are_as_before_once_nobody_needs_them(
    gcs: FaultyServer, url: str
) -> None:
    gc.collect()  # those of earlier tests
    filesystem = fsspec.filesystem("gcs", finalize_on_close=True)

    def settings() -> list[Any]:
        instances = dict(type(filesystem)._cache)
        cache = filesystem.dircache.use_listings_cache
        return [dict(os.environ), instances, cache, filesystem.requests_timeout]

    before = settings()
    with TorchaxCheckpointer(url) as ckpt:
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
def test_an_outage_in_the_middle_of_a_save_is_sat_out(gcs: FaultyServer, url: str) -> None:
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 1)
        gcs.is_out = "refuse"
        threading.Timer(4, gcs.calm).start()
        began = time.monotonic()
        save(ckpt, 2)
        assert time.monotonic() - began > 4
    assert_trees_identical(ckpt.load(2), state(2))


@pytest.mark.slow
@pytest.mark.usefixtures("give_up_soon")
def test_past_the_limit_a_save_fails_clearly_and_saving_resumes(
    gcs: FaultyServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = TorchaxCheckpointer(url)
    save(ckpt, 1)
    for step, outage in ((2, "refuse"), (3, "down")):
        gcs.is_out = outage
        assert ckpt.save(step, state=state(step), force=True)  # training goes on
        with pytest.raises(SaveError, match=rf"(?s)saving step {step} .*check the network"):
            ckpt.wait_until_finished()
        with pytest.raises(DirectoryError, match="cannot read gs://.*check the network"):
            ckpt.latest_step()
        with pytest.raises(DirectoryError, match=r"cannot be listed.*check the network"):
            TorchaxCheckpointer(url)
        gcs.calm()
        with caplog.at_level(logging.INFO, logger="torchax_ckpt"):
            save(ckpt, step)
        assert "works again after 1 failed save" in caplog.text
    ckpt.close()
    assert names(gcs, url) == {"1", "2", "3"}
    assert_trees_identical(ckpt.load(2), state(2))


@pytest.mark.slow
@pytest.mark.usefixtures("give_up_soon")
def test_a_step_that_got_its_mark_although_its_save_failed_is_taken_back(
    gcs: FaultyServer, url: str
) -> None:
    prefix = url.removeprefix("gs://bucket/")
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 1)
        for step, outage in ((2, ""), (3, "refuse")):
            mark = f"{prefix}/{step}/commit_success.txt"

            def lose_answer(request: str, mark: str = mark, outage: str = outage) -> None:
                if gcs.store.names(mark):  # what is done about it may fail as well
                    gcs.is_out, gcs.concerned = outage, gcs.concerned * (not outage)

            gcs.rate, gcs.kinds, gcs.concerned = 1, ("reset after",), f"POST .*{mark}.*upload_id"
            gcs.hook = lose_answer
            with pytest.raises(SaveError, match=f"saving step {step}"):
                save(ckpt, step)
            gcs.calm()
            assert bool(gcs.store.names(mark)) == bool(outage)
            assert ckpt.all_steps() == [1]
        assert TorchaxCheckpointer(url).all_steps() == [1, 3]  # by a restart before
        save(ckpt, 4)
        assert ckpt.all_steps() == [1, 4]
    for step in (2, 3):
        assert gcs.names(f"{url}/{step}") == ["begun"]


@pytest.mark.slow
@pytest.mark.usefixtures("give_up_soon")
def test_what_cannot_be_read_now_is_neither_passed_over_nor_tried_for_ever(
    gcs: FaultyServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 1, 2)
    for part in ("2%2F_CHECKPOINT_METADATA", "2%2Fcommit_success", "2%2Fsummary", "2%2Fmanifest"):
        reader = TorchaxCheckpointer(url)
        gcs.is_out, gcs.concerned = "refuse", part
        with pytest.raises(DirectoryError, match="check the network"):
            reader.attach(torch.nn.Linear(2, 2).to("jax"))
        gcs.calm()
    for retries in (1, 2):
        monkeypatch.setattr(tensorstore_context, "_RETRIES", retries)
        gcs.counts.clear()
        gcs.is_out, gcs.concerned = "refuse", "%2Fstate%2Fd%2F"
        message = f"cannot be read now.*All {retries} retry attempts failed.*check the network"
        with pytest.raises(DirectoryError, match=message):
            ckpt.load(1)
        requests = len(gcs.names(f"{url}/1/state/d"))
        assert gcs.counts["refuse"] == (retries + 1) * requests
        gcs.calm()
    assert_trees_identical(ckpt.load(1), state(1))


UNUSABLE = {
    "bucket": r"there is no bucket 'other'.*buckets create gs://other",
    "credentials": r"cannot be listed.*gcloud auth application-default login",
    "reading": r"cannot be listed.*roles/storage.objectUser",
    "writing": r"lacks storage.objects.create, storage.objects.delete.*read_only=True",
}


@pytest.mark.slow
def test_a_bucket_that_cannot_be_used_is_refused_at_construction(
    gcs: FaultyServer, url: str
) -> None:
    with TorchaxCheckpointer(url) as ckpt:
        save(ckpt, 1)
    for missing, message in UNUSABLE.items():
        gcs.needs_credentials = missing == "credentials"
        gcs.allows_reads = missing != "reading"
        gcs.allows_writes = missing != "writing"
        began = time.monotonic()
        with pytest.raises(DirectoryError, match=message):
            TorchaxCheckpointer("gs://other/run" if missing == "bucket" else url)
        assert time.monotonic() - began < 30
    reader = TorchaxCheckpointer(url, options=CheckpointOptions(read_only=True))
    assert_trees_identical(reader.load(), state(1))
    with pytest.raises(DirectoryError, match="cannot be written: .*read_only=True"):
        reader.save(2, state=state(2))
    with pytest.raises(DirectoryError, match="cannot be written: .*read_only=True"):
        reader.delete(1)


@pytest.mark.slow
@pytest.mark.usefixtures("give_up_soon")
def test_a_failed_copy_raises_its_own_error_and_removes_nothing_of_others(
    gcs: FaultyServer, url: str, tmp_path: Path
) -> None:
    with TorchaxCheckpointer(tmp_path) as ckpt:
        save(ckpt, 1)
    steps = RunDirectory(tmp_path).steps()
    prefix = url.removeprefix("gs://bucket/")

    def fail(changed: str, concerned: str, request: str) -> None:
        if "manifest" in request and not request.startswith("GET"):
            gcs.is_out, gcs.concerned = "refuse", concerned
            write_at_a_delete(gcs, f"{prefix}/new", changed)

    # First one object cannot be written, then nothing works from then on.
    for concerned, run in (("manifest", "spared"), ("", "outage")):
        changed = f"{prefix}/{run}/1/orbax.checkpoint"
        gcs.hook = functools.partial(fail, changed, concerned)
        with pytest.raises(DirectoryError, match=f"cannot copy step 1 to {url}/{run}: .*503"):
            copy_steps(steps, RunDirectory(f"{url}/{run}"))
        gcs.calm()
    assert gcs.names(f"{url}/spared/1") == ["begun", "orbax.checkpoint"]


@pytest.mark.slow
def test_a_step_is_no_run_and_the_constructor_asks_no_more_to_know(
    gcs: FaultyServer, url: str
) -> None:
    with TorchaxCheckpointer(url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state={"p": {"w": np.full(3, step)}}, force=True)
            ckpt.wait_until_finished()
    requests: list[str] = []
    gcs.hook = requests.append
    TorchaxCheckpointer(f"{url}/eval").close()
    assert len(requests) == 5  # as many as before it looked for the files of a step
    for step, said in ((2, "found its step 2"), (7, "found no such step")):
        with pytest.raises(DirectoryError, match=f"{said}; the run is {url}: give this directory"):
            TorchaxCheckpointer(f"{url}/{step}")
    assert (load_torch_state_dict(f"{url}/1", at="state/p")["w"] == 1).all()
    with pytest.raises(StepNotFoundError, match="no checkpoint at step 7; there are: 1, 2"):
        load_torch_state_dict(f"{url}/7", at="state/p")
    said = commands.run("show", f"{url}/2", "--filter", "state/*")
    assert "step 2: 1" in said
    with TorchaxCheckpointer(f"{url}/2/inner") as ckpt:
        ckpt.save(5, state={"n": np.ones(1)}, force=True)
    inner = epath.Path(f"{url}/2/inner/5")
    for name in gcs.names(str(inner)):
        (epath.Path(f"{url}/2/5") / name).write_bytes((inner / name).read_bytes())
    assert commands.run_json("ls", f"{url}/2")["steps"][0]["step"] == 5
    assert (load_torch_state_dict(f"{url}/2", at="state/p")["w"] == 2).all()


# --- who writes ----------------------------------------------------------------------------------


SAVING = """
import sys
import torchax
torchax.enable_globally()
from support.steps import save
from torchax_ckpt import TorchaxCheckpointer
with TorchaxCheckpointer(sys.argv[1]) as ckpt:
    for step in (1, 2, 3):
        save(ckpt, step)
"""


@pytest.mark.slow
def test_a_second_program_is_refused_and_takes_over_at_once_when_the_first_is_killed(
    gcs: FaultyServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def content() -> dict[str, str]:
        """Every object of the run's steps, and which generation of it."""
        found = gcs.store.generations(url.removeprefix("gs://bucket/") + "/").items()
        return {n: of for n, of in found if n.split("/")[1] not in ("lease", "events")}

    arrived, go_on = gcs.pause("/2/manifest/data.json")
    second = TorchaxCheckpointer(url)
    with Started("-c", SAVING, url, devices=1, env=gcs.environment()) as first:
        assert arrived.wait(100)
        seen = None
        while seen != (seen := content()):  # until nothing was written for a second
            time.sleep(1)
        named = f"(?s)another program writes to this directory: .*pid {first.process.pid},"
        for step in (2, 3, 4):
            with pytest.raises(LeaseError, match=named):
                second.save(step, state=state(step), force=True)
        assert content() == seen
        assert_trees_identical(second.load(1), state(1), shardings=False)  # needs no lease
        arrived, never = gcs.pause("/3/manifest/data.json")
        go_on.set()
        assert arrived.wait(60)
    never.set()  # leaving the block has killed the first, in the middle of a save
    with caplog.at_level(logging.INFO, "torchax_ckpt"), TorchaxCheckpointer(url) as late:
        assert late.all_steps() == [1, 2]
        save(late, 3)
        assert second.all_steps() == late.all_steps() == [1, 2, 3]
        for step in (1, 2, 3):
            assert_trees_identical(second.load(step), state(step), shardings=False)
    assert "taking over" in caplog.text
    assert "Waiting to see" not in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("gcs")
def test_a_lost_lease_commits_nothing_and_one_of_a_dead_host_is_taken_over(url: str) -> None:
    first, second = TorchaxCheckpointer(url), TorchaxCheckpointer(url)
    save(first, 1)
    with pytest.raises(LeaseError, match="this very process"):
        second.save(2, state=state(2), force=True)
    first._directory._lease.renew()
    lease = epath.Path(url) / "lease"
    other = LeaseHolder("t", "tpu-vm-7", 4711, "another kernel", 1, 0.0, time.time())
    mend = at("write the arrays", lambda: lease.write_bytes(other.to_bytes()))
    with pytest.raises(SaveError, match="held by host tpu-vm-7"):
        save(first, 2)
    assert (epath.Path(url) / "2" / "state").exists()
    assert first.all_steps() == [1]
    with pytest.raises(LeaseError):
        first.save(3, state=state(3), force=True)
    mend()
    with pytest.raises(SaveError):
        first.close()
    second.close()
    lease.write_bytes(dataclasses.replace(other, renewed_secs=time.time() - 58).to_bytes())
    with TorchaxCheckpointer(url) as third:
        began = time.monotonic()
        save(third, 2)
        assert time.monotonic() - began < 40
        assert third.all_steps() == [1, 2]
    assert not lease.exists()
