"""Frozen arrays in a bucket: the service copies them, no client uploads them again."""

from __future__ import annotations

import logging
import os
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from etils import epath
from gcs_server import FaultyServer
from support.linked import by_orbax
from support.models import Tuned
from support.processes import Started

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import SaveError
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import bucket
from torchax_ckpt.storage.writing import reused_files
from torchax_ckpt.stored.copy import copy_steps

pytest_plugins = ("gcs_fixtures",)
REUSE = CheckpointOptions(reuse=True)
ALL = {"preservation_policy": policies.PreserveAll()}


def train(ckpt: TorchaxCheckpointer, model: Tuned, *steps: int) -> None:
    for step in steps:
        with torch.no_grad():
            model.head.weight.add_(step)
        assert ckpt.save(step, force=True)
        ckpt.wait_until_finished()


class Uploads:
    """A model whose head is trained, and whether its saves upload all of it."""

    def __init__(self, gcs: FaultyServer) -> None:
        self.gcs, self.model = gcs, Tuned(1024).to("jax")
        self._trained = sum(parameter.nbytes for parameter in self.model.head.parameters())

    def is_whole(self, ckpt: TorchaxCheckpointer, step: int) -> bool:
        """Trains and saves a step; returns whether all of the model was uploaded."""
        before = self.gcs.uploaded_bytes
        train(ckpt, self.model, step)
        uploaded = self.gcs.uploaded_bytes - before
        assert not 1.05 * self._trained <= uploaded <= 2 * self._trained, uploaded
        return uploaded > 2 * self._trained


def assert_holds(run: str, step: int, model: Tuned) -> None:
    """Asserts that bare Orbax reads what the model holds."""
    buffers = {n: torchax_backend.buffer(p) for n, p in model.named_parameters()}
    expected = {f"model/{n}": np.asarray(a).tobytes() for n, a in buffers.items()}
    for arrays in by_orbax(epath.Path(run), step):
        assert {name: arrays[name].tobytes() for name in expected} == expected


def remove(run: str, *steps: int) -> None:
    for step in steps:
        bucket.remove(epath.Path(run) / str(step))


def stored(gcs: FaultyServer, run: str, step: int) -> dict[str, str]:
    """The objects of a step's databases of frozen arrays, and their generations."""
    prefix = run.removeprefix("gs://bucket/") + f"/{step}/state/ocdbt.process_unchanged"
    found: dict[str, str] = gcs.store.generations(prefix)
    return found


@pytest.mark.usefixtures("give_up_soon")
def test_a_copy_survives_refusals_lost_answers_and_tokens(
    gcs: FaultyServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request meets a fault once; the last request of each object meets another one."""
    filesystem, source = fsspec.filesystem("gcs", finalize_on_close=True), f"{url}/a"
    # The emulator takes a \r at the end of what gcsfs sends for the end of a line.
    content = {f"d/{i}": os.urandom(999) + b"." for i in range(4)}
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
    gcs.store.rewrite_bytes = 300
    bucket.copy(epath.Path(source), epath.Path(f"{url}/b"))
    for requests in copies.values():
        assert ["rewriteToken=" in request for request in requests] == [False, True, True, True]
        for request in requests:
            assert re.search(r"ifSourceGenerationMatch=\d+&ifGenerationMatch=0", request)
    for name, octets in content.items():
        assert filesystem.cat_file(f"{url}/b/{name}") == octets


@pytest.mark.parametrize("what", ["replaced", "removed", "another there", "nothing there"])
def test_only_what_was_listed_is_copied_and_nothing_is_replaced(
    what: str, gcs: FaultyServer, url: str
) -> None:
    filesystem = fsspec.filesystem("gcs", finalize_on_close=True)
    source, target = (epath.Path(f"{url}/{name}") for name in "ab")
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


@pytest.mark.slow
def test_a_lost_or_changed_object_is_noticed_by_the_save_that_would_copy_it(
    gcs: FaultyServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An object of array data, while the index of its database is still there."""
    uploads = Uploads(gcs)
    model = uploads.model
    with TorchaxCheckpointer(url, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2)
        changes = {
            "is gone": lambda content: None,
            "has 1 bytes in place of ": lambda content: b"0",
            "has CRC32C ": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        }
        for step, (said, change) in enumerate(changes.items(), 2):
            (place,) = (name for name in stored(gcs, url, step) if "/d/" in name)
            content = change(gcs.store.get_file("bucket", place))
            gcs.store.delete_file("bucket", place)
            if content is not None:
                gcs.store.put(place, content)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "torchax_ckpt"):
                assert uploads.is_whole(ckpt, step + 1)
            ckpt.verify(step + 1)
            assert caplog.text.count(": the frozen arrays are written again") == 1
            assert f"gs://bucket/{place} {said}" in caplog.text
            assert_holds(url, step + 1, model)


