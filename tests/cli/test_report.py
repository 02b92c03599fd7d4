"""The page of a run: what it says, its form, and, with `make test-long`, how a browser shows it."""

from __future__ import annotations

import html.parser
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from support import TESTS, synthetic
from support.commands import run, run_json
from support.waiting import wait_until

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.policies import preservation_rules
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import FOLDER, read_events
from torchax_ckpt.telemetry.timeline import bytes_over_time, numbers_of, runs_of

BEGAN = synthetic.BEGAN_SECS
# Elements without an end.
_VOID = {"meta", "br", "hr"}


class Document(html.parser.HTMLParser):
    """What a page consists of; every element must be closed, in order."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def reported(directory: Path) -> tuple[Path, Document]:
    out = directory.parent / f"{directory.name}.html"
    run("report", directory, out)
    return out, Document(out.read_text())


@pytest.fixture
def three_runs(directory: Path) -> Path:
    synthetic.three_runs(directory)
    return directory


# --- from events to runs ---


def test_runs_and_saves_are_found_in_events(three_runs: Path) -> None:
    runs = runs_of(read_events(epath.Path(three_runs)), is_running=False)
    assert [(r.first_step, r.last_step, r.ended) for r in runs] == [
        (25, 1000, False),
        (975, 1900, False),
        (1875, 3000, True),
    ]
    assert [run.lost_steps for run in runs] == [25, 25, None]
    first = {save.step: save for save in runs[0].saves}
    assert first[400].outcome == "failed"
    assert "No space left" in first[400].error
    assert first[1000].outcome == "cut off"
    assert first[975].outcome == "durable"
    assert {*numbers_of(runs)["interval_steps"]} == {25}


def test_what_a_later_run_goes_back_to_is_no_loss_of_the_one_before() -> None:
    first = [Event("started", 1.0), Event("saving", 2.0, 10), Event("reached", 3.0, 12)]
    later = [
        Event("restored", 11.0, 10),  # by attach
        Event("restored", 12.0, 8),  # before a step was trained, another one was chosen
        Event("reached", 13.0, 20),
        Event("restored", 14.0, 4),
    ]
    runs = runs_of({"a": first, "b": later}, is_running=False)
    assert [run.lost_steps for run in runs] == [4, None]
    fresh = [Event("saving", 11.0, 1), Event("restored", 12.0, 1)]
    runs = runs_of({"a": first, "b": fresh}, is_running=False)
    assert [run.lost_steps for run in runs] == [None, None]
    for is_running, outcome in ((True, "in flight"), (False, "cut off")):
        (newest,) = runs_of({"a": first}, is_running=is_running)
        assert (newest.is_running, newest.saves[0].outcome) == (is_running, outcome)


def test_storage_over_time_is_what_the_events_say() -> None:
    events = [
        Event("started", 1, None, {"total_bytes": 0}),
        Event("durable", 2, 1, {"num_bytes": 100, "new_bytes": 100, "total_bytes": 100}),
        Event("durable", 4, 2, {"num_bytes": 100, "new_bytes": 30, "total_bytes": 130}),
        Event("deleted", 5, None, {"steps": [1], "total_bytes": 120}),
        Event("set_aside", 6, None, {"steps": [2], "total_bytes": 0}),
        Event("durable", 7, 3),
    ]
    runs = runs_of({"a": events}, is_running=False)
    assert bytes_over_time(runs) == [(1, 0), (2, 100), (4, 130), (5, 120), (6, 0)]


# --- the command ---


def test_a_real_run_is_reported(directory: Path) -> None:
    keep = policies.AnyPreservationPolicy(
        [policies.LatestN(1), policies.BestN(metric="loss", mode="min", n=1)]
    )
    with TorchaxCheckpointer(directory, preservation_policy=keep) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.8)):
            ckpt.save(step, state={"w": np.arange(3)}, metrics={"loss": loss}, force=True)
        out = directory.parent / "page.html"
        ckpt.wait_until_finished()
        # Events are written within a second or so.
        wait_until(lambda: run_json("report", directory, out)["runs"][0]["num_durable"] >= 4)
        assert run_json("report", directory, out)["runs"][0]["running"] is True
        assert "A program is writing to this directory, at step 4" in Document(out.read_text()).text
    (of_run,) = run_json("report", directory, out)["runs"]
    assert (of_run["closed"], of_run["running"]) == (True, False)
    assert (of_run["num_durable"], of_run["num_failed"], of_run["last_step"]) == (4, 0, 4)
    text = Document(out.read_text()).text
    assert "The last program has closed it, at step 4" in text
    assert "durable saves 4" in text
    assert "BestN(loss, min, 1)" in text
    listed = {step["step"]: step["kept_by"] for step in run_json("ls", directory)["steps"]}
    assert listed == {2: ["BestN(loss, min, 1)"], 4: ["LatestN(1)", preservation_rules.NEWEST]}
    assert re.search(r"2 .* BestN\(loss, min, 1\) +loss=0.1", run("ls", directory))


def test_a_directory_without_events_is_reported_too(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": np.arange(3)})
    for file in (directory / FOLDER).iterdir():
        file.unlink()
    _, document = reported(directory)
    assert "No events are recorded" in document.text
    assert "newest step 1" in document.text
    assert run_json("ls", directory)["steps"][0]["kept_by"] is None


# --- the page ---


def test_the_page_says_in_words_what_it_draws_and_changes_nothing(
    three_runs: Path, tmp_path: Path
) -> None:
    before = {p: p.stat().st_mtime_ns for p in [three_runs, *three_runs.rglob("*")]}
    out, document = reported(three_runs)
    assert {p: p.stat().st_mtime_ns for p in [three_runs, *three_runs.rglob("*")]} == before
    assert document.tags.count("svg") == 3
    labels = [value for name, value in document.attributes if name == "aria-label"]
    assert any("3 programs, 122 saves, 119 durable, 3 failed or cut off" in x for x in labels if x)
    assert document.attributes.count(("role", "img")) == len(labels) == 3
    assert ("lang", "en") in document.attributes
    assert "prefers-color-scheme: dark" in out.read_text()
    assert document.tags.count("title") > 6
    said = ("done again 50 steps", "deleted: step 25", "restored: step 975", "No space left on dev")
    assert [text for text in said if text not in document.text] == []
    events = [e for of_run in read_events(epath.Path(three_runs)).values() for e in of_run]
    marks = {"deleted": sum(event.name == "deleted" for event in events), "restored": 2}
    marks["failed"] = 1 + 2  # a failure, and the saves that two kills cut off
    assert {kind: document.attributes.count(("class", kind)) for kind in marks} == marks
    assert marks["deleted"] > 100

    sentence = "The oldest events were not kept"
    assert sentence not in document.text
    first = min((three_runs / FOLDER).iterdir())
    first.write_bytes(first.read_bytes()[1000:])
    assert sentence in reported(three_runs)[1].text  # over the report that is there
    out.write_text("notes")
    assert "is not a report" in run("report", three_runs, out, code=exit_codes.UNAVAILABLE)
    assert out.read_text() == "notes"
    assert "expected the name" in run("report", three_runs, tmp_path, code=exit_codes.USAGE)


HOSTILE = [
    "<script>window.scripted = 1</script>",
    "\"><img src=x onerror='window.scripted = 1'>",
    "</title></style></svg><script>window.scripted=1</script>",
    "<style>*{display:none}</style>",
    "javascript:window.scripted=1",
    "&lt;b&gt; &amp; &#x3c;script&#x3e;",
    "]]><!-- -->",
    "\u202e\x00\x1b[31m\u2028\ud800",
    "<a href=//example.org>x</a><iframe src=//example.org></iframe>",
]


@pytest.fixture
def hostile(directory: Path) -> Path:
    """A step and events whose every text is an attack."""
    with TorchaxCheckpointer(directory / HOSTILE[0].replace("/", "_")) as ckpt:
        metrics = dict.fromkeys(HOSTILE[:-2], 1.0)
        ckpt.save(1, state={"w": np.arange(3)}, metrics=metrics)
    path = Path(ckpt.directory)
    for file in (path / FOLDER).iterdir():
        file.unlink()
    keeps = [
        {"rule": HOSTILE[0]}, {"rule": "BestN", "metric": HOSTILE[1], "mode": "min", "n": 1},
        {"rule": "EveryNSteps", "interval_steps": 0}, {"rule": ["x"]},
        {"rule": "LatestN", "n": {"a": "<b>"}}, {"rule": "LatestDuration", "duration_secs": 1e300},
    ]  # fmt: skip
    events = [Event("started", BEGAN, None, {"host": "".join(HOSTILE)[:900], "keeps": keeps})]
    for step, text in enumerate(HOSTILE):
        events.append(Event("saving", BEGAN + step - 0.5, step))
        events.append(Event("failed", BEGAN + step, step, {"error": text}))
    synthetic.write(path, [events])
    return path


def test_whatever_a_directory_holds_is_text(hostile: Path) -> None:
    out = hostile.parent / "page.html"
    run("report", hostile, out)
    document = Document(out.read_text())
    assert not {"script", "img", "iframe", "a", "link"} & set(document.tags)
    assert document.tags.count("style") == 1
    assert not re.search(r"url\(|@import", out.read_text())  # nothing is loaded
    assert not [name for name, _ in document.attributes if name.startswith("on") or name == "src"]
    for text in HOSTILE[:6]:
        assert text in document.text
    assert "\x1b" not in out.read_text()
    assert "\u202e" not in out.read_text()
    # Rules that make no sense are named, and keep nothing.
    (step,) = run_json("ls", hostile)["steps"]
    assert preservation_rules.NEWEST in step["kept_by"]
    assert "\x1b" not in run("ls", hostile)


def test_an_odd_lease_is_no_sign_of_life(three_runs: Path) -> None:
    lease = three_runs / "lease"
    for content in ("[" * 100_000, '{"pid": "../.."}', ""):
        lease.write_text(content)
        assert run_json("ls", three_runs)["writer"] is None
    os.truncate(lease, 1 << 40)
    assert run_json("ls", three_runs)["writer"] is None
    lease.unlink()
    lease.symlink_to("/dev/zero")
    assert run_json("ls", three_runs)["writer"] is None
    lease.unlink()
    os.mkfifo(lease)
    assert "The last program has closed it" in reported(three_runs)[1].text


@pytest.mark.parametrize(
    ("events", "said"),
    [
        pytest.param(
            lambda: [
                synthetic.run(
                    first=0, last=100_000, at_secs=BEGAN, step_secs=0.5, durable_secs=1.0, every=4
                )
            ],
            "durable saves 25,000",
            marks=pytest.mark.slow,
        ),
        (
            lambda: [
                synthetic.run(first=i, last=i + 10, at_secs=BEGAN + 10 * i, every=5, end="killed")
                for i in range(0, 5000, 10)
            ],
            "and 450 more",
        ),
    ],
)
def test_a_very_long_run_and_many_restarts_make_a_small_page(
    events: Any, said: str, directory: Path
) -> None:
    synthetic.write(directory, events())
    out, document = reported(directory)
    assert out.stat().st_size < 400_000
    assert len(document.tags) < 3000
    assert said in document.text


def test_odd_events_are_drawn_too(tmp_path: Path) -> None:
    gaps = (0.0, 0.0, 1e-9, 1e15)
    for number, events in enumerate(
        (
            [Event("closed", BEGAN)],
            [Event("saving", BEGAN, 0)],
            [Event("saving", 0.0, 1), Event("durable", 2.5e11, 1, {"num_bytes": 2**62})],
            [Event("saving", 1.0, 2**62), Event("durable", 1.0, 2**62, {"durable_secs": 1e18})],
            [Event("restored", BEGAN, 3), Event("reached", BEGAN + 1e-6, 3)],
            [Event("saving", BEGAN + i, i, {"interval_secs": g}) for i, g in enumerate(gaps)],
            [Event("saving", BEGAN, 1, {"interval_secs": 5e-324})],
        )
    ):
        synthetic.write(tmp_path / str(number), [events])
        _, document = reported(tmp_path / str(number))
        assert "svg" in document.tags
        assert not [v for _, v in document.attributes if v and re.search(r"\b(nan|inf)\b", v)]


# --- in a browser, with `make test-long` ---


def looked_at(page: Path, **settings: Any) -> dict[str, Any]:
    program = TESTS / "support" / "browser.py"
    result = subprocess.run(
        [sys.executable, str(program), json.dumps({"page": str(page), **settings})],
        env={k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def luminance(color: str) -> float:
    numbers = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
    red, green, blue = ((c + 0.055) ** 2.4 / 1.055**2.4 if c > 0.04 else c / 12.92 for c in numbers)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.long
@pytest.mark.parametrize(("width", "dark"), [(360, True), (1100, False)])
def test_it_looks_right_in_a_browser(width: int, dark: bool, three_runs: Path) -> None:
    page, _ = reported(three_runs)
    seen = looked_at(page, width=width, dark=dark)
    assert seen["is_loaded"]
    assert seen["title"] == f"{three_runs}: checkpoints"
    assert seen["scroll_width"] <= seen["width"] == width  # nothing is wider than the screen
    assert seen["num_drawings"] == 3
    assert seen["messages"] == []
    assert [url for url in seen["requests"] if not url.startswith("data:")] == [f"file://{page}"]
    assert (luminance(seen["paper"]) < 0.1) == dark
    lighter, darker = sorted((luminance(seen["paper"]), luminance(seen["ink"])), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) > 7  # what the accessibility guidelines call AAA
    assert any(text["text"].startswith("> ") for text in seen["texts"])  # some took much longer
    for text in seen["texts"]:
        assert text["inside"], text
        assert text["height"] >= 10, text  # pixels: it can be read
    for a, b in itertools.combinations(seen["texts"], 2):
        apart = a["right"] <= b["left"] or b["right"] <= a["left"]
        above = a["bottom"] <= b["top"] + 2 or b["bottom"] <= a["top"] + 2
        assert apart or above or a["drawing"] != b["drawing"], (a, b)


@pytest.mark.long
def test_nothing_hostile_runs_in_a_browser(hostile: Path) -> None:
    page = hostile.parent / "page.html"
    run("report", hostile, page)
    seen = looked_at(page, width=800)
    assert not seen["scripted"]
    assert "<script>window.scripted = 1</script>" in seen["text"]
    assert [url for url in seen["requests"] if not url.startswith("data:")] == [f"file://{page}"]


@pytest.mark.long
def test_the_browser_would_see_a_script(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<title>t</title><script>window.scripted = 1</script><img src='x.png'>")
    seen = looked_at(page, width=800)
    assert seen["scripted"]
    assert any(url.endswith("x.png") for url in seen["requests"])
