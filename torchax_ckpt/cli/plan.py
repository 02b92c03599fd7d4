"""The command ``plan``, which computes checkpoint size, best save interval and goodput."""

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
    """The command-line options of ``plan``, with sizes and times as the user typed them.

    An omitted option has its default value, which is None for some options.

    Attributes:
      params: number of parameters: ``70B``.
      size: size of one checkpoint, instead of ``params``.
      optimizer, param_bytes, moment_bytes: as in ``planning.state_bytes``.
      measured: directory of a run whose recorded sizes and times replace omitted options.
      chips, chips_per_host, slices, process_fraction, cluster_fraction: as in ``planning.Cluster``.
      mtbf: mean time between failures of the run.
      host_mtbf: mean time between failures of one host; used if ``mtbf`` is None.
      restart: time from a failure to the start of the restore.
      restore, blocking, durable: times of the durable tier.
      slowdown: fraction by which steps are slower during a save, to either tier.
      local_blocking, local_durable, local_restore: times of the local tier, the ramdisks.
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
    """Runs ``torchax-ckpt plan``; returns the exit code."""
    known = {} if asked.measured is None else _measured(asked.measured)
    num_bytes = _num_bytes(asked, known)
    # A measured run may have written less than a whole checkpoint with each save.
    is_given = asked.params is not None or asked.size is not None
    new_bytes = num_bytes if is_given else known.get("new_bytes", num_bytes)
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
    result = {
        "checkpoint_bytes": num_bytes,
        "hosts": run.cluster.num_hosts,
        "hosts_per_slice": run.cluster.hosts_per_slice,
        # The ramdisk contains the preserved steps and the step that is being written.
        "ramdisk_bytes_per_host": planning.ramdisk_bytes_per_host(
            num_bytes,
            hosts_per_slice=run.cluster.hosts_per_slice,
            num_copies=LocalTier.keep + 1,
        ),
        # Every slice has the whole state, and the hosts of all slices share the writing.
        "write_bytes_per_sec_and_host": new_bytes / run.cluster.num_hosts / tier.durable_secs,
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
    output.print_json(result) if as_json else _print(result)
    return OK


def _num_bytes(asked: Asked, known: Mapping[str, float]) -> int:
    """Returns the bytes of one checkpoint: from the options, else as measured in ``known``."""
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
    raise UsageError(
        "plan: the size of a checkpoint is missing; give --params 70B, --size 840GB, or "
        "--measured DIRECTORY with the directory of a run that has saved"
    )


def _run(asked: Asked, known: Mapping[str, float]) -> planning.Run:
    """Returns the run to simulate; the measured values in ``known`` replace omitted options."""
    # Cluster counts the hosts, and checks that they are whole. It requires --host-mtbf; --mtbf, if
    # given, replaces that time below.
    cluster = planning.Cluster(
        num_chips=asked.chips,
        chips_per_host=asked.chips_per_host,
        num_slices=asked.slices,
        host_mtbf_secs=parsed_secs("--host-mtbf", asked.host_mtbf),
        restart_secs=parsed_secs("--restart", asked.restart),
        process_fraction=asked.process_fraction,
        cluster_fraction=asked.cluster_fraction,
    )
    if asked.mtbf is not None:
        host_mtbf_secs = parsed_secs("--mtbf", asked.mtbf) * cluster.num_hosts
        cluster = dataclasses.replace(cluster, host_mtbf_secs=host_mtbf_secs)
    durable_secs = _option_secs("--durable", asked.durable, known.get("durable_secs"))
    if not durable_secs:
        raise UsageError(
            "plan: --durable: expected a time above 0, found 0; give the time from the snapshot "
            "to the commit"
        )
    local = None
    if asked.local_durable is not None:
        local = planning.Tier(
            blocking_secs=parsed_secs("--local-blocking", asked.local_blocking),
            durable_secs=parsed_secs("--local-durable", asked.local_durable),
            restore_secs=parsed_secs("--local-restore", asked.local_restore),
            slowdown=asked.slowdown,
        )
    return planning.Run(
        cluster=cluster,
        durable=planning.Tier(
            blocking_secs=_option_secs("--blocking", asked.blocking, known.get("blocking_secs")),
            durable_secs=durable_secs,
            restore_secs=_option_secs(
                "--restore", asked.restore, known.get("restore_secs", durable_secs)
            ),
            slowdown=asked.slowdown,
        ),
        local=local,
    )


def _measured(directory: str) -> dict[str, float]:
    """Returns the medians of the sizes and times of a run's recorded saves and restores.

    Raises:
      UsageError: the run has recorded no durable save.
    """
    events = [e for of_run in read_events(existing(directory).path).values() for e in of_run]
    found = {}
    for name, key, known_as in (
        ("durable", "num_bytes", "num_bytes"),
        ("durable", "new_bytes", "new_bytes"),
        ("durable", "blocking_secs", "blocking_secs"),
        ("durable", "durable_secs", "durable_secs"),
        ("restored", "secs", "restore_secs"),
    ):
        of_name = (e for e in events if e.name == name and e.values.get("tier") != "local")
        if values := [e.values[key] for e in of_name if key in e.values]:
            found[known_as] = float(statistics.median(values))
    if "durable_secs" not in found:
        raise UsageError(
            f"plan: --measured: {directory}: no durable save is recorded in this directory; give a "
            "directory to which a run has saved, or give --blocking, --durable and --size"
        )
    return found


def _simulated(run: planning.Run, best_secs: float) -> list[dict[str, Any]]:
    """Simulates the run under several save policies; returns the results, one for each policy."""
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


def _print(result: Mapping[str, Any]) -> None:
    secs = output.duration
    measured = set(result["measured"])

    def source(key: str) -> str:
        return " (measured)" if key in measured else ""

    continuous = ", which is to save continuously" if result["best_is_continuous"] else ""
    output.print_table(
        ("plan", ""),
        [
            ("one checkpoint", output.size(result["checkpoint_bytes"]) + source("num_bytes")),
            ("hosts", f"{result['hosts']:,}, {result['hosts_per_slice']:,} in each slice"),
            (
                f"ramdisk of each host, keep={LocalTier.keep}",
                output.size(result["ramdisk_bytes_per_host"]),
            ),
            ("each host writes", f"{output.size(result['write_bytes_per_sec_and_host'])}/s"),
            ("time between failures", secs(result["mtbf_secs"])),
            ("restart, then restore",
             f"{secs(result['restart_secs'])} + {secs(result['restore_secs'])}"
             + source("restore_secs")),
            ("a save blocks", secs(result["blocking_secs"]) + source("blocking_secs")),
            ("a save is durable after", secs(result["durable_secs"]) + source("durable_secs")),
            ("a save costs, with slower steps", secs(result["save_cost_secs"])),
            ("best interval", secs(result["best_interval_secs"]) + continuous),
            ("expected goodput", f"{result['expected_goodput']:.2%}"),
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
        for row in result["simulated"]
    ]
    columns = ("simulated", "interval", "goodput", "range of 3 runs", "saving", "lost", "down")
    output.print_line("")
    output.print_table(columns, rows, right=columns[2:])


def _option_secs(option: str, text: str | None, known: float | None) -> float:
    """Returns the seconds of an option; if it was omitted, ``known``, the measured seconds.

    Raises:
      UsageError: the option is not a time, or was neither given nor measured.
    """
    if text is not None:
        return parsed_secs(option, text)
    if known is None:
        raise UsageError(
            f"plan: {option} is missing; give {option} TIME, for example 90s, or --measured "
            "DIRECTORY to take the times that a run has recorded"
        )
    return known


def parsed_secs(option: str, text: str, command: str = "plan") -> float:
    """Parses a time such as ``5min`` into seconds.

    Raises:
      UsageError: the text is not a time; the message names command and option.
    """
    match = _SECS.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{command}: {option}: expected a time such as 90, 90s, 5min, 12h or 365d, "
            f"found {text!r}"
        )
    return float(match[1]) * _UNITS[match[2]]


def _number(text: str) -> int:
    """Parses a number of parameters such as ``70B``."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"plan: --params: expected a number such as 70B or 124e6, found {text!r}")
    return int(float(match[1].replace("_", "")) * _POWERS[match[2].upper()])
