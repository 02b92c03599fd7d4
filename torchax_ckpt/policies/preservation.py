"""Owns preservation policies: which steps are kept. Orbax's own where they fit.

``PreserveAll``, ``LatestN``, ``EveryNSteps``, ``EveryNSeconds``, ``LatestDuration``,
``CustomSteps``, ``BestN``, ``AnyPreservationPolicy``; any object with their ``should_preserve``
(``PreservationPolicy``) works. Whatever a rule says, the newest step is never deleted.

On several processes policies are asked on process 0 alone.

Source: Orbax v1, ``training.preservation_policies``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1.training import preservation_policies as _preserving

from torchax_ckpt.errors import PolicyError

PreservationPolicy: TypeAlias = _preserving.PreservationPolicy
PreservationContext: TypeAlias = _preserving.PreservationContext
PreserveAll = _preserving.PreserveAll
LatestN = _preserving.LatestN
EveryNSteps = _preserving.EveryNSteps
EveryNSeconds = _preserving.EveryNSeconds
LatestDuration = _preserving.LatestDuration
CustomSteps = _preserving.CustomSteps
AnyPreservationPolicy = _preserving.AnyPreservationPolicy

CheckpointInfo = ocp.training.CheckpointMetadata
"""What policies see of a step: ``step``, ``time`` (aware datetime, UTC) and ``metrics``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestN:
    """Keeps the n best steps by a metric, and nothing else; combine it with ``LatestN``.

    Attributes:
      metric: the name it was saved under: ``save(step, metrics={"loss": loss})``.
      mode: whether small ("min") or large ("max") is good.
      n: how many to keep.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    n: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise PolicyError(f"BestN: mode must be 'min' or 'max', found {self.mode!r}")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise PolicyError(f"BestN: n must be a positive int, found {self.n!r}")

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> list[bool]:
        """True for the n best; of equals, for the newest."""
        best = {id(c) for c in self.ranked(checkpoints)[: self.n]}
        return [id(c) in best for c in checkpoints]

    def ranked(self, checkpoints: Sequence[Any]) -> list[Any]:
        """The checkpoints that have the metric, best first; NaN ranks nothing."""
        scored = [(v, c) for c in checkpoints if (v := self._value(c)) is not None]
        sign = 1 if self.mode == "min" else -1
        return [c for _, c in sorted(scored, key=lambda vc: (sign * vc[0], -vc[1].step))]

    def _value(self, checkpoint: Any) -> float | None:
        value = (checkpoint.metrics or {}).get(self.metric)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            return None
        return value


def default_preservation_policy() -> PreservationPolicy:
    """The latest three."""
    return LatestN(3)


def best_rules(policy: Any) -> Iterator[BestN]:
    """Every best-N rule in a policy, also inside any-of."""
    return (rule for rule in _with_children(policy) if isinstance(rule, BestN))


def best_rule(policy: Any) -> BestN:
    """The first best-N rule in a policy; raises PolicyError if there is none."""
    rule = next(best_rules(policy), None)
    if rule is None:
        raise PolicyError(
            "best_step needs to know what is best: give preservation_policy="
            "policies.BestN(metric='loss', mode='min'), alone or in AnyPreservationPolicy"
        )
    return rule


def _with_children(policy: Any) -> Iterator[Any]:
    yield policy
    for child in getattr(policy, "policies", None) or ():
        yield from _with_children(child)


def preserved(policy: Any, checkpoints: Sequence[Any], is_damaged: Sequence[bool]) -> list[bool]:
    """What is kept of the checkpoints, oldest first: by the policy, and always the newest.

    Raises:
      PolicyError: as ``answered``.
    """
    keep = answered(policy, checkpoints, is_damaged)
    newest = len(keep) - 1
    newest_sound = max((i for i, damaged in enumerate(is_damaged) if not damaged), default=newest)
    return [kept or i in (newest, newest_sound) for i, kept in enumerate(keep)]


def answered(policy: Any, checkpoints: Sequence[Any], is_damaged: Sequence[bool]) -> list[bool]:
    """What the policy keeps of the checkpoints, oldest first.

    It keeps a damaged one as if that were sound, which takes no place from those that are.

    Raises:
      PolicyError: the policy answered something else than one bool for each.
    """
    if not checkpoints:
        return []
    answer = list(policy.should_preserve(checkpoints, context=PreservationContext()))
    if len(answer) != len(checkpoints):
        raise PolicyError(
            f"{type(policy).__name__}.should_preserve answered {len(answer)} values for "
            f"{len(checkpoints)} checkpoints; nothing was deleted"
        )
    if any(is_damaged):
        sound = [c for c, damaged in zip(checkpoints, is_damaged, strict=True) if not damaged]
        among = iter(answered(policy, sound, [False] * len(sound)))
        answer = [
            kept if damaged else next(among)
            for kept, damaged in zip(answer, is_damaged, strict=True)
        ]
    return [bool(kept) for kept in answer]
