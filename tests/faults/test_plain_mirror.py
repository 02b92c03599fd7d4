"""A mirror in a plain store, which fsspec lists, reads, writes and deletes in, and no more."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh
import numpy as np
import pytest
from etils import epath
from support.commands import run
from support.mirrored import opened, require_fetched_to_the_bit, wait_for
from support.stages import fail_at
from support.steps import save, state
from support.waiting import wait_until

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import DirectoryError, LeaseError
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location, medium, plain_store

if TYPE_CHECKING:
    from support.plain_stores import Objects

pytest_plugins = ("support.folder_bucket", "support.plain_stores")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has no conditional writes"),
    pytest.mark.usefixtures("impatient"),
]


def path_of(url: str) -> epath.Path:
    return location.resolve(url, as_mirror=True)


def steps_of(url: str) -> list[int]:
    return [s.step for s in RunDirectory(path_of(url), read_only=True).steps()]


def test_a_run_whose_disk_is_gone_goes_on_from_there(directory: Path, plain_url: str) -> None:
    require_fetched_to_the_bit(directory, plain_url)


def test_it_keeps_the_latest_two_and_after_going_back_the_new_branch_counts(
    directory: Path, plain_url: str
) -> None:
    keep = policies.PreserveAll()
    with opened(directory, plain_url, preservation_policy=keep) as ckpt:
        for step in (1, 2, 3, 4):
            save(ckpt, step)
            wait_for(ckpt, step)
    assert steps_of(plain_url) == [3, 4]
    assert len(list(path_of(plain_url).iterdir())) == 2
    with opened(directory, plain_url, preservation_policy=keep) as ckpt:
        ckpt.restore(2)
        ckpt.save(3, state=state(30), force=True)
    assert steps_of(plain_url)[-1] == 3
    shutil.rmtree(directory)
    with opened(directory, plain_url) as ckpt:
        assert ckpt.load()["w"][0] == 30
        save(ckpt, 5)
    # Abandoned steps stay where they are, and go with the command for them.
    assert steps_of(plain_url) == [3, 5]
    assert len(list(path_of(plain_url).iterdir())) > 2
    run("prune", plain_url, "--abandoned", "--delete")
    assert len(list(path_of(plain_url).iterdir())) == 2
    assert steps_of(plain_url) == [3, 5]


def test_frozen_arrays_are_sent_with_each_step(directory: Path, plain_url: str) -> None:
    frozen = np.random.default_rng(0).standard_normal(20_000)
    sent: list[int] = []
    with opened(
        directory,
        plain_url,
        options=CheckpointOptions(reuse=["state.frozen"]),
        on_event=lambda e: sent.append(e.values["sent_bytes"]) if e.name == "mirrored" else None,
    ) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, of={"frozen": frozen, "w": np.full(3, step)})
            wait_for(ckpt, step)
    assert min(sent) > frozen.nbytes
    shutil.rmtree(directory)
    with opened(directory, plain_url) as ckpt:
        np.testing.assert_array_equal(ckpt.load(3)["frozen"], frozen)


def test_a_second_program_is_noticed_and_a_warning_says_that_one_should_write(
    directory: Path, plain_url: str
) -> None:
    other = directory.with_name("other")
    with pytest.warns(UserWarning, match=r"no conditional writes.*one\s+program at a\s+time"):
        ckpt = opened(directory, plain_url)
    with ckpt:
        with pytest.raises(LeaseError, match=re.escape(plain_url)):
            opened(other, plain_url)
        save(ckpt, 1)
        wait_for(ckpt, 1)
        # Another one that has started at the same moment, and wrote later.
        (path_of(plain_url) / "lease").write_text("{}")
        save(ckpt, 2)
        wait_until(lambda: ckpt.stats().num_mirror_failures)
    assert steps_of(plain_url) == [1]


def test_a_copy_that_breaks_off_leaves_no_step_and_the_next_one_removes_it(
    directory: Path, az: type[Objects]
) -> None:
    url = "az://container/runs/a"
    end = fail_at("mark the step", OSError("the link is down"), number=2)
    with opened(directory, url) as ckpt:
        save(ckpt, 1)
        wait_until(lambda: ckpt.stats().num_mirror_failures)
        end()
    assert steps_of(url) == [1]
    names = {name.split("/")[3] for name in az.objects}
    assert len(names) == 1
    # As a killed program leaves it: all but the mark, under another name.
    for name in [n for n in az.objects if "commit_success" not in n]:
        az.objects[re.sub("incoming-1-[0-9]+", "incoming-9-1", name)] = az.objects[name][:5]
    assert steps_of(url) == [1]
    with opened(directory, url) as ckpt:
        save(ckpt, 2)
    assert not [name for name in az.objects if "incoming-9-1" in name]


@pytest.mark.parametrize("verb", ["info", "ls", "read"])
def test_a_store_that_does_not_answer_is_no_new_run(
    directory: Path, az: type[Objects], verb: str
) -> None:
    url = "az://container/runs/a"
    with opened(directory, url) as ckpt:
        save(ckpt, 1)
    shutil.rmtree(directory)
    az.failure = staticmethod(lambda asked, path: asked == verb)
    with pytest.raises(DirectoryError, match=r"ClientError\('no answer'\).*fsspec's configuration"):
        opened(directory, url)
    az.failure = None
    with opened(directory, url) as ckpt:
        assert ckpt.latest_step() == 1


def test_a_store_that_is_out_for_a_while_is_a_counted_failure(
    directory: Path, az: type[Objects], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(directory, "az://container/a") as ckpt:
        az.failure = staticmethod(lambda asked, path: asked == "write")
        save(ckpt, 1)
        wait_until(lambda: ckpt.stats().num_mirror_failures >= 2)
        az.failure = None
    assert steps_of("az://container/a") == [1]
    assert "cannot be copied to the mirror" in caplog.text


def test_an_interrupted_fetch_goes_on(directory: Path, az: type[Objects]) -> None:
    url, read = "az://container/a", set[str]()
    with opened(directory, url) as ckpt:
        save(ckpt, 1)
    shutil.rmtree(directory)

    def fails(verb: str, path: str) -> bool:
        if verb == "read" and "/state/" in path:
            read.add(path.partition("/state/")[2])
        return verb == "read" and "/d/" in path and is_down

    is_down, az.failure = True, staticmethod(fails)
    with pytest.raises(DirectoryError, match="no answer"):
        opened(directory, url)
    [left] = directory.glob("fetching-*/state")
    whole = {os.path.relpath(path, left) for path in left.rglob("*") if path.is_file()}
    is_down = False
    read.clear()
    with opened(directory, url) as ckpt:
        assert ckpt.load(1)["w"][0] == 1
    assert whole
    assert not whole & read
    assert not list(directory.glob("fetching-*"))


def test_commands_read_such_a_mirror_and_name_the_fetch_where_arrays_are_needed(
    directory: Path, plain_url: str, tmp_path: Path
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1, 2)
    assert "step 2: copied" in run("mirror", directory, plain_url, "--once")
    assert "nothing to copy" in run("mirror", directory, plain_url, "--once")
    assert "2" in run("ls", plain_url)
    run("show", plain_url)
    refused = run("verify", plain_url, code=exit_codes.UNAVAILABLE)
    assert "torchax-ckpt fetch URL DIRECTORY" in refused
    assert "fetched step 2" in run("fetch", plain_url, tmp_path / "new")
    run("copy", plain_url, tmp_path / "copied")
    for place in ("new", "copied"):
        assert TorchaxCheckpointer(tmp_path / place).load()["w"][0] == 2
    # Nothing but a mirror is there.
    for words in (
        ("copy", directory, f"{plain_url}-copy"),
        ("follow", directory, f"{plain_url}-out", "--format", "safetensors", "--once"),
        ("follow", plain_url, tmp_path / "out", "--format", "safetensors", "--once"),
    ):
        assert "can only be a mirror" in run(*words, code=exit_codes.USAGE)


def test_what_cannot_be_there_is_refused_with_what_can(directory: Path) -> None:
    for door in (
        TorchaxCheckpointer,
        lambda url: LocalTier(url) and TorchaxCheckpointer(directory, local=LocalTier(url)),
    ):
        with pytest.raises(DirectoryError, match=r"can only be a mirror.*gs://bucket/prefix"):
            door("az://container/run")
    for url, text in {
        "az://": "found neither",
        "az:///x": "found neither",
        "az://c/../x": "without ..",
        "az://c/x[1]": r"without \.\. # \* \[ \] and control",
        "sftp://host/a#b": r"without \.\. # \* \[ \] and control",
        "abfs://c/x": "abfs:// is not supported",
        "sftp://host": "expected sftp://host/path",
        "sftp://host:22/./": "expected sftp://host/path",
        "hf://buckets/user": "expected hf://buckets/user/bucket",
        "hf://me/model/x": "expected hf://buckets/user/bucket",
        "hf://datasets/me/data/x": "expected hf://buckets/user/bucket",
    }.items():
        with pytest.raises(DirectoryError, match=text):
            path_of(url)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plain_store.SCHEMES, "az", ("no_such_package", {}, "az://container"))
    with pytest.raises(DirectoryError, match="pip install no_such_package"):
        path_of("az://container/run")


def test_a_removal_stays_below_its_path_whatever_the_names_hold(
    sftp: str, az: type[Objects]
) -> None:
    for url in (f"{sftp}/runs/a b;%20&~'=", "az://container/a b;%20&~'="):
        run_path = path_of(url)
        store: Any = medium.of(run_path)
        for name in ("kept?x#y[0]*", "gone?x#y[0]*", "gone"):
            store.make_inner_folder(run_path / name)
            (run_path / name / "file").write_bytes(b"1")
        store.remove_left(run_path / "gone?x#y[0]*", is_named_as_step=False)
        store.remove_left(run_path / "gone?", is_named_as_step=False)
        assert not (run_path / "nothing?x").exists()
        assert sorted(path.name for path in run_path.iterdir()) == ["gone", "kept?x#y[0]*"]
        assert (run_path / "kept?x#y[0]*/file").read_bytes() == b"1"


def test_no_more_than_the_first_bytes_of_a_large_file_are_read(
    sftp: str, az: type[Objects], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, sizes = asyncssh.SFTPServer.read, list[int]()

    def counted(server: Any, file: Any, offset: int, size: int) -> Any:
        sizes.append(size)
        return read(server, file, offset, size)

    monkeypatch.setattr(asyncssh.SFTPServer, "read", counted)
    az.objects["container/file"] = content = b"first" + bytes(20 << 20)
    (tmp_path / "server/file").write_bytes(content)
    for url in (f"{sftp}/file", "az://container/file"):
        path = path_of(url)
        assert medium.of(path).read(path, 5) == b"first"
        assert sum(sizes) < 1 << 20
        assert medium.of(path).read(path, 1 << 30) == content
        assert medium.of(path).read(path) == content
        sizes.clear()
        with pytest.raises(FileNotFoundError):
            medium.of(path).read(path.parent / "missing", 5)


def test_a_host_whose_key_is_unknown_is_refused(sftp: str, tmp_path: Path) -> None:
    (tmp_path / "home/.ssh/known_hosts").write_text("")
    with pytest.raises(DirectoryError, match="[Hh]ost key"):
        RunDirectory(path_of(f"{sftp}/runs/a"))


def test_a_connection_that_ended_is_made_anew(directory: Path, sftp: str) -> None:
    url = f"{sftp}/runs/a"
    with opened(directory, url) as ckpt:
        save(ckpt, 1)
        wait_for(ckpt, 1)
        store = plain_store._client("sftp", sftp.removeprefix("sftp://"))
        store.loop.call_soon_threadsafe(store.client.abort)
        save(ckpt, 2)
    assert steps_of(url) == [1, 2]
