"""Lightning: a real Trainer, killed anywhere and resumed, ends on the bits of one that was not."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import jax
import lightning
import pytest
import torch
import torchax
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, TQDMProgressBar
from lightning.pytorch.plugins import AsyncCheckpointIO, HalfPrecision, MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_program import Run, train
from support import PROGRAMS, forked
from support.processes import Started, run_python
from support.training import fsdp_mesh, fsdp_rule
from support.waiting import Clock
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import DirectoryError, PolicyError, ProcessError
from torchax_ckpt.integrations.lightning import TorchaxCheckpoint, TorchaxStrategy
from torchax_ckpt.processes.call_log import CallLog
from torchax_ckpt.saving.training_loop import deadline

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in (
        ".*does not have many workers",
        ".*isinstance\\(treespec, LeafSpec\\)",  # Lightning's, of torch
        "'set_vital' is deprecated",  # torchdata's, of torch
        "Explicitly requested dtype",  # JAX's, of torch's int64
        ".*NumPy array is not writable",  # torchax's, of torch
        "You're resuming from a checkpoint that ended before the epoch ended",
        "The given NumPy array",
        "`LightningModule.configure_optimizers` returned `None`",
        "The `srun` command is available",
        "Detected call of `lr_scheduler.step",  # torch's, in a process that resumes there
        "You defined a `validation_step` but have no `val_dataloader`",
        "You are trying to `self.log\\(\\)`",
        ".*Consider setting `persistent_workers",
        "This DataLoader will create",
        "Your `IterableDataset` has `__len__` defined",
        ".*`_dataset_length`",
    )
]
KEEP_ALL = policies.PreserveAll()
PROGRAM = PROGRAMS / "lightning_program.py"
# First: it sets its logging up by what it finds.
MODULES = ("lightning", "torchdata.stateful_dataloader", *forked.MODULES)


@pytest.fixture(autouse=True)
def _quiet_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def spawn(run: Run, directory: Path, seed: int, *blow: Any) -> subprocess.CompletedProcess[str]:
    """The training in a process of its own."""
    options = json.dumps(dataclasses.asdict(run))
    arguments = (str(PROGRAM), str(directory), str(seed), options, json.dumps(blow))
    return Started(*arguments, modules=MODULES).result(200)


def steps_of(directory: Path) -> list[int]:
    return TorchaxCheckpointer(directory).all_steps()


def as_left_by_a_kill(directory: Path, last: int) -> Path:
    """What was in the directory when step ``last`` was the newest."""
    left = directory.with_name(f"{directory.name}-{last}")
    left.mkdir()
    for step in steps_of(directory):
        if step <= last:
            shutil.copytree(directory / str(step), left / str(step))
    return left


def assert_same_end(resumed: Any, expected: Any, *, but: str = "nothing") -> None:
    """The rest of the batches, and then the same bits everywhere."""
    seen = expected["seen"][len(expected["seen"]) - len(resumed["seen"]) :]
    assert resumed["seen"] == seen
    different = {
        k
        for k in resumed["state"].keys() | expected["state"].keys()
        if resumed["state"].get(k) != expected["state"].get(k)
    }
    assert {k for k in different if not k.startswith(but)} == set()


# --- resuming ----------------------------------------------------------------------------------

VARIANTS = {
    "workers": Run(workers=2, save_at=(6, 14)),
    "sharded": Run(sharded=True, save_at=(6, 14)),
}
LONG_VARIANTS = {
    "validation-within-epochs": Run(val_check_interval=3, save_at=(6, 8)),
    "accumulation": Run(accumulate=2, val_check_interval=0.5, save_at=(4, 6)),
    "steps-and-limits": Run(
        max_epochs=-1, max_steps=24, generator=True, limit_train_batches=5, save_at=(10, 16)
    ),
    "validation-across-epochs": Run(
        check_val_every_n_epoch=None, val_check_interval=5, generator=True, save_at=(10, 14)
    ),
    "no-length": Run(loader="stream", save_at=(6, 14, 18)),
    "sampler-without-state": Run(loader="by-epoch", save_at=(14, 18)),
    "torch-loader": Run(loader="torch", save_at=(14,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [*VARIANTS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_VARIANTS)]
)
def test_a_run_resumed_anywhere_ends_on_the_same_bits(variant: str, directory: Path) -> None:
    run = {**VARIANTS, **LONG_VARIANTS}[variant]
    uninterrupted = dataclasses.replace(run, save_at=()).checkpoint(directory / "uninterrupted")
    expected = train(run, 1, uninterrupted if run.sharded else None)
    saving = train(run, 1, run.checkpoint(directory))
    assert_same_end(saving, expected)
    assert len(saving["seen"]) == len(expected["seen"])
    for cut in run.save_at:
        left = as_left_by_a_kill(directory, cut)
        resumed = train(run, 22, run.checkpoint(left))
        assert 0 < len(resumed["seen"]) < len(expected["seen"])
        assert_same_end(resumed, expected)
        assert steps_of(left) == steps_of(directory)


@pytest.mark.long
def test_so_does_a_run_that_is_killed_and_told_to_end_again_and_again(directory: Path) -> None:
    run = Run(max_epochs=3, save_at=(2, 4))
    for seed, blow, code, saved in (
        (1, ("SIGKILL", "step", 0, 3), -signal.SIGKILL, 4),
        (21, ("SIGTERM", "step", 0, 4), 143, 10),  # within an epoch; saved whatever the policy says
        (22, ("SIGTERM", "validation", 0, 0), 143, 14),  # in a validation, which is begun anew
        (23, ("SIGTERM", "validation", 1, 1), 143, 28),  # at the end of an epoch
    ):
        process = spawn(run, directory, seed, *blow)
        assert process.returncode == code, process.stderr[-3000:]
        assert steps_of(directory)[-1] == saved
    assert_same_end(train(run, 24, run.checkpoint(directory)), train(run, 1))
    assert steps_of(directory) == [2, 4, 10, 14, 28, 42]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blow", "raised", "saved"),
    [
        (("error", "step", 1, 3), RuntimeError, [20]),
        pytest.param(("error", "scratch", 1, 3), RuntimeError, [], marks=pytest.mark.long),
        pytest.param(("error", "between", 1, 3), RuntimeError, [], marks=pytest.mark.long),
        pytest.param(("error", "validation", 1, 1), RuntimeError, [28], marks=pytest.mark.long),
        (("error", "validated", 1, 0), RuntimeError, [28]),
        (("interrupt", "step", 0, 4), SystemExit, [8]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_an_exception_saves_the_last_step_unless_it_is_half_overwritten(
    blow: Any, raised: type[BaseException], saved: list[int], directory: Path
) -> None:
    run = Run()
    with pytest.raises(raised):
        train(run, 1, run.checkpoint(directory), *blow)
    assert steps_of(directory) == saved
    assert_same_end(train(run, 22, run.checkpoint(directory)), train(run, 1 if saved else 22))


@pytest.mark.slow
def test_the_exception_that_ended_the_training_is_raised_though_no_step_can_be_listed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: TorchaxCheckpointer) -> int | None:
        raise DirectoryError("the disk is gone")

    monkeypatch.setattr(TorchaxCheckpointer, "latest_step", fail)
    run = Run()
    with pytest.raises(RuntimeError, match="asked for"):
        train(run, 1, run.checkpoint(directory), "error", "step", 0, 2)
    assert "the steps cannot be listed: the disk is gone" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("blow", [(), ("error", "step", 0, 2)], ids=["at-its-end", "by-an-error"])
def test_a_fit_whose_processes_called_differently_raises_this_at_its_end_and_hides_no_error(
    blow: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    differing = property(lambda log: ProcessError("the processes do not make the same calls"))
    monkeypatch.setattr(CallLog, "error", differing)
    run = Run()
    expected = (RuntimeError, "asked for") if blow else (ProcessError, "do not make the same calls")
    with pytest.raises(expected[0], match=expected[1]):
        train(run, 1, run.checkpoint(directory), *blow)


@pytest.mark.parametrize(
    ("epoch", "batch", "saved"),
    [
        pytest.param(1, 4, 6, id="within-an-epoch"),
        pytest.param(1, 0, 4, id="across-epochs", marks=pytest.mark.slow),
    ],
)
def test_accumulation_is_begun_again(epoch: int, batch: int, saved: int, directory: Path) -> None:
    run = Run(accumulate=3)  # in the last batch of an epoch no optimizer steps
    with pytest.raises(RuntimeError, match="asked for"):
        train(run, 1, run.checkpoint(directory), "error", "step", epoch, batch)
    assert steps_of(directory) == [saved]
    assert_same_end(train(run, 22, run.checkpoint(directory)), train(run, 1))


# --- ends and beginnings -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_longer_run_goes_on_from_a_shorter_one(directory: Path) -> None:
    for short, long in (
        (Run(max_steps=8, val_check_interval=2), Run(max_steps=18, val_check_interval=2)),
        (Run(max_epochs=1), Run()),
        (Run(max_epochs=1, accumulate=3), Run(accumulate=3)),
    ):
        shutil.rmtree(directory, ignore_errors=True)
        train(short, 1, short.checkpoint(directory))
        assert_same_end(train(long, 22, long.checkpoint(directory)), train(long, 1))


def test_a_run_that_was_stopped_goes_on(directory: Path) -> None:
    run = Run()
    train(run, 1, run.checkpoint(directory), "stop", "step", 0, 2)
    assert steps_of(directory) == [6]
    # Lightning has validated at the stop, so it is not the same run any more. But no batch is lost.
    resumed = train(run, 22, run.checkpoint(directory))
    assert resumed["seen"][0][:2] == [0, 3]
    assert len(resumed["seen"]) == 11
    assert steps_of(directory) == [6, 28]


@pytest.mark.slow
def test_a_finished_run_trains_and_saves_nothing(directory: Path) -> None:
    run = Run(max_epochs=1)
    finished = train(run, 1, run.checkpoint(directory))
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    again = train(run, 22, run.checkpoint(directory))
    assert again["seen"] == []
    # The loader was asked for an iterator, which draws a seed.
    assert_same_end(again, {**finished, "seen": []}, but="/rng/torch")
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_nothing_is_written_but_by_training(directory: Path) -> None:
    run = Run(max_epochs=1)
    module, checkpoint = run.module(1), run.checkpoint(directory)
    _, loader = run.loaders()
    run.trainer(checkpoint).validate(module, loader, verbose=False)
    run.trainer(checkpoint).test(module, loader, verbose=False)
    tried = train(run, 1, checkpoint, fast_dev_run=True)
    assert not directory.exists()
    # A run that has steps is left as it is, and not resumed.
    train(run, 1, run.checkpoint(directory))
    before = steps_of(directory)
    assert train(run, 1, run.checkpoint(directory), fast_dev_run=True)["seen"] == tried["seen"]
    assert [seen[1] for seen in tried["seen"]] == [0]
    assert steps_of(directory) == before


def test_sanity_checks_run_once_and_not_in_a_resumed_run(directory: Path) -> None:
    run = Run(max_epochs=1, save_at=(4,))
    expected = train(run, 1, run.checkpoint(directory), num_sanity_val_steps=2)
    left = as_left_by_a_kill(directory, 4)
    resumed = train(run, 22, run.checkpoint(left), num_sanity_val_steps=2)
    assert_same_end(resumed, expected)


# --- metrics -----------------------------------------------------------------------------------


class Losses(lightning.LightningModule):
    """Validates to what it is told."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.losses = losses

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.weight.grad = torch.ones_like(self.weight)
        optimizer: Any = self.optimizers()
        optimizer.step()
        self.log("step_loss", self.weight.sum())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.full((), self.losses[self.current_epoch], device="jax"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=1e-2)


