"""Writes the page of benchmarks and its picture from raw figures; page.md has its sentences."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What a sitting writes, which therefore does not count as a change of the code it measured.
WRITTEN = ("results.json", "results.png", "README.md")
# Where the figures in the project's README begin and end.
_BEGIN, _END = "<!-- make bench writes these lines -->", "<!-- until here -->"
OURS, BARE = "torchax_ckpt", "orbax_v1"
LABELS = {
    "article": "the recipe of articles",
    "orbax_v1": "bare Orbax v1",
    "torch_save": "`torch.save` of a copy",
    "torchax_ckpt": "**torchax_ckpt**",
    "donated": "torchax_ckpt, state donated",
    "one file": "*one file of as many bytes*",
}
# The peers have muted colors, so that the bars of this library stand out.
_COLORS = {
    "article": "#d9d9d9",
    "orbax_v1": "#8491a8",
    "torch_save": "#d3c6b0",
    "torchax_ckpt": "#c2185b",
    "donated": "#e6a3bf",
}
_PANELS = {
    "blocking": "blocking:\nsave, on the training thread",
    "durable": "durable:\nfrom save until the commit",
    "restore": "first restore,\nin a fresh process",
}


def write(results: dict[str, Any], folder: Path) -> None:
    """Writes README.md and results.png into a folder."""
    states, taken = results["states"], results["taken"]
    text = (
        Path(__file__)
        .with_suffix(".md")
        .read_text()
        .format(
            head=_head(taken),
            headlines="\n".join(f"- {line}" for line in headlines(results)),
            states=_states(states),
            loops=_loops(results["loops"]),
            floors=_floors(results["floors"]),
            frozen="\n\n".join(_frozen(*each) for each in results["frozen"].items()),
            turns=_turns(states),
            declined=_declined(results["declined"]),
        )
    )
    (folder / "README.md").write_text(text)
    if states:
        _draw(states, folder / "results.png")


def rewritten(readme: str, results: dict[str, Any]) -> str:
    """Returns the project's README with the figures and the date of these results."""
    taken = results["taken"]
    chosen = headlines(results)[-2:]
    lines = [textwrap.fill(f"- {line}", 100, subsequent_indent="  ") for line in chosen]
    caption = (
        "How long a save stops the training, how long until it is durable, and how long a restore "
        f"takes; shorter is better. {taken['machine'].partition(' (')[0]}, {taken['date']}: "
        "[benchmarks](docs/benchmarks.md)."
    )
    shown = readme.split("![")[1].partition("\n")[0]
    text = "\n".join([*lines, "", f"![{shown}", "", *textwrap.wrap(f"*{caption}*", 100)])
    before, _, rest = readme.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{text}\n{_END}{after}"


def headlines(results: dict[str, Any]) -> list[str]:
    """Returns what the page and the project's README say first."""
    lines = []
    for name, rows in results["states"].items():
        ours, bare = rows[OURS], rows[BARE]
        if name in ("gpt2", "deep"):
            size = f"{ours['leaves']:,} leaves, {_size(ours['bytes'])}"
            pairs = [f"{_secs(_mid(ours[w]))} ({_secs(_mid(bare[w]))})" for w in _PANELS]
            lines.append(
                f"**{name}** ({size}; in brackets bare Orbax v1): `save` blocks for {pairs[0]}, "
                f"the step is durable after {pairs[1]}, "
                f"and a fresh process restores it in {pairs[2]}."
            )
    for name, rows in [*results["loops"].items()][:1]:
        added, bare_added = (_secs(_added(rows[peer])) for peer in (OURS, BARE))
        lines.append(
            f"**A loop** that always has a save of `{name}` in flight takes {added} longer for "
            f"each durable step; with bare Orbax v1 {bare_added}."
        )
    return lines


def _head(taken: dict[str, Any]) -> str:
    apart = ("date", "commit", "machine", "platform", "minutes")
    libraries = ", ".join(f"{k} {v}" for k, v in taken.items() if k not in apart)
    return (
        f"`make bench` wrote this page on {taken['date']}, in one sitting of {taken['minutes']} "
        f"minutes, with the code of commit {taken['commit']}.\n{taken['machine']}; {libraries}."
    )


def _states(states: dict[str, Any]) -> str:
    table = ["| state | saved by | blocking | durable | restore |", "|---|---|---|---|---|"]
    for name, rows in states.items():
        ours = rows[OURS]
        title = f"{name}: {ours['leaves']:,} leaves, {_size(ours['bytes'])}"
        for peer, found in rows.items():
            table.append(_row(title, LABELS[peer], *(spread(found[what]) for what in _PANELS)))
            title = ""
        write, read = ([t for found in rows.values() for t in found[w]] for w in ("write", "read"))
        table.append(_row("", LABELS["one file"], "", spread(write), spread(read)))
    return "\n".join(table)


def _loops(loops: dict[str, Any]) -> str:
    heads = ("without saves", "mean step", "saves a minute", "steps between", "added")
    table = [_row("state", "saved by", *heads), "|---|---|---|---|---|---|---|"]
    for title, rows in loops.items():
        for peer, found in rows.items():
            cells = [_secs(found["alone"]), _secs(found["mean"]), "none in time", "", ""]
            if found["saves"]:
                rate = found["saves"] / (found["mean"] * found["steps"]) * 60
                cells[2:] = f"{rate:.0f}", f"{found['between']:.0f}", _secs(_added(found))
            table.append(_row(title, LABELS[peer], *cells))
            title = ""
    return "\n".join(table)


