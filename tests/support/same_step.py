"""Compares committed steps, or whole runs, that two versions of the package wrote.

    python -m tests.support.same_step FOUND EXPECTED

Prints what differs, and exits with 1 if anything does. ``tests/programs/same_step_cases.py`` writes
the runs. Two saves with the same seeds differ in the names of OCDBT's data files, in the order in
which these hold the values, in times, and in the random name of a run with a local tier. These are
the only differences that are allowed, with the releases of the libraries. All digests and seals
must be right.
"""

from __future__ import annotations

import collections
import json
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts
import xxhash

DATABASE = "manifest.ocdbt"
RECORD, MARK = "_CHECKPOINT_METADATA", "commit_success.txt"
_ANY = "(any)"  # stands for a value that differs by construction
_DATA = re.compile(r"(?<=/d/)[0-9a-f]{32}$")
_RECORDED = re.compile(r"(?<=events/)[0-9]+-[0-9a-f]+(?=\.jsonl$)")
# Files of a run, outside of its steps, that hold random names and times.
_OF_RUN = re.compile(r"(^|/)(events/[^/]+|lease|run)$")


def differences(found: Path, expected: Path) -> list[str]:
    """Returns a line for each difference between two folders; each is a step, or holds steps.

    Compares the tree of files, with permissions and numbers of links, the keys and values of each
    OCDBT database, and the content of all other files.
    """
    lines = _of_dicts("", _tree(found), _tree(expected))
    for path in sorted(expected.rglob("*")):
        name = path.relative_to(expected).as_posix()
        if path.name == DATABASE and (found / name).exists():
            folder = Path(name).parent
            values = _values(found / folder), _values(expected / folder)
            lines += _of_dicts(f"{folder}: ", *values)
        elif path.is_file() and (found / name).is_file() and not _OF_RUN.search(name):
            read = _FORMS.get("/".join(path.parts[-2:]), _FORMS.get(path.name, Path.read_bytes))
            lines += _of_values(name, read(found / name), read(path))
    return lines


def assert_same(found: Path, expected: Path) -> None:
    """Asserts that two steps, or two folders of steps, differ in nothing."""
    assert (lines := differences(found, expected)) == [], "\n".join(lines)


def steps_in(folder: Path) -> list[str]:
    """Returns the paths of the committed steps below a folder, relative to it."""
    return sorted(mark.parent.relative_to(folder).as_posix() for mark in folder.rglob(MARK))


def _tree(folder: Path) -> dict[str, Any]:
    """Returns the kinds, permissions and numbers of links of a folder's files, by their names.

    Data files are grouped, because their names are random.
    """
    found = collections.defaultdict(list)
    for path in folder.rglob("*"):
        name = f"/{path.relative_to(folder).as_posix()}"
        status = path.lstat()
        links = status.st_nlink if path.is_file() else None
        name = _RECORDED.sub("*", _DATA.sub("*", name))
        found[name[1:]].append(f"{stat.filemode(status.st_mode)} links={links}")
    return {name: sorted(group) for name, group in found.items()}


def _values(database: Path) -> dict[str, bytes]:
    """Returns the values of an OCDBT database by their keys."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{database.resolve()}/"}).result()
    keys = store.list().result()
    reads = [store.read(key) for key in keys]
    return {key.decode(): read.result().value for key, read in zip(keys, reads, strict=True)}


def _manifest(path: Path) -> Any:
    content = _sealed(path)
    return {**content, "versions": sorted(content["versions"]), "xxh3_64": _ANY}


def _summary(path: Path) -> str:
    _sealed(path)
    # Names of runs and of starts, the seal, and the times of abandoned steps.
    return re.sub(r"\b([0-9a-f]{32}|[0-9a-f]{16}|[0-9]{19})\b", _ANY, path.read_text())


def _record(path: Path) -> Any:
    content = json.loads(path.read_bytes())
    return {key: _ANY if key.endswith("_timestamp_nsecs") else content[key] for key in content}


def _mark(path: Path) -> Any:
    said, _, sealed = path.read_text().partition("\n")
    digests = json.loads(sealed)
    for name, digest in digests.items():
        content = (path.parent / name).read_bytes()
        assert digest == xxhash.xxh3_64_hexdigest(content), f"{path}: the digest of {name} is wrong"
    return said, {**digests, RECORD: _ANY}


def _sealed(path: Path) -> dict[str, Any]:
    """Returns a JSON file's content, once its seal is known to be right."""
    content: dict[str, Any] = json.loads(path.read_bytes())
    rest = {key: value for key, value in content.items() if key != "xxh3_64"}
    seal = xxhash.xxh3_64_hexdigest(json.dumps(rest, separators=(",", ":")).encode())
    assert content["xxh3_64"] == seal, f"{path}: the seal is wrong"
    return content


# How files are read whose content differs by construction.
_FORMS: dict[str, Callable[[Path], Any]] = {
    "manifest/data.json": _manifest,
    "summary/data.json": _summary,
    RECORD: _record,
    MARK: _mark,
}


def _of_values(where: str, found: Any, expected: Any) -> Iterator[str]:
    """Yields a line for each difference between two values of JSON."""
    if isinstance(found, dict) and isinstance(expected, dict):
        yield from _of_dicts(f"{where}: ", found, expected)
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for i, pair in enumerate(zip(found, expected, strict=True)):
            yield from _of_values(f"{where}[{i}]", *pair)
    elif (type(found), found) != (type(expected), expected):
        yield f"{where}: {found!r:.400} is not {expected!r:.400}"


def _of_dicts(where: str, found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    lines = [f"{where}{key} is missing" for key in expected if key not in found]
    lines += [f"{where}{key} is new" for key in found if key not in expected]
    for key in expected:
        if key in found:
            lines += _of_values(f"{where}{key}", found[key], expected[key])
    return lines


def main(found: Path, expected: Path) -> int:
    """Says what differs between two folders of steps; returns the exit code."""
    steps = steps_in(expected)
    lines = differences(found, expected) if steps else [f"{expected} has no steps"]
    print(*lines, sep="\n")
    print(f"{len(steps)} steps, {len(lines)} differences")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
