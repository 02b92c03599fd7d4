"""The lease: one writer at a time, wherever it runs and however it ended."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from etils import epath
from support import PROGRAMS
from support.compare import entries
from support.processes import environment, run_python
from support.stages import at
from support.training import save_state
from support.waiting import T0, Clock, wait_until

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import LeaseError, SaveError
from torchax_ckpt.storage.directory import lease
from torchax_ckpt.storage.directory.lease import Lease, LeaseHolder, process_of
from torchax_ckpt.storage.directory.leftovers import _LEFTOVER
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import fsync
from torchax_ckpt.storage.medium.compare_and_swap import AtomicRecord, Conflict

STATE = {"w": np.arange(3)}
FIELDS = ["token", "host", "pid", "kernel", "started", "since_secs", "renewed_secs"]
CONNECT = "If both are processes of one run, call jax.distributed.initialize() first in each"
ELSEWHERE = LeaseHolder("t1", "tpu-vm-7", 4711, "another kernel", 99, T0 - 600, T0 - 10)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leased(tmp_path: Path, clock: Clock) -> Iterator[Lease]:
    lease = Lease(tmp_path, clock=clock, sleep=clock.sleep)
    yield lease
    lease.release()


def keeping_all(directory: Path) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll())


def save(ckpt: TorchaxCheckpointer, *steps: int) -> None:
    for step in steps:
        assert ckpt.save(step, state=STATE, force=True)


def saved(directory: Path, *steps: int) -> None:
    with keeping_all(directory) as ckpt:
        save(ckpt, *steps)


def write(directory: Path, holder: LeaseHolder) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "lease").write_bytes(holder.to_bytes())


def taken_over(directory: Path) -> None:
    """Now, by a program elsewhere."""
    write(directory, dataclasses.replace(ELSEWHERE, renewed_secs=time.time()))


def written(directory: Path) -> LeaseHolder:
    holder = LeaseHolder.of((directory / "lease").read_bytes())
    assert holder is not None
    return holder


# --- who may take it, and when ---


def odd(**changes: Any) -> bytes:
    """A lease that names a holder elsewhere, all but what was changed."""
    return json.dumps(dataclasses.asdict(ELSEWHERE) | changes).encode()


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


LEFT: list[tuple[bytes | Callable[[Path], Any], float]] = [
    # By a holder that died; the last from a clock that is ahead.
    *((odd(renewed_secs=T0 - ago), waited) for ago, waited in ((60, 0), (59, 1), (10, 50))),
    (odd(renewed_secs=T0 + 500), 60),
    # What cannot be read.
    *((content, 60) for content in (b"[]", b'{"pid": 1}', b"\xff", b"[" * 60_000)),
    *((odd(since_secs=secs), 60) for secs in (1e300, 10**400, -1, "x", True)),
    *((odd(renewed_secs=secs), 60) for secs in (float("nan"), float("inf"))),
    *((odd(pid=pid), 60) for pid in ("../..", 2**70, 1.5, None)),
    *((lease, 60) for lease in (odd(host=5), odd(token=None), odd(kernel=[1]), odd(started="x"))),
    # Torn by a power cut.
    *((ELSEWHERE.to_bytes()[:kept], 0) for kept in (0, 40, -2)),
    *((ELSEWHERE.to_bytes()[:kept] + b"\0" * 200, 0) for kept in (0, 40)),
    # No file of a lease, which is neither waited for nor followed.
    *((make, 60) for make in (os.mkfifo, lambda path: path.symlink_to("elsewhere"), huge)),
]


@pytest.mark.parametrize(("left", "waited_secs"), LEFT, ids=lambda left: f"{left!r:.15}")
def test_a_holder_that_died_elsewhere_blocks_until_its_last_sign_of_life_is_60_s_old(
    left: bytes | Callable[[Path], Any],
    waited_secs: float,
    tmp_path: Path,
    clock: Clock,
    leased: Lease,
) -> None:
    """And for 60 s what cannot be read, but nothing that a power cut left."""
    (tmp_path / "elsewhere").write_text("precious")
    if isinstance(left, bytes):
        (tmp_path / "lease").write_bytes(left)
    else:
        left(tmp_path / "lease")
    leased.hold()
    assert clock.waited_secs == waited_secs
    assert written(tmp_path).pid == os.getpid()
    assert written(tmp_path).since_secs == T0 + waited_secs
    assert (tmp_path / "elsewhere").read_text() == "precious"


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_holder_that_lives_elsewhere_is_named(
    is_connected: bool, tmp_path: Path, clock: Clock, leased: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And how to connect processes that do not know each other."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: is_connected)
    write(tmp_path, ELSEWHERE)
    sign = dataclasses.replace(ELSEWHERE, renewed_secs=T0 + 12)
    clock.scheduled.append((12, lambda: write(tmp_path, sign)))
    with pytest.raises(
        LeaseError,
        match=r"another program writes .*host tpu-vm-7, pid 4711, since 2027-01-15 07:50:00 UTC, "
        r"last sign of life 0 s ago\. End that program, or give this one a directory of its own",
    ) as caught:
        leased.hold()
    assert clock.waited_secs == 12
    assert (CONNECT in str(caught.value)) is not is_connected
    assert caught.value.path == str(tmp_path)
    assert written(tmp_path) == sign


def holder_of(process: subprocess.Popen[Any]) -> LeaseHolder:
    started = process_of(process.pid)
    assert started is not None
    return dataclasses.replace(
        LeaseHolder.here(T0), pid=process.pid, started=started.started, host="here"
    )


@pytest.fixture
def process() -> Iterator[subprocess.Popen[Any]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_that_runs_on_this_host_refuses_at_once(
    tmp_path: Path, clock: Clock, leased: Lease, process: subprocess.Popen[Any]
) -> None:
    # However old its last sign of life is: it may be stopped, and go on.
    holder = dataclasses.replace(holder_of(process), renewed_secs=T0 - 3600)
    write(tmp_path, holder)
    said = f"host here, pid {process.pid}, since.*call jax.distributed.initialize"
    with pytest.raises(LeaseError, match=said):
        leased.hold()
    assert clock.waited_secs == 0
    assert written(tmp_path) == holder


@pytest.mark.parametrize("how", ["not reaped", "reaped", "its number is used again"])
def test_a_process_killed_on_this_host_never_blocks(
    how: str, tmp_path: Path, clock: Clock, leased: Lease, process: subprocess.Popen[Any]
) -> None:
    holder = holder_of(process)
    if how == "its number is used again":
        holder = dataclasses.replace(holder, started=(holder.started or 0) - 1)
    else:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if how == "reaped":
            process.wait()
    write(tmp_path, holder)
    leased.hold()
    assert clock.waited_secs == 0


def place_of(directory: Path) -> str:
    status = directory.stat()
    return f"{status.st_dev}-{status.st_ino}"


@pytest.mark.parametrize(
    ("place", "kernel", "refusal"),
    [
        pytest.param("{there}", "ours", "", id="copy"),
        pytest.param("{here}", "ours", r"ago\. End that", id="same-inode"),
        pytest.param("", "ours", r"ago\. End that", id="without-inode"),
        pytest.param("1{there}", "ours", "on another device: if .* is a copy, remove", id="device"),
        pytest.param("{device}-0", "ours", r"ago\. End that", id="no-inode"),
        pytest.param("{there}", "another", None, id="another-kernel"),
        pytest.param("{there}", None, None, id="no-kernel"),
    ],
)
def test_the_lease_of_a_running_process_in_a_copy_of_its_directory_refuses_nobody(
    place: str,
    kernel: str | None,
    refusal: str | None,
    tmp_path: Path,
    clock: Clock,
    process: subprocess.Popen[Any],
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    copy.mkdir()
    place = place.format(
        there=place_of(run), here=place_of(copy), device=place_of(run).partition("-")[0]
    )
    holder = holder_of(process)
    token = f"{'e' * 32}-{place}" if place else "e" * 32
    holder = dataclasses.replace(holder, token=token, renewed_secs=T0 - 3600)
    write(run, holder if kernel == "ours" else dataclasses.replace(holder, kernel=kernel))
    shutil.copyfile(run / "lease", copy / "lease")
    lease = Lease(copy, clock=clock, sleep=clock.sleep)
    if refusal:
        with pytest.raises(LeaseError, match=refusal):
            lease.hold()
        assert (copy / "lease").read_bytes() == (run / "lease").read_bytes()
    else:
        lease.hold()  # of another kernel: an hour after the last sign of life
        assert written(copy).pid == os.getpid()
        lease.release()
    assert clock.waited_secs == 0
    assert written(run).pid == process.pid


def test_an_unknown_kernel_is_not_taken_for_this_one(
    tmp_path: Path, clock: Clock, leased: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, LeaseHolder("t", "other", os.getpid(), None, None, T0 - 600, T0 - 10))
    monkeypatch.setattr(lease, "this_kernel", lambda: None)
    leased.hold()
    assert clock.waited_secs == 50


def test_a_lease_follows_its_directory(tmp_path: Path, clock: Clock, leased: Lease) -> None:
    run = tmp_path / "run"
    run.mkdir()
    held = Lease(run, clock=clock, sleep=clock.sleep)
    held.hold()
    assert LeaseHolder.of((run / "lease").read_bytes()) == written(run)
    moved, link = run.rename(tmp_path / "moved"), tmp_path / "link"
    link.symlink_to(moved)
    for name in (moved, link):
        with pytest.raises(LeaseError, match="another checkpointer of this very process"):
            Lease(name, clock=clock, sleep=clock.sleep).hold()
    assert [*json.loads((moved / "lease").read_bytes())] == FIELDS
    moved.rename(run)
    held.hold()
    held.release()


@pytest.mark.parametrize("left", [None, ELSEWHERE], ids=["free", "left-by-a-dead-host"])
def test_without_links_locks_and_o_excl_one_of_two_that_took_it_at_once_is_told(
    left: LeaseHolder | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if left is not None:
        write(tmp_path, dataclasses.replace(left, renewed_secs=0))
    first, second = Lease(tmp_path), Lease(tmp_path)
    opened, replace = os.open, os.replace

    refuse = Mock(side_effect=OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP)))

    def replace_after_second(*args: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        second.hold()
        replace(*args)

    def open_existing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        return opened(path, flags & ~os.O_EXCL, *args, **kwargs)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "open", open_existing)
    monkeypatch.setattr(os, "replace", replace_after_second)
    first.hold()
    first.hold()
    with pytest.raises(LeaseError, match="has lost its lease: it is held by"):
        second.hold()
    second.release()
    first.hold()
    first.release()
    assert list(tmp_path.iterdir()) == []


def test_a_record_loses_no_exchange(tmp_path: Path) -> None:
    first = AtomicRecord(tmp_path / "count")
    first.swap(None, b"0")

    def count() -> None:
        record = AtomicRecord(tmp_path / "count")
        done = 0
        while done < 50:
            seen = record.read()
            assert seen is not None
            try:
                record.swap(seen, str(int(seen.content) + 1).encode())
                done += 1
            except Conflict:
                pass
        record.close()

    with ThreadPoolExecutor(4) as threads:
        for counted in [threads.submit(count) for _ in range(4)]:
            counted.result()
    seen = first.read()
    assert seen is not None
    assert seen.content == b"200"
    with pytest.raises(Conflict):
        first.swap(None, b"0")
    first.close()


@pytest.mark.parametrize("link", ["links", "no-links"])
def test_a_record_is_synced_before_it_has_its_name(
    link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    fsync, link_file, replace = os.fsync, os.link, os.replace

    def synced(opened: int) -> None:
        fsync(opened)
        status = os.fstat(opened)
        assert status.st_size, "synced before it was written"
        calls.append(("synced", status.st_ino))

    def linked(draft: Any, path: Any) -> None:
        if link == "no-links":
            raise PermissionError
        calls.append(("named", os.stat(draft).st_ino))
        link_file(draft, path)

    def replaced(draft: Any, path: Any) -> None:
        calls.append(("named", os.stat(draft).st_ino))
        replace(draft, path)

    for name, wrapped in (("fsync", synced), ("link", linked), ("replace", replaced)):
        monkeypatch.setattr(os, name, wrapped)
    record = AtomicRecord(tmp_path / "record")
    first = record.swap(None, b"1")
    record.swap(first, b"2")
    record.close()
    assert [what for what, _ in calls] == ["synced", "named"] * 2
    assert [inode for _, inode in calls[::2]] == [inode for _, inode in calls[1::2]]


def test_a_record_that_cannot_be_written_says_why_and_not_that_its_draft_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> Any:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise OSError(number, os.strerror(number))

        return refused

    record = AtomicRecord(tmp_path / "lease")
    seen = record.swap(None, b"1")
    monkeypatch.setattr(os, "replace", refuse(errno.ENOSPC))
    monkeypatch.setattr(Path, "unlink", refuse(errno.EIO))
    with pytest.raises(OSError, match="No space left"):
        record.swap(seen, b"2")
    # Nor does a lease that cannot be removed replace the reason that it cannot be held.
    monkeypatch.setattr(lease, "_Hold", refuse(errno.EAGAIN))
    (tmp_path / "run").mkdir()
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        Lease(epath.Path(tmp_path / "run")).hold()
    record.close()


# --- keeping it ---


def test_it_is_renewed_without_a_save(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECS", 0.02)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
        ckpt.wait_until_finished()
        before = written(directory)
        wait_until(lambda: written(directory).renewed_secs > before.renewed_secs)
        assert written(directory).since_secs == before.since_secs
        save(ckpt, 2)
    assert not (directory / "lease").exists()
    assert not [t for t in threading.enumerate() if t.name == "lease"]


def test_a_cleanup_during_a_renewal_costs_no_lease(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(directory)
    run.claim()
    sync = fsync.sync

    def cleaned_up(draft: Path) -> None:
        sync(draft)
        assert _LEFTOVER.fullmatch(draft.name)
        draft.unlink()

    monkeypatch.setattr(fsync, "sync", cleaned_up)
    before = written(directory)
    run._lease.renew()
    monkeypatch.undo()
    assert written(directory) == before
    run.fence()
    run.release()


def test_a_removed_lease_is_lost_unless_the_directory_went(tmp_path: Path, clock: Clock) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lease = Lease(run, clock=clock, sleep=clock.sleep)
    lease.hold()
    shutil.rmtree(run)
    run.mkdir()
    lease.renew()
    lease.hold()
    assert written(run).pid == os.getpid()
    (run / "lease").unlink()
    with pytest.raises(LeaseError, match="its file was removed or overwritten"):
        lease.hold()
    lease.release()


# --- what checkpointers do with it ---


def test_a_second_checkpointer_in_one_process_is_refused_until_the_first_is_closed(
    directory: Path,
) -> None:
    first, second = TorchaxCheckpointer(directory), TorchaxCheckpointer(directory)
    first.save(1, state=STATE)
    for _ in range(2):
        said = r"another checkpointer of this very process .*Close"
        with pytest.raises(LeaseError, match=said) as e:
            save(second, 2)
        assert "jax.distributed" not in str(e.value)
    first.wait_until_finished()
    with pytest.raises(LeaseError):
        second.delete(1)
    assert second.all_steps() == [1]  # reading needs no lease
    second.load(1)
    first.close()
    save(second, 2)
    second.close()
    with TorchaxCheckpointer(directory) as third:
        third.delete(1)
    assert third.all_steps() == [2]
    assert entries(directory) == {"2"}


def test_a_copy_of_a_run_is_saved_to_while_the_run_goes_on(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with TorchaxCheckpointer(directory) as run:
        run.save(1, state=STATE)
        run.wait_until_finished()
        shutil.copytree(directory, copy)
        with TorchaxCheckpointer(copy) as other:
            save(other, 2)
            save(run, 3)
        with TorchaxCheckpointer(directory) as second, pytest.raises(LeaseError):
            save(second, 4)
    assert entries(directory) == {"1", "3"}
    assert entries(copy) == {"1", "2"}


@pytest.mark.parametrize("newer", [False, True])
def test_a_late_first_save_does_not_mix_with_others(newer: bool, directory: Path) -> None:
    """Newer steps, or another branch, which the other program has begun."""
    saved(directory, *((1, 2) if newer else (1, 2, 9)))
    with keeping_all(directory) as late:
        assert late.attach() == (2 if newer else 9)
        with keeping_all(directory) as other:
            other.attach()
            other.restore(2)
            save(other, *((3, 4, 5) if newer else (3,)))
        held = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
        said = f"has saved steps {'3, 4, 5' if newer else '3'} there.*nothing was written"
        for _ in range(2 if newer else 0):
            with pytest.raises(LeaseError, match=said):
                save(late, 3)
        with pytest.raises(LeaseError, match=said):
            late.delete(1)
        assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == held
        if newer:  # On purpose: what is newer than the step gone back to is set aside.
            late.restore(4)
            save(late, 6)
            late.wait_until_finished()
            assert entries(directory) >= {"1", "2", "3", "4", "6", "abandoned-5"}


def test_steps_that_were_removed_before_the_first_save_stop_nobody(directory: Path) -> None:
    saved(directory, 1, 2, 3)
    with keeping_all(directory) as ckpt:
        ckpt.load(2)
        shutil.rmtree(directory / "3")
        save(ckpt, 4)
    assert entries(directory) == {"1", "2", "4"}


def test_readers_take_no_lease(directory: Path) -> None:
    saved(directory, 1)
    write(directory, ELSEWHERE)
    reader = TorchaxCheckpointer(directory)
    assert reader.attach() == 1
    reader.load()
    reader.metrics(1)
    reader.close()
    assert written(directory) == ELSEWHERE


def test_a_writer_that_lost_its_lease_while_writing_commits_nothing_and_stops(
    directory: Path,
) -> None:
    ckpt = TorchaxCheckpointer(directory)
    ckpt.save(1, state=STATE)
    ckpt.wait_until_finished()
    mend = at("write the arrays", lambda: taken_over(directory))
    save(ckpt, 2)
    with pytest.raises(SaveError, match=r"saving step 2 .* has lost its lease: it is held by host"):
        ckpt.wait_until_finished()
    mend()
    assert ckpt.all_steps() == [1]
    with pytest.raises(LeaseError, match="It writes nothing more"):
        save(ckpt, 3)
    with pytest.raises(LeaseError):
        ckpt.delete(1)
    with pytest.raises(SaveError, match="lost its lease"):
        ckpt.close()
    assert ckpt.all_steps() == [1]
    assert written(directory).host == "tpu-vm-7"


@pytest.mark.parametrize("moment", ["publish", "set_aside", "settle", "delete", "recover"])
def test_nothing_is_committed_moved_or_removed_without_the_lease(
    moment: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(directory, 1, 2)
    (directory / "2").rename(directory / "incoming-1")
    (directory / "7.orbax-checkpoint-tmp").mkdir()
    (directory / "writing-8-t").mkdir()
    steps = RunDirectory(directory)
    one, incoming = sorted(steps._visible(), key=lambda s: s.is_incoming)
    taken_over(directory)
    monkeypatch.setattr(lease, "_POLL_SECS", 0.01)
    monkeypatch.setattr(lease, "LEASE_SECS", 0.3)
    steps.fence()
    taken_over(directory)
    before = entries(directory)
    with pytest.raises(LeaseError):
        {
            "publish": lambda: steps.publish(8, steps.path / "writing-8-t"),
            "set_aside": lambda: steps.set_aside([one]),
            "settle": lambda: steps.settle(incoming),
            "delete": lambda: steps.delete(one),
            "recover": steps.recover,
        }[moment]()
    assert entries(directory) == before


def test_the_last_look_precedes_the_commit(directory: Path) -> None:
    seen: list[tuple[set[str], bool]] = []

    def look() -> None:
        for child in directory.glob("writing-*"):
            items = {item.name for item in child.iterdir() if item.is_dir()}
            seen.append((items, (child / "commit_success.txt").exists()))

    at("check the lease", look)
    save_state(directory, STATE)
    everything = {"state", "manifest", "summary"}
    assert seen == [(everything, False), (everything, True)]  # Orbax's mark, and our rename


def test_a_stalled_writer_does_not_write_into_its_successors_step(directory: Path) -> None:
    paths = set()
    for _ in range(2):
        steps = RunDirectory(directory)
        steps.claim()
        paths.add(steps.path_for(7))
        steps.release()
    assert len(paths) == 2


# --- processes ---


@pytest.mark.slow
def test_what_a_live_process_is_writing_is_left_alone_and_removed_once_it_is_killed(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = subprocess.Popen(
        [sys.executable, PROGRAMS / "saves.py", "stops_in_save", directory],
        env=environment(1, {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        before = entries(directory)
        with TorchaxCheckpointer(directory) as ckpt:
            assert ckpt.attach() == 1
            with pytest.raises(LeaseError, match=f"pid {process.pid}"):
                save(ckpt, 2)
        assert entries(directory) == before
        assert len(before) == 3  # step 1, the lease, and what is being written
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        with TorchaxCheckpointer(directory) as ckpt:
            save(ckpt, 2)
        assert "Waiting to see" not in caplog.text
        assert entries(directory) == {"1", "2"}
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_forked_child_neither_writes_nor_gives_the_lease_away(directory: Path) -> None:
    arguments = PROGRAMS / "interruptions.py", "forked_lease", str(directory)
    assert "all is well" in run_python(*arguments, fresh=True).stdout
