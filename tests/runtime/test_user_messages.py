"""What users read: errors that show where the program called the package, and a short log."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.damage import fill_disk
from support.steps import save_due
from support.training import mlp

from torchax_ckpt import LocalTier, TorchaxCheckpointer, load_torch_state_dict, policies, warm_start
from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    SaveError,
    StepError,
)
from torchax_ckpt.saving import tier

STATE = {"w": np.arange(3)}


def functions(error: BaseException) -> list[str]:
    """The functions in the traceback of an error, from the outermost inwards."""
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


def raised(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "call",
    [
        lambda ckpt: ckpt.attach(object()),
        lambda ckpt: ckpt.restore(9),
        lambda ckpt: ckpt.load(9),
        lambda ckpt: ckpt.verify(9),
        lambda ckpt: ckpt.delete(9),
        lambda ckpt: ckpt.metrics(9),
        lambda ckpt: ckpt.steps(3),
        lambda ckpt: ckpt.save(0, state=STATE),
        lambda ckpt: ckpt.should_save(-1),
        lambda ckpt: ckpt.reached_preemption(-1),
        lambda ckpt: ckpt.record(x=object()),
        lambda ckpt: ckpt.best_step(),
        lambda ckpt: ckpt.all_steps("local"),
        lambda ckpt: ckpt.latest_step("local"),
        lambda ckpt: warm_start(mlp(), ckpt.directory, step=9),
        lambda ckpt: load_torch_state_dict(ckpt.directory, 9),
        lambda ckpt: TorchaxCheckpointer(__file__),
    ],
)
def test_a_traceback_ends_at_the_public_function(
    directory: Path, call: Callable[[TorchaxCheckpointer], Any]
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        save_due(ckpt, 1, of=STATE)
        error = raised(lambda: call(ckpt))
    assert isinstance(error, CheckpointError)
    assert functions(error) == ["raised", "<lambda>", "<lambda>"]


def test_causes_of_background_errors_stay(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        save_due(ckpt, 1, of=STATE)
        mend = fill_disk()
        ckpt.save(2, state=STATE, force=True)
        error = raised(ckpt.wait_until_finished)
        assert isinstance(error, SaveError)
        assert functions(error) == ["raised"]
        assert "No space left" in str(error)
        assert error.__cause__ is not None
        assert functions(error.__cause__)[-1] == "fail"
        assert fields(caplog.records[-1]) == {"ckpt_step": 2, "ckpt_path": str(directory)}
        mend()
        ckpt.save(3, state=STATE, force=True)
    (directory / "3" / "manifest" / "data.json").write_text("{")
    error = raised(lambda: TorchaxCheckpointer(directory).load(3))
    assert isinstance(error, CorruptCheckpointError)
    assert functions(error)[1:] == ["<lambda>"]
    assert error.__cause__ is not None or error.__context__ is not None


class OwnError(StepError):
    """A program's own class of error."""


@pytest.mark.parametrize("kind", [OwnError, StepError, ZeroDivisionError])
def test_errors_of_users_functions_keep_frames(directory: Path, kind: type[Exception]) -> None:
    class Refusing:
        refuses: type[Exception] | None = None

        def state_dict(self) -> dict[str, int]:
            return self.refuse() or {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.refuse()

        def refuse(self) -> Any:
            if self.refuses is not None:
                raise self.refuses("no")

    refusing = Refusing()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={"x": refusing})
        ckpt.save(1, force=True)
        refusing.refuses = kind
        error = raised(lambda: ckpt.save(2, force=True))
        assert type(error) is kind
        assert functions(error)[-2:] == ["state_dict", "refuse"]
        assert "save" in functions(error)
        error = raised(lambda: ckpt.restore(1))
        seen = error.__cause__ if isinstance(error, MismatchError) else error
        assert type(seen) is kind
        assert functions(seen)[-1] == "refuse"
        refusing.refuses = None


# --- the log -------------------------------------------------------------------------------------


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record for loggers of JSON; what is no JSON raises."""
    found = {name: value for name, value in vars(record).items() if name.startswith("ckpt_")}
    return json.loads(json.dumps(found, allow_nan=False))


@pytest.mark.parametrize("many", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_an_ordinary_run_logs_a_screenful_with_fields(
    many: int, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert tier._LOGGED_SAVES == 100
    monkeypatch.setattr(tier, "_LOGGED_SAVES", many)
    caplog.set_level(logging.DEBUG, "torchax_ckpt")
    last, every, ramdisk = 5 * many // 2, policies.FixedIntervalPolicy, directory.with_name("local")
    local = LocalTier(ramdisk, save_decision_policy=every(1))
    said: list[list[logging.LogRecord]] = []
    for total in (last, last + 1):
        caplog.clear()
        with TorchaxCheckpointer(directory, save_decision_policy=every(5), local=local) as ckpt:
            ckpt.attach(mlp(), rng=False)
            list(ckpt.steps(total))
        said.append([r for r in caplog.records if r.name.startswith("torchax_ckpt")])
    first, second = ([r for r in each if r.levelno > logging.DEBUG] for each in said)
    assert {record.levelno for record in (*first, *second)} == {logging.INFO}
    (start, one, two, end), num = first, last // 5
    assert start.getMessage() == f"new run in {directory}: it has no step to resume from"
    assert fields(start) == {"ckpt_step": 0, "ckpt_path": str(directory)}
    for record, step in ((one, many), (two, 2 * many)):
        assert f"{ramdisk}: step {step} is durable (median of {many}: " in record.getMessage()
        assert 0 < fields(record)["ckpt_blocking_secs"] < fields(record)["ckpt_durable_secs"]
    assert f"step {last}; saves: {num} durable, 0 failed" in end.getMessage()
    assert (fields(end)["ckpt_step"], fields(end)["ckpt_num_durable"]) == (last, num)
    each = [fields(r) for r in said[0] if "is durable (median of 1:" in r.getMessage()]
    assert [f["ckpt_step"] for f in each if f["ckpt_path"] == str(ramdisk)] == [*range(1, last)]
    start, end = second
    assert f"resumed from step {last} of {directory} (durable tier)" in start.getMessage()
    assert fields(start).keys() == {"ckpt_secs", "ckpt_age_secs", "ckpt_path", "ckpt_step"}
