"""Finds the steps that a number, ``latest``, ``best:METRIC`` or ``best:METRIC:max`` means in a run.

Without ``:min`` or ``:max``, a metric is ranked as the run itself ranks it: by a best-N rule of
this program, or of the one that saved the newest step that was ranked by the metric. Else small
values are good.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torchax_ckpt.errors import PolicyError, SelectionError, StepNotFoundError
from torchax_ckpt.policies.preservation import BestN, ranking
from torchax_ckpt.policies.preservation_rules import StepInfo
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.runtime.background import Executor
from torchax_ckpt.runtime.step_numbers import BEST, LATEST, as_given
from torchax_ckpt.storage.directory.committed_step import MANIFEST, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory

Holding = Callable[[CommittedStep], RunDirectory]


def candidates(run: RunDirectory, step: Any) -> list[CommittedStep]:
    """Returns the steps of a run that ``step`` means, the one to try first last.

    Raises as ``as_given`` does, StepNotFoundError without such a step, and as ``ranked`` does.
    """
    given = as_given(step)
    if not isinstance(given, str):
        return run.candidates(given)
    num_looks = 0
    while True:
        num_looks += 1
        steps = run.candidates(None)
        try:
            return named(given, steps, lambda committed: run)
        except StepNotFoundError:
            # If all are gone, the program that writes there has replaced them meanwhile.
            if num_looks == 3 or any(step.path.exists() for step in steps):
                raise


def named(
    name: str, steps: Sequence[CommittedStep], holding: Holding, rules: Iterable[BestN] = ()
) -> list[CommittedStep]:
    """Returns the steps that a name means, the one to try first last: all for the latest.

    Args:
      name: a text of which ``is_name`` is true.
      steps: the steps of the run, oldest first, at least one.
      holding: returns the directory that holds a step.
      rules: best-N rules of this program.

    Raises:
      SelectionError: ``best:`` is not followed by a metric.
      StepNotFoundError: no step can be ranked.
    """
    if name == LATEST:
        return [*steps]
    rule = rule_of(name.removeprefix(BEST), steps, holding, rules)
    if rule is None:
        raise SelectionError(
            f"step: expected best:METRIC, or best:METRIC:max if large values are good, found "
            f"{name!r:.80}; a metric whose name has a colon cannot be given here"
        )
    best_last = ranked(rule, steps, holding)
    # Their metrics were read to rank them, and are known now. Orbax alone writes no manifest.
    lost = [step for step in steps if holding(step).has_lost_summary(step)]
    if lost := [step for step in lost if (step.path / MANIFEST).exists()]:
        numbers = ", ".join(str(step.step) for step in lost)
        user_messages.warn(
            f"{holding(steps[0]).path}: the metrics of step {numbers} are damaged, so it is not "
            f"known whether {name} would be that step"
        )
    return best_last


def rule_of(
    text: str, steps: Sequence[CommittedStep], holding: Holding, rules: Iterable[BestN] = ()
) -> BestN | None:
    """Returns the rule that ``METRIC``, ``METRIC:min`` or ``METRIC:max`` means in a run."""
    return ranking(text, itertools.chain(rules, _recorded_rules(steps, holding)))


def ranked(rule: BestN, steps: Sequence[CommittedStep], holding: Holding) -> list[CommittedStep]:
    """Returns the steps that a rule can rank and that are not known to be damaged, the best last.

    Raises StepNotFoundError if there is none.
    """
    # Readers try the last of equal steps first.
    sound = [s for s in reversed(steps) if not holding(s).verified.is_damaged(s)]
    infos = step_infos(sound, holding)
    by_info = {id(info): step for info, step in zip(infos, sound, strict=True)}
    if not (best_first := rule.ranked(infos)):
        known = sorted({name for info in infos for name in info.metrics or {}})
        path = holding(steps[0]).path
        problem = (
            f"no step has the metric {rule.metric!r:.80}; there are: {', '.join(known) or 'none'}"
        )
        if rule.metric in known:
            problem = (
                f"no step can be ranked by {rule.metric!r:.80}: each value is NaN or no number"
            )
        raise StepNotFoundError(f"{path}: {problem}", path=path)
    return [by_info[id(info)] for info in reversed(best_first)]


def step_infos(steps: Iterable[CommittedStep], holding: Holding) -> list[StepInfo]:
    """Returns the facts about steps that rules see."""
    steps = [*steps]
    with Executor() as pool:  # each is a round trip to a bucket
        metrics = [*pool.map(lambda step: holding(step).metrics(step), steps)]
    return [
        StepInfo(step.step, step.commit_timestamp_nsecs / 1e9, each)
        for step, each in zip(steps, metrics, strict=True)
    ]


def _recorded_rules(steps: Sequence[CommittedStep], holding: Holding) -> Iterator[BestN]:
    """Yields the rules by which the run ranked its metrics, those of the newest steps first."""
    for committed in reversed(steps):
        for metric, mode in holding(committed).ranks(committed).items():
            with contextlib.suppress(PolicyError):  # the directory is untrusted
                yield BestN(metric=metric, mode=mode)
