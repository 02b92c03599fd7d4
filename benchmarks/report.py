"""Turns the raw figures into the tables of README.md and the plots beside it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BARE = ("orbax_v0", "orbax_v1")
OURS = "torchax_ckpt"
LABELS = {
    "article": "article's recipe",
    "orbax_v0": "bare Orbax v0, async",
    "orbax_v1": "bare Orbax v1, async",
    "torch_save": "torch.save, CPU copy",
    "torchax_ckpt": "**torchax_ckpt**",
    "none": "no checkpoints",
}
LEAVES = {"deep": 3072, "gpt2": 592, "wide": 256, "moe": 9984}
# Fractions of the better bare Orbax that this library set out to reach.
TARGETS = {
    "deep": {"blocking": 1 / 40, "durable": 1 / 15, "restore": 1 / 5},
    "gpt2": {"blocking": 1 / 15, "durable": 1 / 2, "restore": 2 / 3},
    "wide": {"blocking": 1 / 10, "durable": 2 / 3, "restore": 1.0},
    "moe": {"blocking": 1 / 40, "durable": 1 / 15, "restore": 1 / 5},
}


def seconds(values: Sequence[float]) -> str:
    """Median, and the range it lies in."""
    return f"{_unit(statistics.median(values))} ({_unit(min(values))} - {_unit(max(values))})"


def _unit(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def write_report(results: dict[str, Any], folder: Path) -> None:
    """Replaces what stands between the markers in README.md, and the plots."""
    text = "\n\n".join(
        [
            _machine(results["machine"]),
            *(_state(name, state) for name, state in results.get("states", {}).items()),
            _targets(results.get("states", {})),
            *(_loop(name, loop) for name, loop in results.get("loops", {}).items()),
        ]
    )
    readme = folder / "README.md"
    marked = re.compile(r"(<!-- results -->\n).*(<!-- end of results -->)", re.DOTALL)
    readme.write_text(marked.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", readme.read_text()))
    _plots(results, folder)


def _machine(machine: dict[str, str]) -> str:
    libraries = ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("date", "machine"))
    return f"{machine['date']}, {machine['machine']}; {libraries}."


def _state(name: str, state: dict[str, Any]) -> str:
    raw = state["raw"]
    lines = [
        f"### {name}: {LEAVES[name]:,} leaves, {raw['bytes'] / 1e6:,.0f} MB",
        "",
        f"The medium: write and fsync {seconds(raw['write'])}, read {seconds(raw['read'])}.",
        "",
        "| peer | blocking | durable | first save blocks | first restore, fresh process |",
        "|---|---|---|---|---|",
    ]
    for peer, figures in state.items():
        if peer != "raw":
            cells = [
                LABELS[peer],
                seconds(figures["blocking"]),
                seconds(figures["durable"]),
                _unit(figures["first"]),
                seconds(figures["restore"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _targets(states: dict[str, Any]) -> str:
    lines = [
        "### Against the better of bare Orbax v0 and v1",
        "",
        "| state | blocking | durable | durable / raw write | restore |",
        "|---|---|---|---|---|",
    ]
    for name, state in states.items():
        cells = [name]
        for what in ("blocking", "durable", "restore"):
            best = min(statistics.median(state[peer][what]) for peer in BARE)
            ratio = statistics.median(state[OURS][what]) / best
            target = TARGETS[name][what]
            met = "met" if ratio <= target else "missed"
            cells.append(f"1/{1 / ratio:.1f} (target 1/{1 / target:.1f}: {met})")
            if what == "durable":
                raw = statistics.median(state[OURS][what]) / statistics.median(
                    state["raw"]["write"]
                )
                cells.append(f"{raw:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _loop(name: str, loop: dict[str, Any]) -> str:
    base = statistics.median(loop["none"]["step"])
    total = statistics.mean(loop["none"]["step"])
    lines = [
        f"### Training under continuous saving: {name}",
        "",
        f"A step takes {_unit(base)} (median) without checkpoints.",
        "",
        "| peer | steps between durable checkpoints, median | 90th percentile | mean step "
        "| added to training per durable step | durable checkpoints |",
        "|---|---|---|---|---|---|",
    ]
    for peer, figures in loop.items():
        if peer == "none" or not figures["intervals"]:
            continue
        intervals = sorted(figures["intervals"])
        mean = statistics.mean(figures["step"])
        added = (mean - total) * len(figures["step"]) / max(1, figures["saves"])
        cells = [
            LABELS[peer],
            f"{statistics.median(intervals):.0f}",
            f"{intervals[int(0.9 * (len(intervals) - 1))]}",
            f"{_unit(mean)} ({(mean / total - 1) * 100:+.0f} %)",
            _unit(added) if added >= 0 else f"-{_unit(-added)}",
            str(figures["saves"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _plots(results: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    states = results.get("states", {})
    if not states:
        return
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), constrained_layout=True)
    peers = [p for p in LABELS if p in next(iter(states.values()))]
    for axis, what in zip(axes, ("blocking", "durable", "restore"), strict=True):
        for offset, peer in enumerate(peers):
            xs = [i + 0.15 * (offset - len(peers) / 2) for i in range(len(states))]
            medians = [statistics.median(s[peer][what]) for s in states.values()]
            spread = [
                [m - min(s[peer][what]) for m, s in zip(medians, states.values(), strict=True)],
                [max(s[peer][what]) - m for m, s in zip(medians, states.values(), strict=True)],
            ]
            label = LABELS[peer].strip("*")
            axis.bar(xs, medians, 0.14, yerr=spread, label=label, error_kw={"lw": 0.8})
        axis.set_yscale("log")
        axis.set_xticks(range(len(states)), list(states))
        axis.set_ylabel("seconds")
        axis.set_title(what)
    axes[0].legend(fontsize=7)
    figure.savefig(folder / "results.png", dpi=90)
