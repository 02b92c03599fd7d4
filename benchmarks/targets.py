"""The performance targets of this library, and verdicts on the medians of measured figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

BARE = ("orbax_v0", "orbax_v1")
OURS = "torchax_ckpt"

# Fractions of the better bare Orbax.
OF_BARE = {
    "deep": {"blocking": 1 / 40, "durable": 1 / 15, "restore": 1 / 5},
    "gpt2": {"blocking": 1 / 15, "durable": 1 / 2, "restore": 2 / 3},
    "wide": {"blocking": 1 / 10, "durable": 2 / 3, "restore": 1.0},
    "moe": {"blocking": 1 / 40, "durable": 1 / 15, "restore": 1 / 5},
}
# Largest ratio of the durable time to the medium's time for the same bytes.
OF_MEDIUM = {"gpt2": 1.5, "wide": 1.5}
# Blocking time with reference snapshots and idle devices.
REFERENCE_SECS, REFERENCE_SECS_PER_LEAF = 0.5e-3, 1e-6
# Blocking time with copies and busy devices, on four CPU devices of two cores.
COPY_SECS = {"deep": 25e-3, "moe": 52e-3, "gpt2": 75e-3, "wide": 10e-3}
# First restore of a process, as a fraction of torch.load and device_put of the same state.
OF_TORCH_LOAD = {"deep": 1.0, "moe": 1.0, "gpt2": 1.15, "wide": 1.15}
# What a durable step adds to a training that waits for its device, and a save's processor time.
ADDED_SECS = {"deep": 12e-3, "broad": 15e-3}
PROCESSOR_SECS = {"deep": 50e-3}
# Additional blocking time of the first save.
FIRST_EXTRA_SECS = 1.0
DIGESTS_OF_DURABLE, DIGESTS_OF_RESTORE = 0.05, 0.10
# Steps between durable checkpoints, as a fraction of the better bare Orbax.
STEPS_OF_BARE = 1 / 2
DECLINED_SECS = 20e-6
# For a state of at least this many bytes on an accelerator: blocking time as a fraction of the
# better bare Orbax, and the fraction by which steps take longer.
ACCELERATOR_BYTES, ACCELERATOR_BLOCKING, ACCELERATOR_OVERHEAD = 10e9, 1 / 50, 0.03


def verdict(reached: str, target: str, is_met: bool) -> str:
    return f"{reached} (target {target}: {'met' if is_met else 'missed'})"


def at_most(reached: float, target: float, form: Any) -> str:
    """Returns the verdict on two numbers, which ``form`` formats."""
    return verdict(form(reached), form(target), reached <= target)


def of_bare(name: str, peers: dict[str, Any], what: str) -> str:
    """Returns the ratio of our median to the better bare Orbax's, with a verdict if it has one."""
    ratio = _median(peers[OURS][what]) / min(_median(peers[peer][what]) for peer in BARE)
    target = OF_BARE.get(name, {}).get(what)
    return at_most(ratio, target, fraction) if target else fraction(ratio)


def against_medium(figures: dict[str, Any]) -> float:
    """Returns the median ratio of durable time to the medium's time, from adjacent pairs."""
    pairs = zip(figures["durable"], figures["write"], strict=True)
    return _median([durable / write for durable, write in pairs])


def of_medium(name: str, peers: dict[str, Any]) -> str:
    ratio, target = against_medium(peers[OURS]), OF_MEDIUM.get(name)
    return at_most(ratio, target, "{:.2f}".format) if target else f"{ratio:.2f}"


def by_reference(state: dict[str, Any]) -> str:
    target = REFERENCE_SECS + REFERENCE_SECS_PER_LEAF * state["peers"][OURS]["leaves"]
    return at_most(_median(state["modes"]["reference, idle"]), target, seconds)


def by_copy(name: str, state: dict[str, Any]) -> str:
    found, target = _median(state["modes"]["copy, busy"]), COPY_SECS.get(name)
    return at_most(found, target, seconds) if target else seconds(found)


def of_torch_load(name: str, peers: dict[str, Any]) -> str:
    ratio = _median(peers[OURS]["restore"]) / _median(peers["torch_save"]["restore"])
    target = OF_TORCH_LOAD.get(name)
    return at_most(ratio, target, "x {:.2f}".format) if target else f"x {ratio:.2f}"


def first_extra(peers: dict[str, Any]) -> str:
    extra = peers[OURS]["first"] - _median(peers[OURS]["blocking"])
    return at_most(extra, FIRST_EXTRA_SECS, seconds)


