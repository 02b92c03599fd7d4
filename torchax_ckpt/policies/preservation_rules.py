"""Converts preservation policies to rules in JSON, and says which steps a rule keeps.

A run records its rules in its log of events, so that tools can say why a step is kept. For a policy
that is neither this library's nor Orbax's, it records only the name. The directory is untrusted:
JSON that describes no valid rule counts as an unknown rule. This module evaluates rules itself, in
the way of Orbax's policies of the same names, because importing Orbax takes longer than all else
that a command does.

Source: Orbax v1, ``training.preservation_policies``.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from torchax_ckpt import policies
from torchax_ckpt.errors import PolicyError
from torchax_ckpt.policies.preservation import BestN, judged

_MAX_STEPS = 1000
_MAX_NAME = 100
# A hundred years.
_MAX_SECS = 100 * 365 * 86400

NEWEST = "newest"
VERIFIED = "newest verified"
UNKNOWN = "?"


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a rule sees of a step: its number, the seconds of its commit, and its metrics."""

    step: int
    time_secs: float
    metrics: Mapping[str, Any] | None = None


def rules_of(policy: Any) -> list[dict[str, Any]]:
    """Returns a policy's rules as JSON; the policy keeps each step that at least one rule keeps."""
    if isinstance(policy, policies.AnyPreservationPolicy):
        return [rule for child in policy.policies for rule in rules_of(child)]
    name = type(policy).__name__
    if type(policy) is not getattr(policies, name, None):
        return [{"rule": name[:_MAX_NAME]}]
    if isinstance(policy, policies.LatestDuration):
        return [{"rule": name, "duration_secs": policy.duration.total_seconds()}]
    if isinstance(policy, policies.CustomSteps):
        [known] = dataclasses.asdict(policy).values()
        steps = [_plain(step) for step in sorted(known)]
        return [{"rule": name, "steps": steps} if len(steps) <= _MAX_STEPS else {"rule": name}]
    fields = {key: _plain(value) for key, value in vars(policy).items() if value is not None}
    if not all(isinstance(v, (int, str)) or _is_finite(v) for v in fields.values()):
        return [{"rule": name}]
    return [{"rule": name, **fields}]


def _plain(value: Any) -> Any:
    """Converts a numpy number to a Python number, because JSON does not accept numpy's."""
    return value.item() if isinstance(value, np.generic) else value


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)  # JSON has no other numbers


def kept_by(
    rule: Mapping[str, Any], steps: Sequence[StepInfo], is_damaged: Sequence[bool]
) -> list[bool] | None:
    """Returns for each step, oldest first, whether a rule keeps it; None if the rule is unknown."""
    values = {key: value for key, value in rule.items() if key != "rule"}
    try:
        keeps = _RULES[rule["rule"]]
        return judged(lambda some: keeps(some, **values), steps, is_damaged)
    except Exception:  # the directory is untrusted
        return None


def rule_text(rule: Mapping[str, Any]) -> str:
    """Returns a rule as text, such as ``LatestN(3)`` or ``BestN(loss, min, 1)``."""
    # Omits True, because it is the default value of ``exact_interval`` in ``EveryNSteps``.
    values = [v for k, v in rule.items() if k != "rule" and v is not True]
    arguments = [each for v in values for each in (v if isinstance(v, list) else [v])]
    name = f"{rule.get('rule') or UNKNOWN}"[:_MAX_NAME]
    return f"{name}({', '.join(map(str, arguments))})"[: 2 * _MAX_NAME] if values else name


def parsed(text: str) -> dict[str, Any]:
    """Returns the rule that a text like ``BestN(loss, min)`` describes, or raises PolicyError."""
    for form, pattern in _FORMS.items():
        if match := re.fullmatch(pattern, text.strip()):
            values = {key: value for key, value in match.groupdict().items() if value is not None}
            if "steps" in values:
                return {"rule": "CustomSteps", "steps": [*map(int, values["steps"].split(","))]}
            texts = ("metric", "mode")
            numbers = {k: v if k in texts else int(v) for k, v in values.items()}
            return {"rule": form.partition("(")[0], **numbers}
    raise PolicyError(f"expected one of {'; '.join(_FORMS)}; found {text[:_MAX_NAME]!r}")


