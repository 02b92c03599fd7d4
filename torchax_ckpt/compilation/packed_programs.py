"""One file that carries compiled programs from one machine to the next.

It is a zip file of the files in which JAX keeps the programs. These have flat names, of a module
and a SHA-256, and are compressed. Zip has a checksum of each, so no damaged program is run.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import io
import logging
import os
import pathlib
import re
import stat
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Mapping

import jax
from etils import epath

from torchax_ckpt.runtime import durable_steps
from torchax_ckpt.runtime.background import Executor
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.storage.medium import medium, permissions, storage_errors
from torchax_ckpt.storage.medium.compare_and_swap import AtomicRecord, Conflict, Seen

logger = logging.getLogger(__name__)

# The most bytes of one program, and of a packed file.
_PROGRAM_BYTES, MAX_BYTES = 1 << 28, 1 << 30
_ADDED_BYTES = 1 << 10  # more than zip adds for one program
_NAME = re.compile(r"[\w.-]+-[0-9a-f]{64}-cache")
_FETCH_SECS, _END_SECS = 60.0, 10.0
# JAX writes a program in place. One that does not change for so long is taken to be whole.
_SETTLE_SECS = 1.0
_ATTEMPTS = 3
# A draft beside the packed file that is older was left by a program that was killed.
_DRAFT_SECS = 3600.0


def pack(programs: Mapping[str, bytes]) -> bytes:
    """Returns the packed file of programs, which are given by the names of JAX's files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in programs.items():
            file.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def unpack(content: bytes) -> dict[str, bytes]:
    """Returns the programs of a packed file; ValueError if it is damaged or holds anything else."""
    try:
        if len(content) > MAX_BYTES or not content.startswith(b"PK\3\4"):
            raise ValueError(f"expected a zip file of at most {MAX_BYTES} bytes")
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            members = file.infolist()
            for member in members:
                is_file = stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG)
                is_plain = is_file and member.compress_type == zipfile.ZIP_STORED
                is_small = member.file_size <= _PROGRAM_BYTES
                if not (_NAME.fullmatch(member.filename) and is_plain and is_small):
                    raise ValueError(f"{member.filename!a:.300} is no program of JAX's cache")
            if len({member.filename for member in members}) < len(members):
                raise ValueError("two programs have one name")
            if sum(member.file_size for member in members) > MAX_BYTES:
                raise ValueError(f"the programs have more than {MAX_BYTES} bytes")
            return {member.filename: file.read(member) for member in members}
    except Exception as error:  # zipfile raises many kinds if the file is damaged
        raise ValueError(
            f"this is no file of compiled programs, or it is damaged ({error}). It is left as it "
            "is: remove it, or give another name"
        ) from error


