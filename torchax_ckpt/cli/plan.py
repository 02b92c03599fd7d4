"""Owns the command ``plan``: what a run's checkpoints weigh, how often to save, what to expect."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

from torchax_ckpt import planning
from torchax_ckpt.cli import output
from torchax_ckpt.cli.convert import parsed_size
from torchax_ckpt.cli.exit_codes import OK, UsageError
from torchax_ckpt.cli.step_arguments import existing
from torchax_ckpt.options import LocalTier
from torchax_ckpt.telemetry.journal import read_events

_SECS = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?) ?(ms|s|min|h|d|)")
_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_COUNT = re.compile(r"([0-9_]+(?:\.[0-9]+)?(?:e[0-9]+)?) ?([KMBT]?)", re.IGNORECASE)
_POWERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for: numbers, and texts that are sizes and times; None where it was not said.

    Attributes:
      params: how many parameters: ``70B``.
      size: of one checkpoint, in place of params.
      optimizer, param_bytes, moment_bytes: as in ``planning.state_bytes``.
      measured: the directory of a run to take sizes and times from.
      chips, chips_per_host, slices, process_fraction, cluster_fraction: as in ``planning.Cluster``.
      mtbf: of the run; else host_mtbf, of one host.
      restart, restore, blocking, durable, slowdown: times of the durable tier.
      local_blocking, local_durable, local_restore: of the ramdisks; the slowdown is the same.
    """

    params: str | None
    size: str | None
    optimizer: str
    param_bytes: float
    moment_bytes: float | None
    measured: str | None
    chips: int
    chips_per_host: int
    slices: int
    mtbf: str | None
    host_mtbf: str
    process_fraction: float
    cluster_fraction: float
    restart: str
    restore: str | None
    blocking: str | None
    durable: str | None
    slowdown: float
    local_blocking: str
    local_durable: str | None
    local_restore: str


def plan(asked: Asked, *, as_json: bool) -> int:
    """``torchax-ckpt plan``."""
    known = {} if asked.measured is None else _measured(asked.measured)
    num_bytes = _num_bytes(asked, known)
    run = _run(asked, known)
    mtbf_secs, tier = run.cluster.mtbf_secs, run.durable
    best = planning.best_interval(
        blocking_secs=tier.blocking_secs,
        durable_secs=tier.durable_secs,
        slowdown=tier.slowdown,
        mtbf_secs=mtbf_secs,
    )
    goodput = planning.expected_goodput(
        interval_secs=best.interval_secs,
        blocking_secs=tier.blocking_secs,
        durable_secs=tier.durable_secs,
        slowdown=tier.slowdown,
        mtbf_secs=mtbf_secs,
        restart_secs=run.cluster.restart_secs + tier.restore_secs,
    )
    said = {
        "checkpoint_bytes": num_bytes,
        "hosts": run.cluster.num_hosts,
        "hosts_per_slice": run.cluster.hosts_per_slice,
        # Those that stay, and the one being written.
        "ramdisk_bytes_per_host": planning.ramdisk_bytes_per_host(
            num_bytes,
            hosts_per_slice=run.cluster.hosts_per_slice,
            num_copies=LocalTier.keep + 1,
        ),
        # All slices share the writing.
        "write_bytes_per_sec_and_host": num_bytes / run.cluster.num_hosts / tier.durable_secs,
        "mtbf_secs": mtbf_secs,
        "restart_secs": run.cluster.restart_secs,
        **dataclasses.asdict(tier),
        "save_cost_secs": tier.cost_secs,
        "best_interval_secs": best.interval_secs,
        "best_is_continuous": best.is_continuous,
        "expected_goodput": goodput,
        "measured": sorted(known),
        "simulated": _simulated(run, best.interval_secs),
    }
    output.print_json(said) if as_json else _print(said)
    return OK


def _num_bytes(asked: Asked, known: Mapping[str, float]) -> int:
    if asked.params is not None and asked.size is not None:
        raise UsageError("plan: give --params or --size, not both")
    if asked.size is not None:
        return parsed_size(asked.size)
    if asked.params is not None:
        return planning.state_bytes(
            _number(asked.params),
            optimizer=asked.optimizer,
            param_bytes=asked.param_bytes,
            moment_bytes=asked.moment_bytes,
        ).total_bytes
    if "num_bytes" in known:
        return math.ceil(known["num_bytes"])
    raise UsageError("plan: say how large the state is: --params 70B, --size 840GB or --measured")


def _run(asked: Asked, known: Mapping[str, float]) -> planning.Run:
    # Whole hosts are checked by the cluster, which needs a time to be made at all.
    cluster = planning.Cluster(
        num_chips=asked.chips,
        chips_per_host=asked.chips_per_host,
        num_slices=asked.slices,
        host_mtbf_secs=_secs("--host-mtbf", asked.host_mtbf),
        restart_secs=_secs("--restart", asked.restart),
        process_fraction=asked.process_fraction,
        cluster_fraction=asked.cluster_fraction,
    )
    if asked.mtbf is not None:
        of_host = _secs("--mtbf", asked.mtbf) * cluster.num_hosts
        cluster = dataclasses.replace(cluster, host_mtbf_secs=of_host)
    durable_secs = _given("--durable", asked.durable, known.get("durable_secs"))
    if not durable_secs:
        raise UsageError("plan: --durable: expected a time above 0, found 0")
    local = None
    if asked.local_durable is not None:
        local = planning.Tier(
            blocking_secs=_secs("--local-blocking", asked.local_blocking),
            durable_secs=_secs("--local-durable", asked.local_durable),
            restore_secs=_secs("--local-restore", asked.local_restore),
            slowdown=asked.slowdown,
        )
    return planning.Run(
        cluster=cluster,
        durable=planning.Tier(
            blocking_secs=_given("--blocking", asked.blocking, known.get("blocking_secs")),
            durable_secs=durable_secs,
            restore_secs=_given(
                "--restore", asked.restore, known.get("restore_secs", durable_secs)
            ),
            slowdown=asked.slowdown,
        ),
        local=local,
    )


