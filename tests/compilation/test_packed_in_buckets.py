"""A bucket holds the file with which compiled programs travel."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from etils import epath
from gcs_server import FaultyServer
from support.travelling import NAMES, PROGRAMS, add_to_each_others, killed, machine, session, warned
from support.waiting import wait_until

from torchax_ckpt.compilation import packed_programs
from torchax_ckpt.runtime import durable_steps

pytest_plugins = ("gcs_fixtures", "s3_fixtures", "support.travelling_fixtures")
pytestmark = pytest.mark.usefixtures("no_patience")


def test_the_next_machine_compiles_nothing_even_after_a_kill(
    gcs: FaultyServer, url: str, tmp_path: Path
) -> None:
    env, name = gcs.environment(), url.removeprefix("gs://bucket/")
    killed(tmp_path / "first", url, lambda: name in gcs.store.names(), **env)
    compiled, found = session(tmp_path / "second", url, **env)
    assert (compiled, found > 3) == (0, True)


@pytest.mark.usefixtures("gcs")
def test_machines_that_write_at_once_add_to_each_others(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_to_each_others(epath.Path(url), tmp_path, monkeypatch)


@pytest.mark.usefixtures("s3")
def test_programs_travel_with_an_object_of_s3(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_to_each_others(epath.Path(f"{s3_url}/programs"), tmp_path, monkeypatch)


REFUSED = {
    "unreachable": ("fetch from", "The storage service did not answer"),
    "no bucket": ("fetch from", "there is no bucket 'buckets'"),
    "may not read": ("fetch from", "The account in use lacks the permission"),
    "may not write": ("write to", "The account in use lacks the permission"),
    "large": ("fetch from", "expected at most 100 bytes, found"),
}


@pytest.mark.usefixtures("listening", "give_up_soon")
@pytest.mark.parametrize("name", REFUSED)
def test_a_bucket_that_cannot_be_used_gives_one_warning(
    name: str,
    gcs: FaultyServer,
    url: str,
    directory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = epath.Path(url.replace("bucket", "buckets" if name == "no bucket" else "bucket"))
    if name == "large":
        place.write_bytes(packed_programs.pack(PROGRAMS))
        monkeypatch.setattr(packed_programs, "MAX_BYTES", 100)
    gcs.is_out = "refuse" if name == "unreachable" else ""
    gcs.allows_reads, gcs.allows_writes = name != "may not read", name != "may not write"
    text = warned(machine(tmp_path, "first", NAMES[0], place=place), directory, caplog)
    action, problem = REFUSED[name]
    assert f"cannot {action} {place}" in text
    assert problem in text


@pytest.mark.usefixtures("listening")
def test_neither_the_start_nor_the_end_of_a_program_waits_for_long(
    gcs: FaultyServer,
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_programs, "_FETCH_SECS", 0.1)
    monkeypatch.setattr(packed_programs, "_END_SECS", 0.1)
    arrived, go_on = gcs.pause("GET")
    programs = machine(tmp_path, "first", NAMES[0], place=url)
    programs.start()
    assert arrived.wait(60)
    assert "no answer after 0.1 s" in caplog.text
    began = time.monotonic()
    programs.finish()
    assert 0.1 <= time.monotonic() - began < 30
    go_on.set()
    durable_steps.listeners[-1]()
    wait_until(lambda: url.removeprefix("gs://bucket/") in gcs.store.names())