def trainer_with(*callbacks: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_model_summary", "enable_progress_bar"), False
    )
    defaults |= {"strategy": TorchaxStrategy(), "num_sanity_val_steps": 0, "max_epochs": 1}
    checkpointing = any(isinstance(c, TorchaxCheckpoint) for c in callbacks)
    defaults |= {"callbacks": list(callbacks), "enable_checkpointing": checkpointing}
    return lightning.Trainer(**{**defaults, **options})


def numbers(count: int, kind: Any = StatefulDataLoader, **options: Any) -> Any:
    return kind(range(count), **options)


def monitoring(
    directory: Path, name: str, policy: Any, keep: Any = KEEP_ALL, **settings: Any
) -> TorchaxCheckpoint:
    return TorchaxCheckpoint(
        directory, monitor=name, save_decision_policy=policy, preservation_policy=keep, **settings
    )


def fit_losses(checkpoint: TorchaxCheckpoint, losses: list[float]) -> TorchaxCheckpointer:
    trainer = trainer_with(checkpoint, max_epochs=len(losses))
    trainer.fit(Losses(losses), numbers(6, batch_size=2), numbers(2))
    assert checkpoint.checkpointer is not None
    return checkpoint.checkpointer


@pytest.mark.parametrize(("num_batches", "is_finished"), [(12, False), (9, True)])
def test_a_fit_ends_by_the_deadline_and_asks_for_a_restart_unless_it_is_finished(
    num_batches: int, is_finished: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "time", clock := Clock())
    slow = LambdaCallback(on_train_batch_start=lambda *_: clock.sleep(100))
    options = CheckpointOptions(deadline=clock.now + 1000)
    checkpoint = TorchaxCheckpoint(
        directory, save_decision_policy=policies.SpecificStepsPolicy([2]), options=options
    )
    trainer = trainer_with(slow, checkpoint)
    code: Any = None
    try:
        trainer.fit(Losses([1.0]), numbers(num_batches), numbers(2))
    except SystemExit as exited:
        code = exited.code
    assert code == (None if is_finished else 143)
    assert steps_of(directory) == [2, 9]