def digests_cost(taken: dict[str, list[float]], with_: str, without: str) -> list[float]:
    """Returns by what fraction digests lengthen a save or restore, for each adjacent pair."""
    return [a / b - 1 for a, b in zip(taken[with_], taken[without], strict=True)]


def digests(taken: dict[str, list[float]]) -> tuple[str, str]:
    """Returns the verdicts on digests for the durable time and for a process's first restore."""
    durable = _median(digests_cost(taken, "taken", "not taken"))
    restore = _median(digests_cost(taken, "first, compared", "first, trusted"))
    return at_most(durable, DIGESTS_OF_DURABLE, more), at_most(restore, DIGESTS_OF_RESTORE, more)


def overhead(peers: dict[str, Any], peer: str) -> float:
    """Returns by what fraction a peer lengthens the mean step."""
    return statistics.mean(peers[peer]["step"]) / statistics.mean(peers["none"]["step"]) - 1


def added_secs(peers: dict[str, Any], peer: str) -> float:
    """Returns the seconds that a durable step of a peer adds to the training."""
    steps = peers[peer]["step"]
    longer = statistics.mean(steps) - statistics.mean(peers["none"]["step"])
    return longer * len(steps) / max(1, len(peers[peer]["intervals"]))


def processor_secs(peers: dict[str, Any], peer: str) -> float:
    """Returns the processor time of a peer's save, beyond that of the steps meanwhile."""
    none, figures = peers["none"], peers[peer]
    idle = none["processor"] / len(none["step"])
    secs = figures["processor"] - idle * len(figures["step"])
    return float(secs / len(figures["intervals"]))


def waiting(name: str, peers: dict[str, Any]) -> list[str]:
    """Returns the verdicts on a loop that waits for its device, for each target of the state."""
    state, is_waiting, _ = name.partition(", waiting ")
    if not is_waiting or not peers.get(OURS, {}).get("intervals"):
        return []
    verdicts = []
    if target := ADDED_SECS.get(state):
        found = at_most(added_secs(peers, OURS), target, seconds)
        verdicts.append(f"added to training per durable step: {found}")
    if target := PROCESSOR_SECS.get(state):
        found = at_most(processor_secs(peers, OURS), target, seconds)
        verdicts.append(f"processor time per save: {found}")
    return verdicts


def loop(measured: dict[str, Any]) -> list[str]:
    """Returns the verdicts on a training loop, for each target that has figures."""
    peers = measured["peers"]
    bare = [peer for peer in BARE if peers.get(peer, {}).get("intervals")]
    if not bare or not peers.get(OURS, {}).get("intervals"):
        return []
    steps = _median(peers[OURS]["intervals"])
    best = min(_median(peers[peer]["intervals"]) for peer in bare)
    slower = min(overhead(peers, peer) for peer in bare)
    ours = overhead(peers, OURS)
    of_theirs = verdict(more(ours), f"bare Orbax's {more(slower)}", ours <= slower)
    verdicts = [
        "steps between durable checkpoints, of bare Orbax's: "
        f"{at_most(steps / best, STEPS_OF_BARE, fraction)}",
        f"steps take longer by {of_theirs}",
    ]
    is_cpu = measured["taken"]["platform"] == "cpu"
    if not is_cpu and peers[OURS]["bytes"] >= ACCELERATOR_BYTES:
        ratio = _median(peers[OURS]["blocking"]) / min(_median(peers[p]["blocking"]) for p in bare)
        verdicts += [
            "on an accelerator, blocking, of bare Orbax's: "
            f"{at_most(ratio, ACCELERATOR_BLOCKING, fraction)}",
            f"on an accelerator, steps take longer by {at_most(ours, ACCELERATOR_OVERHEAD, more)}",
        ]
    return verdicts


def declined(median_secs: float) -> str:
    return at_most(median_secs, DECLINED_SECS, microseconds)


def seconds(value: float) -> str:
    sign, value = ("-" if value < 0 else ""), abs(value)
    return f"{sign}{value * 1e3:.1f} ms" if value < 1 else f"{sign}{value:.2f} s"


def microseconds(value: float) -> str:
    return f"{value * 1e6:.1f} us"


def fraction(ratio: float) -> str:
    return f"1/{1 / ratio:.3g}"


def more(value: float) -> str:
    return f"{value:+.1%}"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
