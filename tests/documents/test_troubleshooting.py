"""docs/troubleshooting.md against reality: every error has an entry, every message can come up."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import ROOT

import torchax_ckpt
from torchax_ckpt import errors

PAGE = ROOT / "docs" / "troubleshooting.md"
OTHERS = "Errors of other libraries"
PACKAGE = Path(torchax_ckpt.__file__).parent
ERRORS = {
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.CheckpointError)
}
ENTRY = re.compile(
    r"^```text\n(?P<message>.*?)^```$(?:\n\n<!-- raises\n(?P<program>.*?)^-->$)?", re.M | re.S
)


class Entry(NamedTuple):
    """A message of the page, and the program that provokes it, if it has one."""

    section: str
    message: str
    program: str | None
    line: int


def entries() -> Iterator[Entry]:
    text = PAGE.read_text()
    for found in ENTRY.finditer(text):
        section = re.findall(r"^## (.+)$", text[: found.start()], re.M)[-1]
        line = text.count("\n", 0, found.end())
        yield Entry(section, flat(found["message"]), found["program"], line)


def flat(text: str) -> str:
    """The text on one line, however it was wrapped."""
    return " ".join(text.split())


def outcome(program: Any, names: dict[str, Any]) -> Exception:
    """What a program raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the page says which
        exec(program, names)
    return caught.value


def pattern(message: str) -> str:
    """A regular expression for a message of the page, where ... stands for anything."""
    return ".+?".join(re.escape(part) for part in message.split("..."))


PROVOKED = [entry for entry in entries() if entry.program]
QUOTED = [entry for entry in entries() if not entry.program and entry.section in ERRORS]


def test_every_error_has_an_entry_and_every_entry_an_error() -> None:
    sections = re.findall(r"^## (\w+Error)$", PAGE.read_text(), re.M)
    assert set(sections) == ERRORS
    assert sections == sorted(sections)
    assert {entry.section for entry in entries() if entry.section in ERRORS} == ERRORS - {
        "CheckpointError"  # the base, which nothing raises itself
    }


@pytest.mark.usefixtures("empty_folder")
def test_every_provoked_message_is_what_comes_up(tmp_path: Path) -> None:
    """All in one program, from top to bottom, as the page's other blocks are."""
    prelude = re.search(r"^<!-- python\n(.*?)^-->$", PAGE.read_text(), re.M | re.S)
    assert prelude
    names: dict[str, Any] = {"__name__": "troubleshooting"}
    exec(prelude[1], names)
    for entry in PROVOKED:
        assert entry.program
        program = compile("\n" * entry.line + entry.program, str(PAGE), "exec")
        raised = outcome(program, names)
        message = flat(str(raised).replace(f"{tmp_path}{os.sep}", ""))
        assert re.fullmatch(pattern(entry.message), message), entry
        assert entry.section in (type(raised).__name__, OTHERS), entry
    assert len(PROVOKED) > len(QUOTED)


def template(node: ast.expr) -> str:
    """A regular expression for what an expression of strings can give."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    if isinstance(node, ast.IfExp):
        return f"(?:{template(node.body)}|{template(node.orelse)})"
    return ".*?"


@functools.cache
def templates(error: str) -> list[str]:
    """What the package's code gives to this error as its message, and what it logs."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                called = ast.unparse(node.func)
                if called.rpartition(".")[2] == error:
                    found.append(template(node.args[0]))
                elif ast.unparse(node.args[0]) == error and called.endswith(".error"):  # of a step
                    found.append(f"step .*? in .*?: {template(node.args[1])}")
                elif called in ("logger.warning", "logger.error"):
                    found.append(re.sub("%[sdr]", ".*?", template(node.args[0])))
    return found


@pytest.mark.slow
def test_every_other_message_is_one_that_the_code_can_raise() -> None:
    for entry in QUOTED:
        own_words = [
            re.findall(r"[a-z]{2,}", template)
            for template in templates(entry.section)
            if re.fullmatch(template, entry.message)
        ]
        # A message made elsewhere matches anything: too little of it stands in the code found.
        assert max(map(len, own_words), default=0) >= 6, f"no {entry.section} says this: {entry}"
