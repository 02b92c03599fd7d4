"""One check of paths at every door, and one encoding at every border between libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from etils import epath
from support.commands import run, run_json
from support.compare import assert_trees_identical, bits
from support.processes import run_python
from support.steps import save, save_due
from support.training import before_enabling, fsdp_mesh, fsdp_rule, mlp, place, save_state

from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    load_torch_state_dict,
    policies,
    warm_start,
)
from torchax_ckpt.cli.exit_codes import USAGE
from torchax_ckpt.errors import CheckpointError, DirectoryError, SaveError, TierError
from torchax_ckpt.integrations.huggingface import Publisher
from torchax_ckpt.publishing import Reader
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.publishing.follower import Follower
from torchax_ckpt.storage.medium import location
from torchax_ckpt.storage.medium.local_medium import LocalMedium
from torchax_ckpt.torch import LoadPlanner, StorageReader, restore

# What a user may type for a bucket, for nothing, or by mistake -> what the error says.
NO_PATHS = {
    "": "found an empty string. Is a variable unset?",
    "gs://": "found neither",
    "gs:///x": "found neither",
    "gs:/bucket/x": "give 'gs://bucket/x'",  # what pathlib makes of a URL
    "gs//bucket": "give 'gs://bucket'",
    " gs://bucket/x": "give 'gs://bucket/x'",
    "GS://bucket": "give 'gs://bucket'",
    "gs:bucket/x": "give 'gs://bucket/x'",
    "gs://bucket/../x": "without ..",
    "gs://bucket/x\n": "control characters",
    "s3://": "found neither",
    "s3:/bucket/x": "give 's3://bucket/x'",
    "abfs://bucket/x": "abfs:// is not supported",
    "hdfs://host/run": "hdfs:// is not supported. Give a local path",
    "gcs://bucket/run": "gcs:// is not supported",
    "file:///x": "file:// is not supported",
    "http://host": "http:// is not supported",
    "a\0b": "remove the character",
    os.fsdecode(b"l\xe4ufe"): r"found 'l\udce4ufe', whose bytes are not UTF-8",
    "dangling/run": "the symbolic link",
    "file/run": "found one that cannot: Not a directory",
    "x" * 300: "found one that cannot: File name too long",
}
FORM = FolderForm(format="safetensors")


def commands(*words: str) -> Callable[[str], None]:
    def given(path: str) -> None:
        said = run(*(path if word == "PATH" else word for word in words), code=USAGE)
        raise DirectoryError(said)

    return given


DOORS: dict[str, Callable[[str], Any]] = {
    "checkpointer": TorchaxCheckpointer,
    "local tier": lambda path: TorchaxCheckpointer("run", local=LocalTier(path)),
    "load_torch_state_dict": load_torch_state_dict,
    "warm_start": lambda path: warm_start(mlp(), path),
    "torch.restore": lambda path: restore(path, torch.nn.Linear(1, 1)),
    "StorageReader": StorageReader,
    "Publisher": lambda path: Publisher(path, "out"),
    "Publisher's out": lambda path: Publisher("run", path),
    "follower": lambda path: Follower(path, "out", FORM),
    "Reader": Reader,
    **{
        words: commands(*words.split())
        for words in (
            *(
                "ls PATH",
                "show PATH",
                "verify PATH",
                "diff PATH PATH",
                "report PATH",
                "plan --run PATH",
            ),
            *(
                "report run PATH",
                "follow PATH out",
                "follow run PATH",
                "prune PATH --policy LatestN(1)",
            ),
            *("export PATH out", "export run PATH", "export run out --config PATH"),
            *("import PATH new", "import weights PATH", "copy PATH out", "copy run PATH"),
        )
    },
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_what_is_no_path_and_creates_nothing(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("weights").mkdir()
    Path("dangling").symlink_to("nowhere")
    Path("file").touch()
    before = sorted(tmp_path.rglob("*"))
    for path, said in NO_PATHS.items():
        if " PATH " in f" {door} " and "\0" in path:
            continue  # no command line has this character
        with pytest.raises((CheckpointError, ValueError)) as caught:
            DOORS[door](path)
        assert said in str(caught.value), (path, caught.value)
        str(caught.value).encode()  # can be printed
    for thing in (None, 7, b"run") if door == "checkpointer" else ():
        with pytest.raises(
            DirectoryError, match="expected a path or the URL of a bucket, gs:// or s3://, found"
        ):
            DOORS[door](thing)  # type: ignore[arg-type]
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert location.resolve("~/run") == epath.Path(tmp_path / "home" / "run")
    assert location.resolve("./gs:/run") == epath.Path(tmp_path / "gs:" / "run")


@pytest.mark.parametrize(
    "url",
    [
        "sftp://me:secret@host/x",
        "SFTP://me:secret@host/x",
        " sftp://me:secret@host/x",
        "sftp:/me:secret@host/x",
        "sftp://me:secret/with/slashes@host/x",
        "sftp://me:secret@host/x\0",
        "ssh://me:secret@host/x",
        "ftp://me:secret@host/x",
        "abfs://me:secret@host/x",
        "https://host/x?sig=secret",
        "az://container/x?sig=secret",
        "az://secret@container/x",
        "s3://key:secret@bucket/x",
        "s3:key:secret@bucket/x",
        "gs//secret@bucket/x",
        "GS:/me:secret@bucket/x",
        "simplecache::sftp://secret/x",
        "gs://bucket/x::sftp://secret/x",
    ],
)
def test_a_url_that_may_hold_a_password_is_refused_without_its_text(
    url: str, tmp_path: Path
) -> None:
    doors: tuple[Callable[[str], Any], ...] = (
        location.resolve,
        lambda given: location.resolve(given, as_mirror=True),
        lambda given: TorchaxCheckpointer(tmp_path, mirror=given),
        commands("fetch", "PATH", str(tmp_path / "new")),
        commands("ls", "PATH"),
    )
    for door in doors[: 3 if "\0" in url else None]:
        with pytest.raises(DirectoryError, match="without user information.*environment") as error:
            door(url)
        assert "secret" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_prefix_that_leaves_no_room_for_the_names_of_a_step_is_refused(scheme: str) -> None:
    assert location.resolve(f"{scheme}://bucket/{'k' * 793}")
    for prefix in ("k" * 794, "\u00e9" * 397):  # in UTF-8
        with pytest.raises(DirectoryError, match="at most 800 bytes .* Give a shorter prefix"):
            location.resolve(f"{scheme}://bucket/{prefix}")


def test_a_port_and_odd_names_are_no_user_information(tmp_path: Path) -> None:
    for url in ("gs://bucket/a@b:c?d", "s3://bucket/run::1", f"{tmp_path}/me:x@host"):
        assert str(location.resolve(url)) == url
    for url in ("sftp://host:22/a@b:c", "az://container/run::1"):
        with pytest.raises(DirectoryError, match="can only be a mirror"):
            location.resolve(url)


def test_paths_are_made_absolute_but_for_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    for given, found in {
        "link/run": "link/run",
        "./run/": "run",
        "a:b/c://d": "a:b/c:/d",
        "link/../x": "x",  # of the folder to which the link leads
        f"/{tmp_path}/run": "run",
        "~nobody-has-this-name": "~nobody-has-this-name",
    }.items():
        assert location.resolve(given) == epath.Path(tmp_path / found)
    assert str(location.resolve("gs://bucket//a b/%20?#[x]*\\")) == "gs://bucket/a b/%20?#[x]*\\"


def test_a_relative_path_without_a_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(DirectoryError, match=r"^run: expected an absolute path, because the work"):
        TorchaxCheckpointer("run")
    assert "run: expected an absolute path" in run("ls", "run", code=USAGE)
    TorchaxCheckpointer(tmp_path / "run").close()


def content(state: Any) -> dict[str, Any]:
    """Dtype, shape and bytes by name, of torchax's tensors or of plain ones."""
    return {name: bits(tensor)[1:] for name, tensor in state.items()}