def programs_in(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Returns the programs in a folder: name -> when JAX last wrote or used it, and its bytes."""
    programs = {}
    for path in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # JAX deletes programs
            written, use = path.lstat(), _last_use(path)
            used_ns = use.stat().st_mtime_ns if use.exists() else 0
            if _NAME.fullmatch(path.name):
                programs[path.name] = max(written.st_mtime_ns, used_ns), written.st_size
    return programs


def complete(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Writes a time of last use for programs; if one has none, JAX until 0.11 keeps no new ones."""
    for name in names:
        if not _last_use(folder / name).exists():
            try:
                _last_use(folder / name).write_bytes(time.time_ns().to_bytes(8, "little"))
            except OSError as error:  # a folder that others fill, from which JAX reads
                logger.info("%s: JAX keeps no more programs there: %s", folder, error)
                return


def _last_use(program: pathlib.Path) -> pathlib.Path:
    return program.with_name(f"{program.name.removesuffix('-cache')}-atime")


@functools.cache
def travel(folder: pathlib.Path, place: epath.Path) -> None:
    """Has the programs of a folder travel with the packed file at a path or URL, from now on."""
    PackedPrograms(folder, place).start()


class PackedPrograms:
    """The programs in a folder of this machine, and the packed file at a path or URL."""

    def __init__(self, folder: pathlib.Path, place: epath.Path) -> None:
        self._folder, self._place = folder, place
        self._known: set[str] = set()  # the programs that the file has, or has no room for
        self._is_failing = False
        self._executor = Executor(1, "torchax_ckpt-compiled-programs")

    def start(self) -> None:
        """Fetches on a thread, for which it waits a minute; then writes after each durable save."""
        self._newest = self._executor.submit(self._attempt, "fetch from", self.fetch)
        durable_steps.listeners.append(self._wake)
        atexit.register(self.finish)
        if not concurrent.futures.wait([self._newest], _FETCH_SECS).done:
            text = "%s: no answer after %g s; programs are compiled meanwhile"
            logger.warning(text, self._place, _FETCH_SECS)

    def _wake(self) -> None:
        if self._newest.running() or self._newest.done():  # a queued one will see all programs
            self._newest = self._executor.submit(self._attempt, "write to", self.write)

    def finish(self) -> None:
        """Waits at the end of the program, but only for seconds, for a write that is running."""
        concurrent.futures.wait([self._newest], _END_SECS)

    # --- on the thread ---

    def _attempt(self, action: str, run: Callable[[], None]) -> None:
        """Logs a failure; as a warning only the first of failures in a row."""
        try:
            run()
        except Exception as error:  # bucket clients raise errors of their own
            level = logging.DEBUG if self._is_failing else logging.WARNING
            text = "cannot %s %s, with which compiled programs travel: %s Training goes on."
            why = storage_errors.explained(error, self._place)
            logger.log(level, text, action, self._place, why)
            self._is_failing = True

    def fetch(self) -> None:
        """Adds to the folder the programs that only the file has."""
        storage = medium.of(self._place.parent)
        storage.use(self)
        storage.require_usable(for_writing=False)
        with self._record() as record:
            if self._take(record) is None:
                logger.info("%s: there are no compiled programs yet", self._place)

    def write(self) -> None:
        """Adds to the file what JAX has put into the folder since, if anything."""
        before = programs_in(self._folder)
        if jax.process_index() != 0 or before.keys() <= self._known:
            return  # JAX lets process 0 alone keep programs
        time.sleep(_SETTLE_SECS)
        now = programs_in(self._folder)
        whole = {name for name, found in now.items() if before.get(name) == found and found[1]}
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(Conflict), self._record() as record:
                seen = self._take(record)
                if not whole <= self._known:
                    content = pack(self._contents(whole | self._known))
                    record.swap(seen, content)
                    text = "%s: compiled programs are written, %.1f MB"
                    logger.info(text, self._place, len(content) / 1e6)
                self._known |= whole
                self._is_failing = False
                return
        logger.info("%s: other machines keep writing it; a later save tries again", self._place)

    def _record(self) -> contextlib.closing[AtomicRecord]:
        storage = medium.of(self._place)
        storage.require_own(self._place)
        if (num_bytes := storage.num_bytes(self._place)) > MAX_BYTES:
            text = f"expected at most {MAX_BYTES} bytes, found {num_bytes}"
            raise ValueError(f"{text}: remove it, or give another name")
        record = storage.record(self._place, max_bytes=MAX_BYTES + 1, mode=0o600)
        return contextlib.closing(record)

    def _take(self, record: AtomicRecord) -> Seen | None:
        """Does what ``fetch`` does; returns what the file holds, None if there is no file."""
        record.remove_drafts(_DRAFT_SECS)
        seen = record.read()
        if seen is not None:
            programs = unpack(seen.content)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = [name for name in programs if not os.path.lexists(self._folder / name)]
            complete(self._folder, new)
            for name in new:
                draft = self._folder / f"fetched-{uuid.uuid4().hex}{permissions.DRAFT_SUFFIX}"
                permissions.write_file(draft, programs[name], 0o600)
                draft.replace(self._folder / name)
            self._known |= programs.keys()
            text = "%s has %s, %d of them new on this machine"
            logger.info(text, self._place, counted(len(programs), "compiled program"), len(new))
        return seen

    def _contents(self, names: set[str]) -> dict[str, bytes]:
        """Returns the content of programs, those used last first, up to the limit."""
        programs, contents, left_bytes = programs_in(self._folder), {}, MAX_BYTES
        for name in sorted(names & programs.keys(), key=programs.__getitem__, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                content = (self._folder / name).read_bytes()
                left_bytes -= len(content) + _ADDED_BYTES
                if left_bytes >= 0 and len(content) <= _PROGRAM_BYTES:
                    contents[name] = content
        return contents
