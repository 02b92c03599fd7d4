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
# Durable time, at most so many times what the medium takes for as many bytes.
MEDIUM_TARGETS = {"gpt2": 1.5, "wide": 1.5}


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
            *([_declined(results["declined"])] if "declined" in results else []),
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
    peers = state["peers"]
    writes = [t for figures in peers.values() for t in figures["write"]]
    reads = [t for figures in peers.values() for t in figures["read"]]
    lines = [
        f"### {name}: {LEAVES[name]:,} leaves, {peers[OURS]['bytes'] / 1e6:,.0f} MB",
        "",
        f"The medium: write and fsync {seconds(writes)}, read {seconds(reads)}.",
        "",
        "| peer | blocking | durable | durable / medium, pairs | first save blocks "
        "| first restore, fresh process |",
        "|---|---|---|---|---|---|",
    ]
    for peer, figures in peers.items():
        cells = [
            LABELS[peer],
            seconds(figures["blocking"]),
            seconds(figures["durable"]),
            f"{_against_medium(figures):.2f}",
            _unit(figures["first"]),
            seconds(figures["restore"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    modes = "; ".join(f"{mode}: {seconds(times)}" for mode, times in state["modes"].items())
    lines += ["", f"Blocking by way of snapshot, with idle and with busy devices: {modes}."]
    if "digests" in state:
        lines += ["", _digests(state["digests"])]
    return "\n".join(lines)


def _digests(taken: dict[str, list[float]]) -> str:
    """What digests cost, in pairs of saves and of restores with and without."""
    save, first, restore = (
        f"{statistics.median(more):+.1%} ({quartiles(more)[0]:+.1%} to {quartiles(more)[1]:+.1%})"
        for more in (
            [a / b - 1 for a, b in zip(taken[with_], taken[without], strict=True)]
            for with_, without in (
                ("taken", "not taken"),
                ("first, compared", "first, trusted"),
                ("compared", "trusted"),
            )
        )
    )
    return (
        f"Digests, in pairs with and without (quartiles): {save} of the durable time (target "
        f"+5 %), {first} of the first restore of a fresh process (target +10 %), {restore} of a "
        "later one, from the page cache."
    )


def quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def _against_medium(figures: dict[str, Any]) -> float:
    """The median of durable time over the medium's, of pairs taken one after the other."""
    pairs = zip(figures["durable"], figures["write"], strict=True)
    return statistics.median(durable / write for durable, write in pairs)


def _targets(states: dict[str, Any]) -> str:
    lines = [
        "### Against the better of bare Orbax v0 and v1",
        "",
        "| state | blocking | durable | durable / medium | first restore |",
        "|---|---|---|---|---|",
    ]
    for name, state in states.items():
        peers, cells = state["peers"], [name]
        for what in ("blocking", "durable", "restore"):
            best = min(statistics.median(peers[peer][what]) for peer in BARE)
            ratio = statistics.median(peers[OURS][what]) / best
            cells.append(_verdict(f"1/{1 / ratio:.1f}", f"1/{1 / TARGETS[name][what]:.1f}",
                                  ratio <= TARGETS[name][what]))  # fmt: skip
            if what == "durable":
                medium = _against_medium(peers[OURS])
                most = MEDIUM_TARGETS.get(name)
                cells.append(
                    _verdict(f"{medium:.2f}", f"{most}", medium <= most)
                    if most
                    else f"{medium:.2f}"
                )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(reached: str, target: str, met: bool) -> str:
    return f"{reached} (target {target}: {'met' if met else 'missed'})"


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


def _declined(declined: dict[str, Any]) -> str:
    lines = [
        "### A declined save",
        "",
        "What a `save` that does not save costs the training thread, 5,000 each.",
        "",
        "| declined by | median | 90th percentile |",
        "|---|---|---|",
    ]
    for name, taken in declined.items():
        cells = [f"{taken[what] * 1e6:.1f} us" for what in ("median", "90th percentile")]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def _plots(results: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    states = {name: state["peers"] for name, state in results.get("states", {}).items()}
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
