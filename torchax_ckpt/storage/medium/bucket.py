"""Access to ``gs://``: the settings of its clients, the check of a bucket, and conditional removal.

Three clients talk to a bucket: TensorStore for array data, gcsfs (through epath) for everything
else, and google-cloud-storage, which Orbax asks for the bucket's kind. Each repeats what fails:
gcsfs for about 35 seconds per request, google-cloud-storage for two minutes, TensorStore for 15
minutes. On a connection that stays silent they would wait for many minutes each time, or without
end, so that is bounded here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import tensorstore as ts
from etils import epath
from etils.epath import backend
from fsspec import asyn
from google.api_core import exceptions

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.medium import storage_errors

logger = logging.getLogger(__name__)

_CHECK_SECS = 60.0
_SILENCE_SECS = 30
_REMOVALS_AT_A_TIME = 32
_TENSORSTORE = {
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": str(_SILENCE_SECS),
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": str(_SILENCE_SECS),
}
# Orbax asks for the bucket itself, to learn whether it has a hierarchical namespace.
_READING = ("storage.buckets.get", "storage.objects.get", "storage.objects.list")
_WRITING = ("storage.objects.create", "storage.objects.delete")


def check(path: epath.Path, *, for_writing: bool) -> None:
    """Makes sure that a bucket is there and may be used, within seconds.

    Args:
      path: ``gs://bucket/prefix``.
      for_writing: whether the account must be allowed to write, too.

    Raises:
      DirectoryError: no credentials, no bucket, no permission, or no answer.
    """
    filesystem = _filesystem(path)
    name, _, prefix = str(path).removeprefix("gs://").partition("/")
    try:
        _call(filesystem, "b/{}/o", name, prefix=prefix, maxResults=1)
    except FileNotFoundError:
        raise DirectoryError(
            f"{path}: there is no bucket {name!r}. Check its name, or create it: "
            f"gcloud storage buckets create gs://{name} --location=<the accelerators' region>",
            path=path,
        ) from None
    except Exception as error:
        raise DirectoryError(
            f"{path}: the bucket cannot be listed: {storage_errors.said(error)}. "
            f"{storage_errors.advice(error, is_bucket=True)}",
            path=path,
        ) from error
    wanted = _READING + (_WRITING if for_writing else ())
    try:
        found = _call(filesystem, "b/{}/iam/testPermissions", name, permissions=list(wanted))
    except Exception as error:
        # Not every server of this API can be asked; the first save will tell.
        logger.info(
            "%s: not known what this account may do there: %s", path, storage_errors.said(error)
        )
        return
    missing = [p for p in wanted if p not in found.get("permissions", ())]
    if missing:
        raise DirectoryError(
            f"{path}: the account in use lacks {', '.join(missing)} on the bucket. Grant it "
            "roles/storage.objectUser and roles/storage.legacyBucketReader"
            + (
                "; or, to only read, give options=CheckpointOptions(read_only=True)."
                if set(missing) <= set(_WRITING)
                else "."
            ),
            path=path,
        )


def remove(path: epath.Path) -> None:
    """Removes an object, or everything under a prefix; does nothing if there is nothing.

    Each object is removed only in the generation that was listed. A request whose answer was lost
    is sent again, and the first one may be carried out long after the second: an unconditional
    delete would then remove an object that was written under the same name meanwhile.

    Where the bucket has a hierarchical namespace, the listed folders that are empty by then are
    removed too. An object that appeared or changed since the listing stays, with its folders.
    """
    filesystem = _filesystem(path)
    found = filesystem.find(str(path), withdirs=True, detail=True)
    objects = {name: info["generation"] for name, info in found.items() if "generation" in info}
    asyn.sync(filesystem.loop, _remove_objects, filesystem, objects)
    folders = found.keys() - objects.keys()
    asyn.sync(filesystem.loop, _remove_empty_folders, filesystem, folders)


async def _remove_objects(filesystem: Any, generations: Mapping[str, str]) -> None:
    async def remove_one(name: str, generation: str) -> None:
        bucket, _, key = name.partition("/")
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # gone, or another by now
            await filesystem._call(
                "DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=str(generation)
            )

    removals = [remove_one(name, generation) for name, generation in generations.items()]
    await asyn._run_coros_in_chunks(removals, batch_size=_REMOVALS_AT_A_TIME)


async def _remove_empty_folders(filesystem: Any, folders: Iterable[str]) -> None:
    """Removes folder resources; the service itself refuses to remove one that is not empty.

    In a flat bucket, folders are only parts of objects' names, and there is nothing to remove.
    gcsfs's ``rmdir`` is not used: it deletes an object ``folder/`` first, in any generation.
    """
    for folder in sorted(folders, reverse=True):  # those inside a folder come before it
        bucket, _, key = folder.partition("/")
        # gcsfs without its support of hierarchical namespaces neither lists nor removes folders.
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


def _filesystem(path: epath.Path) -> Any:
    """The gcsfs instance behind epath, without what it remembers."""
    filesystem = backend.fsspec_backend.fs(path)
    filesystem.invalidate_cache()
    return filesystem


class _Settings:
    """The settings of the gcsfs instance that epath, Orbax and this package share with the program.

    They are this package's while there are users, else what they were before.
    """

    def __init__(self) -> None:
        # Users may be collected, and counted, anywhere: also in here.
        self._lock = threading.RLock()
        self._num_users = 0
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_SILENCE_SECS, sock_read=_SILENCE_SECS
        )

    def use(self, filesystem: Any, user: object) -> None:
        """Sets the instance until the user, and every other one, is collected."""
        with self._lock:
            if self._num_users == 0:
                self._had_cache = filesystem.dircache.use_listings_cache
            # It would never see what TensorStore, or another process, has written meanwhile.
            filesystem.dircache.use_listings_cache = False
            if filesystem.requests_timeout is None:
                filesystem.requests_timeout = self._timeout
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
    """Sets the clients of a bucket for as long as an object lives that reads or writes there."""
    _start_tensorstore()
    _settings.use(_filesystem(path), user)


@functools.cache
def _start_tensorstore() -> None:
    """Has TensorStore give up on silent connections.

    Only environment variables say that, which TensorStore reads once, as it opens its first
    bucket; opening one sends no request. They are set for that moment alone.
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