@pytest.mark.slow
def test_a_step_with_an_object_of_another_size_is_not_committed(
    gcs: FaultyServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is replaced after the save has looked for it, and before it is copied."""
    model, differing = Tuned(1024).to("jax"), reused_files.differing

    def replaced(known: Any, here: Any, state: Any) -> Iterator[str]:
        found = [*differing(known, here, state)]
        (name,) = (name for name in stored(gcs, url, 2) if "/d/" in name)
        gcs.store.put(name, gcs.store.get_file("bucket", name) + b"0")
        return iter(found)

    with TorchaxCheckpointer(url, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2)
        monkeypatch.setattr(reused_files, "differing", replaced)
        with pytest.raises(SaveError, match="bytes in place of .* before the step was committed"):
            train(ckpt, model, 3)
        assert ckpt.all_steps() == [1, 2]
        with TorchaxCheckpointer(url, options=CheckpointOptions(read_only=True)) as reader:
            assert reader.all_steps() == [1, 2]
        monkeypatch.setattr(reused_files, "differing", differing)
        train(ckpt, model, 4)
        assert ckpt.all_steps() == [1, 2, 4]


@pytest.mark.slow
@pytest.mark.usefixtures("give_up_soon")
def test_a_bucket_that_refuses_every_copy_fails_fewer_and_fewer_saves(
    gcs: FaultyServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchax_ckpt")
    model = Tuned(1024).to("jax")
    with TorchaxCheckpointer(url, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2)
        gcs.rate, gcs.kinds, gcs.concerned = 1, ("503",), "rewriteTo"
        failed = []
        for step in range(3, 7):
            try:
                train(ckpt, model, step)
            except SaveError:
                failed.append(step)
        gcs.calm()
        assert failed == [3, 6]
        train(ckpt, model, 7)
        assert ckpt.all_steps() == [1, 2, 4, 5, 7]
        ckpt.verify(7)
    said = [re.findall(r"the next (\d+) saves write all", text) for text in caplog.messages]
    assert [int(number) for numbers in said for number in numbers] == [2, 4]


@pytest.mark.slow
@pytest.mark.usefixtures("give_up_soon")
def test_what_copied_steps_share_is_copied_by_the_service_or_sent_again_if_it_refuses(
    gcs: FaultyServer, url: str, tmp_path: Path
) -> None:
    model = Tuned()
    model.base = torch.nn.Linear(256, 256)  # aiohttp warns of requests of a MiB
    model.base.requires_grad_(False)
    model.to("jax")
    with TorchaxCheckpointer(tmp_path, options=REUSE, **ALL) as ckpt:
        ckpt.attach(model)
        train(ckpt, model, 1, 2, 3)  # steps 1 and 3 share files
        steps = ckpt._run.tiers.steps()
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    sent = []
    for place, refusals in (("a", 0), ("b", 1)):
        gcs.rate, gcs.kinds, gcs.concerned = refusals, ("503",), "rewriteTo"
        before = gcs.uploaded_bytes
        copied = copy_steps(steps, RunDirectory(f"{url}/{place}"))
        sent.append(gcs.uploaded_bytes - before)
        assert [committed.step for committed in copied] == [1, 2, 3]
        assert_holds(f"{url}/{place}", 3, model)
    assert 0.9 * frozen_bytes < sent[1] - sent[0] < 1.1 * frozen_bytes


KILLED = """
import sys
import torchax
torchax.enable_globally()
from support.models import Tuned
from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
with TorchaxCheckpointer(sys.argv[1], options=CheckpointOptions(reuse=True)) as ckpt:
    model = Tuned(1024).to("jax")
    ckpt.attach(model)
    for step in (1, 2, 3):
        ckpt.save(step, force=True)
        ckpt.wait_until_finished()
"""


@pytest.mark.slow
def test_a_save_killed_between_its_copies_and_its_commit_is_no_step(
    gcs: FaultyServer, url: str
) -> None:
    arrived, go_on = gcs.pause("3%2Fstate%2Fmanifest.ocdbt&")  # the arrays are there
    with Started("-c", KILLED, url, env=gcs.environment()):  # leaving the block kills it
        assert arrived.wait(100)
    go_on.set()
    assert stored(gcs, url, 3)
    model = Tuned(1024).to("jax")
    with TorchaxCheckpointer(url, options=REUSE, **ALL) as ckpt:
        assert ckpt.attach(model) == 2
        train(ckpt, model, 4)
        assert ckpt.all_steps() == [1, 2, 4]
    assert not stored(gcs, url, 3)
    assert len(stored(gcs, url, 4)) == len(stored(gcs, url, 2))
    assert_holds(url, 4, model)
