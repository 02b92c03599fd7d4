"""Arguments of a wrong type: each is refused by name, where it is given, and with what to give."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.steps import save
from support.training import adamw, mlp

import torchax_ckpt
from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    load_torch_state_dict,
    policies,
    warm_start,
)
from torchax_ckpt.errors import ArgumentError, AttachError, CallError, PolicyError, StepTypeError
from torchax_ckpt.publishing import Reader
from torchax_ckpt.torch import StorageReader, restore

OPTIONS = "expected a CheckpointOptions or None, found"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"compression": True}}, r"give options=CheckpointOptions\(...\)"),
        ({"options": {}}, f"options: {OPTIONS}"),
        ({"options": CheckpointOptions}, f"options: {OPTIONS} <class"),
        ({"local": "/mnt/ramdisk"}, r"give local=LocalTier\(...\)"),
        ({"local": 3}, "local: expected a LocalTier or None, found 3"),
        ({"on_event": [print]}, "on_event: expected a function of one Event"),
        ({"on_event": 0}, "on_event: expected a function of one Event, found 0"),
    ],
)
def test_a_constructor_refuses_a_wrong_type(
    given: dict[str, Any], message: str, directory: Path
) -> None:
    with pytest.raises(ArgumentError, match=message):
        TorchaxCheckpointer(directory, **given)
    assert not directory.exists()


NO_SECONDS = (0, float("inf"), float("nan"), "30", True)
NO_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "snapshot": (("lazy",), ""),
    "layout": (("deep",), ""),
    "compression": (("Zstd", "", "blosc", None, 1), ": expected .*zstd, blosc-lz4, blosc-zstd, f"),
    "max_host_bytes": ((0,), ""),
    "preemption_grace_secs": (NO_SECONDS, ": expected None or a positive number of seconds"),
    "save_timeout_secs": (NO_SECONDS, ": expected None or a positive number of seconds"),
}


@pytest.mark.parametrize("option", NO_OPTIONS)
def test_an_option_of_another_type_or_value_is_refused(option: str) -> None:
    values, said = NO_OPTIONS[option]
    for value in values:
        with pytest.raises((ValueError, TypeError), match=option + said) as caught:
            CheckpointOptions(**{option: value})
        assert f"found {value!r}" in str(caught.value)


SAVES, KEEPS = "save_decision_policy", "preservation_policy"
OF_SAVES, OF_STEPS = policies.FixedIntervalPolicy(10), policies.LatestN(3)


@pytest.mark.parametrize(
    ("argument", "policy", "message"),
    [
        (KEEPS, 3, r"preservation_policy: .* found 3; give policies.LatestN\(3\)"),
        (KEEPS, 0, "preservation_policy: .* found 0"),
        (KEEPS, [OF_STEPS], r"or several in policies.AnyPreservationPolicy\(\[...\]\)"),
        (KEEPS, policies.LatestN, r"expected an object .* <class .* give policies.LatestN\(3\)"),
        (KEEPS, OF_SAVES, "give it as save_decision_policy="),
        (KEEPS, policies.AnySavePolicy([OF_SAVES]), "give it as save_decision_policy="),
        (KEEPS, policies.AnyPreservationPolicy([OF_SAVES]), "give it as save_decision_policy="),
        (KEEPS, policies.AnyPreservationPolicy([[OF_STEPS]]), "or several in"),
        (SAVES, 100, r"give policies.FixedIntervalPolicy\(100\)"),
        (SAVES, OF_STEPS, "give it as preservation_policy="),
        (SAVES, policies.BestN(metric="loss"), "give it as preservation_policy="),
        (SAVES, policies.AnySavePolicy([3]), r"found 3; give"),
        ("local", OF_STEPS, "LocalTier: save_decision_policy: .* preservation_policy="),
    ],
)
def test_a_policy_of_the_other_kind_is_sent_to_its_argument(
    argument: str, policy: Any, message: str, directory: Path
) -> None:
    if argument == "local":
        policy = LocalTier(directory.with_name("local"), save_decision_policy=policy)
    with pytest.raises(PolicyError, match=message):
        TorchaxCheckpointer(directory, **{argument: policy})


def test_a_class_with_static_methods_is_a_policy(directory: Path) -> None:
    class Never:
        @staticmethod
        def should_save(step: Any, known: Any, *, context: Any) -> bool:
            return False

    with TorchaxCheckpointer(directory, save_decision_policy=Never) as ckpt:
        ckpt.attach(mlp())
        assert not ckpt.save(1)


def test_short_forms_save_and_keep_as_the_policies_that_they_stand_for(directory: Path) -> None:
    cases: tuple[tuple[Any, Any, list[int]], ...] = (
        (4, 2, [8, 9]),
        (torch.tensor(4), torch.tensor(1), [9]),
        (2, None, [6, 8, 9]),
        (5, 9, [5, 9]),
    )
    for save_every, keep, kept in cases:
        folder = directory / f"{save_every}-{keep}"
        with TorchaxCheckpointer(folder, save_every=save_every, keep=keep) as ckpt:
            ckpt.attach(mlp())
            for _ in ckpt.steps(9):
                ckpt.wait_until_finished()
        assert ckpt.all_steps() == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_every": 0}, "save_every: expected a number of steps, a positive int, found 0"),
        ({"keep": True}, "keep: expected a number of steps, a positive int, found True"),
        ({"keep": 0}, r"to keep all steps, preservation_policy=policies.PreserveAll\(\)"),
        ({"save_every": 2.0}, "found 2.0"),
        (
            {"save_every": 2, "save_decision_policy": policies.FixedIntervalPolicy(3)},
            r"save_every=2 is short for save_decision_policy=policies.FixedIntervalPolicy\(2\)",
        ),
        (
            {"keep": 2, "preservation_policy": policies.BestN(metric="loss")},
            r"keep=2 is short for preservation_policy=policies.LatestN\(2\)",
        ),
    ],
)
def test_short_forms_are_positive_and_stand_alone(
    directory: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        TorchaxCheckpointer(directory, **arguments)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("save_interval_steps", "save_every"),
        ("save_steps", "save_every"),
        ("max_to_keep", "keep"),
        ("save_total_limit", "keep"),
    ],
)
def test_arguments_of_other_libraries_are_told_ours(
    directory: Path, theirs: str, ours: str
) -> None:
    arguments: dict[str, Any] = {theirs: 7}
    with pytest.raises(TypeError, match=f"{theirs}: expected .*; give {ours}=7"):
        TorchaxCheckpointer(directory, **arguments)
    both: dict[str, Any] = {"save_total_limit": None, "save_steps": 5}
    advice = (
        r"save_steps, save_total_limit: .* give save_every=5; to keep all steps, preservation_po"
    )
    with pytest.raises(TypeError, match=advice):
        TorchaxCheckpointer(directory, **both)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_keep'"):
        TorchaxCheckpointer(directory, max_keep=7)  # type: ignore[call-arg]


@pytest.mark.parametrize("metric", [3, {}, "", None])
def test_a_best_n_rule_needs_the_name_of_a_metric(metric: Any) -> None:
    with pytest.raises(PolicyError, match="metric must be the name"):
        policies.BestN(metric=metric)


def test_a_state_dict_is_no_object_to_attach(directory: Path) -> None:
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    ckpt = TorchaxCheckpointer(directory)
    save(ckpt, 1)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ckpt.attach(model.state_dict()),
        lambda: ckpt.attach(model, optimizer.state_dict()),
        lambda: ckpt.attach(model, optimizer, lr_scheduler=scheduler.state_dict()),
        lambda: ckpt.attach(model, stateful={"s": scheduler.state_dict()}),
        lambda: warm_start(model.state_dict(), directory),
        lambda: restore(directory, model.state_dict()),
    )
    for call in calls:
        with pytest.raises(AttachError, match=r"If state_dict\(\) returned this dict"):
            call()
    ckpt.close()


def test_functions_refuse_wrong_types(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model := mlp())
        ckpt.save(1, force=True)
        with pytest.raises(ArgumentError, match="timeout_secs: expected a number of seconds"):
            ckpt.wait_until_finished("soon")  # type: ignore[arg-type]
    calls: tuple[tuple[type[Exception], str, Callable[[], Any]], ...] = (
        (ArgumentError, OPTIONS, lambda: warm_start(model, directory, options={})),  # type: ignore[arg-type]
        (ArgumentError, "source: expected a path", lambda: warm_start(model, 3)),  # type: ignore[arg-type]
        (ArgumentError, "at: expected a key path", lambda: warm_start(model, directory, at=3)),  # type: ignore[arg-type]
        (ArgumentError, OPTIONS, lambda: load_torch_state_dict(directory, options={})),  # type: ignore[arg-type]
        (StepTypeError, "found 'x'", lambda: load_torch_state_dict(directory, "x")),
        (StepTypeError, "found 1.5", lambda: restore(directory, model, step=1.5)),  # type: ignore[arg-type]
    )
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()


def test_a_checkpointer_and_the_package_say_what_they_are(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        assert repr(ckpt) == f"<TorchaxCheckpointer '{directory}': open, step 0>"
        ckpt.attach(mlp())
        ckpt.save(2, force=True)
        assert repr(ckpt) == f"<TorchaxCheckpointer '{directory}': attached, step 2>"
    assert repr(ckpt) == f"<TorchaxCheckpointer '{directory}': closed, step 2>"
    assert repr(StorageReader(directory, 2)) == f"StorageReader('{directory}', step=2)"
    assert repr(Reader(directory)) == f"<Reader of '{directory}': step None>"
    assert torchax_ckpt.__version__ == importlib.metadata.version("torchax-ckpt")


def test_no_copy_of_a_checkpointer_ends_its_saves(directory: Path) -> None:
    trainer = types.SimpleNamespace(ckpt=TorchaxCheckpointer(directory))
    save(trainer.ckpt, 1)
    held = copy.copy(trainer)  # has the same checkpointer
    for make in (copy.deepcopy, pickle.dumps):
        for value in (trainer, trainer.ckpt):
            with pytest.raises(CallError, match="Leave it out of the copy of an object"):
                make(value)
    with pytest.raises(CallError, match="neither copied nor pickled"):
        copy.copy(trainer.ckpt)
    del held
    assert (directory / "lease").exists()
    save(trainer.ckpt, 2)
    trainer.ckpt.close()
    assert trainer.ckpt.all_steps() == [1, 2]