def odd(folder: Path) -> Path:
    """A folder below names that Linux allows, and some library takes for something else."""
    names = (
        "runs\\a",
        "%41%",
        "q?x#y&z",
        " s p ",
        "n\nl\t\r",
        "~",
        "..x",
        "x.",
        "[a]*{b}",
        "日本ü",
    )
    return folder.joinpath(*names, "\\n\\", "r")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A run below odd names, given with ``..``, with a local tier; and what it has saved."""
    home = tmp_path / "of one"
    (home / "x").mkdir(parents=True)
    given = home / "x" / ".." / odd(home).relative_to(home)
    model = mlp()
    place(model, fsdp_rule(fsdp_mesh()))
    near = LocalTier(odd(tmp_path / "two"), save_decision_policy=policies.FixedIntervalPolicy(1))
    with TorchaxCheckpointer(given, local=near) as ckpt:
        ckpt.attach(model)
        save_due(ckpt, 1, 2, of=None)
        assert ckpt.verify(2) == 2
    return odd(home), content(model.state_dict())


def require_odd(tmp_path: Path, *tops: str) -> None:
    """Nothing lies below but the odd folders: no library has written into a tree of its own."""
    assert {path.name for path in tmp_path.iterdir()} == {"of one", *tops}
    for top in tops:
        assert [len(list(path.iterdir())) for path in odd(tmp_path / top).parents][:11] == [1] * 11


def test_all_that_linux_allows_in_a_path_is_saved_to_and_restored_from(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    here, expected = saved
    with TorchaxCheckpointer(here, local=LocalTier(odd(tmp_path / "two"))) as ckpt:
        assert ckpt.attach(fresh := mlp()) == 2
        assert content(fresh.state_dict()) == content(load_torch_state_dict(here)) == expected
        assert ckpt.restore(tier="local").step == 2
    run("copy", here, odd(tmp_path / "three"))
    assert run_json("diff", here / "2", odd(tmp_path / "three") / "2")["identical"]
    require_odd(tmp_path, "two", "three")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of DCP, in one process
def test_all_that_linux_allows_in_a_path_works_at_every_door(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    here, expected = saved
    warm_start(fresh := mlp(), here)
    assert content(fresh.state_dict()) == expected
    with before_enabling():
        layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
        restore(here, native := torch.nn.Sequential(*layers))
        assert content(native.state_dict()) == expected
        state = {name: torch.zeros_like(tensor) for name, tensor in native.state_dict().items()}
        reader = StorageReader(here, prefix={"model": ""})
        dcp.load(state, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
        assert content(state) == expected
    with Follower(here, out := odd(tmp_path / "three"), FORM) as follower:
        assert follower.publish_due() is not None
    assert content(Reader(out).poll()) == expected
    names = ("w.pt", "w.safetensors", "dcp")
    for name in names:
        file, new = odd(tmp_path / "four") / name, odd(tmp_path / name)
        run("export", here, file, *["--format", "dcp"][: 2 * (name == "dcp")])
        run("import", file, new)
        assert content(load_torch_state_dict(new)) == expected
    run("verify", here, "--all")
    run("report", here, odd(tmp_path / "five"))
    require_odd(tmp_path, "two", "three", "four", "five", *names)


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_commands_find_names_that_the_locale_lacks(tmp_path: Path) -> None:
    directory = tmp_path / "läufe" / "日本"
    save_state(directory, {"w": np.arange(3)})
    program = """
        import sys
        from torchax_ckpt.__main__ import main
        assert sys.getfilesystemencoding() == "ascii"
        main()
    """
    args = "copy", str(directory), str(tmp_path / "ü")
    assert "verified: 1" in run_python(program, *args, env=C_LOCALE, fresh=True).stdout
    with TorchaxCheckpointer(tmp_path / "ü") as ckpt:
        assert_trees_identical(ckpt.load(1), {"w": np.arange(3)})
    assert {path.name for path in tmp_path.iterdir()} == {"läufe", "ü"}


@pytest.mark.slow
def test_a_program_trains_where_the_locale_lacks_the_names(tmp_path: Path) -> None:
    """Given as an argument, and as a literal, which Python cannot pass to the kernel by itself."""
    program = """
        import os, sys, torch, torchax
        from support.training import mlp
        from torchax_ckpt import LocalTier, TorchaxCheckpointer, load_torch_state_dict, warm_start
        from torchax_ckpt import torchax_backend

        torchax.enable_globally()
        os.chdir(sys.argv[1])
        given = sys.argv[2]
        for run in (given + "/x", "l\\u00e4ufe/y"):
            with TorchaxCheckpointer(run, local=LocalTier(run + "-near")) as ckpt:
                ckpt.attach(mlp())
                ckpt.save(1, force=True)
            with TorchaxCheckpointer(run) as ckpt:
                assert ckpt.attach(mlp()) == 1
                ckpt.verify(1)
            warm_start(mlp(), run)
        with open(given + "/w.pt", "wb") as file, torchax_backend.native_torch():
            torch.save(load_torch_state_dict(run), file)
        warm_start(mlp(), given + "/w.pt")
    """
    (tmp_path / "日本").mkdir()
    run_python(program, str(tmp_path), str(tmp_path / "日本"), env=C_LOCALE, fresh=True)
    assert {path.name for path in tmp_path.iterdir()} == {"läufe", "日本"}


@pytest.mark.parametrize("elsewhere", ["elsewhere", "run/1/elsewhere"])
def test_a_save_whose_arrays_lie_elsewhere_is_not_committed(
    elsewhere: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where TensorStore understands a path in its own way."""
    kvstore = LocalMedium.kvstore

    def misunderstood(self: LocalMedium, folder: epath.Path) -> dict[str, Any]:
        return kvstore(self, tmp_path / elsewhere / os.path.relpath(folder, directory))

    monkeypatch.setattr(LocalMedium, "kvstore", misunderstood)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": np.arange(3)}, force=True)
        with pytest.raises(SaveError, match=r"expected the database.*manifest\.ocdbt.*found none"):
            ckpt.wait_until_finished()
        assert ckpt.all_steps() == []
        monkeypatch.undo()
        save(ckpt, 2, of={"w": np.arange(3)})
        assert ckpt.all_steps() == [2]


def test_a_descriptor_follows_a_folder_that_was_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "a\\b"
    for _ in range(2):
        folder.mkdir()
        (folder / "file").touch()
        assert os.listdir(location.without_backslash(os.fspath(folder))) == ["file"]
        number = location._descriptor(os.fspath(folder))
        assert location._descriptor(os.fspath(folder)) == number
        os.close(number)  # as a program does that becomes a daemon
        assert os.listdir(location.without_backslash(os.fspath(folder))) == ["file"]
        (folder / "file").unlink()
        folder.rmdir()


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_local_tier_that_shares_the_runs_folder_is_refused(
    is_read_only: bool, directory: Path, tmp_path: Path
) -> None:
    options = CheckpointOptions(read_only=is_read_only)
    directory.mkdir()
    (tmp_path / "link").symlink_to(directory)
    for tier in (directory, directory / "near", tmp_path, tmp_path / "link" / "near"):
        with pytest.raises(TierError, match="expected a directory apart from the run's, .*found"):
            TorchaxCheckpointer(directory, local=LocalTier(tier), options=options)
    assert list(directory.iterdir()) == []
    TorchaxCheckpointer(directory, local=LocalTier(f"{directory}-near"), options=options).close()
