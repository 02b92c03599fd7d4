"""JAX keeps compiled programs in a folder that is the user's alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.processes import run_python

from torchax_ckpt import compilation_cache
from torchax_ckpt.compilation import packed_programs
from torchax_ckpt.errors import DirectoryError

PROGRAM = """
import collections, sys
import jax, jax.numpy as jnp
import torchax_ckpt

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
jnp.ones(3) + 1  # a compilation before it does not matter
used = torchax_ckpt.compilation_cache(sys.argv[1] or None)
for n in (2, 3):
    jax.jit(lambda x: x * n)(jnp.arange(5 + n))
print(used, counts["cache_hits"], jax.config.jax_compilation_cache_max_size)
"""


def told(folder: str, env: dict[str, str]) -> tuple[str, bool, int]:
    path, hits, size = run_python(PROGRAM, folder, env=env, fresh=True).stdout.split()
    return path, int(hits) > 0, int(size)


def test_a_restart_takes_small_programs_from_the_users_own_folder(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "torchax_ckpt" / "programs"
    assert told("", env) == (str(folder), False, 4 << 30)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert any(folder.iterdir())
    assert told("", env)[1]


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    own = tmp_path / "own"
    env = {"JAX_COMPILATION_CACHE_DIR": str(own), "JAX_COMPILATION_CACHE_MAX_SIZE": "-1"}
    assert told(str(tmp_path / "other"), env) == (str(own), False, -1)
    assert any(own.iterdir())  # JAX's own folder gets the small programs too


MIXED = """
import sys, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp
import torchax_ckpt

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
if sys.argv[2] == "without a limit":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
else:
    torchax_ckpt.compilation_cache()
jax.jit(lambda x: x + float(len(sys.argv[2])))(jnp.arange(5))
"""


@pytest.mark.slow
def test_a_cache_that_had_no_limit_can_get_one(tmp_path: Path) -> None:
    for how in ("without a limit", "with one"):
        before = len(os.listdir(tmp_path))
        run_python(MIXED, str(tmp_path), how, fresh=True)
        assert len(os.listdir(tmp_path)) > before


TRAVELS = """
import sys
import torchax_ckpt
from torchax_ckpt.runtime import durable_steps

for _ in range(2):
    torchax_ckpt.compilation_cache(travels_with=sys.argv[1])
print(len(durable_steps.listeners))
"""


def test_a_cell_of_a_notebook_may_run_twice(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    result = run_python(TRAVELS, str(tmp_path / "file"), env=env, fresh=True)
    assert (result.stdout, result.stderr) == ("1\n", "")


def test_jaxs_own_cache_in_a_bucket_travels_without_us(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": "gs://bucket/own"}
    result = run_python(TRAVELS, str(tmp_path / "file"), env=env, fresh=True)
    assert result.stdout == "0\n"
    assert "no compiled programs travel with" in result.stderr
    assert "expected a path on this host; found 'gs://bucket/own'" in result.stderr


@pytest.mark.parametrize("place", ["az://bucket/programs", "s3://bucket", ""])
def test_what_can_be_no_file_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"az://|s3://bucket/name|empty"):
        compilation_cache(tmp_path / "programs", travels_with=place)
    assert not os.listdir(tmp_path)


REFUSED = {
    "link": "found a link or a file",
    "file": "cannot be created: File exists",
    "open": "mode 0750; run chmod 700",
    "foreign": f"a folder of user {os.geteuid()}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_to_which_others_may_write_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "programs"
    if name == "link":
        path.symlink_to(tmp_path)
    elif name == "file":
        path.touch()
    else:
        path.mkdir(mode=0o750 if name == "open" else 0o700)
    if name == "foreign":
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(DirectoryError, match=REFUSED[name]):
        compilation_cache(path)


def test_a_bucket_is_refused_with_the_reason() -> None:
    with pytest.raises(DirectoryError, match="one program after the other"):
        compilation_cache("gs://bucket/programs")


def test_a_folder_that_others_fill_may_be_readable_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"jit_f-{1:064x}-cache").write_bytes(b"1")

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    packed_programs.complete(tmp_path, packed_programs.programs_in(tmp_path))


@pytest.mark.parametrize("url", ["gs://bucket", "gs://bucket/"])
def test_a_bucket_alone_is_no_file_with_which_programs_travel(url: str, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="expected gs://bucket/name, found gs://bucket"):
        compilation_cache(tmp_path / "programs", travels_with=url)


OFF = """
import os, sys
import torchax_ckpt

os.chdir(sys.argv[1])
torchax_ckpt.compilation_cache(travels_with=sys.argv[2])
print(len(os.listdir()))
"""


def test_no_programs_travel_if_the_environment_turns_the_cache_off(tmp_path: Path) -> None:
    place, folder = tmp_path / "programs.zip", tmp_path / "working"
    folder.mkdir()
    place.write_bytes(packed_programs.pack({f"jit_f-{1:064x}-cache": b"1"}))
    place.chmod(0o600)
    env = {"JAX_COMPILATION_CACHE_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    result = run_python(OFF, str(folder), str(place), env=env, fresh=True)
    assert result.stdout.split() == ["0"]
    assert f"is off, so none travel with {place}" in result.stderr
