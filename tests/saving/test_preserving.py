"""What is kept once a step is saved is known before: the forecast is what happens then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.processes.coordination import SINGLE_PROCESS
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory

LATEST = policies.LatestN(1)
TENTHS = policies.AnyPreservationPolicy([LATEST, policies.EveryNSteps(10)])
BEST = policies.AnyPreservationPolicy([LATEST, policies.BestN(metric="loss")])


@pytest.mark.parametrize(
    ("policy", "options", "is_warned"),
    [
        (LATEST, {"reuse": True}, True),
        (
            policies.AnyPreservationPolicy([policies.AnyPreservationPolicy([LATEST])]),
            {"reuse": True},
            True,
        ),
        (LATEST, {}, False),
        (LATEST, {"reuse": True, "read_back": True}, False),
        (LATEST, {"reuse": True, "read_only": True}, False),
        (policies.LatestN(), {"reuse": True}, False),
        (policies.LatestN(2), {"reuse": True}, False),
        (BEST, {"reuse": True}, False),
        (None, {"reuse": True}, False),
    ],
)
def test_with_reuse_a_policy_that_keeps_one_step_is_warned_of(
    policy: Any,
    options: Any,
    is_warned: bool,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    TorchaxCheckpointer(
        directory,
        preservation_policy=policy,
        local=LocalTier(directory.with_name("local"), keep=1),
        options=CheckpointOptions(**options),
    )
    said = [r.message for r in caplog.records if "keeps one step" in r.message]
    assert len(said) == is_warned
    if said:
        assert said[0].startswith(f"{directory}: ")
        assert "\n" not in said[0]


class Raises:
    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("policy", "steps", "verified", "settings", "expected"),
    [
        (LATEST, [], [], {}, None),
        (LATEST, [8], [], {}, 8),
        (LATEST, [8, 9], [], {}, 9),  # which exists until the new step is durable
        (TENTHS, [10, 18, 19], [], {}, 10),
        (TENTHS, [10, 18, 20], [], {}, 20),
        (TENTHS, [10, 18, 19], [18], {}, 18),
        (TENTHS, [10, 18, 19], [18], {"is_local": True}, 10),
        (TENTHS, [10, 18, 19], [18], {"read_back": True}, 10),
        (BEST, [10, 18, 19], [], {}, 18),
        (BEST, [10, 18, 19], [], {"loss": -1.0}, 19),
        (Raises(), [10, 18, 19], [], {}, 19),
    ],
)
def test_the_step_that_is_kept_before_the_next_one(
    policy: Any,
    steps: list[int],
    verified: list[int],
    settings: dict[str, Any],
    expected: int | None,
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path)
    losses = {10: 2.0, 18: 1.0, 19: 3.0}
    directory.info = lambda committed: SimpleNamespace(  # type: ignore[method-assign]
        step=committed.step, metrics={"loss": losses.get(committed.step, 4.0)}
    )
    known = [CommittedStep(step, epath.Path(tmp_path / str(step)), step) for step in steps]
    for committed in known:
        if committed.step in verified:
            directory.verified.note(committed, is_sound=True)
    options = CheckpointOptions(read_back=settings.get("read_back", False))
    is_local = settings.get("is_local", False)
    preserving = Preserving(directory, policy, options, SINGLE_PROCESS, is_local=is_local)
    found = preserving.kept_before(known, 21, {"loss": settings.get("loss", 5.0)})
    assert (found and found.step) == expected
