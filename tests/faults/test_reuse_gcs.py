"""Unchanged arrays in a bucket: the service copies them, no client uploads them again."""

from __future__ import annotations

import itertools
import logging
import os
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import gcs_proxy
import numpy as np
import pytest
import torch
from etils import epath
from support.buckets import give_up_soon, killed_before_the_commit
from support.linked import by_orbax
from support.models import Tuned

from torchax_ckpt import (
    CheckpointOptions,
    Event,
    LocalTier,
    TorchaxCheckpointer,
    policies,
    torchax_backend,
)
from torchax_ckpt.errors import CorruptCheckpointError, SaveError
from torchax_ckpt.storage.medium import bucket
from torchax_ckpt.storage.writing import databases

pytest_plugins = ("gcs_fixtures",)
ROOT = Path(__file__).parent.parent.parent
REUSE = CheckpointOptions(reuse=True)
ALL = {"preservation_policy": policies.PreserveAll()}


def train(ckpt: TorchaxCheckpointer, model: Tuned, *steps: int) -> None:
    for step in steps:
        with torch.no_grad():
            model.head.weight.add_(step)
        assert ckpt.save(step, force=True)
        ckpt.wait_until_finished()


def assert_holds(run: str, step: int, model: Tuned) -> None:
    """Asserts that bare Orbax reads what the model holds."""
    buffers = {n: torchax_backend.buffer(p) for n, p in model.named_parameters()}
    expected = {f"model/{n}": np.asarray(a).tobytes() for n, a in buffers.items()}
    for arrays in by_orbax(epath.Path(run), step):
        assert {name: arrays[name].tobytes() for name in expected} == expected


def remove(run: str, *steps: int) -> None:
    for step in steps:
        bucket.remove(epath.Path(run) / str(step))


def stored(gcs: gcs_proxy.FaultProxy, run: str, step: int) -> dict[str, str]:
    """The objects of a step's databases of unchanged arrays, and their generations."""
    prefix = run.removeprefix("gs://bucket/") + f"/{step}/state/ocdbt.process_unchanged"
    storage = gcs.server.storage
    return {n: storage.get_file_obj("bucket", n)["generation"] for n in gcs.server.names(prefix)}


