"""Computes the tables and figures of docs/planning.md, prints the tables, and writes all there.

    python benchmarks/plans.py

This program measures nothing. It uses the formulas and the simulation of ``torchax_ckpt.planning``
with the assumptions below.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from torchax_ckpt import LocalTier, planning
from torchax_ckpt.planning import Cluster, Continuous, FixedInterval, OptimalInterval, Tier, TwoTier

DOCS = Path(__file__).parents[1] / "docs"
YEAR_SECS = 365 * 86400.0
SEEDS = (0, 1, 2, 3, 4)

# The published setting. The publication states the chips, the model, intervals of 100 and 47 steps,
# and 5-10 % slower steps.
NUM_PARAMS = 70_000_000_000
PUBLISHED_CHIPS, PUBLISHED_SLICES = 128, 2
FIXED_STEPS, CONTINUOUS_STEPS = 100, 47
SLOWDOWNS = (0.0, 0.01, 0.025, 0.05, 0.10, 0.20)
# Assumptions about the published setting.
STEP_SECS = 20.0
BLOCKING_SECS = 1.0
RESTART_SECS = 600.0

# The tables from small to large clusters, with assumptions only.
CHIPS = (64, 256, 1024, 4096, 16_384, 65_536, 100_000)
SCALED = planning.Run(
    cluster=Cluster(
        num_chips=64,
        num_slices=2,
        host_mtbf_secs=YEAR_SECS,
        restart_secs=300,
        process_fraction=0.2,
        cluster_fraction=0.02,
        restart_can_fail=True,
    ),
    durable=Tier(blocking_secs=1, durable_secs=120, restore_secs=120, slowdown=0.05),
    local=Tier(blocking_secs=1, durable_secs=10, restore_secs=20, slowdown=0.05),
    step_secs=10,
)
SCALED_POLICIES: dict[str, planning.Policy | TwoTier] = {
    "every 30 min": FixedInterval(secs=1800),
    "continuous": Continuous(),
    "optimal, b alone": OptimalInterval(counts_slowdown=False),
    "optimal": OptimalInterval(),
    "two-tier, optimal": TwoTier(local=OptimalInterval(), durable=OptimalInterval()),
}


def published_tier(slowdown: float) -> Tier:
    """Returns a tier whose saves are durable after 47 steps, each slower by ``slowdown``."""
    training_secs = CONTINUOUS_STEPS * STEP_SECS * (1 + slowdown)
    return Tier(
        blocking_secs=BLOCKING_SECS,
        durable_secs=BLOCKING_SECS + training_secs,
        slowdown=slowdown,
    )


def goodput(tier: Tier, interval_secs: float, mtbf_secs: float) -> float:
    """Returns the expected goodput in closed form."""
    return planning.expected_goodput(
        interval_secs=interval_secs,
        blocking_secs=tier.blocking_secs,
        durable_secs=tier.durable_secs,
        slowdown=tier.slowdown,
        mtbf_secs=mtbf_secs,
        restart_secs=RESTART_SECS,
    )


def fixed_secs(tier: Tier) -> float:
    """Returns the seconds between two snapshots that are 100 steps apart."""
    return FIXED_STEPS * STEP_SECS + tier.cost_secs


def gain(tier: Tier, mtbf_secs: float, fixed: Tier | None = None) -> float:
    """Returns by what fraction continuous saving has more goodput than every 100 steps.

    Args:
      tier: the tier of continuous saving.
      mtbf_secs: the mean time between failures of the run.
      fixed: the tier of saving every 100 steps, if it differs.
    """
    fixed = fixed or tier
    continuous = goodput(tier, tier.durable_secs, mtbf_secs)
    return continuous / goodput(fixed, fixed_secs(fixed), mtbf_secs) - 1


def highest_mtbf_secs(holds: Callable[[float], bool]) -> float:
    """Returns the largest M, between a minute and three centuries, for which a condition holds."""
    low, high = 60.0, 1e10
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def best(tier: Tier, mtbf_secs: float) -> planning.BestInterval:
    return planning.best_interval(
        blocking_secs=tier.blocking_secs,
        durable_secs=tier.durable_secs,
        slowdown=tier.slowdown,
        mtbf_secs=mtbf_secs,
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(goodputs: Sequence[float]) -> str:
    """Formats the median, the smallest and the largest value."""
    ordered = sorted(goodputs)
    return f"{ordered[len(ordered) // 2]:.4f} ({ordered[0]:.4f} - {ordered[-1]:.4f})"


def sizes() -> str:
    total_bytes = planning.state_bytes(NUM_PARAMS).total_bytes
    slice_hosts = PUBLISHED_CHIPS // PUBLISHED_SLICES // 4
    rows = []
    for hosts in (slice_hosts, 2 * slice_hosts):
        published, kept = (
            planning.ramdisk_bytes_per_host(total_bytes, hosts_per_slice=hosts, num_copies=copies)
            for copies in (2, LocalTier.keep + 1)
        )
        # The hosts of one slice write the checkpoint within 47 of the assumed steps.
        rate = total_bytes / hosts / (CONTINUOUS_STEPS * STEP_SECS)
        rows.append(
            [
                f"{hosts}",
                f"{total_bytes / 1e9:.0f} GB",
                f"{published / 1e9:.1f} GB",
                f"{kept / 1e9:.1f} GB",
                f"{rate / 1e6:.0f} MB/s",
            ]
        )
    return table(
        ["hosts per slice", "one checkpoint", "ramdisk of each host, published",
         f"with `LocalTier(keep={LocalTier.keep})`",
         f"each writes, if durable in {CONTINUOUS_STEPS * STEP_SECS:.0f} s"],
        rows,
    )  # fmt: skip


def validation() -> str:
    rows = []
    for interval, blocking, durable, restart, mtbf in [
        (60, 2, 50, 600, 10000),
        (600, 6, 120, 600, 10800),
        (120, 6, 120, 600, 10800),
    ]:
        run = planning.Run(
            cluster=Cluster(num_chips=4, host_mtbf_secs=mtbf, restart_secs=restart),
            durable=Tier(blocking_secs=blocking, durable_secs=durable),
        )
        policy = FixedInterval(secs=interval)
        simulated = [planning.simulate(run, policy, seed=seed).goodput for seed in SEEDS]
        expected = planning.expected_goodput(
            interval_secs=interval,
            blocking_secs=blocking,
            durable_secs=durable,
            restart_secs=restart,
            mtbf_secs=mtbf,
        )
        case = ", ".join(map(str, (interval, blocking, durable, restart, mtbf)))
        rows.append([case, f"{expected:.4f}", spread(simulated)])
    return table(["T, b, P, R, M (s)", "closed form", "simulated"], rows)


def break_even() -> str:
    rows = [break_even_row(published_tier(slowdown)) for slowdown in SLOWDOWNS]
    return table(
        ["slower steps", "a save costs", "better than every 100 below M =", "that is",
         "one failure per host in", "better below M =, if saves every 100 slow no steps",
         "the optimum below M ="],
        rows,
    )  # fmt: skip


def break_even_row(tier: Tier) -> list[str]:
    quiet = dataclasses.replace(tier, slowdown=0.0)
    even_secs = highest_mtbf_secs(lambda mtbf_secs: gain(tier, mtbf_secs) > 0)
    quiet_secs = highest_mtbf_secs(lambda mtbf_secs: gain(tier, mtbf_secs, quiet) > 0)
    best_secs = highest_mtbf_secs(lambda mtbf_secs: best(tier, mtbf_secs).is_continuous)
    return [
        f"{tier.slowdown:.1%}",
        f"{tier.cost_secs / STEP_SECS:.2f} steps",
        f"{even_secs / STEP_SECS:,.0f} steps",
        f"{even_secs / 3600:,.1f} h",
        f"{even_secs * PUBLISHED_CHIPS / 4 / 86400:,.0f} days",
        f"{quiet_secs / STEP_SECS:,.0f} steps",
        f"{best_secs / STEP_SECS:,.0f} steps",
    ]


def published() -> str:
    rows = []
    hosts = PUBLISHED_CHIPS // 4
    for slowdown in (0.0, 0.05, 0.10):
        tier = published_tier(slowdown)
        for host_days in (3, 10, 30, 100, 365):
            mtbf_secs = host_days * 86400 / hosts
            run = planning.Run(
                cluster=Cluster(
                    num_chips=PUBLISHED_CHIPS,
                    num_slices=PUBLISHED_SLICES,
                    host_mtbf_secs=host_days * 86400,
                    restart_secs=RESTART_SECS,
                ),
                durable=tier,
                step_secs=STEP_SECS,
            )
            wanted = best(tier, mtbf_secs)
            policies: list[planning.Policy] = [
                FixedInterval(num_steps=FIXED_STEPS),
                Continuous(),
                FixedInterval(secs=wanted.interval_secs),
            ]
            cells = [
                spread([planning.simulate(run, policy, seed=seed).goodput for seed in SEEDS])
                for policy in policies
            ]
            rows.append(
                [
                    f"{slowdown:.0%}",
                    f"{host_days} days",
                    f"{mtbf_secs / STEP_SECS:,.0f} steps",
                    *cells,
                    f"{wanted.training_secs / STEP_SECS:.0f} steps",
                ]
            )
    return table(
        ["slower steps", "M of a host", "M of the run", "every 100 steps", "continuous",
         "best interval", "which is"],
        rows,
    )  # fmt: skip


def scale() -> tuple[str, list[planning.Comparison]]:
    compared = planning.compare(SCALED, SCALED_POLICIES, num_chips=CHIPS, seeds=SEEDS)
    rows = []
    for chips in CHIPS:
        cluster = dataclasses.replace(SCALED.cluster, num_chips=chips)
        cells = [
            spread([outcome.goodput for outcome in row.outcomes])
            for row in compared
            if row.num_chips == chips
        ]
        rows.append([f"{chips:,}", f"{cluster.mtbf_secs / 3600:.1f} h", *cells])
    return table(["chips", "M", *SCALED_POLICIES], rows), compared


def draw_published(path: Path) -> None:
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    mtbf_secs = np.geomspace(100, 300_000, 200) * STEP_SECS
    for slowdown in SLOWDOWNS:
        tier = published_tier(slowdown)
        gains = [100 * gain(tier, m) for m in mtbf_secs]
        axes.plot(mtbf_secs / STEP_SECS, gains, label=f"{slowdown:.1%}")
    axes.axhline(0, color="black", linewidth=0.8)
    year = YEAR_SECS / (PUBLISHED_CHIPS / 4) / STEP_SECS
    axes.axvline(year, color="gray", linestyle=":")
    axes.annotate("a failure per\nhost and year", (year, 12), ha="right", fontsize=8)
    axes.set(
        xscale="log",
        ylim=(-12, 20),
        xlabel="mean time between failures of the run (steps)",
        ylabel="goodput against every 100 steps (%)",
        title="Continuous (every 47 steps): where it pays",
    )
    axes.legend(title="slower steps\nduring a save", fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_scale(compared: Sequence[planning.Comparison], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name in SCALED_POLICIES:
        rows = [row for row in compared if row.policy == name]
        medians = [row.goodput for row in rows]
        errors = [
            [row.goodput - row.goodput_range[0] for row in rows],
            [row.goodput_range[1] - row.goodput for row in rows],
        ]
        axes.errorbar([row.num_chips for row in rows], medians, errors, marker=".", label=name)
    axes.set(
        xscale="log",
        xlabel="chips",
        ylabel="goodput",
        title="The same state on more chips, a failure per host and year",
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    scaled, compared = scale()
    tables = {
        "sizes": sizes(),
        "validation": validation(),
        "break-even": break_even(),
        "published": published(),
        "scale": scaled,
    }
    page = DOCS / "planning.md"
    text = page.read_text()
    for name, rows in tables.items():
        print(f"{name}\n\n{rows}\n")
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marked.sub(rf"\g<1>\n{rows}\n\n\g<2>", text)
    page.write_text(text)
    draw_published(DOCS / "planning-published.png")
    draw_scale(compared, DOCS / "planning-scale.png")


if __name__ == "__main__":
    main()