def _added(found: dict[str, Any]) -> float:
    """Returns the seconds by which a durable step makes the training longer."""
    return (found["mean"] - found["alone"]) * found["steps"] / max(1, found["saves"])


def _floors(floors: dict[str, Any]) -> str:
    table = ["| state | torchax_ckpt | the floor | ratio |", "|---|---|---|---|"]
    for name, found in floors.items():
        ours, floor = found[OURS], found["floor"]
        table.append(_row(name, spread(ours), spread(floor), f"x {_mid(ours) / _mid(floor):.2f}"))
    return "\n".join(table)


def _frozen(name: str, rows: dict[str, Any]) -> str:
    any_row = next(iter(rows.values()))
    frozen, trained = _size(any_row["frozen"]), _size(any_row["trained"])
    labels = {
        "by identity": "torchax_ckpt, frozen leaves named, as on TPUs",
        "reuse": "torchax_ckpt, frozen leaves named",
        "no reuse": "torchax_ckpt, `reuse=False`",
        "Orbax v1": "bare Orbax v1, compressed",
    }
    table = [
        f"`{name}`: {frozen} frozen, {trained} trained.",
        "",
        "| saved by | new bytes a save | blocking | durable |",
        "|---|---|---|---|",
    ]
    for peer, found in rows.items():
        times = (spread([ms / 1e3 for ms in found[what]]) for what in ("blocking", "durable"))
        table.append(_row(labels[peer], _size(_mid(found["new"]) * 1e6), *times))
    return "\n".join(table)


def _turns(states: dict[str, Any]) -> str:
    counts = {
        (len(f["blocking"]), len(f["restore"])) for rows in states.values() for f in rows.values()
    }
    return " or ".join(
        f"{saves} saves and {restores} restores" for saves, restores in sorted(counts)
    )


def _declined(found: dict[str, Any]) -> str:
    times = [times["median"] for times in found.values()]
    return f"{min(times) * 1e6:.0f} to {max(times) * 1e6:.0f} us"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float]) -> str:
    """Formats seconds: the median, and in brackets the least and the greatest."""
    middle, least, greatest = map(_secs, (_mid(values), min(values), max(values)))
    unit = middle.rpartition(" ")[2]
    if all(text.endswith(f" {unit}") for text in (least, greatest)):
        least, greatest = least.partition(" ")[0], greatest.partition(" ")[0]
    return f"{middle} ({least} - {greatest})"


def _secs(value: float) -> str:
    """Formats seconds with two digits."""
    unit, scale = (" s", 1.0) if abs(value) >= 0.9995 else (" ms", 1e3)
    return f"{_digits(value * scale)}{unit}"


def _size(num_bytes: float) -> str:
    unit, scale = (" GB", 1e9) if num_bytes >= 0.9995e9 else (" MB", 1e6)
    return f"{_digits(num_bytes / scale)}{unit}"


def _digits(value: float) -> str:
    if abs(value) < 1e-9:
        return "0"
    digits = max(0, 1 - math.floor(math.log10(abs(value))))
    return f"{round(value, digits):,.{digits}f}" if abs(value) < 100 else f"{value:,.0f}"


def _mid(values: Sequence[float]) -> float:
    return statistics.median(values)


def _draw(states: dict[str, Any], path: Path) -> None:
    """Draws a panel for each time: medians as bars, the least to the greatest as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(11.5, 6.5), layout="constrained", sharey=True)
    height = 0.84 / len(_COLORS)
    for axis, (what, title) in zip(axes, _PANELS.items(), strict=True):
        for place, (peer, color) in enumerate(_COLORS.items()):
            ys = [i + height * (place - (len(_COLORS) - 1) / 2) for i in range(len(states))]
            times = [rows[peer][what] for rows in states.values()]
            medians = [_mid(t) for t in times]
            lines = [
                [m - min(t) for m, t in zip(medians, times, strict=True)],
                [max(t) - m for m, t in zip(medians, times, strict=True)],
            ]
            label = re.sub("[*`]", "", LABELS[peer]).replace(", ", ",\n")
            kept = {"lw": 0.9, "ecolor": "#555555"}
            axis.barh(
                ys, medians, 0.92 * height, xerr=lines, color=color, label=label, error_kw=kept
            )
            for y, median, ends in zip(ys, medians, times, strict=True):
                if peer == OURS:
                    axis.annotate(
                        _secs(median),
                        (max(ends), y),
                        (3, 0),
                        textcoords="offset points",
                        va="center",
                        color=color,
                        fontweight="bold",
                    )
        axis.set_xscale("log")
        least = min(min(row[what]) for rows in states.values() for row in rows.values())
        axis.set_xlim(left=10.0 ** math.floor(math.log10(least)))
        axis.xaxis.set_major_formatter(lambda s, _: f"{s:g} s" if s >= 1 else f"{s * 1e3:g} ms")
        axis.tick_params(axis="x", labelsize=9)
        axis.set_xlabel("time, log scale")
        axis.set_title(title, loc="left", fontsize=12)
        axis.grid(axis="x", color="#dddddd", lw=0.8)
        axis.set_axisbelow(True)
    sizes = [(name, rows[OURS]) for name, rows in states.items()]
    labels = [f"{n}\n{row['leaves']:,} leaves\n{_size(row['bytes'])}" for n, row in sizes]
    axes[0].set_yticks(range(len(states)), labels)
    axes[0].invert_yaxis()
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, labelspacing=1)
    figure.savefig(path, dpi=100)
    plt.close(figure)