def test_the_best_steps_by_a_monitored_metric_are_kept(directory: Path) -> None:
    policy, keep = policies.SpecificStepsPolicy([4]), policies.LatestN(1)
    told: list[Any] = []
    checkpoint = monitoring(directory, "val_loss", policy, keep, num_best=2, on_event=told.append)
    ckpt = fit_losses(checkpoint, [3.0, 1.0, 2.0, 5.0, 4.0])
    assert ckpt.all_steps() == [6, 9, 15]
    assert ckpt.best_step() == 6
    assert told[-1].name == "closed"
    assert {step: ckpt.metrics(step)["val_loss"] for step in (6, 9, 15)} == {6: 1, 9: 2, 15: 4}


def test_a_metric_is_saved_with_the_step_it_was_measured_at_and_no_other(directory: Path) -> None:
    checkpoint = monitoring(directory, "val_loss", policies.FixedIntervalPolicy(1))
    ckpt = fit_losses(checkpoint, [3.0, float("nan")])
    assert ckpt.all_steps() == [1, 2, 3, 4, 5, 6]
    assert [s for s in ckpt.all_steps() if "val_loss" in ckpt.metrics(s)] == [3]
    assert ckpt.metrics(5)["step_loss"] == pytest.approx(-0.1, abs=1e-6)


