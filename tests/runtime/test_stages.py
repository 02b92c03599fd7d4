"""Stages: each marks one function, and is where a test fails, holds or ends the work."""

from __future__ import annotations

import collections
import functools
import re
from pathlib import Path

import numpy as np
import pytest
from support.stages import Moment, at, fail_at

import torchax_ckpt
from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import SaveError
from torchax_ckpt.runtime.stages import STAGES, Stage, stage


def test_every_stage_is_the_work_of_one_function() -> None:
    sources = (path.read_text() for path in Path(torchax_ckpt.__file__).parent.rglob("*.py"))
    marked = [name for text in sources for name in re.findall(r'^ *@stage\("([^"]+)"', text, re.M)]
    assert collections.Counter(marked) == collections.Counter(STAGES)


def test_a_stage_is_interrupted_before_and_after_its_nth_time() -> None:
    seen: list[str] = []

    @stage("gather")
    def work(name: str) -> str:
        seen.append(name)
        return name

    at("gather", lambda: seen.append("before"))
    at("gather", lambda: seen.append("after the second"), when="after", number=2)
    at("share", lambda: seen.append("of another stage"))
    assert [work("first"), work("second")] == ["first", "second"]
    assert seen == ["before", "first", "before", "second", "after the second"]
    end = fail_at("gather", ValueError("third"), number=1)
    with pytest.raises(ValueError, match="third"):
        work("not done")
    end()
    assert work("done") == "done"
    assert seen[-2:] == ["before", "done"]


def test_a_save_passes_its_stages_in_order(directory: Path) -> None:
    passed: list[Stage] = []
    for name in STAGES:
        at(name, functools.partial(passed.append, name))
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": np.arange(3)})
    assert passed[:2] == ["claim the directory", "check the lease"]
    assert [name for name in passed if name in STAGES[5:15]] == [
        "take the snapshot",
        "stack the arrays",
        "write the arrays",
        "complete the step",
        "commit",
        "mark the step",
        "commit the folder",
        "end a durable save",
    ]


FAILS: list[Stage] = ["write the arrays", "complete the step", "mark the step", "commit the folder"]


@pytest.mark.parametrize(("name", "when"), [*((n, "before") for n in FAILS), (FAILS[2], "after")])
def test_a_save_that_fails_at_a_stage_is_no_step(
    name: Stage, when: Moment, directory: Path
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": np.arange(3)})
        ckpt.wait_until_finished()
        mend = fail_at(name, OSError(5, "failed"), when=when)
        ckpt.save(2, state={"w": np.arange(3)}, force=True)
        with pytest.raises(SaveError, match="saving step 2"):
            ckpt.wait_until_finished()
        mend()
        assert ckpt.all_steps() == [1]
        assert ckpt.save(3, state={"w": np.arange(3)}, force=True)
    assert ckpt.all_steps() == [1, 3]
