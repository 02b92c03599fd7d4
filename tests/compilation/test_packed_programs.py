"""Compiled programs go from machine to machine in one file, which nobody vouches for."""

from __future__ import annotations

import io
import os
import random
import stat
import time
import zipfile
from pathlib import Path

import jax
import pytest
from etils import epath
from support.processes import run_processes
from support.travelling import (
    NAMES,
    PROGRAMS,
    add_to_each_others,
    killed,
    machine,
    session,
    warned,
)

from torchax_ckpt.compilation import packed_programs
from torchax_ckpt.compilation.packed_programs import pack, unpack

pytest_plugins = ("support.travelling_fixtures",)
pytestmark = pytest.mark.usefixtures("no_patience")


def test_the_next_machine_compiles_nothing_even_after_a_kill(tmp_path: Path) -> None:
    place = tmp_path / "disk" / "programs.zip"
    place.parent.mkdir()
    killed(tmp_path / "first", place, lambda: os.listdir(place.parent) == ["programs.zip"])
    compiled, found = session(tmp_path / "second", place)
    assert (compiled, found > 3) == (0, True)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


def test_without_a_kill_the_last_save_is_followed_by_the_file(tmp_path: Path) -> None:
    place = tmp_path / "programs.zip"
    assert session(tmp_path / "first", place)[0] > 3
    written = place.stat().st_mtime_ns
    assert session(tmp_path / "second", place)[0] == 0
    assert place.stat().st_mtime_ns == written  # nothing was new


PROCESS = """
import collections, json, os, sys
del os.environ["JAX_COMPILATION_CACHE_DIR"]
import jax, jax.numpy as jnp
import torchax_ckpt

index, count, port, home, place = sys.argv[1:]
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
torchax_ckpt.compilation_cache(f"{home}/{index}", travels_with=place)
jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
with torchax_ckpt.TorchaxCheckpointer(f"{home}/run") as ckpt:
    step = ckpt.attach(rng=False) + 1
    w = jax.jit(lambda x: x * 2 + 1)(jnp.arange(4.0))
    own = counts["compile_requests_use_cache"] - counts["cache_hits"]
    kept = [name for name in os.listdir(f"{home}/{index}") if name.endswith("-cache")]
    ckpt.save(step, state={"step": step}, force=True)
print(json.dumps({"compiled": own, "kept": len(kept)}))
"""


@pytest.mark.slow
def test_on_several_processes_those_of_process_0_travel(tmp_path: Path) -> None:
    """As docs/quickstart.md says; if JAX has other processes keep programs, it may say more."""
    place = tmp_path / "programs.zip"
    for name in ("a", "b"):
        told = run_processes(PROCESS, 2, tmp_path / name, place, fresh=True)
        (first,), (second,) = told
        if name == "a":
            assert first["kept"] == first["compiled"] > 0 == second["kept"]
        else:
            assert first["compiled"] == 0 < second["compiled"]
            assert first["kept"] == second["kept"] > 0  # both have fetched


# --- a machine, without a program of its own ---


def test_machines_that_write_at_once_add_to_each_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_to_each_others(epath.Path(tmp_path / "file"), tmp_path, monkeypatch)


def test_who_is_overtaken_again_and_again_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, programs = tmp_path / "programs.zip", machine(tmp_path, "first", NAMES[0])
    contents = iter(NAMES[1:])

    def overtaken(mine: dict[str, bytes]) -> bytes:
        name = next(contents)
        place.write_bytes(pack({name: PROGRAMS[name]}))
        place.chmod(0o600)
        return pack(mine)

    with monkeypatch.context() as patch:
        patch.setattr(packed_programs, "pack", overtaken)
        programs.write()
    assert unpack(place.read_bytes()) == {NAMES[3]: PROGRAMS[NAMES[3]]}
    programs.write()
    assert unpack(place.read_bytes()) == {name: PROGRAMS[name] for name in NAMES[:4]}


def test_a_program_that_jax_is_writing_travels_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = machine(tmp_path, "first", *NAMES[:2])
    growing = tmp_path / "first" / NAMES[1]
    growing.write_bytes(PROGRAMS[NAMES[1]][:10])
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda secs: growing.write_bytes(PROGRAMS[NAMES[1]]))
        programs.write()
    assert unpack((tmp_path / "programs.zip").read_bytes()).keys() == {NAMES[0]}
    programs.write()
    found = unpack((tmp_path / "programs.zip").read_bytes())
    assert found == {name: PROGRAMS[name] for name in NAMES[:2]}


def test_what_was_not_used_for_the_longest_time_stays_behind_above_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = machine(tmp_path, "first", *NAMES)
    for age, name in enumerate(NAMES):
        path = tmp_path / "first" / name
        if age % 2:  # JAX has used it later than it has written it
            os.utime(path, (1e9 - 100, 1e9 - 100))
            path = path.with_name(name.replace("-cache", "-atime"))
            path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(packed_programs, "MAX_BYTES", 4000)
    programs.write()
    place = tmp_path / "programs.zip"
    assert unpack(place.read_bytes()).keys() == {*NAMES[:3]}
    monkeypatch.setattr(packed_programs, "_PROGRAM_BYTES", 200)
    place.unlink()
    machine(tmp_path, "first").write()
    assert unpack(place.read_bytes()).keys() == {*NAMES[:2]}