def _measured(directory: str) -> dict[str, float]:
    """The medians of what a run has recorded of its saves and restores.

    Raises:
      UsageError: it has recorded no save.
    """
    events = [e for of_run in read_events(existing(directory).path).values() for e in of_run]
    found = {}
    for name, key, known_as in (
        ("durable", "num_bytes", "num_bytes"),
        ("durable", "blocking_secs", "blocking_secs"),
        ("durable", "durable_secs", "durable_secs"),
        ("restored", "secs", "restore_secs"),
    ):
        of_name = (e for e in events if e.name == name and e.values.get("tier") != "local")
        if values := [e.values[key] for e in of_name if key in e.values]:
            found[known_as] = float(statistics.median(values))
    if "durable_secs" not in found:
        raise UsageError(f"plan: --measured: {directory}: no durable save is recorded there")
    return found


def _simulated(run: planning.Run, best_secs: float) -> list[dict[str, Any]]:
    policies: dict[str, planning.Policy | planning.TwoTier] = {
        "continuous": planning.Continuous(),
        "best interval": planning.FixedInterval(secs=best_secs),
        "every 10 min": planning.FixedInterval(secs=600),
        "every hour": planning.FixedInterval(secs=3600),
    }
    if run.local is not None:
        policies["two tiers, bucket hourly"] = planning.TwoTier(
            local=planning.OptimalInterval(), durable=planning.FixedInterval(secs=3600)
        )
    size = run.cluster.num_chips
    return [
        {
            "policy": compared.policy,
            "interval_secs": outcome.interval_secs,
            "local_interval_secs": outcome.local_interval_secs,
            "goodput": compared.goodput,
            "goodput_least": compared.goodput_range[0],
            "goodput_greatest": compared.goodput_range[1],
            **{
                f"{part}_fraction": statistics.median(
                    getattr(o, f"{part}_secs") / o.duration_secs for o in compared.outcomes
                )
                for part in ("saving", "lost", "down")
            },
        }
        for compared in planning.compare(run, policies, num_chips=[size], seeds=_SEEDS)
        for outcome in compared.outcomes[:1]
    ]


def _print(said: Mapping[str, Any]) -> None:
    secs = output.duration
    measured = set(said["measured"])

    def source(key: str) -> str:
        return " (measured)" if key in measured else ""

    continuous = ", which is to save continuously" if said["best_is_continuous"] else ""
    output.print_table(
        ("plan", ""),
        [
            ("one checkpoint", output.size(said["checkpoint_bytes"]) + source("num_bytes")),
            ("hosts", f"{said['hosts']:,}, {said['hosts_per_slice']:,} in each slice"),
            (
                f"ramdisk of each host, keep={LocalTier.keep}",
                output.size(said["ramdisk_bytes_per_host"]),
            ),
            ("each host writes", f"{output.size(said['write_bytes_per_sec_and_host'])}/s"),
            ("time between failures", secs(said["mtbf_secs"])),
            ("restart, then restore", f"{secs(said['restart_secs'])} + {secs(said['restore_secs'])}"
             + source("restore_secs")),
            ("a save blocks", secs(said["blocking_secs"]) + source("blocking_secs")),
            ("it is durable after", secs(said["durable_secs"]) + source("durable_secs")),
            ("it costs, slower steps counted", secs(said["save_cost_secs"])),
            ("best interval", secs(said["best_interval_secs"]) + continuous),
            ("expected goodput", f"{said['expected_goodput']:.2%}"),
        ],
    )  # fmt: skip
    rows = [
        (
            row["policy"],
            secs(row["interval_secs"])
            + (f"; local {secs(row['local_interval_secs'])}" if row["local_interval_secs"] else ""),
            f"{row['goodput']:.2%}",
            f"{row['goodput_least']:.2%} - {row['goodput_greatest']:.2%}",
            *(f"{row[f'{part}_fraction']:.2%}" for part in ("saving", "lost", "down")),
        )
        for row in said["simulated"]
    ]
    columns = ("simulated", "interval", "goodput", "of 3 runs", "saving", "lost", "down")
    output.print_line("")
    output.print_table(columns, rows, right=columns[2:])


def _given(option: str, text: str | None, known: float | None) -> float:
    """Seconds of an option, or those that were measured."""
    if text is not None:
        return _secs(option, text)
    if known is None:
        raise UsageError(f"plan: say {option}, or take it from a run: --measured DIRECTORY")
    return known


def _secs(option: str, text: str) -> float:
    match = _SECS.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"plan: {option}: expected a time such as 90, 90s, 5min, 12h or 365d, "
                         f"found {text!r}")  # fmt: skip
    return float(match[1]) * _UNITS[match[2]]


def _number(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"plan: --params: expected a number such as 70B or 124e6, found {text!r}")
    return int(float(match[1].replace("_", "")) * _POWERS[match[2].upper()])
