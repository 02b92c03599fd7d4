"""Configures the clients of buckets, checks that a bucket is usable, copies and removes objects.

TensorStore reads and writes array data, gcsfs (through epath) does everything else. Each repeats
failed requests: gcsfs for about 35 seconds, TensorStore for 15 minutes. On a connection that
transfers (almost) no data, gcsfs and TensorStore would by default wait for many minutes, or
forever. Here TensorStore gives up a request that gets less than 10 kB/s for 60 seconds, and gcsfs
one after 30 seconds of silence, or 10 minutes in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorstore as ts
from etils import epath
from etils.epath import backend
from fsspec import asyn

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.runtime.background import Executor
from torchax_ckpt.storage.medium import storage_errors

logger = logging.getLogger(__name__)

_CHECK_SECS = 60.0
_SILENCE_SECS = 30
# One request of gcsfs transfers at most some 50 MB.
_REQUEST_SECS = 600
# Low enough for 32 requests that share the slowest link of ``min_read_bytes_per_sec``.
_SLOW_BYTES_PER_SEC, _SLOW_SECS = 10_000, 60
_REQUESTS_AT_A_TIME = 32
# Objects that are equal in these have the same content.
_IDENTIFYING = ("size", "crc32c")
_TENSORSTORE = {
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": str(_SLOW_BYTES_PER_SEC),
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": str(_SLOW_SECS),
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": str(_SILENCE_SECS),
}
_READING = ("storage.objects.get", "storage.objects.list")
_WRITING = ("storage.objects.create", "storage.objects.delete")


def check(path: epath.Path, *, for_writing: bool, name: str = "") -> bool:
    """Raises DirectoryError without credentials, bucket, answer or the permissions needed there.

    Returns whether an object has this ``name`` under the path; the same request finds out.
    """
    filesystem = _filesystem(path)
    bucket, _, key = f"{path}/{name}".removeprefix("gs://").partition("/")
    try:
        found = _call(filesystem, "b/{}/o", bucket, prefix=key, maxResults=1)
    except FileNotFoundError:
        raise DirectoryError(
            f"{path}: there is no bucket {bucket!r}. Check its name, or create it: "
            f"gcloud storage buckets create gs://{bucket} --location=<the accelerators' region>",
            path=path,
        ) from None
    except Exception as error:
        raise DirectoryError(
            f"{path}: the bucket cannot be listed: {storage_errors.explained(error, path)}",
            path=path,
        ) from error
    is_there = any(listed["name"] == key for listed in found.get("items", ()))
    wanted = _READING + (_WRITING if for_writing else ())
    try:
        may = _call(filesystem, "b/{}/iam/testPermissions", bucket, permissions=list(wanted))
    except Exception as error:
        # Some servers of this API do not answer this request. The first save then shows whether a
        # permission is missing.
        text = "%s: cannot read this account's permissions: %s"
        logger.debug(text, path, storage_errors.said(error))
        return is_there
    missing = [p for p in wanted if p not in may.get("permissions", ())]
    if missing:
        is_reading_allowed = set(missing) <= set(_WRITING)
        or_read = "; or, to only read, give options=CheckpointOptions(read_only=True)"
        raise DirectoryError(
            f"{path}: the account in use lacks {', '.join(missing)} on the bucket. Grant it "
            f"roles/storage.objectUser{or_read if is_reading_allowed else ''}.",
            path=path,
        )
    return is_there


def remove(path: epath.Path) -> None:
    """Removes an object, or everything under a prefix; does nothing if nothing is there.

    Removes only the generation that was listed: the server may carry out a repeated request late,
    when another object has this name. Then removes folders that have become empty.
    """
    filesystem = _filesystem(path)
    found = filesystem.find(str(path), withdirs=True, detail=True)
    objects = {name: info["generation"] for name, info in found.items() if "generation" in info}
    asyn.sync(filesystem.loop, _remove_objects, filesystem, objects)
    asyn.sync(filesystem.loop, _remove_empty_folders, filesystem, found.keys() - objects.keys())


async def _remove_objects(filesystem: Any, generations: Mapping[str, str]) -> None:
    async def remove_one(name: str, generation: str) -> None:
        bucket, _, key = name.partition("/")
        # Objects that were deleted or replaced meanwhile are left alone.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            await filesystem._call(
                "DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=str(generation)
            )

    removals = [remove_one(name, generation) for name, generation in generations.items()]
    await asyn._run_coros_in_chunks(removals, batch_size=_REQUESTS_AT_A_TIME)


async def _remove_empty_folders(filesystem: Any, folders: Iterable[str]) -> None:
    """Removes folder resources; the service itself refuses to remove one that is not empty.

    A flat bucket has none. gcsfs's ``rmdir`` would first delete an object ``folder/`` in any
    generation.
    """
    from google.api_core import exceptions

    for folder in sorted(folders, reverse=True):  # inner folders come first
        bucket, _, key = folder.partition("/")
        # A gcsfs without support for hierarchical namespaces neither lists nor removes folders.
        if not hasattr(filesystem, "_is_bucket_hns_enabled"):
            return
        if not await filesystem._is_bucket_hns_enabled(bucket):
            return
        client = await filesystem._get_control_plane_client()
        with contextlib.suppress(exceptions.NotFound, exceptions.FailedPrecondition):
            await client.delete_folder(
                name=f"projects/_/buckets/{bucket}/folders/{key}",
                retry=filesystem._get_retry_config(),
                timeout=_SILENCE_SECS,
            )


def read(path: epath.Path, max_bytes: int | None = None) -> bytes:
    """Returns the first bytes of an object, or all, by one request; epath's methods make three."""
    content: bytes = _filesystem(path).cat_file(str(path), end=max_bytes)
    return content


