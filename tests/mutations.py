"""Breaks the promises of docs/guarantees.md one by one, and expects that a test fails each time.

    python tests/mutations.py [--row NAME ...] [--whole-room]

Each row of tests/mutations.toml is a promise, and an edit of the package that breaks it. The edit
is made in a copy of the repository, where the row's tests run until one fails. The result is

- *killed* if a test has failed;
- *survived* if all have passed, so that none of them shows the promise;
- *broken* if something else has failed: an import, a fixture, the collection of the tests;
- *unfit* if the text of the edit is not there exactly once, or a test fails without the edit.

The exit code is 0 if all edits are killed. It needs the packages of the tests, and minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from support import forked

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TABLE = TESTS / "mutations.toml"
# What a copy of the repository leaves out.
LEFT_OUT = (".*", "__pycache__", "build", "dist", "shared")
TIMEOUT_SECS = 240  # a test that hangs has failed
# Imported once, not for each row; the package itself is imported anew each time.
_LIBRARIES = tuple(name for name in forked.MODULES if not name.startswith("torchax_ckpt"))
_PYTEST = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
# Errors that an edit makes if it is wrong itself.
OF_THE_EDIT = re.compile(
    r"\b(NameError|UnboundLocalError|SyntaxError|ImportError|ModuleNotFoundError)\b"
)


class Row(NamedTuple):
    """A promise, an edit that breaks it, and the tests that notice."""

    name: str
    promise: str  # words of the page
    place: str  # a file of the package and a function, "storage/medium/fsync.py sync"
    before: str  # is in the file exactly once
    after: str
    tests: Sequence[str]  # files below tests/ and functions, as pytest names them

    @property
    def file(self) -> str:
        """The path of the edited file in the package."""
        return self.place.partition(" ")[0]

    @property
    def room(self) -> str:
        """The folder below tests/ with the tests of the edited file's room."""
        folders = Path(self.file).parents
        return str(next(folder for folder in folders if (TESTS / folder).is_dir()))

    def found(self) -> int:
        """Returns how often the text of the edit is in the package's file."""
        return (ROOT / "torchax_ckpt" / self.file).read_text().count(self.before)


ROWS = tuple(Row(name, **row) for name, row in tomllib.loads(TABLE.read_text()).items())


class Outcome(NamedTuple):
    """The tests that have failed, and other errors, by test; those of no test are under ""."""

    failed: Sequence[str]
    errors: Mapping[str, str]


class Copy:
    """A copy of the repository, in which tests run with one file of the package edited."""

    def __init__(self, folder: Path) -> None:
        self._root, self._report = folder / "copy", folder / "report.xml"
        shutil.copytree(ROOT, self._root, ignore=shutil.ignore_patterns(*LEFT_OUT))
        compiled = folder / "compiled"  # what JAX compiles, for all runs of tests
        compiled.mkdir()
        self._env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{self._root}:{self._root / 'tests'}",
            "TORCHAX_CKPT_TESTS_COMPILED": str(compiled),
        }
        code = "import torchax_ckpt; print(torchax_ckpt.__file__)"
        found = subprocess.check_output([sys.executable, "-c", code], env=self._env, cwd=folder)
        if self._root not in Path(found.decode()).parents:
            raise RuntimeError(f"expected the copy in {self._root} to be imported, found {found!r}")

    def run(self, tests: Iterable[str], *flags: str) -> Outcome:
        """Runs tests, also slow ones; ``tests`` are paths below tests/, perhaps with functions."""
        self._report.unlink(missing_ok=True)
        words = [
            *("-q", "-m", "", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_SECS}"),
            *(f"--junitxml={self._report}", *flags),
            *(f"tests/{test}" for test in dict.fromkeys(tests)),
        ]
        with tempfile.TemporaryFile("w+") as output, contextlib.chdir(self._root):
            arguments, both = ["-c", _PYTEST, *words], {"stdout": output, "stderr": output}
            code = forked.start(arguments, env=self._env, modules=_LIBRARIES, **both).wait()
            output.seek(0)
            told = output.read()[-2000:]
        failed: list[str] = []
        errors: dict[str, str] = {}
        cases = ElementTree.parse(self._report).iter("testcase") if self._report.exists() else ()
        for case in cases:
            file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
            name = f"{file}.py::{case.get('name')}" if file else ""  # "" if it is not collected
            for error in case.iter("error"):
                errors[name] = str(error.get("message"))
            for failure in case.iter("failure"):
                why = str(failure.get("message"))
                if OF_THE_EDIT.search(why):
                    errors[name] = why
                else:
                    failed.append(name)
        if not failed and not errors and code != 0:
            errors[""] = f"exit code {code}: {told}"
        return Outcome(failed, errors)

    def run_edited(self, row: Row, tests: Iterable[str], *flags: str) -> Outcome:
        """Runs tests with a row's edit, which is undone afterwards."""
        file = self._root / "torchax_ckpt" / row.file
        text = file.read_text()
        # Python takes a compiled file for that of any text of the same size and second.
        compiled = file.parent / "__pycache__"
        try:
            file.write_text(text.replace(row.before, row.after))
            shutil.rmtree(compiled, ignore_errors=True)
            return self.run(tests, *flags)
        finally:
            file.write_text(text)
            shutil.rmtree(compiled, ignore_errors=True)


def tried(row: Row, copy: Copy, unedited: Outcome, *, whole_room: bool) -> tuple[str, str]:
    """Returns a row's result, and what shows it: tests or an error."""
    if (count := row.found()) != 1:
        return "unfit", f"the text of the edit is there {count} times"
    without = {name.partition("[")[0] for name in (*unedited.failed, *unedited.errors)}
    if failing := without.intersection(row.tests):
        return "unfit", f"without the edit too: {', '.join(sorted(failing))}"
    tests, flags = ([row.room], []) if whole_room else (row.tests, ["-x"])
    failed, errors = copy.run_edited(row, tests, *flags)
    if failed:
        return "killed", ", ".join(failed)
    return ("broken", ", ".join(map(": ".join, errors.items()))) if errors else ("survived", "")


def main() -> int:
    """Tries the rows that the arguments name, or all; prints a table, returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--row", action="append", metavar="NAME", help="only this row")
    parser.add_argument(
        "--whole-room", action="store_true", help="run all tests of the room, also after a failure"
    )
    given = parser.parse_args()
    names = [row.name for row in ROWS]
    if unknown := set(given.row or ()).difference(names):
        parser.error(f"no row is named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    rows = [row for row in ROWS if not given.row or row.name in given.row]
    results = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Copy(Path(folder))
        unedited = copy.run(test for row in rows for test in row.tests)
        if "" in unedited.errors:
            raise RuntimeError(f"the tests cannot run without edits: {unedited.errors['']}")
        print("| row | promise | place | result | by | seconds |\n" + "|---" * 6 + "|", flush=True)
        for row in rows:
            began = time.monotonic()
            result, why = tried(row, copy, unedited, whole_room=given.whole_room)
            secs = f"{time.monotonic() - began:.0f}"
            cells = (row.name, row.promise, row.place, result, why.replace("\n", " "), secs)
            print("| " + " | ".join(cells) + " |", flush=True)
            results.append(result)
    print(", ".join(f"{results.count(result)} {result}" for result in sorted(set(results))))
    return 0 if set(results) == {"killed"} else 1


if __name__ == "__main__":
    sys.exit(main())