def test_what_does_not_change_is_uploaded_once_and_every_step_is_complete_by_itself(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    model = Tuned(1024).to("jax")
    trained = sum(p.nbytes for p in model.head.parameters())
    uploaded = []
    events: list[Event] = []
    with TorchaxCheckpointer(bucket_run, options=REUSE, on_event=events.append, **ALL) as ckpt:
        ckpt.attach(model)
        for step in range(1, 5):
            before = gcs.uploaded_bytes
            train(ckpt, model, step)
            uploaded.append(gcs.uploaded_bytes - before)
    assert uploaded[0] > 2 * trained
    assert max(uploaded[1:]) < 1.05 * trained
    durable = [event.values for event in events if event.name == "durable"]
    copied = [values["num_bytes"] - values["new_bytes"] for values in durable]
    assert [nbytes > trained for nbytes in copied] == [False, True, True, True]
    sizes = [values["num_bytes"] for values in durable]
    assert [values["total_bytes"] for values in durable] == [*itertools.accumulate(sizes)]
    assert not any(stored(gcs, bucket_run, 4).items() & stored(gcs, bucket_run, 3).items())
    remove(bucket_run, 1, 2, 3)
    assert_holds(bucket_run, 4, model)


def test_host_leaves_that_do_not_change_are_copied_by_the_service(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    """The leaf that changes in place is uploaded again."""
    table = np.random.default_rng(0).random((1 << 15, 8), np.float32)
    unchanged = table.copy()
    uploaded = []
    with TorchaxCheckpointer(bucket_run, options=REUSE, **ALL) as ckpt:
        for step in range(1, 8):
            before = gcs.uploaded_bytes
            if step == 7:
                table[0, 0] += 1
            ckpt.save(step, state={"table": table}, force=True)
            ckpt.wait_until_finished()
            uploaded.append(gcs.uploaded_bytes - before)
    assert max(uploaded[3:6]) < table.nbytes / 10
    assert min(*uploaded[:3], uploaded[6]) > table.nbytes / 2
    remove(bucket_run, 1, 2, 3, 4, 5)
    for step, expected in ((6, unchanged), (7, table)):
        for arrays in by_orbax(epath.Path(bucket_run), step):
            assert arrays["state/table"].tobytes() == expected.tobytes()


def test_a_copy_survives_refusals_lost_answers_and_tokens(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request meets a fault once; the last request of each object meets another one."""
    filesystem, source = fsspec.filesystem("gcs", finalize_on_close=True), f"{bucket_run}/a"
    content = {f"d/{i}": os.urandom(1000) for i in range(4)}
    for name, octets in content.items():
        filesystem.pipe_file(f"{source}/{name}", octets)
    copies: dict[str, list[str]] = {name: [] for name in content}

    def draw(request: str) -> str:
        match = re.search("/a/(d/.)/rewriteTo/", urllib.parse.unquote(request))
        if match is None or request in copies[match[1]]:
            return ""
        copies[match[1]].append(request)
        kinds = ("503", "reset", "reset after", "truncated")
        return kinds[(int(match[1][-1]) + len(copies[match[1]])) % len(kinds)]

    monkeypatch.setattr(gcs, "draw", draw)
    give_up_soon(monkeypatch)
    gcs.server.storage.rewrite_bytes = 300
    bucket.copy(epath.Path(source), epath.Path(f"{bucket_run}/b"))
    for requests in copies.values():
        assert ["rewriteToken=" in request for request in requests] == [False, True, True, True]
        for request in requests:
            assert re.search(r"ifSourceGenerationMatch=\d+&ifGenerationMatch=0", request)
    for name, octets in content.items():
        assert filesystem.cat_file(f"{bucket_run}/b/{name}") == octets


@pytest.mark.parametrize("what", ["replaced", "removed", "another there", "nothing there"])
def test_only_what_was_listed_is_copied_and_nothing_is_replaced(
    what: str, gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
    source, target = (epath.Path(f"{bucket_run}/{name}") for name in "ab")
    if what != "nothing there":
        filesystem.pipe_file(f"{source}/x", b"listed")
    if what == "another there":
        filesystem.pipe_file(f"{target}/x", b"other!")

    def meanwhile(request: str) -> None:
        if "/rewriteTo/" in request and what == "replaced":
            filesystem.pipe_file(f"{source}/x", b"newer")
        elif "/rewriteTo/" in request and what == "removed":
            filesystem.rm_file(f"{source}/x")

    gcs.hook = meanwhile
    with pytest.raises(OSError):  # noqa: PT011  (of three kinds)
        bucket.copy(source, target)
    gcs.hook = None
    there = f"{target}/x"
    assert (filesystem.cat_file(there) if filesystem.exists(there) else None) == (
        b"other!" if what == "another there" else None
    )


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_keeps_one_step_copies_from_it(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    """Also after a restart; nothing is kept beside the steps."""
    latest = {"preservation_policy": policies.LatestN(1)}
    model = Tuned(1024).to("jax")
    trained = sum(p.nbytes for p in model.head.parameters())
    for steps in ((1, 2, 3), (4, 5)):
        with TorchaxCheckpointer(bucket_run, options=REUSE, **latest) as ckpt:
            assert ckpt.attach(model) == steps[0] - 1
            for step in steps:
                before = gcs.uploaded_bytes
                train(ckpt, model, step)
                assert (gcs.uploaded_bytes - before < 1.05 * trained) == (step > 1)
    assert_holds(bucket_run, 5, model)
    assert gcs.server.names(f"{bucket_run.removeprefix('gs://bucket/')}/unchanged") == []


@pytest.mark.slow
def test_a_run_that_goes_on_from_a_local_step_uploads_everything_once(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, tmp_path: Path
) -> None:
    """It has compared no step of the bucket."""
    trained = sum(p.nbytes for p in Tuned(1024).head.parameters())
    uploaded: dict[int, int] = {}
    for last in (6, 9):
        model = Tuned(1024).to("jax")
        local = LocalTier(
            tmp_path / "ramdisk", save_decision_policy=policies.FixedIntervalPolicy(1)
        )
        odd = policies.SpecificStepsPolicy((1, 3, 5, 7, 9))
        with TorchaxCheckpointer(
            bucket_run, save_decision_policy=odd, local=local, options=REUSE, **ALL
        ) as ckpt:
            for step in range(ckpt.attach(model) + 1, last + 1):
                before = gcs.uploaded_bytes
                with torch.no_grad():
                    model.head.weight.add_(step)
                assert ckpt.save(step)
                ckpt.wait_until_finished()
                uploaded[step] = gcs.uploaded_bytes - before
    assert [*uploaded] == [*range(1, 10)]
    assert min(uploaded[1], uploaded[7]) > 2 * trained
    assert max(uploaded[3], uploaded[5], uploaded[9]) < 1.05 * trained
    remove(bucket_run, 3, 5, 7)
    assert_holds(bucket_run, 9, model)


@pytest.mark.long
@pytest.mark.slow
def test_what_was_deleted_under_the_hands_is_written_in_full(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tuned(1024).to("jax")
    with TorchaxCheckpointer(bucket_run, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2, 3)
        for name in stored(gcs, bucket_run, 3):
            gcs.server.storage.delete_file("bucket", name)
        with caplog.at_level(logging.WARNING, "torchax_ckpt"):
            train(ckpt, model, 4, 5, 6)
    assert caplog.text.count(": the unchanged arrays are written again") == 1
    assert "/3/state/ocdbt.process_unchanged0 is gone" in caplog.text
    remove(bucket_run, 1, 2, 3, 4, 5)
    assert_holds(bucket_run, 6, model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "is gone"),
        (lambda content: b"0", "has 1 bytes in place of "),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "has CRC32C "),
    ],
    ids=["lost", "resized", "flipped"],
)
def test_a_lost_or_changed_object_is_noticed_by_the_save_that_would_copy_it(
    change: Callable[[bytes], bytes] | None,
    said: str,
    gcs: gcs_proxy.FaultProxy,
    bucket_run: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An object of array data, while the index of its database is still there."""
    model, storage = Tuned(1024).to("jax"), gcs.server.storage
    trained = sum(p.nbytes for p in model.head.parameters())
    with TorchaxCheckpointer(bucket_run, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2)
        (lost,) = (name for name in stored(gcs, bucket_run, 2) if "/d/" in name)
        filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
        content = filesystem.cat_file(f"bucket/{lost}")
        storage.delete_file("bucket", lost)
        if change is not None:
            filesystem.pipe_file(f"bucket/{lost}", change(content))
        before = gcs.uploaded_bytes
        with caplog.at_level(logging.WARNING, "torchax_ckpt"):
            train(ckpt, model, 3)
        assert gcs.uploaded_bytes - before > 2 * trained
        ckpt.verify(3)
    assert caplog.text.count(": the unchanged arrays are written again") == 1
    assert f"{bucket_run.removeprefix('gs://bucket/')}/2/state/" in lost
    assert f"gs://bucket/{lost} {said}" in caplog.text
    assert_holds(bucket_run, 3, model)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_damage_that_was_found_in_any_step_makes_the_next_save_upload_everything(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    """An older step's object: those copied from it later may be damaged too."""
    model, uploaded = Tuned(1024).to("jax"), []
    trained = sum(p.nbytes for p in model.head.parameters())
    with TorchaxCheckpointer(bucket_run, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2)
        (name,) = (name for name in stored(gcs, bucket_run, 1) if "/d/" in name)
        filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
        content = bytearray(filesystem.cat_file(f"bucket/{name}"))
        content[len(content) // 2] ^= 1
        filesystem.pipe_file(f"bucket/{name}", bytes(content))
        with pytest.raises(CorruptCheckpointError):
            ckpt.verify(1)
        for step in (3, 4):
            before = gcs.uploaded_bytes
            train(ckpt, model, step)
            uploaded.append(gcs.uploaded_bytes - before)
    assert uploaded[0] > 2 * trained
    assert uploaded[1] < 1.05 * trained


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_step_with_an_object_of_another_size_is_not_committed(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is replaced after the save has looked for it, and before it is copied."""
    model, differing = Tuned(1024).to("jax"), databases.differing

    def replaced(known: Any, here: Any) -> list[str]:
        found = [*differing(known, here)]
        (name,) = (name for name in stored(gcs, bucket_run, 2) if "/d/" in name)
        filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
        filesystem.pipe_file(f"bucket/{name}", filesystem.cat_file(f"bucket/{name}") + b"0")
        return found

    with TorchaxCheckpointer(bucket_run, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2)
        monkeypatch.setattr(databases, "differing", replaced)
        with pytest.raises(SaveError, match="bytes in place of .* before the step was committed"):
            train(ckpt, model, 3)
        assert ckpt.all_steps() == [1, 2]
        with TorchaxCheckpointer(bucket_run, options=CheckpointOptions(read_only=True)) as reader:
            assert reader.all_steps() == [1, 2]
        monkeypatch.setattr(databases, "differing", differing)
        train(ckpt, model, 4)
        assert ckpt.all_steps() == [1, 2, 4]


@pytest.mark.slow
def test_a_copy_that_fails_costs_one_save(gcs: gcs_proxy.FaultProxy, bucket_run: str) -> None:
    """The objects go after the save has looked for them."""
    model = Tuned(1024).to("jax")
    with TorchaxCheckpointer(bucket_run, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2)

        def delete(request: str) -> None:
            if "/rewriteTo/" in request:
                for name in stored(gcs, bucket_run, 2):
                    gcs.server.storage.delete_file("bucket", name)

        gcs.hook = delete
        with pytest.raises(SaveError, match=r"saving step 3 .*next save tries again"):
            train(ckpt, model, 3)
        train(ckpt, model, 4)
        gcs.hook = None
        assert ckpt.all_steps() == [1, 2, 4]
        ckpt.verify(4)


@pytest.mark.long
@pytest.mark.slow
def test_a_bucket_that_refuses_every_copy_fails_fewer_and_fewer_saves(
    gcs: gcs_proxy.FaultProxy,
    bucket_run: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    give_up_soon(monkeypatch)
    model = Tuned(1024).to("jax")
    with TorchaxCheckpointer(bucket_run, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2)
        gcs.rate, gcs.kinds, gcs.concerned = 1, ("503",), "rewriteTo"
        failed = []
        for step in range(3, 10):
            try:
                train(ckpt, model, step)
            except SaveError:
                failed.append(step)
        gcs.calm()
        assert failed == [3, 6]
        assert ckpt.all_steps() == [1, 2, 4, 5, 7, 8, 9]
        ckpt.verify(9)
    said = [re.findall(r"the next (\d+) saves write all", text) for text in caplog.messages]
    assert [int(number) for numbers in said for number in numbers] == [2, 4]


KILLED = """
    import sys
    import torchax
    torchax.enable_globally()
    from test_reuse_gcs import ALL, REUSE, TorchaxCheckpointer, Tuned, train
    with TorchaxCheckpointer(sys.argv[1], options=REUSE, **ALL) as ckpt:
        model = Tuned(1024).to("jax")
        ckpt.attach(model)
        train(ckpt, model, 1, 2, 3)
"""


@pytest.mark.slow
def test_a_save_killed_between_its_copies_and_its_commit_is_no_step(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    folders = [ROOT, ROOT / "tests", ROOT / "tests" / "faults"]
    killed_before_the_commit(gcs, KILLED, bucket_run, 3, folders)
    assert stored(gcs, bucket_run, 3)
    model = Tuned(1024).to("jax")
    with TorchaxCheckpointer(bucket_run, options=REUSE, **ALL) as ckpt:
        assert ckpt.attach(model) == 2
        train(ckpt, model, 4)
        assert ckpt.all_steps() == [1, 2, 4]
    assert not stored(gcs, bucket_run, 3)
    assert len(stored(gcs, bucket_run, 4)) == len(stored(gcs, bucket_run, 2))
    assert_holds(bucket_run, 4, model)
