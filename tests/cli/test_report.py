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
from torchax_ckpt.cli import exit_codes, report
from torchax_ckpt.policies import preservation_rules
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import FOLDER, read_events
from torchax_ckpt.telemetry.timeline import (
    bytes_over_time,
    metrics_over_steps,
    numbers_of,
    runs_of,
)

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


def styled(page: Path) -> set[str]:
    """The elements that a page has styles for."""
    style = re.split("</?style>", page.read_text())[1]
    selectors = re.findall(r"([^{};/]+)\{", style)
    names = [re.findall(r"(?<![\w.:-])[a-z]\w*", s) for s in selectors if "@media" not in s]
    return {*itertools.chain(*names)}


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


def test_the_metrics_of_a_curve_are_those_of_the_training_that_goes_on() -> None:
    def durable(step: int, loss: float) -> Event:
        return Event("durable", step, step, {"metrics": {"loss": loss}})

    killed = [durable(10, 1.0), durable(20, 0.9), durable(30, 5.0)]
    back = [Event("restored", 40, 20), durable(25, 0.8), durable(27, 0.7)]
    runs = runs_of({"a": killed, "b": back}, is_running=False)
    expected = [(10, 1.0), (20, 0.9), (25, 0.8), (27, 0.7)]
    assert metrics_over_steps(runs) == {"loss": expected}
    anew = [Event("started", 50), durable(20, 0.7), Event("durable", 60, 21, {"metrics": {"f": 1}})]
    runs = runs_of({"a": killed, "b": anew}, is_running=False)
    assert metrics_over_steps(runs) == {"loss": [(10, 1.0), (20, 0.7)], "f": [(21, 1)]}


def test_a_restore_that_no_training_follows_leaves_the_curve_whole() -> None:
    events = [Event("durable", n, n, {"metrics": {"val": n}}) for n in (100, 500, 1000)]
    best = [Event("restored", 1001, 500), Event("closed", 1002, 1000)]
    whole = {"val": [(100, 100), (500, 500), (1000, 1000)]}
    assert metrics_over_steps(runs_of({"a": events + best}, is_running=False)) == whole
    newest = [Event("restored", 1003, 1000)]
    assert metrics_over_steps(runs_of({"a": events + best, "b": newest}, is_running=False)) == whole
    anew = [*newest, Event("durable", 1100, 1100, {"metrics": {"val": 3}})]
    curves = metrics_over_steps(runs_of({"a": events + best, "b": anew}, is_running=False))
    assert curves == {"val": [*whole["val"], (1100, 3)]}


# --- the charts ---


def below(chart: report.Chart) -> list[str]:
    """The labels below a chart, from left to right; the first day is beside them."""
    bottom = max(y for _, y, _, _ in chart.texts)
    return [text for _, y, _, text in sorted(chart.texts) if y == bottom]


def places(chart: report.Chart, kind: str) -> list[tuple[float, float]]:
    """Where the boxes of a class begin and end."""
    paths = [path for name, path, _ in chart.shapes if name == kind]
    found = [re.fullmatch(r"M([\d.]+) [\d.]+H([\d.]+)V.*Z", path) for path in paths]
    return [(float(match[1]), float(match[2])) for match in found if match]


NOON = BEGAN - BEGAN % 86_400 + 43_200


def programs(*spans: tuple[float, float]) -> Any:
    """Programs that ran from a time to another, in seconds after a noon."""
    events = {
        str(number): [Event("saving", NOON + begin, 1), Event("closed", NOON + end, 9)]
        for number, (begin, end) in enumerate(spans)
    }
    return runs_of(events, is_running=False)


def test_idle_time_is_cut_out_and_a_band_says_so() -> None:
    runs = programs((0, 3600), (3700, 7200), (50_000, 57_200))
    chart = report.timeline(runs, NOON + 10**6)
    first, second, third = places(chart, "program")
    assert second[0] - first[1] < 5  # a short time is none
    ((left, right),) = places(chart, "idle")
    assert (second[1], third[0]) == (left, right)
    assert right - left == pytest.approx(18, abs=0.2)
    assert third[1] - third[0] == pytest.approx(second[1] - first[0], abs=0.2)  # to scale
    assert "idle 12 h" in [text for _, _, _, text in chart.texts]
    assert ("idle", "no program ran for 12 h") in [(k, title) for k, _, title in chart.shapes]
    curve = [(NOON, 1), (NOON + 60_000, 5)]
    assert places(report.storage(runs, curve, NOON + 10**6), "idle") == [(left, right)]
    often = programs(*((1000 * n, 1000 * n + 10) for n in range(400)))
    drawn = [kind for kind, _, _ in report.timeline(often, NOON + 10**6).shapes]
    assert (drawn.count("program"), drawn.count("idle")) == (1, 1)  # too many to draw each


