"""Preservation policies, which decide which steps are kept. All but ``BestN`` are Orbax's.

Any object with the method ``should_preserve`` of ``PreservationPolicy`` is a valid policy, which
only process 0 calls. No policy can delete the newest step.

Source: Orbax v1, ``training.preservation_policies``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

from torchax_ckpt.errors import ArgumentError, PolicyError, StepError
from torchax_ckpt.layout import names
from torchax_ckpt.runtime.lazily import orbax, root_logger_left_alone
from torchax_ckpt.runtime.step_numbers import as_step
from torchax_ckpt.runtime.user_messages import counted

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestN:
    """Keeps only the n best steps by a metric; add ``LatestN`` to keep recent steps as well.

    A step with the metric is saved, whatever the save decision policy says, unless the step before
    has the metric too. On several processes, process 0's metrics count.

    Attributes:
      metric: the name of the metric, as in ``save(step, metrics={"loss": loss})``.
      mode: whether small ("min") or large ("max") values are good.
      n: the number of steps to keep.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    n: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise PolicyError(f"BestN: metric must be the name of a metric, found {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise PolicyError(f"BestN: mode must be 'min' or 'max', found {self.mode!r}")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise PolicyError(f"BestN: n must be a positive int, found {self.n!r}")

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns for each step whether it is among the n best; of equal values the newest wins."""
        best = {id(c) for c in self.ranked(checkpoints)[: self.n]}
        return [id(c) in best for c in checkpoints]

    def ranked(self, checkpoints: Sequence[Any]) -> list[Any]:
        """Returns the checkpoints that have the metric, best first; NaN counts as no value."""
        scored = [(v, c) for c in checkpoints if (v := self._value(c)) is not None]
        sign = 1 if self.mode == "min" else -1
        return [c for _, c in sorted(scored, key=lambda vc: (sign * vc[0], -vc[1].step))]

    def _value(self, checkpoint: Any) -> float | None:
        value = (checkpoint.metrics or {}).get(self.metric)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            return None
        return value


def ranking(text: Any, known: Iterable[BestN] = ()) -> BestN | None:
    """Returns the rule that ``METRIC``, ``METRIC:min`` or ``METRIC:max`` means; else None.

    ``METRIC`` alone is ranked as the first rule of ``known`` does that has it, else by min.
    """
    metric, colon, wanted = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not metric or (colon and wanted not in ("min", "max")):
        return None
    if wanted:
        return BestN(metric=metric, mode="max" if wanted == "max" else "min")
    return next((rule for rule in known if rule.metric == metric), BestN(metric=metric))


# Method -> the argument that takes such policies, the policy to suggest in place of a number, and
# the policy that joins several.
_METHODS = {
    "should_save": ("save_decision_policy", "FixedIntervalPolicy", "AnySavePolicy"),
    "should_preserve": ("preservation_policy", "LatestN", "AnyPreservationPolicy"),
}


def _are_steps(steps: Any) -> bool:
    """Returns whether ``steps`` are whole numbers; containers without iteration are not checked."""
    if isinstance(steps, range) or not isinstance(steps, Iterable):
        return True
    return not isinstance(steps, Iterator) and all(int(step) == step for step in steps)


def _is_interval(steps: Any) -> bool:
    return steps >= 1 and (steps % 1 == 0 or steps == math.inf)  # infinite: only step 0


# Values that Orbax's policies do not check: name -> what is expected, and a function that checks.
_VALUES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "n": ("an int or None", lambda n: n is None or operator.index(n) >= 0),
    "interval": ("an int of at least 1", _is_interval),
    "interval_steps": ("an int of at least 1", _is_interval),
    "steps": ("a list, set or range of ints", _are_steps),
}


def _require_values(argument: str, policy: Any) -> None:
    """Raises PolicyError if one of Orbax's policies has a value that makes it fail or say no."""
    if type(policy).__module__.partition(".")[0] != "orbax":
        return
    for attribute, value in vars(policy).items():
        name = attribute.removeprefix("_").removesuffix("_set")  # CustomSteps has _steps_set
        expected, fits = _VALUES.get(name, ("", lambda value: True))
        try:
            is_right = fits(value)
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            raise PolicyError(
                f"{argument}: {type(policy).__name__}: {name}: expected {expected}, found "
                f"{value!r:.80}"
            )


def require_policy(argument: str, policy: Any, method: str) -> None:
    """Raises PolicyError unless a policy, and each policy that it joins, has this method."""
    training = orbax.v1.training
    keeps, saves = training.preservation_policies, training.save_decision_policies
    if isinstance(policy, (keeps.AnyPreservationPolicy, saves.AnySavePolicy)):
        for each in policy.policies:
            require_policy(argument, each, method)
    _require_values(argument, policy)
    is_class = isinstance(policy, type) and inspect.isfunction(
        inspect.getattr_static(policy, method, None)
    )
    if callable(getattr(policy, method, None)) and not is_class:
        return
    _, of_number, joining = _METHODS[method]
    advice = f"policies.{of_number}({policy if type(policy) is int else 3}), or several in "
    advice += f"policies.{joining}([...])"
    for other, (right, *_) in _METHODS.items():
        if other != method and callable(getattr(policy, other, None)):
            advice = f"it as {right}="
    raise PolicyError(
        f"{argument}: expected an object with the method {method}(), found {policy!r:.100}; "
        f"give {advice}"
    )


# For those who want no step deleted.
_KEEP_ALL = "; to keep all steps, preservation_policy=policies.PreserveAll()"


def in_full(
    save_every: Any, keep: Any, save_decision_policy: Any, preservation_policy: Any
) -> tuple[Any, Any]:
    """Returns the policies that ``save_every`` and ``keep`` stand for, or that were given.

    The save decision policy may be None; the preservation policy is ``LatestN(3)`` by default.
    Raises PolicyError for a short form that is no positive int, or beside the policy it stands for.
    """
    given = {
        "save_decision_policy": save_decision_policy,
        "preservation_policy": preservation_policy,
    }
    training = orbax.v1.training
    for name, value, argument, make in (
        (
            "save_every",
            save_every,
            "save_decision_policy",
            training.save_decision_policies.FixedIntervalPolicy,
        ),
        ("keep", keep, "preservation_policy", training.preservation_policies.LatestN),
    ):
        if value is None:
            continue
        try:
            number = as_step(value)
        except StepError:
            number = 0
        if number < 1:
            raise PolicyError(
                f"{name}: expected a number of steps, a positive int, found {value!r:.80}"
                f"{_KEEP_ALL * (name == 'keep')}"
            )
        if given[argument] is not None:
            raise PolicyError(
                f"expected {name} or {argument}, found both: {name}={number} is short for "
                f"{argument}=policies.{make.__name__}({number}). Leave one of them out"
            )
        given[argument] = make(number)
    if given["preservation_policy"] is None:
        given["preservation_policy"] = training.preservation_policies.LatestN(3)
    return given["save_decision_policy"], given["preservation_policy"]


# What Orbax and transformers call the arguments that are ``save_every`` and ``keep`` here.
_OURS = {
    "save_interval_steps": "save_every",
    "save_steps": "save_every",
    "max_to_keep": "keep",
    "save_total_limit": "keep",
}


def naming_ours(init: Callable[P, R]) -> Callable[P, R]:
    """Decorates a constructor: for arguments as other libraries call them, the error names ours."""

    @functools.wraps(init)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if theirs := [name for name in _OURS if name in kwargs]:
            values = {_OURS[name]: kwargs[name] for name in theirs}
            # To both libraries, None means to keep all.
            keeps_all = "keep" in values and values["keep"] is None
            ours = ", ".join(f"{k}={v!r:.80}" for k, v in values.items() if v is not None)
            raise ArgumentError(
                f"{', '.join(theirs)}: expected arguments of this library, found those of another; "
                f"give {ours or 'none'}{_KEEP_ALL * keeps_all}"
            )
        return init(*args, **kwargs)

    return called


def with_children(policy: Any) -> Iterator[Any]:
    """Yields a policy and, recursively, all policies inside it."""
    yield policy
    for child in getattr(policy, "policies", None) or ():
        yield from with_children(child)


def keeps_one(policy: Any) -> bool:
    """Returns whether a policy keeps the newest step only: all its rules are ``LatestN(1)``."""
    of_orbax = orbax.v1.training.preservation_policies
    rules = (r for r in with_children(policy) if not isinstance(r, of_orbax.AnyPreservationPolicy))
    return all(isinstance(r, of_orbax.LatestN) and r.n is not None and r.n <= 1 for r in rules)


def best_rules(policy: Any) -> Iterator[BestN]:
    """Yields each ``BestN`` rule of a policy, including those in ``AnyPreservationPolicy``."""
    return (rule for rule in with_children(policy) if isinstance(rule, BestN))


def best_rule(policy: Any) -> BestN:
    """Returns the first ``BestN`` rule of a policy; raises PolicyError if the policy has none."""
    rule = next(best_rules(policy), None)
    if rule is None:
        raise PolicyError(
            "best_step needs a best-N rule: give preservation_policy="
            "policies.BestN(metric='loss', mode='min'), alone or in AnyPreservationPolicy"
        )
    return rule


def why_unranked(rules: Iterable[BestN], metrics: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Returns why rules rank none of several steps, and whether a metric is probably misspelled.

    Returns "" if each rule ranks a step, or no step has metrics. A metric that no step has may come
    from an evaluation that has not run yet.
    """
    known = sorted({name for each in metrics for name in each})
    missing = sorted({rule.metric for rule in rules}.difference(known))
    if not missing or not known or len(metrics) < 2:
        return "", False
    text = (
        f"no step is the best one: none of the {len(metrics)} steps has the metric {missing[0]!r}, "
        f"by which they are ranked. They have {', '.join(map(repr, known[:10]))}. "
        "Rank them by the name under which the metric is recorded"
    )
    return text, any(names.may_be_mistyped(a, b) for a in missing for b in known)


def preserved(policy: Any, checkpoints: Sequence[Any], is_damaged: Sequence[bool]) -> list[bool]:
    """Returns for each step, oldest first, whether the policy or ``with_newest`` keeps it."""
    context = orbax.v1.training.preservation_policies.PreservationContext()

    def keeps(some: Sequence[Any]) -> Sequence[bool]:
        try:
            with root_logger_left_alone():  # Orbax's policies log
                answer = list(policy.should_preserve(some, context=context))
        except Exception as error:
            raise PolicyError(
                f"{type(policy).__name__}.should_preserve failed with {type(error).__name__}: "
                f"{error}; nothing was deleted"
            ) from error
        if len(answer) != len(some):
            raise PolicyError(
                f"{type(policy).__name__}.should_preserve returned {counted(len(answer), 'value')} "
                f"for {counted(len(some), 'checkpoint')}, expected one for each; nothing was "
                "deleted"
            )
        return answer

    return with_newest(judged(keeps, checkpoints, is_damaged), is_damaged)


def with_newest(are_kept: Sequence[bool], is_damaged: Sequence[bool]) -> list[bool]:
    """Adds the newest step, and the newest one not known to be damaged, to those that are kept."""
    newest = len(are_kept) - 1
    newest_sound = max((i for i, damaged in enumerate(is_damaged) if not damaged), default=newest)
    return [kept or i in (newest, newest_sound) for i, kept in enumerate(are_kept)]


def judged(
    keeps: Callable[[Sequence[Any]], Sequence[bool]],
    checkpoints: Sequence[Any],
    is_damaged: Sequence[bool],
) -> list[bool]:
    """Returns for each step whether a rule keeps it; damaged steps do not displace intact ones."""
    if not checkpoints:
        return []
    answer = list(keeps(checkpoints))
    if any(is_damaged):
        sound = [c for c, damaged in zip(checkpoints, is_damaged, strict=True) if not damaged]
        of_sound = iter(keeps(sound) if sound else ())
        answer = [
            kept if damaged else next(of_sound)
            for kept, damaged in zip(answer, is_damaged, strict=True)
        ]
    return [bool(kept) for kept in answer]
