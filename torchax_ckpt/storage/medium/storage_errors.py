"""Interprets storage errors: what failed, whether the failure may be temporary, what to do.

The storage libraries report the same full disk in different ways: as ``OSError``, as ``ValueError``
with a status and an ``os_error_code`` in its text (TensorStore), or as the cause of an error about
something else (Orbax). Clients of buckets also report HTTP codes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Iterator
from typing import Any

from etils import epath

from torchax_ckpt.errors import CheckpointError, DirectoryError
from torchax_ckpt.storage.medium import location, plain_store
from torchax_ckpt.storage.medium.s3 import service

_STATUS = re.compile(r"(?:^|: )([A-Z]+(?:_[A-Z]+)*): ")
_HTTP_CODE = re.compile(r"http_response_code='(\d+)'")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
# A URL, in which user information and query may be passwords.
_URL = re.compile(r"(https?://)([^/\s@'\"`]+@)?([^\s'\"`?]*)(\?[^\s'\"`]+)?")
_FILE = re.compile(r'local file "([^"]*[^"/])"')
# Statuses that mean that the bytes are not those that were written. Other reports of a medium (no
# answer, no permission, an I/O error) say nothing about the bytes.
_DAMAGE = {"DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE"}
_UNAVAILABLE = {
    *("ABORTED", "ALREADY_EXISTS", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNAVAILABLE", "UNKNOWN"),
}
# A missing file of a committed step is damage, and so is a folder instead of a file or the reverse.
_DAMAGE_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_CLIENTS = {
    *("adlfs", "aiohttp", "asyncssh", "azure", "botocore", "gcsfs", "google", "huggingface_hub"),
    *("requests", "s3fs", "sshfs", "urllib3"),
}

_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "The disk is full: free space, or keep fewer steps (preservation_policy).",
    errno.EDQUOT: "The quota is used up: free space (on Google Drive, empty the trash too), or "
    "keep fewer steps (preservation_policy).",
    errno.EFBIG: "A file would exceed the limit on file sizes: raise it (ulimit -f).",
    errno.EROFS: "The medium is read-only: mount it for writing. Disks with errors turn read-only "
    "by themselves; the kernel's log (dmesg) says so.",
    errno.EACCES: "This process lacks the permission: check owner and mode of the directory.",
    errno.ENOENT: "A file or folder was removed from the directory; the next save creates what it "
    "needs.",
    errno.ESTALE: "The network file system has lost the directory: mount it again.",
    errno.EIO: "The medium reports an I/O error: look into the kernel's log (dmesg) and replace "
    "the disk, or mend the network file system.",
    errno.EMFILE: "Too many open files: raise the limit (ulimit -n).",
    errno.EAGAIN: "Too many threads or processes: raise the limit (ulimit -u; pids.max of a "
    "container's control group).",
    errno.ENOMEM: "The host's memory does not suffice: use less, or raise the limit (ulimit -v; "
    "memory.max of a container's control group).",
}
# What the system refuses to a process that has reached a limit.
_LIMITS = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_ADVICE_BY_ERRNO[errno.EPERM] = _ADVICE_BY_ERRNO[errno.EACCES]
_ADVICE_BY_ERRNO[errno.ENFILE] = _ADVICE_BY_ERRNO[errno.EMFILE]
_NO_INODES = (
    "The file system has free space, but no free inodes, of which each file takes one (df -i shows "
    "them): remove files, or keep fewer steps (preservation_policy)."
)
_CREDENTIALS = (
    "Google's credentials are missing or have expired: run `gcloud auth application-default "
    "login`, or set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service account."
)
_BUCKET_PERMISSION = (
    "The account in use lacks the permission: grant it roles/storage.objectUser on the bucket "
    "(roles/storage.objectViewer is enough to read)."
)
_NETWORK = (
    "The storage service did not answer or refused the requests, even when they were repeated: "
    "check the network, the service's status and its request limits."
)
_PLAIN_STORE = (
    "The store did not answer or refused the request: check the network, the service's status, and "
    "the credentials that the environment or fsspec's configuration gives to its client."
)
_NO_ADVICE = "Check that the path is a directory and that this process may use it."


def is_unavailable(error: BaseException) -> bool:
    """Returns whether storage cannot be read now, which says nothing about damage."""
    for link in _chain(error):
        if isinstance(link, CheckpointError):
            return isinstance(link, DirectoryError)
        number = _errno(link)
        if number is not None:
            return number not in _DAMAGE_ERRNOS
        if isinstance(link, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return False
        if isinstance(link, OSError) or type(link).__module__.partition(".")[0] in _CLIENTS:
            return True
        if (code := _http_code(link)) is not None and code >= 400:
            return code not in (404, 410, 416)  # an object that is gone or too short is damage
        status = _status(link)
        if status is not None:
            return status in _UNAVAILABLE
    return False


def is_limit(error: BaseException) -> bool:
    """Returns whether the system refused the host a thread, a process, a file or memory."""
    if isinstance(error, CheckpointError) and not isinstance(error, DirectoryError):
        return False  # it says more than that, and may have another limit for its cause
    return any(_errno(e) in _LIMITS or isinstance(e, MemoryError) for e in _chain(error))


def is_full(error: BaseException) -> bool:
    """Returns whether a write failed because the disk is full or the quota is used up."""
    return _errno(root_cause(error)) in {errno.ENOSPC, errno.EDQUOT}


def is_refusal(error: BaseException | None) -> bool:
    """Returns whether the system refuses a rename for good, in place of failing this time."""
    return getattr(error, "errno", None) in (errno.EXDEV, errno.EPERM, errno.EACCES)


def root_cause(error: BaseException) -> BaseException:
    """Returns the storage error that is or caused ``error``; ``error`` if none is found."""
    for link in _chain(error):
        if isinstance(link, CheckpointError):
            if link.__cause__ is None:
                # Its text is complete; its ``__context__`` is not the reason for it.
                return link
            continue  # its cause is what storage reported
        is_client = type(link).__module__.partition(".")[0] in _CLIENTS
        is_of_system = isinstance(link, OSError) or _errno(link) is not None
        if is_of_system or is_client or _status(link) is not None:
            return link
    return error


def said(error: BaseException) -> str:
    """Returns the text of the error that storage reported, on one line, without a full stop."""
    link = root_cause(error)
    text = " ".join(f"{type(link).__name__}: {link}".split()).rstrip(".: ")
    return _URL.sub(lambda m: m[1] + "...@" * bool(m[2]) + m[3] + "?..." * bool(m[4]), text)


def file_of(error: BaseException) -> str | None:
    """Returns the path of the file that storage reported an error about, if it named one."""
    link = root_cause(error)
    if isinstance(link, OSError) and isinstance(link.filename, (str, os.PathLike)):
        return os.fspath(link.filename)
    match = _FILE.search(str(link))
    return match[1] if match else None


def advice(error: BaseException, place: Any = "") -> str:
    """Returns what to do about a storage error at a path; "" if there is no specific advice."""
    link = root_cause(error)
    number, code, status = _errno(link), _http_code(link), _status(link)
    if str(place).startswith("s3://") and (found := _s3_advice(link)):
        return found
    if plain_store.contains(place) and number not in _ADVICE_BY_ERRNO:
        return _PLAIN_STORE
    if location.is_url(place):
        if code == 401 or status == "UNAUTHENTICATED":
            return _CREDENTIALS
        if code == 403 or status == "PERMISSION_DENIED":
            return _BUCKET_PERMISSION
        if is_unavailable(link) and number not in _ADVICE_BY_ERRNO:  # those are of a local disk
            return _NETWORK
    if number is None and status == "PERMISSION_DENIED":
        number = errno.EACCES
    if number is None and isinstance(link, FileNotFoundError):
        number = errno.ENOENT
    if isinstance(link, MemoryError):
        number = errno.ENOMEM
    if isinstance(link, RuntimeError) and "interpreter shutdown" in str(link):
        return "This Python starts no thread after the last line of the program."
    if isinstance(link, (ConnectionError, TimeoutError)):
        return _NETWORK
    if number == errno.ENOSPC and _lacks_inodes(place):
        return _NO_INODES
    return _ADVICE_BY_ERRNO.get(number or 0, "")


def _s3_advice(link: BaseException) -> str:
    cause = link.__cause__ or link  # s3fs and this package turn errors of botocore into OSError
    answer = getattr(cause, "response", None) or {}
    number = errno.errorcode.get(_errno(cause) or _errno(link) or 0)
    names = type(link).__name__, type(cause).__name__, answer.get("Error", {}).get("Code")
    kind = " ".join(map(str, (*names, number, _http_code(cause), _status(cause))))
    is_missing = isinstance(link, FileNotFoundError)
    is_of_client = type(cause).__module__.startswith("botocore") and not is_missing
    return service.advice(kind) or (_NETWORK if is_of_client else "")


def explained(error: BaseException, path: Any) -> str:
    """Returns text for a message: the error that storage reported, and what to do about it."""
    return f"{said(error)}. {advice(error, path)}".rstrip()


def _lacks_inodes(place: Any) -> bool:
    """Returns whether a file system has room for bytes, but for no further file."""
    while place and not os.path.exists(place):
        place = os.path.dirname(place)
    try:
        found = os.statvfs(place or ".")
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail == 0 and found.f_bavail > 0


def without_locals(error: BaseException) -> BaseException:
    """Clears the frames of an error's traceback, which may keep a copy of the state alive."""
    if error.__traceback__ is not None:  # the frame that caught it still runs and cannot be cleared
        error.__traceback__ = error.__traceback__.tb_next
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
    return error