def test_only_after_a_program_that_closed_does_a_band_say_that_none_ran(directory: Path) -> None:
    def hours(begin: float, end: float, name: str) -> list[Event]:
        return [Event("saving", NOON + 3600 * begin, 1), Event(name, NOON + 3600 * end, 1)]

    killed_and_restarted = [hours(0, 2, "durable"), hours(2.01, 6, "closed")]
    killed = [hours(18, 26, "durable"), hours(36, 50, "closed")]
    synthetic.write(directory, killed_and_restarted + killed)
    runs = runs_of(read_events(epath.Path(directory)), is_running=False)
    chart = report.timeline(runs, NOON + 10**6)
    titles = [title for kind, _, title in chart.shapes if kind == "idle"]
    assert titles == ["no program ran for 12 h", "no event for 10 h; the program may have run on"]
    labels = [text for _, y, _, text in chart.texts if y < 26]
    assert labels == ["idle 12 h", "gap 10 h"]
    text = reported(directory)[1].text
    assert "that program may have run on until it was killed" in text
    assert "Time in which no program ran" not in text
    assert text.count("at least 8 h") == 1  # in the table of programs
    assert "at least 14 h" not in text


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(100, 7000)], ["Nov 18", "12:30", "13:00", "13:30"]),
        ([(0, 47)], ["Nov 18", "12:00:00", "12:00:20", "12:00:30", "12:00:40"]),
        ([(60, 7200), (80_000, 87_000)], ["Nov 18", "13:00", "14:00", "Nov 19 11:00", "12:00"]),
        ([(0, 9 * 86_400)], ["Nov 19", "Nov 21", "Nov 23", "Nov 25", "Nov 27"]),
        ([(10, 11)], ["Nov 18", "12:00:10", "12:00:11"]),
        ([(600.1, 600.2), (90_000.3, 90_000.4)], ["Nov 18", "12:10:01", "Nov 19 13:00:01"]),
        ([(5_000_000.5, 5_000_000.6)], ["Jan 15", "08:53:21"]),
    ],
)
def test_times_are_round_and_name_each_day_once(
    spans: list[tuple[float, float]], expected: list[str]
) -> None:
    assert below(report.timeline(programs(*spans), NOON)) == expected


def test_values_are_round() -> None:
    for most, expected in (
        (1, ["0", "1"]),
        (10, ["0", "5", "10"]),
        (3010, ["0", "2,000", "4,000"]),
        (5_400_000, ["0", "2M", "4M", "6M"]),
    ):
        runs = runs_of({"a": [Event("saving", NOON, most)]}, is_running=False)
        chart = report.timeline(runs, NOON)
        lanes = {"program", "saving", "durable", "deleted", "restored", "failed", "Nov 18"}
        texts = [text for _, _, anchor, text in chart.texts if anchor == "end"]
        assert [text for text in texts if text not in lanes] == expected
    late = report.metric_chart("loss", [(10**6, 1.0), (10**6 + 3, 1.0)], [])
    assert below(late) == ["1M", "1,000,001", "1,000,002", "1,000,003"]
    chart = report.histogram([3.0, 50.0, 41.0, 99.0])
    assert below(chart) == ["0", "30 s", "60 s", "90 s"]
    assert sum(kind == "bar" for kind, _, _ in chart.shapes) == 14  # of 7.5 s each


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.31, 0.9, 2.4], ["0", "1", "2", "3"]),
        ([-0.2, 0.1], ["-0.2", "-0.1", "0", "0.1"]),
        ([1e-5, 3e-5], ["1e-05", "2e-05", "3e-05"]),
        ([1e99, -1e99], ["-1e+99", "0", "1e+99"]),
        ([5e-324, 0.0], ["0"]),
        ([0.0, 0.0], ["0"]),
    ],
)
def test_a_metric_is_a_curve_with_its_saved_and_its_present_steps(
    values: list[float], expected: list[str]
) -> None:
    saved = [*enumerate(values, start=100)]
    chart = report.metric_chart("loss", saved, saved[-1:])
    texts = [text for _, _, anchor, text in chart.texts if anchor == "end"]
    assert texts == expected
    shapes = {kind: path for kind, path, _ in chart.shapes}
    assert shapes["line"].count("L") == len(values) - 1
    assert shapes["saved"].count("h0") == len(values)
    assert shapes["kept"].count("h0") == 1
    assert shapes["saved"].endswith(shapes["kept"])
    assert below(chart)[0] == "100"
    only_there = report.metric_chart("loss", [], saved)  # written before events had metrics
    assert [kind for kind, _, _ in only_there.shapes if kind in ("line", "kept")] == ["kept"]


def test_metrics_of_saves_are_drawn_those_of_the_policy_first(directory: Path) -> None:
    keep = policies.AnyPreservationPolicy(
        [policies.LatestN(1), policies.BestN(metric="val", mode="min", n=1)]
    )
    others = {f"m{number}": 1.0 for number in range(12)}
    with TorchaxCheckpointer(directory, preservation_policy=keep) as ckpt:
        for step, val in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.8)):
            metrics = {**others, "val": val, "name": "x", "odd": float("inf")}
            ckpt.save(step, state={"w": np.arange(3)}, metrics=metrics, force=True)
            ckpt.wait_until_finished()
    _, document = reported(directory)
    labels = [value for name, value in document.attributes if name == "aria-label"]
    drawn = [label.split(":")[0] for label in labels if label and ": from " in label]
    assert drawn == ["val", *sorted(others)[:7]]
    assert "val: from 0.1 to 0.8" in labels
    assert "and 5 more On storage" in document.text
    assert document.attributes.count(("class", "kept")) == 8


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
    assert document.tags.count("svg") == 4
    assert styled(out) <= set(document.tags)
    labels = [value for name, value in document.attributes if name == "aria-label"]
    assert any("3 programs, 122 saves, 119 durable, 3 failed or cut off" in x for x in labels if x)
    assert document.attributes.count(("role", "img")) == len(labels) == 4
    assert ("lang", "en") in document.attributes
    assert "prefers-color-scheme: dark" in out.read_text()
    assert document.tags.count("title") > 6
    said = (
        "trained a second time 50 steps",
        "deleted: step 25",
        "restored: step 975",
        "No space left on dev",
    )
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
    assert seen["num_drawings"] == 4
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