def copy(source: epath.Path, target: epath.Path, names: Collection[str] | None = None) -> None:
    """Copies objects under a prefix to another prefix; the bytes do not leave the service.

    Copies all, or those of these ``names`` below the prefix: the generations that were listed, and
    only to names that no object has; else OSError.
    """
    filesystem = _filesystem(source)
    with as_os_error(source):
        there = listed(source)
        objects = {n: info for n, info in there.items() if names is None or n in names}
        if not objects or (names is not None and len(objects) < len(names)):
            raise FileNotFoundError(errno.ENOENT, "there are no objects", str(source))
        asyn.sync(filesystem.loop, _copy_objects, filesystem, source, target, objects)


def listed(path: epath.Path, prefix: str = "") -> dict[str, Mapping[str, Any]]:
    """Returns the objects under a path: name below the path -> what the service says of it."""
    found = _filesystem(path).find(str(path), prefix=prefix, detail=True)
    above = str(path).removeprefix("gs://") + "/"
    return {n.removeprefix(above): info for n, info in found.items() if "generation" in info}


async def _copy_objects(
    filesystem: Any, source: epath.Path, target: epath.Path, objects: Mapping[str, Any]
) -> None:
    async def copy_one(name: str, info: Mapping[str, Any]) -> None:
        (old, _, old_key), (new, _, new_key) = (
            f"{path}/{name}".removeprefix("gs://").partition("/") for path in (source, target)
        )
        token: dict[str, str] = {}
        try:
            while True:
                answer = await filesystem._call(
                    *("POST", "b/{}/o/{}/rewriteTo/b/{}/o/{}", old, old_key, new, new_key),
                    headers={"Content-Type": "application/json"},
                    ifSourceGenerationMatch=str(info["generation"]),
                    ifGenerationMatch="0",
                    json_out=True,
                    **token,
                )
                if answer["done"]:
                    return
                token = {"rewriteToken": answer["rewriteToken"]}
        except FileExistsError:  # gcsfs raises this for "precondition failed"
            # The request may have succeeded; if its answer was lost, gcsfs sent it again.
            there = await filesystem._call("GET", "b/{}/o/{}", new, new_key, json_out=True)
            if [str(there[k]) for k in _IDENTIFYING] != [str(info[k]) for k in _IDENTIFYING]:
                raise

    copies = [copy_one(name, info) for name, info in objects.items()]
    await asyn._run_coros_in_chunks(copies, batch_size=_REQUESTS_AT_A_TIME)


@contextlib.contextmanager
def as_os_error(path: Any) -> Iterator[None]:
    """Turns errors of gcsfs and of its libraries, which are of many types, into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{path}: {error!r}") from error


def _filesystem(path: epath.Path) -> Any:
    """Clears the caches of the gcsfs instance that epath uses, and returns the instance."""
    filesystem = backend.fsspec_backend.fs(path)
    filesystem.invalidate_cache()
    return filesystem


class _Settings:
    """The settings of the process's shared gcsfs instance while one of its users exists."""

    def __init__(self) -> None:
        # Garbage collection may run _leave anywhere, also inside these methods.
        self._lock = threading.RLock()
        self._num_users = 0
        self._timeout: Any = None

    def use(self, filesystem: Any, user: object) -> None:
        """Applies this package's settings until all objects passed as ``user`` are deleted."""
        with self._lock:
            if self._num_users == 0:
                self._had_cache = filesystem.dircache.use_listings_cache
            # The cache would miss what TensorStore or other processes wrote meanwhile.
            filesystem.dircache.use_listings_cache = False
            if filesystem.requests_timeout is None:
                import aiohttp

                filesystem.requests_timeout = self._timeout = aiohttp.ClientTimeout(
                    total=_REQUEST_SECS, sock_connect=_SILENCE_SECS, sock_read=_SILENCE_SECS
                )
            self._num_users += 1
            weakref.finalize(user, self._leave, filesystem).atexit = False

    def _leave(self, filesystem: Any) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                filesystem.dircache.use_listings_cache = self._had_cache
                if filesystem.requests_timeout is self._timeout:
                    filesystem.requests_timeout = None


_settings = _Settings()


def use(path: epath.Path, user: object) -> None:
    """Applies this package's settings to gcsfs while ``user`` exists, to TensorStore for good."""
    filesystem = _filesystem(path)
    prepare_clients(filesystem.loop)
    _settings.use(filesystem, user)


@functools.cache
def prepare_clients(loop: asyncio.AbstractEventLoop) -> None:
    """Bounds the requests of TensorStore to buckets; has fsspec's clients run until the end.

    They look up hosts, as each new connection does, also once the main thread has ended.
    """
    _start_tensorstore()
    loop.set_default_executor(Executor(4, "torchax_ckpt-look-up"))


@functools.cache
def _start_tensorstore() -> None:
    """Makes TensorStore give up a request that transfers almost nothing, and send it again.

    It reads the limits from environment variables, once: when it opens its first bucket.
    """
    missing = [name for name in _TENSORSTORE if name not in os.environ]
    try:
        os.environ.update({name: _TENSORSTORE[name] for name in missing})
        ts.KvStore.open({"driver": "gcs", "bucket": "any-bucket"}).result()
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _call(filesystem: Any, route: str, bucket: str, **query: Any) -> Any:
    return asyn.sync(
        filesystem.loop,
        filesystem._call,
        *("GET", route, bucket),
        **query,
        json_out=True,
        timeout=_CHECK_SECS,
    )
