"""Writes the tables of README.md and its plot from the raw figures."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import targets

LABELS = {
    "article": "article's recipe",
    "orbax_v0": "bare Orbax v0, async",
    "orbax_v1": "bare Orbax v1, async",
    "torch_save": "torch.save, CPU copy",
    "torchax_ckpt": "**torchax_ckpt**",
    "functional": "torchax_ckpt, `save(state=)`, donated",
}
# The peers have muted colors, so that the bars of this library stand out.
_COLORS = {
    "article": "#d9d9d9",
    "orbax_v0": "#b3bccb",
    "orbax_v1": "#8491a8",
    "torch_save": "#d3c6b0",
    "torchax_ckpt": "#c2185b",
    "functional": "#e6a3bf",
}
_PANELS = {
    "blocking": "blocking:\nsave, on the training thread",
    "durable": "durable:\nfrom save until the commit",
    "restore": "first restore,\nin a fresh process",
}
_LEGEND = {
    "orbax_v0": "bare Orbax v0,\nasync",
    "orbax_v1": "bare Orbax v1,\nasync",
    "torch_save": "torch.save,\nCPU copy",
    "functional": "torchax_ckpt,\nsave(state=),\ndonated",
}


def seconds(values: Sequence[float]) -> str:
    """Formats the median and the range."""
    median, low, high = statistics.median(values), min(values), max(values)
    unit = targets.seconds
    return f"{unit(median)} ({unit(low)} - {unit(high)})"


def write_report(results: dict[str, Any], folder: Path) -> None:
    """Replaces the text between the markers in README.md, and the plot."""
    states, loops = results.get("states", {}), results.get("loops", {})
    text = "\n\n".join(
        [
            *(_state(name, state) for name, state in states.items()),
            *([_against_bare(states), _own(states)] if states else []),
            *(_loop(name, loop) for name, loop in loops.items()),
            *([_declined(results["declined"])] if "declined" in results else []),
        ]
    )
    readme = folder / "README.md"
    marked = re.compile(r"(<!-- results -->\n).*(<!-- end of results -->)", re.DOTALL)
    readme.write_text(marked.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", readme.read_text()))
    _plots(results, folder)


def _taken(taken: dict[str, str]) -> str:
    """Returns the date, machine and versions of a section, because each is measured separately."""
    apart = ("date", "machine", "platform")
    libraries = ", ".join(f"{k} {v}" for k, v in taken.items() if k not in apart)
    return f"{taken['date']}, {taken['machine']}; {libraries}."


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _state(name: str, state: dict[str, Any]) -> str:
    peers = state["peers"]
    ours = peers[targets.OURS]
    writes = [t for figures in peers.values() for t in figures["write"]]
    reads = [t for figures in peers.values() for t in figures["read"]]
    lines = [
        f"### {name}: {ours['leaves']:,} leaves, {ours['bytes'] / 1e6:,.0f} MB",
        "",
        _taken(state["taken"]),
        "",
        f"The medium: write and fsync {seconds(writes)}, read, from the page cache, "
        f"{seconds(reads)}.",
        "",
        "| peer | blocking | durable | durable / medium, pairs | first save blocks "
        f"| first restore, {len(ours['restore'])} fresh processes |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        _row(
            LABELS[peer],
            seconds(figures["blocking"]),
            seconds(figures["durable"]),
            f"{targets.against_medium(figures):.2f}",
            targets.seconds(figures["first"]),
            seconds(figures["restore"]),
        )
        for peer, figures in peers.items()
    ]
    modes = "; ".join(f"{mode}: {seconds(times)}" for mode, times in state["modes"].items())
    lines += ["", f"Blocking time by snapshot mode, with idle and busy devices: {modes}."]
    lines += ["", _digests(state["digests"])]
    return "\n".join(lines)


def _digests(taken: dict[str, list[float]]) -> str:
    """Formats the cost of digests, from pairs of saves and of restores with and without them."""
    save, first, later = (
        f"{targets.more(statistics.median(pairs))} (quartiles {targets.more(low)} to "
        f"{targets.more(high)}, {len(pairs)} pairs)"
        for with_, without in (
            ("taken", "not taken"),
            ("first, compared", "first, trusted"),
            ("compared", "trusted"),
        )
        for pairs in [targets.digests_cost(taken, with_, without)]
        for low, _, high in [statistics.quantiles(pairs, n=4)]
    )
    return (
        f"Cost of digests, from pairs with and without them: {save} of the durable time, {first} "
        f"of the first restore of a process, {later} of a later restore."
    )


def _against_bare(states: dict[str, Any]) -> str:
    lines = [
        "### Against the better of bare Orbax v0 and v1",
        "",
        "| state | blocking | durable | durable / medium | first restore |",
        "|---|---|---|---|---|",
    ]
    for name, state in states.items():
        peers = state["peers"]
        blocking, durable, restore = (
            targets.of_bare(name, peers, what) for what in ("blocking", "durable", "restore")
        )
        lines.append(_row(name, blocking, durable, targets.of_medium(name, peers), restore))
    return "\n".join(lines)


def _own(states: dict[str, Any]) -> str:
    lines = [
        "### Against absolute targets",
        "",
        "| state | blocking by reference, idle devices | by copy, busy devices "
        "| first restore / torch.load | the first save blocks longer by | digests, of durable "
        "| digests, of first restore |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        _row(
            name,
            targets.by_reference(state),
            targets.by_copy(name, state),
            targets.of_torch_load(name, state["peers"]),
            targets.first_extra(state["peers"]),
            *targets.digests(state["digests"]),
        )
        for name, state in states.items()
    ]
    return "\n".join(lines)


def _loop(name: str, loop: dict[str, Any]) -> str:
    peers, wanted = loop["peers"], loop["wanted"]
    none = peers["none"]["step"]
    lines = [
        f"### Training under continuous saving: {name}",
        "",
        _taken(loop["taken"]),
        "",
        f"A step takes {targets.seconds(statistics.median(none))} (median) without checkpoints.",
        "",
        "| peer | steps between durable checkpoints, median | 90th percentile | blocking "
        "| mean step | added to training per durable step | intervals |",
        "|---|---|---|---|---|---|---|",
    ]
    few, more = [], []
    for peer, figures in peers.items():
        if peer == "none":
            continue
        intervals, count = sorted(figures["intervals"]), len(figures["intervals"])
        if count < wanted:
            few.append(f"{LABELS[peer].strip('*')} ({count})")
        mean = statistics.mean(figures["step"])
        lines.append(
            _row(
                LABELS[peer],
                f"{statistics.median(intervals):.0f}" if intervals else "-",
                f"{intervals[int(0.9 * (count - 1))]}" if intervals else "-",
                seconds(figures["blocking"]) if figures.get("blocking") else "-",
                f"{targets.seconds(mean)} ({targets.overhead(peers, peer) * 100:+.0f} %)",
                targets.seconds(targets.added_secs(peers, peer)),
                str(count),
            )
        )
        if "processor" in figures and count:
            steps = sorted(figures["step"])
            more.append(
                _row(
                    LABELS[peer],
                    targets.seconds(statistics.median(steps)),
                    targets.seconds(steps[int(0.99 * (len(steps) - 1))]),
                    f"{count / sum(steps) * 60:.0f}",
                    targets.seconds(targets.processor_secs(peers, peer)),
                )
            )
    if more:
        lines += [
            "",
            "| peer | median step | 99th percentile | saves per minute | processor time per save |",
            "|---|---|---|---|---|",
            *more,
        ]
    if few:
        lines += [
            "",
            f"**Fewer than {wanted} intervals** within {loop['max_secs']:.0f} s, thus imprecise: "
            f"{', '.join(few)}.",
        ]
    verdicts = [*targets.loop(loop), *targets.waiting(name, peers)]
    lines += ["", *(f"- {verdict}" for verdict in verdicts)] if verdicts else []
    return "\n".join(lines)


def _declined(declined: dict[str, Any]) -> str:
    lines = [
        "### A declined save",
        "",
        _taken(declined["taken"]),
        "",
        "Time of a declined `save` on the training thread, 5,000 calls each.",
        "",
        "| declined by | median | 90th percentile |",
        "|---|---|---|",
    ]
    lines += [
        _row(
            name,
            targets.declined(times["median"]),
            targets.microseconds(times["90th percentile"]),
        )
        for name, times in declined["times"].items()
    ]
    return "\n".join(lines)


def _plots(results: dict[str, Any], folder: Path) -> None:
    """Draws a panel for each measure: medians as bars, smallest to largest as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    states = {name: state["peers"] for name, state in results.get("states", {}).items()}
    if not states:
        return
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(11.5, 6.5), layout="constrained", sharey=True)
    peers = [peer for peer in LABELS if all(peer in state for state in states.values())]
    height = 0.84 / len(peers)
    for axis, (what, title) in zip(axes, _PANELS.items(), strict=True):
        for place, peer in enumerate(peers):
            ys = [i + height * (place - (len(peers) - 1) / 2) for i in range(len(states))]
            times = [state[peer][what] for state in states.values()]
            medians = [statistics.median(t) for t in times]
            spread = [
                [m - min(t) for m, t in zip(medians, times, strict=True)],
                [max(t) - m for m, t in zip(medians, times, strict=True)],
            ]
            axis.barh(
                ys,
                medians,
                0.92 * height,
                xerr=spread,
                color=_COLORS[peer],
                label=_LEGEND.get(peer, LABELS[peer].replace("*", "")),
                error_kw={"lw": 0.9, "ecolor": "#555555"},
            )
            if peer == targets.OURS:
                for y, median, ends in zip(ys, medians, times, strict=True):
                    axis.annotate(
                        targets.seconds(median),
                        (max(ends), y),
                        (3, 0),
                        textcoords="offset points",
                        va="center",
                        color=_COLORS[peer],
                        fontsize=10,
                        fontweight="bold",
                    )
        axis.set_xscale("log")
        least = min(min(state[peer][what]) for state in states.values() for peer in peers)
        axis.set_xlim(left=10.0 ** math.floor(math.log10(least)))
        axis.xaxis.set_major_formatter(lambda secs, _: _tick(secs))
        axis.set_xlabel("time, log scale")
        axis.set_title(title, loc="left", fontsize=12)
        axis.grid(axis="x", color="#dddddd", lw=0.8)
        axis.set_axisbelow(True)
    sizes = [state[targets.OURS] for state in states.values()]
    axes[0].set_yticks(
        range(len(states)),
        [
            f"{name}\n{ours['leaves']:,} leaves\n{ours['bytes'] / 1e6:,.0f} MB"
            for name, ours in zip(states, sizes, strict=True)
        ],
    )
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, labelspacing=1)
    figure.savefig(folder / "results.png", dpi=100)


def _tick(secs: float) -> str:
    return f"{secs:g} s" if secs >= 1 else f"{secs * 1e3:g} ms"
