"""Owns preservation policies as data: what a run notes of them, and which rule keeps which step.

A run notes its rules as JSON among its events, so that whoever looks at the directory can say why
a step is there. Rules that are not of this library or Orbax's are noted by name alone. What is read
comes from a directory that anybody may have written to: what makes no sense is an unknown rule.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchax_ckpt.errors import PolicyError
from torchax_ckpt.storage import policies

_MAX_STEPS = 1000
_MAX_NAME = 100
# A hundred years: what dates can be computed from.
_MAX_SECS = 100 * 365 * 86400

_WORDS = re.compile(r"(?P<name>\w+)\((?P<given>.*)\)")
_COMMA = re.compile(r"\s*,\s*")

NEWEST = "newest"
VERIFIED = "newest verified"
UNKNOWN = "?"


def described(policy: Any) -> list[dict[str, Any]]:
    """The rules that a policy consists of, as JSON; any of them keeps a step."""
    if isinstance(policy, policies.AnyPreservationPolicy):
        return [rule for child in policy.policies for rule in described(child)]
    name = type(policy).__name__
    if type(policy) is not getattr(policies, name, None):
        return [{"rule": name[:_MAX_NAME]}]
    if isinstance(policy, policies.LatestDuration):
        return [{"rule": name, "duration_secs": policy.duration.total_seconds()}]
    if isinstance(policy, policies.CustomSteps):
        steps = [_plain(step) for step in sorted(policy._steps_set)]
        return [{"rule": name, "steps": steps} if len(steps) <= _MAX_STEPS else {"rule": name}]
    fields = {key: _plain(value) for key, value in vars(policy).items() if value is not None}
    if not all(isinstance(value, (bool, int, float, str)) for value in fields.values()):
        return [{"rule": name}]
    return [{"rule": name, **fields}]


def _plain(value: Any) -> Any:
    """Python's own number where it is one of numpy's, which JSON does not take."""
    return value.item() if isinstance(value, np.generic) else value


def kept_by(
    rules: Sequence[Mapping[str, Any]], checkpoints: Sequence[Any]
) -> Iterator[tuple[str, list[bool] | None]]:
    """Each rule in words, and which steps it keeps, oldest first; None where that is not known."""
    for rule in rules:
        policy = _policy_of(rule)
        if policy is None:
            yield f"{rule.get('rule') or UNKNOWN!s}"[:_MAX_NAME], None
            continue
        try:
            kept = policy.should_preserve(checkpoints, context=policies.PreservationContext())
            answer = [bool(keep) for keep in kept]
        except Exception:  # numbers from elsewhere that a rule cannot work with
            yield _in_words(rule), None
            continue
        yield _in_words(rule), answer


def parsed(words: str) -> Any:
    """The policy that ``kept_by`` has such words for: ``LatestN(3)``, ``BestN(loss, min)``.

    Raises:
      PolicyError: it has them for none.
    """
    match = _WORDS.fullmatch(words.strip())
    name, given = (match["name"], _values(match["given"])) if match else ("", [])
    if name == "CustomSteps":
        given = [given]
    is_positive = all(value > 0 for value in given if isinstance(value, (int, float)))
    if 0 < len(given) <= len(_FIELDS.get(name, ())) and is_positive:
        rule = {"rule": name, **dict(zip(_FIELDS[name], given, strict=False))}
        if (policy := _policy_of(rule)) is not None:
            return policy
    known = ", ".join(f"{name}({', '.join(fields)})" for name, fields in _FIELDS.items())
    raise PolicyError(f"expected one of {known}, found {words[:_MAX_NAME]!r}")


def _values(words: str) -> list[Any]:
    def value(word: str) -> Any:
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(word)
        return word

    return [value(word) for word in _COMMA.split(words.strip()) if word]


def _policy_of(rule: Mapping[str, Any]) -> Any:
    """The policy of a noted rule; None if it is none that is known."""
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


def _best_n(*, metric: str, mode: Any = "min", n: int = 1) -> Any:
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


# In the order of their words.
_FIELDS: Mapping[str, Sequence[str]] = {
    "LatestN": ("n",),
    "EveryNSteps": ("interval_steps",),
    "EveryNSeconds": ("interval_secs",),
    "LatestDuration": ("duration_secs",),
    "BestN": ("metric", "mode", "n"),
    "CustomSteps": ("steps",),
}


def _in_words(rule: Mapping[str, Any]) -> str:
    """``LatestN(3)``, ``BestN(loss, min, 1)``."""
    # What is a default of Orbax's goes without saying.
    said = [v for k, v in rule.items() if k != "rule" and v is not True and k != "steps"]
    return f"{rule['rule']}({', '.join(map(str, said))})"[: 2 * _MAX_NAME]