def test_other_processes_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    machine(tmp_path, "first", NAMES[0]).write()
    assert not (tmp_path / "programs.zip").exists()


# --- files that are no good ---


def zipped(*names: str, content: bytes = b"code", mode: int = 0, how: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            member = zipfile.ZipInfo(name)
            member.external_attr, member.compress_type = mode << 16, how
            file.writestr(member, content)
    return buffer.getvalue()


KEY = f"{0:064x}-cache"
GOOD = pack({name: PROGRAMS[name] for name in NAMES[:5]})
HOSTILE = {
    "link": zipped(NAMES[0], mode=stat.S_IFLNK | 0o777),
    "device": zipped(NAMES[0], mode=stat.S_IFCHR | 0o666),
    "folder": zipped(f"{NAMES[0]}/"),
    "above": zipped(f"../f-{KEY}"),
    "absolute": zipped(f"/tmp/f-{KEY}"),
    "inner": zipped(f"a/f-{KEY}"),
    "only the key": zipped(KEY),
    "no program": zipped("sitecustomize.py"),
    "its end": zipped(f"f-{KEY}\n"),
    "second": zipped(NAMES[0], "f.py"),
    "packed": zipped(NAMES[0], content=bytes(1 << 20), how=zipfile.ZIP_DEFLATED),
    "huge": zipped(NAMES[0], content=bytes(3000)),
    "huge in all": zipped(*NAMES, content=bytes(1900)),
    "empty": b"",
    "another": b"\x1f\x8b" + GOOD,
    "after another": b"#!/bin/sh\n" + GOOD,
    "no content": GOOD[:4],
    **{f"cut at {at}": GOOD[:at] for at in (30, 500, len(GOOD) // 2, len(GOOD) - 1)},
}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_programs, "_PROGRAM_BYTES", 2000)
    monkeypatch.setattr(packed_programs, "MAX_BYTES", 9000)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("name", [*HOSTILE, "twice"])
def test_a_hostile_file_is_refused_as_a_whole(name: str, tmp_path: Path) -> None:
    if name == "twice":
        with pytest.warns(UserWarning, match="Duplicate name"):
            content = zipped(NAMES[0], NAMES[0])
    else:
        content = HOSTILE[name]
    place = tmp_path / "programs.zip"
    place.write_bytes(content)
    programs = machine(tmp_path, "first", NAMES[5])
    for action in (programs.fetch, programs.write):
        with pytest.raises(ValueError, match="or it is damaged|expected at most"):
            action()
    assert sorted(os.listdir(tmp_path)) == ["first", "programs.zip"]
    assert os.listdir(tmp_path / "first") == [NAMES[5]]
    assert place.read_bytes() == content


def test_a_flipped_bit_changes_no_program() -> None:
    chance, num_refused = random.Random(0), 0
    for _ in range(2000):
        content = bytearray(GOOD)
        content[chance.randrange(len(GOOD))] ^= 1 << chance.randrange(8)
        try:
            assert unpack(bytes(content)).items() <= PROGRAMS.items()
        except ValueError:
            num_refused += 1
    assert num_refused > 1500


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    programs, outside = machine(tmp_path, "first"), tmp_path / "outside"
    (tmp_path / "first" / NAMES[0]).symlink_to(outside)
    (tmp_path / "programs.zip").write_bytes(pack({NAMES[0]: b"code"}))
    programs.fetch()
    assert not outside.exists()


# --- nothing of this fails a program ---

SPOILT = {
    "missing": "there is no folder",
    "folder": "found drw",
    "link": "found lrw",
    "open": "since what is in it runs as code; found -rw--w----",
    "exchangeable": "a folder in which others cannot exchange files",
    "foreign": "expected a file that only user",
    "damaged": "or it is damaged",
}


def spoil(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parent.mkdir()
    if name == "missing":
        place.parent.rmdir()
    elif name == "folder":
        place.mkdir()
    elif name == "link":
        place.symlink_to("elsewhere")
    else:
        place.write_bytes(GOOD[:-1] if name == "damaged" else GOOD)
        place.chmod(0o620 if name == "open" else 0o600)
    if name == "exchangeable":
        place.parent.chmod(0o777)
    if name == "foreign":
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("name", SPOILT)
def test_a_file_that_cannot_be_used_gives_one_warning(
    name: str,
    directory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "disk" / "programs.zip"
    spoil(name, place, monkeypatch)
    before = place.lstat().st_mtime_ns if name != "missing" else None
    text = warned(machine(tmp_path, "first", NAMES[0], place=place), directory, caplog)
    assert f"cannot fetch from {place}" in text
    assert SPOILT[name] in text
    assert before == (place.lstat().st_mtime_ns if name != "missing" else None)


def test_drafts_that_killed_programs_left_are_removed(tmp_path: Path) -> None:
    drafts = [tmp_path / f"programs.zip-{n:032x}.draft" for n in range(2)]
    others = [tmp_path / f"programs.zip-{'0' * 31}.draft", tmp_path / f"p-{'0' * 32}.draft"]
    for draft in (*drafts, *others):
        draft.write_bytes(b"1")
    for old in (drafts[0], *others):
        os.utime(old, (0, 0))
    machine(tmp_path, "first", NAMES[0]).write()
    left = {path for path in tmp_path.iterdir() if path.is_file()}
    assert left == {tmp_path / "programs.zip", drafts[1], *others}
