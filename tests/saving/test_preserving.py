"""What is kept once a step is saved is known before: the forecast is what happens then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies

LATEST = policies.LatestN(1)
BEST = policies.AnyPreservationPolicy([LATEST, policies.BestN(metric="loss")])


@pytest.mark.parametrize(
    ("policy", "options", "is_warned"),
    [
        (LATEST, {"reuse": True}, True),
        (policies.AnyPreservationPolicy([LATEST]), {"reuse": True}, True),
        (LATEST, {}, False),
        (LATEST, {"reuse": True, "read_back": True}, False),
        (LATEST, {"reuse": True, "read_only": True}, False),
        (policies.LatestN(2), {"reuse": True}, False),
        (BEST, {"reuse": True}, False),
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
