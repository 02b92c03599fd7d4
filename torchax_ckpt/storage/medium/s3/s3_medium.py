"""A bucket of S3, or of a service that speaks its protocol.

An object has an ETag and no generation: objects with the same bytes have the same ETag. So nothing
here relies on ETags telling two writes apart. No name of a step is ever used again, so that a late
request finds nothing but its own step. A lease has a token, so that no two leases have the same
content. Nothing relies on the conditions of a copy either, which some servers ignore. A server that
ignores those of writes is refused; conditions of deletes, which few know, are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import re
import shlex
import urllib.parse
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts
from etils import epath
from fsspec import asyn

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.medium import bucket, permissions, storage_errors
from torchax_ckpt.storage.medium.bucket_medium import BucketRecord, OnceNamedMedium
from torchax_ckpt.storage.medium.compare_and_swap import Conflict, Seen
from torchax_ckpt.storage.medium.local_medium import Fence, Send
from torchax_ckpt.storage.medium.s3 import service
from torchax_ckpt.storage.medium.stored_file import StoredFile

# One request copies at most so much.
COPIED_AT_ONCE_BYTES = 5 * 10**9
PART_BYTES = 1 << 30  # of a larger copy, by one request
_CHECK_SECS = 60.0  # how long small requests may take, with their repetitions
_REQUESTS_AT_A_TIME = 32
_PROBE = ".torchax_ckpt_conditions"
# What a service answers if a condition does not hold, or if two writes meet.
_REFUSALS = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_ACTIONS = "s3:ListBucket on the bucket, s3:GetObject, s3:PutObject and s3:DeleteObject"


class S3Medium(OnceNamedMedium):
    """The bucket in which a prefix ``s3://bucket/prefix`` lies."""

    # --- the storage ---

    def use(self, user: object) -> None:
        with storage_errors.translated("open", self._folder):
            try:
                found = service.filesystem()
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise DirectoryError(  # as botocore reports some settings
                    f"{self._folder}: a client for it cannot be made: "
                    f"{storage_errors.said(error)}. {service.SETTINGS}",
                    path=self._folder,
                ) from error
            endpoint = urllib.parse.urlsplit(found.s3.meta.endpoint_url or "")
            if endpoint.query or endpoint.username is not None:
                raise DirectoryError(
                    f"{self._folder}: expected an endpoint without user information and query (?), "
                    f"found one at {endpoint.hostname} with one of these, which may be a password. "
                    f"{service.SETTINGS}",
                    path=self._folder,
                )
            bucket.prepare_clients(found.loop)

    def require_usable(self, *, for_writing: bool, name: str = "") -> bool:
        """Raises DirectoryError if a client cannot reach the bucket, or lacks a permission.

        Both clients must reach the same objects, each with its own credentials. TensorStore reads
        an object that s3fs has written or, unless ``for_writing``, the start of one that is there.
        """
        is_there = self._has(name)
        if not for_writing:
            prefix = _prefix(self._folder)
            for each in self._first(prefix):
                if each["Size"]:  # there is no range of an empty object
                    self._require_tensorstore(each["Key"].removeprefix(prefix), None)
            return is_there
        # The next cleanup of the directory removes one that stays.
        probe = f"{permissions.PROBE}-{uuid.uuid4().hex}{permissions.DRAFT_SUFFIX}"
        content = uuid.uuid4().bytes
        with self._allowed("write", "s3:PutObject"):
            _call(self._folder / probe, "put_object", Body=content)
        try:
            self._require_tensorstore(probe, content)
        finally:
            deleting = self._allowed("delete from", "s3:DeleteObject")
            with deleting, contextlib.suppress(FileNotFoundError):
                _call(self._folder / probe, "delete_object")
        return is_there

    def _has(self, name: str) -> bool:
        key = _prefix(self._folder) + name
        return any(each["Key"] == key for each in self._first(key))

    def _first(self, prefix: str) -> Sequence[Mapping[str, Any]]:
        try:
            with self._allowed("list", "s3:ListBucket"):
                query = {"Prefix": prefix, "MaxKeys": 1}
                return _call(self._folder, "list_objects_v2", **query).get("Contents", ())
        except FileNotFoundError:
            name = _split(self._folder)[0]
            raise DirectoryError(
                f"{self._folder}: there is no bucket {name!r}. Check its name, and the endpoint "
                f"{service.filesystem().s3.meta.endpoint_url}; or create it: aws s3 mb s3://{name}",
                path=self._folder,
            ) from None

    def _require_tensorstore(self, name: str, content: bytes | None) -> None:
        folder, context = self._folder, ts.Context({"s3_request_retries": {"max_retries": 3}})
        try:
            store = ts.KvStore.open(self.kvstore(folder), context=context).result()
            found = store.read(name, byte_range=slice(0, len(content or b"1"))).result()
        except ValueError as error:
            why = storage_errors.said(error)
        else:
            if found.state == "value" and content in (None, found.value):
                return
            if found.state == "missing" and not self._has(name):
                return  # somebody has deleted it meanwhile, and both say so
            why = f"TensorStore found no such object (state {found.state!r})"
        raise DirectoryError(
            f"{folder}: expected TensorStore, which reads and writes the arrays, to read the "
            f"object {name} as s3fs does, but it cannot: {why}. {service.chains()}. Grant both "
            "s3:GetObject, and give both the same account, endpoint and region.",
            path=folder,
        )

    @contextlib.contextmanager
    def _allowed(self, verb: str, action: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except PermissionError as error:
            is_of_reading = action == "s3:ListBucket"
            or_read = "; or, to only read, give options=CheckpointOptions(read_only=True)"
            raise DirectoryError(
                f"{self._folder}: the account in use may not {verb} the bucket: it lacks {action}, "
                f"or its credentials are wrong: {storage_errors.said(error)}. A run needs "
                f"{_ACTIONS} on its objects{'' if is_of_reading else or_read}.",
                path=self._folder,
            ) from error
        except Exception as error:
            raise DirectoryError(
                f"{self._folder}: cannot {verb} the bucket: "
                f"{storage_errors.explained(error, self._folder)}",
                path=self._folder,
            ) from error

    def prove_writable(self) -> None:
        pass  # ``require_usable`` and the lease have done so

    # --- files and folders ---

    def files(self, folder: epath.Path, prefix: str = "") -> list[StoredFile]:
        # Without ETags: those of equal content may differ, as with encryption by a service's keys.
        return [StoredFile(n, int(i["size"])) for n, i in _listed(folder, prefix).items() if n]

    def read(self, path: epath.Path, max_bytes: int | None = None) -> bytes:
        return _read(path, max_bytes)[0]

    def kvstore(self, folder: epath.Path) -> dict[str, Any]:
        return service.kvstore(str(folder))

    def record(self, path: epath.Path, **limits: int) -> BucketRecord:
        return S3Record(path)

    def _remove(self, path: epath.Path) -> None:
        removals = [_ask(path / name, "delete_object") for name in _listed(path)]
        _await_all(removals, but=(FileNotFoundError,))

    def _copy(
        self, source: epath.Path, target: epath.Path, names: Collection[str] | None = None
    ) -> None:
        there = _listed(source)
        wanted = {n: info for n, info in there.items() if names is None or n in names}
        if not wanted or (names is not None and len(wanted) < len(names)):
            raise FileNotFoundError(errno.ENOENT, "there are no objects", str(source))
        copies = [_copy_one(source / n, target / n, info) for n, info in wanted.items()]
        try:
            _await_all(copies)
        except (Conflict, OSError) as error:
            why = storage_errors.said(error)
            raise OSError(f"{source}: cannot be copied to {target}: {why}") from error

    def put_folder(
        self, draft: Path, target: epath.Path, before: epath.Path, reused: Sequence[str], send: Send
    ) -> None:
        send(draft, target)  # no request tells whether a stored object has the bytes of a file here

    def has_run(self, folder: epath.Path, is_step: Callable[[epath.Path], bool]) -> bool:
        # A copied run has no journal, and no folder here is named by its number alone.
        prefix = f"{_prefix(folder)}incoming-"
        found = (each["Key"].removeprefix(prefix) for each in self._first(prefix))
        is_there = any(re.match(r"\d+-\d{15}/", rest) for rest in found)
        return is_there or super().has_run(folder, is_step)

    def command_to_move(self, patterns: Sequence[str], new: str) -> str:
        folders = " ".join(shlex.quote(f"{folder}/") for folder in (self._folder, new))
        # It takes no patterns of folders. Those of objects match all that begins so.
        chosen = (f"--include {shlex.quote(pattern.rstrip('*') + '*')}" for pattern in patterns)
        return f"aws s3 mv --recursive {folders} --exclude '*' {' '.join(chosen)}"

    # --- steps that are written ---

    def set_aside(self, path: epath.Path, target: epath.Path, fence: Fence) -> OSError | None:
        number = "-".join(target.name.split("-")[:2])
        return super().set_aside(path, self.unused(target.parent, number), fence)

    def _move(self, path: epath.Path, target: epath.Path) -> None:
        self._copy(path, target)
        self._remove(path)


class S3Record(BucketRecord):
    """A record in a bucket of S3, with the credentials and retries of s3fs.

    Many services know no conditions of deletes. So a record that is removed stays as an empty
    object, which counts as none.
    """

    def __init__(self, path: epath.Path) -> None:
        self._path = path

    def read(self) -> Seen | None:
        found = self._found()
        return found if found is not None and found.content else None

    def _found(self) -> Seen | None:
        try:
            content, etag = _read(self._path)
        except FileNotFoundError:
            return None
        return Seen(content, etag, etag)

    def swap(self, seen: Seen | None, content: bytes) -> Seen:
        _require_conditions(self._path.parent)
        try:
            return self._put(seen, content, service.REQUEST_SECS)
        except Conflict:
            removed = self._found() if seen is None else None
            if removed is None or removed.content:
                raise
            return self._put(removed, content, service.REQUEST_SECS)

    def _put(self, seen: Seen | None, content: bytes, limit_secs: float) -> Seen:
        condition = {"IfMatch": seen.version} if seen else {"IfNoneMatch": "*"}
        # Without a record, what is missing is the bucket.
        changed = (Conflict, FileNotFoundError) if seen else (Conflict,)
        put = _ask(self._path, "put_object", Body=content, **condition)
        try:
            made = _answer(self._path, put, limit_secs)
        except changed:
            # The request may have succeeded; if its answer was lost, s3fs sent it again.
            now = self._found()
            if now is None or now.content != content:
                raise Conflict from None
            return now
        return Seen(content, made["ETag"], made["ETag"])

    def remove(self, seen: Seen) -> None:
        with contextlib.suppress(Conflict):
            self._put(seen, b"", _CHECK_SECS)


@functools.cache  # a server does not change its ways
def _require_conditions(folder: epath.Path) -> None:
    """Raises DirectoryError unless the server heeds the conditions on which records rely."""
    probe, wrong = folder / f"{_PROBE}-{uuid.uuid4().hex}", f'"{uuid.uuid4().hex}"'
    conditions: tuple[tuple[str, dict[str, str]], ...] = (
        ("If-None-Match", {"IfNoneMatch": "*"}),
        ("If-Match", {"IfMatch": wrong}),
    )
    _call(probe, "put_object", Body=b"1")
    try:
        for condition, query in conditions:
            try:
                _call(probe, "put_object", Body=b"2", **query)
            except Conflict:
                continue
            except OSError as error:
                if error.errno != errno.ENOSYS:  # it does not know the condition
                    raise
            raise DirectoryError(
                f"{folder}: the server of this bucket does not heed the condition {condition} of "
                "PutObject, so that two programs could write here at the same time. Use a service "
                "that heeds it. CheckpointOptions(read_only=True) reads this one.",
                path=folder,
            )
    finally:
        with contextlib.suppress(OSError):  # one byte, under a name that nobody looks at
            _call(probe, "delete_object")


def _split(path: epath.Path) -> tuple[str, str]:
    name, _, key = str(path).removeprefix("s3://").partition("/")
    return name, key


def _prefix(folder: epath.Path) -> str:
    """Returns how the keys of all objects below a folder begin; "" for the bucket itself."""
    key = _split(folder)[1]
    return f"{key}/" if key else ""


async def _ask(path: epath.Path, method: str, **query: Any) -> Any:
    """Sends a request about an object; Conflict if a condition of it does not hold."""
    name, key = _split(path)
    try:
        with bucket.as_os_error(path):
            return await service.filesystem()._call_s3(method, Bucket=name, **{"Key": key, **query})
    except OSError as error:
        answer = getattr(error.__cause__, "response", None) or {}
        if answer.get("Error", {}).get("Code") in _REFUSALS:
            raise Conflict from error
        raise


def _call(path: epath.Path, method: str, **query: Any) -> Any:
    return _answer(path, _ask(path, method, **query), _CHECK_SECS)


def _answer(path: epath.Path, request: Coroutine[Any, Any, Any], limit_secs: float) -> Any:
    """Returns the answer to a request; TimeoutError if it has not come after so long."""
    try:
        return asyn.sync(service.filesystem().loop, lambda: request, timeout=limit_secs)
    except asyn.FSTimeoutError as error:  # whose text is empty
        raise TimeoutError(f"{path}: no answer for {limit_secs:.0f} s") from error


def _await_all(requests: Sequence[Any], but: tuple[type[Exception], ...] = ()) -> None:
    """Sends requests, some of them at a time; then raises the first error, if not in ``but``."""
    loop, send = service.filesystem().loop, asyn._run_coros_in_chunks
    settings: Any = {"batch_size": _REQUESTS_AT_A_TIME, "return_exceptions": True}
    for result in asyn.sync(loop, send, requests, **settings):
        if isinstance(result, Exception) and not isinstance(result, but):
            raise result


def _read(path: epath.Path, max_bytes: int | None = None) -> tuple[bytes, str]:
    """Returns the first bytes of an object, or all, and its ETag, by one request."""
    from s3fs.core import S3_RETRYABLE_ERRORS

    async def read() -> tuple[bytes, str]:
        found = service.filesystem()
        for attempt in range(found.retries):
            answer = await _ask(path, "get_object")
            content = bytearray()
            try:
                async with answer["Body"] as body:
                    # A read of some bytes returns those that have come so far.
                    while piece := await body.read(max_bytes and max_bytes - len(content)):
                        content += piece
                return bytes(content), answer["ETag"]
            except S3_RETRYABLE_ERRORS as error:  # the answer broke off
                if attempt == found.retries - 1:
                    raise OSError(f"{path}: {error!r}") from error
                await asyncio.sleep(0.1 * 2**attempt)
        raise AssertionError("a range without numbers")

    result: tuple[bytes, str] = _answer(path, read(), service.REQUEST_SECS)
    return result


def _listed(folder: epath.Path, prefix: str = "") -> dict[str, Mapping[str, Any]]:
    """Returns the objects under a path whose names there begin with ``prefix``.

    Name below the path, or "" for an object at the path itself -> what s3fs says of it.
    """
    with bucket.as_os_error(folder):
        found = service.filesystem().find(str(folder), prefix=prefix, detail=True)
    above = str(folder).removeprefix("s3://")
    return {name.removeprefix(above).lstrip("/"): info for name, info in found.items()}


async def _copy_one(source: epath.Path, target: epath.Path, info: Mapping[str, Any]) -> None:
    """Copies an object to a name that nobody else writes, so that to repeat it does no harm."""
    name, key = _split(source)
    origin = {"CopySource": {"Bucket": name, "Key": key}, "CopySourceIfMatch": info["ETag"]}
    if (size := int(info["size"])) <= COPIED_AT_ONCE_BYTES:
        await _ask(target, "copy_object", **origin)
        return
    upload = (await _ask(target, "create_multipart_upload"))["UploadId"]
    parts = []
    try:
        for number, start in enumerate(range(0, size, PART_BYTES), 1):
            part: dict[str, Any] = {"UploadId": upload, "PartNumber": number}
            part["CopySourceRange"] = f"bytes={start}-{min(start + PART_BYTES, size) - 1}"
            made = await _ask(target, "upload_part_copy", **part, **origin)
            parts.append({"PartNumber": number, "ETag": made["CopyPartResult"]["ETag"]})
        end = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        try:
            await _ask(target, "complete_multipart_upload", **end)
        except FileNotFoundError:  # it was completed, and the answer was lost
            if (await _ask(target, "head_object"))["ContentLength"] != size:
                raise
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            await _ask(target, "abort_multipart_upload", UploadId=upload)
        raise
