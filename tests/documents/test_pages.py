"""The pages of docs/ and README.md: the site builds without a warning, and every block runs."""

from __future__ import annotations

import contextlib
import functools
import html
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.commands import BLOCK, run_commands
from support.processes import Talking, environment, run_python
from support.training import mlp

import torchax_ckpt
from torchax_ckpt import planning, policies, shardings
from torchax_ckpt import torch as native
from torchax_ckpt.integrations import huggingface

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

# A block, whatever its fence; or a program that a page keeps from the reader's eyes, in a comment.
# What a block may be: Python or commands of torchax-ckpt, which are run here; or no code, what is
# printed or stored. The commands of a console need what no test has: an index, or a cluster.
# "raises" provokes the message above it (test_troubleshooting).
KINDS = {"python", "sh", "console", "text", "json", "raises"}
DIRECTIVES = {"{toctree}", "{eval-rst}", "{include}"}


# SIGTERM is a notice to a whole process, and Lightning warns of loaders that are fine for a page:
# these get a process of their own.
SEPARATE = {"lightning", "native-pytorch", "preemption"}
SLOW = {*SEPARATE, "command-line", "howto", "huggingface", "migration", "quickstart"}


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.stem in SLOW else [], id=page.stem)
        for page in PAGES
    ],
)
def test_the_blocks_of_a_page_run_as_one_program(page: Path) -> None:
    text = page.read_text()
    if page.stem in SEPARATE:
        blocks = [b["body"] for b in BLOCK.finditer(text) if b["kind"] == "python"]
        run_python("\n".join(blocks), fresh=True)
        return
    names = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        if block["kind"] == "python":
            above = text.count("\n", 0, block.start("body"))  # so that errors name the page's lines
            exec(compile("\n" * above + block["body"], str(page), "exec"), names)
        elif block["kind"] == "sh":
            run_commands(block["body"])


def test_the_code_of_the_first_pages_fits_a_phone() -> None:
    for name in ("quickstart", "howto"):
        blocks = re.findall(r"^```\w+\n(.*?)^```$", (DOCS / f"{name}.md").read_text(), re.M | re.S)
        lines = [line for block in blocks for line in block.splitlines()]
        assert len(lines) > 100
        assert [line for line in lines if len(line) > 60] == [], name


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    for page in (*PAGES, *DOCS.glob("api/*.md"), ROOT / "README.md"):
        kinds = {block["kind"] for block in BLOCK.finditer(page.read_text())}
        assert kinds <= KINDS | DIRECTIVES, page


# What is indented is not run: a synopsis, whose arguments are names in capitals.
SYNOPSIS = re.compile(r"torchax-ckpt ([a-z]+ )?[A-Z]+\b")


def test_commands_that_are_not_run_are_synopses() -> None:
    others = ("README.md", "CONTRIBUTING.md", "examples/gke/README.md")
    for page in (*PAGES, *(ROOT / name for name in others)):
        indented = re.findall(r"^(?: {4}|\t)\s*(torchax-ckpt .*)$", page.read_text(), re.M)
        assert not [line for line in indented if not SYNOPSIS.match(line)], page


def test_links_of_a_page_beside_the_site_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"):
        page = ROOT / name
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert links
        assert not [link for link in links if not (page.parent / link).exists()], page


