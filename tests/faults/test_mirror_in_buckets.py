"""A mirror in a bucket, of Google's or of S3, over requests: what is sent, faults, and a lease."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from gcs_server import FaultyServer
from support.commands import run
from support.steps import save
from support.waiting import wait_until

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.errors import DirectoryError, LeaseError
from torchax_ckpt.saving.mirroring import mirroring
from torchax_ckpt.storage.directory.run_directory import RunDirectory

pytest_plugins = ("gcs_fixtures", "s3_fixtures")

Bucket = tuple[FaultyServer, str]


@pytest.fixture(params=["gs", "s3"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """A server, and a prefix of its own there."""
    names = ("gcs", "url") if request.param == "gs" else ("s3", "s3_url")
    server, url = map(request.getfixturevalue, names)
    return server, url


def content(step: int) -> dict[str, np.ndarray]:
    frozen = np.random.default_rng(0).standard_normal(100_000)
    return {"frozen": frozen, "w": np.full(3, step)}


def opened(directory: Path, url: str) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        directory, mirror=url, options=CheckpointOptions(reuse=["state.frozen"])
    )


def steps_of(url: str) -> list[int]:
    return [s.step for s in RunDirectory(url, read_only=True).steps()]


def test_a_bucket_mirrors_a_run_and_gives_it_back(directory: Path, bucket: Bucket) -> None:
    server, url = bucket
    frozen_bytes, sent = content(0)["frozen"].nbytes, []
    with opened(directory, url) as ckpt:
        ckpt.attach(stateful={})
        for step in range(1, 6):
            before = server.uploaded_bytes
            save(ckpt, step, of=content)
            wait_until(lambda: ckpt.stats().mirrored_step == ckpt.latest_step())
            sent.append(server.uploaded_bytes - before)
        other = TorchaxCheckpointer(directory.with_name("other"), mirror=url)
        with other, pytest.raises(LeaseError):
            other.attach(stateful={})
    assert sum(each > frozen_bytes for each in sent) == 2  # two copies take turns on the disk
    assert steps_of(url) == [4, 5]
    run("verify", url, "--all")
    shutil.rmtree(directory)
    with opened(directory, url) as ckpt:
        assert ckpt.attach(stateful={}) == 5
        found = ckpt.load()
        for name, array in content(5).items():
            np.testing.assert_array_equal(found[name], array)


def test_a_bucket_that_is_out_is_an_error_at_attach_and_a_counted_failure_later(
    directory: Path,
    gcs: FaultyServer,
    url: str,
    give_up_soon: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirroring, "_RETRY_SECS", 0.05)
    with opened(directory, url) as ckpt:
        ckpt.attach(stateful={})
        gcs.is_out = "refuse"
        save(ckpt, 1, 2, of=content)
        wait_until(lambda: ckpt.stats().num_mirror_failures)
        gcs.is_out = ""
        wait_until(lambda: ckpt.stats().mirrored_step == 2)
    shutil.rmtree(directory)
    gcs.is_out = "refuse"
    with pytest.raises(DirectoryError), opened(directory, url) as ckpt:
        ckpt.attach(stateful={})
    gcs.is_out = ""
    with opened(directory, url) as ckpt:
        assert ckpt.attach(stateful={}) == 2


@pytest.mark.slow  # beside tests/saving/test_mirror.py
def test_a_bucket_mirrors_a_run_that_goes_back(directory: Path, bucket: Bucket) -> None:
    _, url = bucket
    with opened(directory, url) as ckpt:
        ckpt.attach(stateful={})
        for step in (1, 2, 3):
            save(ckpt, step, of=content)
            wait_until(lambda: ckpt.stats().mirrored_step == ckpt.latest_step())
        ckpt.restore(2)
    assert steps_of(url) == [2, 3]
    with opened(directory, url) as ckpt:
        ckpt.attach(stateful={})
        ckpt.restore(2)
        save(ckpt, 3, of={**content(30), "w": np.full(3, 30)})
    assert steps_of(url) == [2, 3]
    run("verify", url, "--all")
    shutil.rmtree(directory)
    with opened(directory, url) as ckpt:
        assert ckpt.attach(stateful={}) == 3
        assert ckpt.load()["w"][0] == 30


@pytest.mark.slow
def test_a_copy_whose_answers_are_lost_counts_once(
    directory: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = bucket
    monkeypatch.setattr(mirroring, "_RETRY_SECS", 0.05)
    with opened(directory, url) as ckpt:
        ckpt.attach(stateful={})
        save(ckpt, 1, of=content)
        wait_until(lambda: ckpt.stats().mirrored_step == 1)
        server.kinds, server.concerned, server.rate = ("reset after",), "commit_success", 0.5
        save(ckpt, 2, 3, 4, of=content)
        wait_until(lambda: ckpt.stats().mirrored_step == 4, 200)
        server.calm()
    assert steps_of(url)[-1] == 4
    run("verify", url, "--all")