def kind(error: BaseException) -> str:
    """Returns a text that stays the same if a failure with the same cause happens again."""
    link = root_cause(error)
    what = _errno(link) or _http_code(link) or _status(link)
    # Codes are best: file names in texts differ between saves, and error types between libraries.
    return str(what) if what else f"{type(link).__name__} {re.sub(r'[0-9a-f]+', '#', str(link))}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error, its causes and contexts, and the members of exception groups."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        link = todo.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += getattr(link, "exceptions", ())
        todo += [e for e in (link.__cause__ or link.__context__,) if e is not None]


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError) and isinstance(error.errno, int):
        return error.errno
    if isinstance(error, RuntimeError) and "new thread" in str(error):  # as Python reports it
        return errno.EAGAIN
    if isinstance(error, RuntimeError) and "credentials are still expired" in str(error):
        return errno.EACCES  # as botocore reports it
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def _status(error: BaseException) -> str | None:
    match = _STATUS.search(str(error)[:80])
    return match[1] if match and match[1] in _DAMAGE | _UNAVAILABLE else None


def _http_code(error: BaseException) -> int | None:
    match = _HTTP_CODE.search(str(error))
    code = match[1] if match else getattr(error, "code", getattr(error, "status", None))
    if str(code).isdigit():
        return int(code)  # type: ignore[arg-type]
    return 403 if isinstance(error, OSError) and str(error).startswith("Forbidden") else None


@contextlib.contextmanager
def translated(action: str, directory: epath.Path) -> Iterator[None]:
    """Turns storage errors of a block into DirectoryError; ``action`` is a verb for the message."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not is_unavailable(error):
            raise
        what_to_do = advice(error, directory) or _NO_ADVICE
        failure = DirectoryError(
            f"cannot {action} {directory}: {said(error)}. {what_to_do}", path=directory
        )
        if is_limit(error):
            failure.errno = _errno(error)  # so that other processes learn it
        raise failure from error