def test_the_readme_and_the_news_of_a_release_stay_short() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 110
    assert len(readme.split()) <= 900
    _, *news = re.split(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert max(text.count("\n") for text in news) <= 60  # a page


# --- the site --------------------------------------------------------------------------------


def public_names() -> Iterator[str]:
    for module in (torchax_ckpt, policies, planning, shardings, huggingface, native):
        for name in module.__all__:
            if not inspect.ismodule(getattr(module, name)):
                yield f"{module.__name__}.{name}"
    for name, value in vars(torchax_ckpt.errors).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            yield f"torchax_ckpt.errors.{name}"
    for name, value in vars(torchax_ckpt.TorchaxCheckpointer).items():
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            yield f"torchax_ckpt.TorchaxCheckpointer.{name}"


@pytest.mark.slow
def test_the_site_builds_and_its_reference_has_every_public_name(tmp_path: Path) -> None:
    """The pages as HTML, from scratch, where any warning is an error."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {page.stem: page.read_text() for page in (tmp_path / "api").glob("*.html")}
    texts = {stem: html.unescape(re.sub(r"<[^>]+>", "", page)) for stem, page in pages.items()}
    described = set(re.findall(r'id="([^"]+)"', "".join(pages.values())))
    # Orbax's policies and types, which its own pages describe, are named in tables.
    described |= {f"torchax_ckpt.policies.{word}" for word in re.findall(r"\w+", texts["policies"])}
    assert not set(public_names()) - described
    for stem, text in texts.items():
        # A colon in the first line of what is returned would make a type of the words before it.
        assert "Return type:" not in text, stem
        assert "\nType:" not in text, stem
        assert not re.search("\N{EN DASH}\\s*\n", text), f"{stem}: an item without a description"


# --- README and quickstart, in an empty folder ---

README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"


def blocks(page: Path, kind: str) -> str:
    """The blocks of this kind, one after the other."""
    return "\n".join(b["body"] for b in BLOCK.finditer(page.read_text()) if b["kind"] == kind)


def program(page: Path, folder: Path) -> str:
    """The Python of a page, as a program that works in this folder."""
    return f"import os; os.chdir({str(folder)!r})\n{blocks(page, 'python')}"


@pytest.mark.slow
def test_the_program_of_the_readme_prints_what_it_says_when_killed_and_started_again(
    tmp_path: Path,
) -> None:
    (code,) = (b["body"] for b in BLOCK.finditer(README.read_text()) if b["kind"] == "python")
    assert code.count("\n") <= 25
    _, *shown = re.split(r"^\$ .*python train.py\n", blocks(README, "text"), flags=re.M)
    file = tmp_path / "train.py"
    file.write_text(f"import os; os.chdir({str(tmp_path)!r})\n{code}")
    with Talking(file, env=environment(None, {})) as program:
        first: list[str] = []
        while not first or not first[-1].startswith("step 200 "):
            first.append(program.lines.readline())
            assert first[-1], first
    second = run_python(file).stdout.splitlines(keepends=True)
    announced, *printed = first
    assert announced == shown[0].replace("runs", f"{tmp_path}/runs").splitlines(keepends=True)[0]
    assert [*map(rounded, printed)] == [*map(rounded, shown[0].splitlines()[1:-1])]
    start = int(second[0].removeprefix("completed steps: "))
    assert start in range(100, 201, 10)
    expected = {**losses(shown[0]), **losses(shown[1])}
    assert losses("".join(second)).keys() == {step for step in expected if step > start}
    for step, loss in losses("".join(second)).items():
        assert loss[:7] == expected[step][:7]
        assert loss == losses("".join(first)).get(step, loss), "not the same bits"


def losses(printed: str) -> dict[int, str]:
    """Step -> the loss that the program of the README printed for it."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", printed, re.M)}


def rounded(line: str) -> str:
    """A line without the last digits of a loss, which depend on the processor."""
    return re.sub(r"(loss \S{7})\S*", r"\1", line.strip())


@pytest.mark.slow
def test_the_programs_of_the_quickstart_run_and_run_again(tmp_path: Path) -> None:
    for start in (0, 20):  # the second time everything resumes
        result = run_python(program(QUICKSTART, tmp_path), fresh=True)
        assert f"completed steps: {start}\n" in result.stdout
    made = {"epochs", "functional", "more", "own-loop", "quickstart"}
    assert {p.name for p in (tmp_path / "runs").iterdir()} == made


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
def test_the_loop_over_epochs_trains_every_epoch_once_wherever_it_is_resumed() -> None:
    """From a fresh start, within an epoch, at the end of epochs (5 steps each), and finished."""
    (loop,) = [b["body"] for b in BLOCK.finditer(QUICKSTART.read_text()) if "epochs" in b["body"]]
    every_step = policies.FixedIntervalPolicy(1)
    make = functools.partial(torchax_ckpt.TorchaxCheckpointer, save_decision_policy=every_step)
    seen: list[list[int]] = []
    names: dict[str, Any] = {"model": mlp(), "optimizer": None}
    for end in (3, 5, 10, 11, 20, 20):

        def train(end: int = end) -> None:
            if len(seen) == end:
                raise InterruptedError
            seen.append(names["batch"].tolist())

        with contextlib.suppress(InterruptedError):
            exec(loop, {**names, "train": train, "TorchaxCheckpointer": make}, names)
        assert len(seen) == end
    assert seen == [list(range(i, i + 4)) for i in range(0, 20, 4)] * 4