@pytest.mark.parametrize("every", [1, 3])
def test_steps_are_saved_whose_batches_alone_log_the_metric(every: int, directory: Path) -> None:
    class Sometimes(Losses):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if batch_idx % 4 == 1:
                self.log("rare", self.weight.sum())

    checkpoint = monitoring(directory, "rare", policies.FixedIntervalPolicy(every))
    trainer_with(checkpoint).fit(Sometimes([1.0]), numbers(11))
    ckpt = checkpoint.checkpointer
    assert ckpt is not None
    assert ckpt.all_steps()[-1] == 11
    ranked = {step for step in ckpt.all_steps() if "rare" in ckpt.metrics(step)}
    assert ranked == {2, 6, 10}  # whatever the policy says, because the batches before have none
    assert len(ckpt.all_steps()) == (11 if every == 1 else 6)  # with 3, 6, 9 and 11


def test_a_metric_of_each_batch_makes_no_step_due_where_a_batch_has_several_steps(
    directory: Path,
) -> None:
    class Two(Losses):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    checkpoint = monitoring(directory, "step_loss", policies.FixedIntervalPolicy(6))
    trainer_with(checkpoint, limit_val_batches=0).fit(Two([1.0]), numbers(10))
    assert steps_of(directory) == [6, 12, 18, 20]


def test_a_metric_that_is_never_logged_is_an_error(directory: Path) -> None:
    checkpoint = TorchaxCheckpoint(directory, monitor="accuracy")
    with pytest.raises(
        MisconfigurationException, match="no metric of that name was logged.*step_loss, val_loss"
    ):
        fit_losses(checkpoint, [1.0, 2.0])
    assert steps_of(directory)[-1] == 3
    with pytest.raises(PolicyError, match="mode must be"):
        TorchaxCheckpoint(directory, monitor="loss", mode="least")  # type: ignore[arg-type]


