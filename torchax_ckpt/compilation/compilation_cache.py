"""Keeps what JAX compiles in a folder of the user's, so that a restart does not compile it again.

JAX has the cache; this module sets it up. With its defaults the cache is off, and keeps no program
that was compiled within a second. A training with an eager optimizer consists of such programs.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import jax
from etils import epath

from torchax_ckpt.compilation import packed_programs
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.medium import location

logger = logging.getLogger(__name__)

_FOLDER, _MIN_SECS, _MAX_SIZE, _XLA_CACHES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_enable_xla_caches",
)
# The values of these options if nobody has set them.
_DEFAULTS = {
    _FOLDER: None,
    _MIN_SECS: 1.0,
    _MAX_SIZE: -1,
    _XLA_CACHES: "xla_gpu_per_fusion_autotune_cache_dir",
}


def compilation_cache(
    folder: str | os.PathLike[str] | None = None,
    *,
    travels_with: str | os.PathLike[str] | None = None,
    max_bytes: int = 4 << 30,
) -> Path:
    """Has JAX keep compiled programs on this machine, and take them from there after a restart.

    Sets only those options of JAX that neither the program nor the environment has set. It is best
    called before anything is compiled; it also works later, unless JAX has opened a cache by then.
    On several processes, JAX lets process 0 alone write, and each process read.

    Whoever can write to the folder, or to the file that ``travels_with`` names, can have a program
    that uses the cache run any code. So both must belong to the user alone. Do not share them, and
    do not put them into a run's directory.

    Args:
      folder: a local path; it is created if it does not exist, with mode 0700. The default is
        ``torchax_ckpt/programs`` in ``XDG_CACHE_HOME``, or in ``~/.cache``.
      travels_with: one file, a path on another disk, or ``gs://bucket/name`` or
        ``s3://bucket/name``, for a machine whose disk ends with the session. Its programs, at most
        1 GiB, are fetched now, which takes at most a minute. After a durable save, a thread adds
        what was compiled since; machines that write at the same time add to each other's. Failures
        are logged as warnings.
      max_bytes: above this size, JAX deletes the programs that were not used for the longest time.

    Returns:
      The folder that JAX uses, which is another one if the program or the environment has set it.

    Raises:
      DirectoryError: the folder is a URL, a link, or no folder; it belongs to somebody else, or
        others may enter it; or it cannot be created. ``travels_with`` is no path, and no
        ``gs://`` or ``s3://`` URL with a name.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    url = str(travels_with).rstrip("/")
    scheme, _, name = url.partition("://")
    if name and "/" not in name:
        raise DirectoryError(
            f"compilation_cache: travels_with: expected {scheme}://bucket/name, found {url}, which "
            "names no file. Give a name in the bucket",
            path=travels_with,
        )
    place = None if travels_with is None else location.resolve(travels_with)
    path = _private(Path(home, "torchax_ckpt", "programs") if folder is None else folder)
    wanted = {_FOLDER: str(path), _MIN_SECS: 0.0, _MAX_SIZE: max_bytes}
    if place is not None:  # the path of XLA's own caches, for GPUs, would be part of JAX's keys
        wanted[_XLA_CACHES] = "none"
    unset = {
        name: value
        for name, value in wanted.items()
        if getattr(jax.config, name) == _DEFAULTS[name] and name.upper() not in os.environ
    }
    for name, value in unset.items():
        jax.config.update(name, value)
    used = Path(getattr(jax.config, _FOLDER) or "")
    if folder is not None and used != path:
        logger.warning("JAX keeps compiled programs in %s already, so not in %s", used, path)
    else:
        logger.info("compiled programs are kept in %s", used)
    if _MAX_SIZE in unset:  # the user's own folder may be one that had no limit before
        packed_programs.complete(used, packed_programs.programs_in(used))
    if place is not None:
        _begin_to_travel(place)
    return used


def _begin_to_travel(place: epath.Path) -> None:
    used = getattr(jax.config, _FOLDER)
    if not used:  # an empty JAX_COMPILATION_CACHE_DIR turns the cache off
        logger.warning("JAX's cache of compiled programs is off, so none travel with %s", place)
        return
    try:
        folder = location.on_this_host(_FOLDER, used)
    except DirectoryError as error:
        logger.warning("no compiled programs travel with %s: %s", place, error)
    else:
        packed_programs.travel(folder, place)


def _private(folder: str | os.PathLike[str]) -> Path:
    """Creates a folder unless it exists; raises DirectoryError if it is not the user's alone."""
    reason = (
        "JAX reads one program after the other, each by a request to a bucket, which takes longer "
        "than to compile small programs"
    )
    path = Path(os.path.abspath(location.on_this_host("compilation_cache", folder, reason)))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise DirectoryError(
            f"compilation_cache: {path} cannot be created: {error.strerror}. Give another folder.",
            path=path,
        ) from error
    problem = ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "a link or a file"
    elif status.st_uid != os.geteuid():
        problem = f"a folder of user {status.st_uid}"
    elif status.st_mode & 0o077:
        problem = f"a folder with mode {stat.S_IMODE(status.st_mode):04o}; run chmod 700"
    if problem:
        raise DirectoryError(
            f"compilation_cache: {path}: expected a folder of user {os.geteuid()} that nobody else "
            f"may enter, since what is in it runs as code; found {problem}",
            path=path,
        )
    return path
