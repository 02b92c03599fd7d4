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
from support.processes import run_python
from support.training import mlp

import torchax_ckpt
from torchax_ckpt import planning, policies
from torchax_ckpt import torch as native
from torchax_ckpt.integrations import huggingface

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

# A block, whatever its fence; or a program that a page keeps from the reader's eyes, in a comment.
# What a block may be: Python or commands of torchax-ckpt, which are run here; or no code, what is
# printed or stored. The commands of a console need what no test has: an index, or a cluster.
# "raises" provokes the message above it (test_troubleshooting).
KINDS = {"python", "sh", "console", "text", "json", "raises"}
DIRECTIVES = {"{toctree}", "{eval-rst}"}


# SIGTERM is a notice to a whole process, and Lightning warns of loaders that are fine for a page:
# these get a process of their own.
SEPARATE = {"lightning", "native-pytorch", "preemption"}
SLOW = {*SEPARATE, "command-line", "huggingface", "migration", "quickstart"}


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
    assert (ROOT / "README.md").read_text().count("\n") <= 220
    _, *news = re.split(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert max(text.count("\n") for text in news) <= 60  # a page


# --- the site --------------------------------------------------------------------------------


def public_names() -> Iterator[str]:
    for module in (torchax_ckpt, policies, planning, huggingface, native):
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
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is, on purpose
def test_the_readme_runs_and_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (0, 200):  # the second time everything resumes
        result = run_python(program(README, tmp_path), fresh=True)
        assert f"completed steps: {start}\n" in result.stdout
        assert ", 200] 200 {'loss'" in result.stdout
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"readme"}

    monkeypatch.chdir(tmp_path)
    run_commands(blocks(README, "sh"))
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"readme", "kept", "imported"}
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "out", "out.pt", "report.html"}


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