def test_callbacks_and_metrics_take_device_scalars(directory: Path) -> None:
    class Accurate(Losses):
        def __init__(self) -> None:
            super().__init__([1.0, 2.0])
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.mean(batch.float())
            self.log("mean", self.mean, on_step=True, on_epoch=True, prog_bar=True)

    TorchaxStrategy()  # from here on metrics can be made
    module = Accurate()
    stopping = EarlyStopping("val_loss", patience=1, verbose=True)
    checkpoint = TorchaxCheckpoint(directory)
    callbacks = (stopping, TQDMProgressBar(), checkpoint)
    trainer = trainer_with(*callbacks, max_epochs=5, enable_progress_bar=True)
    trainer.fit(module, numbers(6, batch_size=2), numbers(2))
    assert trainer.callback_metrics["mean_epoch"] == 2.5
    assert stopping.stopped_epoch == 1
    assert copy.deepcopy(module).weight is not module.weight


@pytest.mark.slow
def test_a_metric_that_ranks_no_step_is_warned_of_where_the_program_can_help_it(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accumulating = Run(max_epochs=1, accumulate=3, monitor="val_loss")  # 7 batches
    train(accumulating, 1, accumulating.checkpoint(directory / "a"))
    assert "val_loss was logged after a batch in which no optimizer stepped" in caplog.text
    caplog.clear()
    run = Run(max_epochs=1, monitor="val_loss")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="asked for"):
        train(run, 1, run.checkpoint(directory / "b"), "error", "validation", 0, 0)
    assert signal.getsignal(signal.SIGTERM) == before
    caplog.clear()
    train(run, 1, run.checkpoint(directory / "b"))  # validates the step that was saved without it
    assert not [r for r in caplog.records if "checkpoint" in r.name and "val_loss" in r.message]


