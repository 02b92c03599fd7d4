"""Converts preservation policies to and from JSON, and tells which rule keeps which step.

A run writes its preservation rules as JSON to the log of events in its directory, so that tools can
tell from the directory why a step is kept. Of a rule that is neither this library's nor Orbax's,
only the name is recorded, so the tools cannot tell which steps it keeps. The directory is
untrusted: JSON that describes no valid rule counts as such an unknown rule.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchax_ckpt import policies
from torchax_ckpt.errors import PolicyError
from torchax_ckpt.policies import preservation

_MAX_STEPS = 1000
_MAX_NAME = 100
# A hundred years, the limit for computing dates.
_MAX_SECS = 100 * 365 * 86400

NEWEST = "newest"
VERIFIED = "newest verified"
UNKNOWN = "?"


def described(policy: Any) -> list[dict[str, Any]]:
    """Returns a policy's rules as JSON; the policy keeps each step that at least one rule keeps."""
    if isinstance(policy, policies.AnyPreservationPolicy):
        return [rule for child in policy.policies for rule in described(child)]
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
    if not all(isinstance(value, (bool, int, float, str)) for value in fields.values()):
        return [{"rule": name}]
    return [{"rule": name, **fields}]


def _plain(value: Any) -> Any:
    """Converts a numpy number to a Python number, because JSON does not accept numpy's."""
    return value.item() if isinstance(value, np.generic) else value


def kept_by(
    rules: Sequence[Mapping[str, Any]], checkpoints: Sequence[Any], is_damaged: Sequence[bool]
) -> Iterator[tuple[str, list[bool] | None]]:
    """Yields for each rule its text, and a list that says of each step whether the rule keeps it.

    Yields None in place of the list if the rule is unknown or cannot handle the recorded numbers.

    Args:
      rules: the rules, as ``described`` returns them.
      checkpoints: the steps, oldest first.
      is_damaged: for each step, whether it is known to be damaged.
    """
    for rule in rules:
        policy = _policy_of(rule)
        if policy is None:
            yield f"{rule.get('rule') or UNKNOWN!s}"[:_MAX_NAME], None
            continue
        try:
            answer = preservation.answered(policy, checkpoints, is_damaged)
        except Exception:  # the rule cannot handle the recorded numbers
            yield _in_words(rule), None
            continue
        yield _in_words(rule), answer


def parsed(words: str) -> Any:
    """Returns the policy that a text such as ``LatestN(3)`` or ``BestN(loss, min)`` describes.

    Raises:
      PolicyError: the text matches none of ``_WRITTEN``.
    """
    for pattern, make in _WRITTEN.values():
        if match := re.fullmatch(pattern, words.strip()):
            return make(*match.groups())
    raise PolicyError(f"expected one of {'; '.join(_WRITTEN)}; found {words[:_MAX_NAME]!r}")


_N = r"\s*([1-9][0-9]{0,8})\s*"
_WRITTEN: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "LatestN(N)": (rf"LatestN\({_N}\)", lambda n: policies.LatestN(int(n))),
    "EveryNSteps(N)": (rf"EveryNSteps\({_N}\)", lambda n: policies.EveryNSteps(int(n))),
    "EveryNSeconds(N)": (rf"EveryNSeconds\({_N}\)", lambda n: policies.EveryNSeconds(int(n))),
    "LatestDuration(SECONDS)": (
        rf"LatestDuration\({_N}\)",
        lambda n: policies.LatestDuration(datetime.timedelta(seconds=int(n))),
    ),
    "BestN(METRIC, min or max, N)": (
        rf"BestN\(\s*(.+?)\s*,\s*(min|max)\s*(?:,{_N})?\)",
        lambda metric, mode, n: policies.BestN(metric=metric, mode=mode, n=int(n or 1)),
    ),
    "CustomSteps(STEP, STEP, ...)": (
        r"CustomSteps\((\s*[0-9]{1,18}(?:\s*,\s*[0-9]{1,18})*\s*)\)",
        lambda steps: policies.CustomSteps([int(step) for step in steps.split(",")]),
    ),
}


def _policy_of(rule: Mapping[str, Any]) -> Any:
    """Returns the policy that a recorded rule describes; None if the rule is unknown."""
    values = {key: value for key, value in rule.items() if key != "rule"}
    make = _MAKERS.get(str(rule.get("rule")))
    try:
        return make(**values) if make is not None else None
    except Exception:
        return None


def _number(value: Any, most: float = 2**63) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ValueError(value)
    return value


def _count(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(value)
    return _number(value)


def _best_n(*, metric: str, mode: Any, n: int) -> Any:
    if not isinstance(metric, str) or len(metric) > _MAX_NAME:
        raise ValueError(metric)
    return policies.BestN(metric=metric, mode=mode, n=_count(n))


def _every_n_steps(
    *, interval_steps: int, exact_interval: bool = True, max_to_keep: int | None = None
) -> Any:
    most = None if max_to_keep is None else _count(max_to_keep)
    return policies.EveryNSteps(_count(interval_steps) or 1, bool(exact_interval), most)


def _custom_steps(*, steps: list[int]) -> Any:
    if len(steps) > _MAX_STEPS:
        raise ValueError(len(steps))
    return policies.CustomSteps([_count(step) for step in steps])


_MAKERS: Mapping[str, Callable[..., Any]] = {
    "BestN": _best_n,
    "CustomSteps": _custom_steps,
    "EveryNSeconds": lambda *, interval_secs: policies.EveryNSeconds(
        _number(interval_secs, _MAX_SECS)
    ),
    "EveryNSteps": _every_n_steps,
    "LatestDuration": lambda *, duration_secs: policies.LatestDuration(
        datetime.timedelta(seconds=_number(duration_secs, _MAX_SECS))
    ),
    "LatestN": lambda *, n=None: policies.LatestN(None if n is None else _count(n)),
    "PreserveAll": lambda: policies.PreserveAll(),
}


def _in_words(rule: Mapping[str, Any]) -> str:
    """Returns a rule as text, such as ``LatestN(3)`` or ``BestN(loss, min, 1)``."""
    # Omits True, because it is the default value of ``exact_interval`` in ``EveryNSteps``.
    values = [v for k, v in rule.items() if k != "rule" and v is not True]
    arguments = [each for v in values for each in (v if isinstance(v, list) else [v])]
    return f"{rule['rule']}({', '.join(map(str, arguments))})"[: 2 * _MAX_NAME]