_N = r"\s*(?P<{}>[1-9][0-9]{{0,8}})\s*"
_FORMS: Mapping[str, str] = {
    "LatestN(N)": rf"LatestN\({_N.format('n')}\)",
    "EveryNSteps(N)": rf"EveryNSteps\({_N.format('interval_steps')}\)",
    "EveryNSeconds(N)": rf"EveryNSeconds\({_N.format('interval_secs')}\)",
    "LatestDuration(SECONDS)": rf"LatestDuration\({_N.format('duration_secs')}\)",
    "BestN(METRIC, min or max, N)": (
        rf"BestN\(\s*(?P<metric>.+?)\s*,\s*(?P<mode>min|max)\s*(?:,{_N.format('n')})?\)"
    ),
    "CustomSteps(STEP, STEP, ...)": (
        r"CustomSteps\((?P<steps>\s*[0-9]{1,19}(?:\s*,\s*[0-9]{1,19})*\s*)\)"
    ),
}


def _latest_n(steps: Sequence[StepInfo], *, n: int | None = None) -> list[bool]:
    return [n is None or i < _count(n) for i in reversed(range(len(steps)))]


def _every_n_steps(
    steps: Sequence[StepInfo],
    *,
    interval_steps: int,
    exact_interval: bool = True,
    max_to_keep: int | None = None,
) -> list[bool]:
    numbers = [info.step for info in steps]
    if exact_interval:
        are_kept = [number % _count(interval_steps) == 0 for number in numbers]
    else:
        are_kept = _spaced(numbers, _count(interval_steps) or 1)
    if max_to_keep:  # for Orbax, 0 is no limit
        for index in [i for i, kept in enumerate(are_kept) if kept][: -_count(max_to_keep)]:
            are_kept[index] = False
    return are_kept


def _every_n_seconds(steps: Sequence[StepInfo], *, interval_secs: float) -> list[bool]:
    return _spaced([info.time_secs for info in steps], _number(interval_secs, _MAX_SECS))


def _spaced(values: Sequence[float], gap: float) -> list[bool]:
    """Returns which values are kept: the first, and each at least ``gap`` above the last kept."""
    are_kept: list[bool] = []
    last = None
    for value in values:
        are_kept.append(last is None or value - last >= gap)
        last = value if are_kept[-1] else last
    return are_kept


def _latest_duration(steps: Sequence[StepInfo], *, duration_secs: float) -> list[bool]:
    earliest = time.time() - _number(duration_secs, _MAX_SECS)
    is_recent = [info.time_secs >= earliest for info in steps]
    return [any(is_recent[: i + 1]) for i in range(len(steps))]


def _custom_steps(infos: Sequence[StepInfo], *, steps: Sequence[int]) -> list[bool]:
    wanted = {_count(step) for step in steps}
    return [info.step in wanted for info in infos]


def _best_n(steps: Sequence[StepInfo], *, metric: str, mode: Any = "min", n: int = 1) -> list[bool]:
    if not isinstance(metric, str) or len(metric) > _MAX_NAME:
        raise ValueError(metric)
    best = BestN(metric=metric, mode=mode, n=n).ranked(steps)[:n]
    return [info in best for info in steps]


_RULES: Mapping[str, Callable[..., list[bool]]] = {
    "BestN": _best_n,
    "CustomSteps": _custom_steps,
    "EveryNSeconds": _every_n_seconds,
    "EveryNSteps": _every_n_steps,
    "LatestDuration": _latest_duration,
    "LatestN": _latest_n,
    "PreserveAll": lambda steps: [True] * len(steps),
}


def _number(value: Any, most: float = 2**63) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ValueError(value)
    return value


def _count(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(value)
    return _number(value)