def test_a_monitored_scalar_is_not_awaited(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps, saved or not: a look at it would wait for all that the step computes."""

    class Scored(Losses):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.log("score", torch.full((), self.losses[batch_idx], device="jax"))

    looked_at: list[str] = []
    training = threading.current_thread()
    for name in ("__float__", "item"):
        original = getattr(torchax.tensor.Tensor, name)

        def look(tensor: Any, original: Any = original, name: str = name) -> Any:
            if threading.current_thread() is training:
                looked_at.append(name)
            return original(tensor)

        monkeypatch.setattr(torchax.tensor.Tensor, name, look)
    checkpoint = monitoring(directory, "score", policies.FixedIntervalPolicy(2))
    trainer_with(checkpoint).fit(Scored([1.0, float("nan"), 0.5, 2.0, 1.0, 3.0]), numbers(6))
    assert looked_at == ["__float__"]  # at the end of the epoch, where what it is decides
    assert checkpoint.checkpointer is not None
    assert checkpoint.checkpointer.all_steps() == [2, 4, 6]
    assert checkpoint.checkpointer.best_step() == 4  # NaN ranks nothing


# --- what it refuses, and warns of -------------------------------------------------------------


def test_automatic_optimization_is_refused_with_what_to_do_instead(directory: Path) -> None:
    module = Losses([1.0])
    module.automatic_optimization = True
    with pytest.raises(MisconfigurationException, match="Losses uses automatic.*jax_value_and"):
        trainer_with().fit(module, numbers(2))
    module.automatic_optimization = False
    module.training_step = lambda batch, batch_idx: module.manual_backward(module.weight.sum())  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match="manual_backward cannot work"):
        trainer_with(TorchaxCheckpoint(directory)).fit(module, numbers(2))
    assert not directory.exists()


def test_arguments_that_would_have_no_effect_are_refused() -> None:
    """When the Trainer is made or when it fits, before anything is trained."""
    arguments: list[dict[str, Any]] = [
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"plugins": [MixedPrecision("bf16-mixed", "cpu")]},
        {"plugins": [AsyncCheckpointIO()]},
        {"devices": 2},
        {"devices": [0, 1]},
        {"devices": -1},
        {"num_nodes": 2},
        {"sync_batchnorm": True},
        {"detect_anomaly": True},
    ]
    for options in arguments:
        module = Losses([1.0])
        ((name, value),) = options.items()
        with pytest.raises(MisconfigurationException) as caught:
            trainer_with(**options).fit(module, numbers(2))
        assert "has no effect under TorchaxStrategy. Remove it: " in str(caught.value)
        assert f"({name}=" in str(caught.value) or name == "plugins", value
        assert module.weight.device.type == "cpu"
    for options, dtype in (
        ({"devices": 1, "precision": "32-true"}, torch.float32),
        ({"devices": "auto", "precision": "bf16-true"}, torch.bfloat16),
        ({"plugins": [HalfPrecision("16-true")]}, torch.float16),
    ):
        module = Losses([1.0])
        trainer_with(**options).fit(module, numbers(2))
        assert module.weight.dtype == dtype


def test_checkpoints_of_lightning_are_refused(directory: Path) -> None:
    theirs = directory.with_suffix(".ckpt")
    with torchax_backend.native_torch():
        state = {"state_dict": {"weight": torch.zeros(2)}, "epoch": 0, "global_step": 0}
        torch.save({**state, "pytorch-lightning_version": lightning.__version__}, theirs)
    with pytest.raises(MisconfigurationException, match="resumes from the newest step in"):
        trainer_with(TorchaxCheckpoint(directory)).fit(Losses([1.0]), numbers(2), ckpt_path=theirs)
    trainer = trainer_with(TorchaxCheckpoint(directory))
    trainer.fit(Losses([1.0]), numbers(2))
    with pytest.raises(MisconfigurationException, match="TorchaxCheckpoint\\(directory\\)"):
        trainer.save_checkpoint(directory / "lightning.ckpt")


def test_state_that_only_lightnings_checkpoints_would_hold_is_refused(directory: Path) -> None:
    module = Losses([1.0])
    averaging = LambdaCallback(on_save_checkpoint=lambda *_: None)
    with pytest.raises(
        MisconfigurationException, match="LambdaCallback overrides on_save_checkpoint.*state_"
    ):
        trainer_with(averaging, TorchaxCheckpoint(directory)).fit(module, numbers(2))
    assert not directory.exists()


def test_an_inexact_resume_is_said(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    for loader, is_exact in ((numbers(2, DataLoader), False), (numbers(2), True)):
        caplog.clear()
        trainer_with(TorchaxCheckpoint(directory / str(is_exact))).fit(Losses([1.0]), loader)
        assert ("restarts its epoch" not in caplog.text) == is_exact


def test_a_module_that_steps_no_optimizer_is_told_that_nothing_is_saved(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Losses([1.0])
    module.training_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    trainer_with(TorchaxCheckpoint(directory)).fit(module, numbers(2))
    assert "nothing was saved: no optimizer step was counted" in caplog.text
    assert not directory.exists()


# --- the strategy ------------------------------------------------------------------------------


def test_a_module_keeps_its_parameters_ties_and_shardings() -> None:
    run = Run(max_epochs=1)
    module = run.module(1)
    before = dict(module.named_parameters())
    run.trainer().fit(module, *run.loaders())
    assert {n: id(p) for n, p in module.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert module.net[2].weight is module.head.weight
    assert {p.device.type for p in module.parameters()} == {"jax"}

    rule = fsdp_rule(fsdp_mesh(4))
    for name, parameter in module.named_parameters():
        array = torchax_backend.buffer(parameter)
        torchax_backend.set_buffer(parameter, jax.device_put(array, rule(name, array)))
    sharding = torchax_backend.buffer(module.net[0].weight).sharding
    assert len(sharding.device_set) == 4
    run.trainer().validate(module, run.loaders()[1], verbose=False)
    assert torchax_backend.buffer(module.net[0].weight).sharding == sharding


# --- installing --------------------------------------------------------------------------------


def test_without_the_extra_one_line_says_what_to_install() -> None:
    result = run_python(
        """
        import sys
        sys.modules["lightning"] = None
        import torchax_ckpt
        import torchax_ckpt.integrations.lightning
        """,
        check=False,
        fresh=True,
    )
    assert result.stderr.splitlines()[-1] == (
        "ImportError: torchax_ckpt.integrations.lightning needs its extra: "
        'pip install "torchax-ckpt[lightning]"'
    )
