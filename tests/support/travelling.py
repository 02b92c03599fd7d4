"""Machines whose compiled programs travel, and sessions on them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from etils import epath

from support.processes import Started
from support.steps import save
from support.waiting import wait_until
from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.compilation import packed_programs
from torchax_ckpt.compilation.packed_programs import PackedPrograms, pack, unpack

NAMES = [f"jit_f{n}-{n:064x}-cache" for n in range(6)]
# The last one has more bytes than a lease or another record may have.
SIZES = (50, 150, 250, 350, 450, 70_000)
PROGRAMS = {name: os.urandom(size) for name, size in zip(NAMES, SIZES, strict=True)}

# What a program does in a session; one that waits is killed.
SESSION = """
import collections, sys, time
import jax, jax.numpy as jnp
import torchax_ckpt

place, directory, how = sys.argv[1:]
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
torchax_ckpt.compilation_cache(travels_with=place)
with torchax_ckpt.TorchaxCheckpointer(directory) as ckpt:
    step, w = ckpt.attach(rng=False) + 1, jnp.arange(4.0)
    for n in range(2, 5):
        w = jax.jit(lambda x: x * n + 1)(w)
    ckpt.save(step, state={"w": w}, force=True)
    while how == "waits":
        time.sleep(1)
print(counts["compile_requests_use_cache"] - counts["cache_hits"], counts["cache_hits"])
"""


def started(machine: Path, place: Path | str, how: str, env: dict[str, str]) -> Started:
    """A session on a machine, whose cache is a folder that no other machine has."""
    directory = machine.with_name(f"run-{machine.name}")
    env = {**env, "JAX_COMPILATION_CACHE_DIR": str(machine)}
    return Started("-c", SESSION, str(place), directory, how, devices=1, env=env)


def session(machine: Path, place: Path | str, **env: str) -> tuple[int, int]:
    """Returns how many programs a whole session compiles, and how many it finds."""
    result = started(machine, place, "ends", env).result(120)
    assert (result.returncode, "travel" in result.stderr) == (0, False), result.stderr
    compiled, found = map(int, result.stdout.split())
    return compiled, found


def killed(machine: Path, place: Path | str, is_there: Callable[[], bool], **env: str) -> None:
    """Runs a session that is killed once the file is there."""
    with started(machine, place, "waits", env):
        wait_until(is_there, 120)


def machine(tmp_path: Path, name: str, *names: str, place: object = None) -> PackedPrograms:
    """The programs of a machine, on which JAX has compiled those of these names."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    for each in names:
        (folder / each).write_bytes(PROGRAMS[each])
    return PackedPrograms(folder, epath.Path(place or tmp_path / "programs.zip"))


def held(folder: Path) -> dict[str, bytes]:
    """The programs in a folder, each with the time of its last use, which JAX needs."""
    names = packed_programs.programs_in(folder)
    files = {path.name for path in folder.iterdir()}
    assert files == {*names, *(name.replace("-cache", "-atime") for name in names)}
    return {name: (folder / name).read_bytes() for name in names}


def add_to_each_others(place: epath.Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that the file has the programs of both machines that write it at the same time."""
    first = machine(tmp_path, "first", NAMES[0], place=place)
    second = machine(tmp_path, "second", NAMES[1], place=place)

    def overtaken(programs: dict[str, bytes]) -> bytes:
        monkeypatch.setattr(packed_programs, "pack", pack)
        second.write()
        return pack(programs)

    monkeypatch.setattr(packed_programs, "pack", overtaken)
    first.write()
    both = {name: PROGRAMS[name] for name in NAMES[:2]}
    assert unpack(place.read_bytes()) == both
    assert packed_programs.programs_in(tmp_path / "first").keys() == both.keys()
    (tmp_path / "second" / NAMES[5]).write_bytes(PROGRAMS[NAMES[5]])
    second.write()
    machine(tmp_path, "third", place=place).fetch()
    assert held(tmp_path / "third") == {**both, NAMES[5]: PROGRAMS[NAMES[5]]}


def warned(programs: PackedPrograms, directory: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Returns the one warning of a program that saves three times."""
    programs.start()
    with TorchaxCheckpointer(directory) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
            programs.finish()
        assert ckpt.all_steps() == [1, 2, 3]
    ours = [r for r in caplog.records if r.name.startswith("torchax_ckpt")]
    (text,) = [r.getMessage() for r in ours if r.levelno >= logging.WARNING]
    return text
