"""The table of mutations fits the package, the tests and the guarantees page."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import mutations
import pytest
from mutations import ROWS, Copy, Outcome, Row
from support import ROOT, TESTS


@functools.cache
def functions(path: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?def (\w+)\(", path.read_text(), flags=re.M))


def test_every_row_fits_the_package_the_tests_and_the_page() -> None:
    page = " ".join((ROOT / "docs" / "guarantees.md").read_text().split())
    for row in ROWS:
        path = ROOT / "torchax_ckpt" / row.file
        assert row.found() == 1, f"{row.name}: is not in {row.file} once: {row.before}"
        assert row.before != row.after, row.name
        ast.parse(path.read_text().replace(row.before, row.after), row.name)
        assert row.place.partition(" ")[2] in functions(path), row.name
        assert row.promise in page, row.name
        assert row.tests, row.name
        for test in row.tests:
            file, _, name = test.partition("::")
            assert name in functions(TESTS / file), f"{row.name}: {test}"


@pytest.mark.parametrize(
    ("failed", "errors", "without", "count", "expected"),
    [
        (["a.py::t[1]"], {}, [], 1, "killed"),
        ([], {}, [], 1, "survived"),
        ([], {"": "exit code 2"}, [], 1, "broken"),
        ([], {"a.py::t": "NameError"}, ["b.py::t"], 1, "broken"),
        (["a.py::t"], {}, ["a.py::t[1]"], 1, "unfit"),
        (["a.py::t"], {}, [], 2, "unfit"),
    ],
)
def test_only_a_failing_test_kills(
    failed: list[str],
    errors: dict[str, str],
    without: list[str],
    count: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, copy = Row("r", "", "x.py f", "", "", ["a.py::t"]), Copy.__new__(Copy)
    monkeypatch.setattr(Row, "found", lambda row: count)
    monkeypatch.setattr(Copy, "run_edited", lambda *_: Outcome(failed, errors))
    result, _ = mutations.tried(row, copy, Outcome(without, {}), whole_room=False)
    assert result == expected
