"""Metrics: checked at once, fetched in the background, read back as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.device_memory import OFFLOAD
from support.strategies import fingerprint
from support.training import on_cpu

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import MetricsError
from torchax_ckpt.saving.training_loop.step_metrics import check_metrics, fetching

STATE = {"w": np.ones(2)}
BEST = policies.BestN(metric="loss", mode="min", n=1)


def through_check(value: Any) -> Any:
    return fetching(check_metrics({"m": value}), (), 1, must_save=False)()[0]["m"]


def _kind(value: Any) -> str:
    return f"{type(value).__name__}-{getattr(value, 'dtype', '')}"


@jax.jit
def _slow(x: jax.Array, num_rounds: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, num_rounds, lambda _, y: jnp.tanh(y @ x), x).sum()


def pending_scalar() -> Any:
    """A device scalar whose computation takes a second or more."""
    x = jnp.full((512, 512), 0.01)
    _slow(x, 1).block_until_ready()  # compiles
    result = _slow(x, 300)
    assert not result.is_ready()
    return result


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.float32(0.25), 0.25),
        (jnp.float8_e5m2(2), 2.0),
        (jnp.bool_(True), True),
        (torchax_backend.wrap(jnp.ones((1,), jnp.bfloat16)), 1.0),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(False), False),
        (np.array([3], np.int8), 3),
        (on_cpu(2**53 + 1, torch.int64), 2**53 + 1),
        (2**100, 2**100),
        (None, None),
        ("text", "text"),
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
    ],
    ids=_kind,
)
def test_a_metric_is_kept_exactly_as_the_number_it_is(value: Any, expected: Any) -> None:
    found = through_check(value)
    assert fingerprint(found) == fingerprint(expected)
    json.dumps(found)


@given(st.sampled_from(["float16", "bfloat16", "float32", "float64", "int64"]), st.integers())
def test_a_scalar_of_any_dtype_is_kept_to_the_bit(dtype: str, seed: int) -> None:
    bits = np.random.default_rng(abs(seed)).bytes(np.dtype(dtype).itemsize)
    scalar = np.frombuffer(bits, dtype)[0]
    if scalar != scalar:
        assert math.isnan(through_check(scalar))
        return
    for value in (scalar, torchax_backend.from_numpy(np.array(scalar))):
        assert np.array(through_check(value), dtype).tobytes() == bits


def test_metrics_are_read_back_by_name(directory: Path) -> None:
    metrics: dict[str, Any] = {
        "loss": jnp.bfloat16(0.5),
        "torchax": torchax_backend.wrap(jnp.float32(0.25)),
        "count": np.int64(2**60 + 1),
        "infinite": math.inf,
        "history": [{"a": 1.5}, None, "é\ud800"],
        "a/b": 1,
        "": 2,
    }
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE, metrics=metrics)
        metrics["history"].pop()  # comes too late
        ckpt.save(2, state=STATE, force=True)
    fresh = TorchaxCheckpointer(directory)
    assert fresh.metrics(1) == {
        **metrics,
        "loss": 0.5,
        "torchax": 0.25,
        "count": 2**60 + 1,
        "history": [{"a": 1.5}, None, "é\ud800"],
    }
    assert fresh.metrics(2) == {}


# A transfer does wait.
not_waiting = pytest.mark.parametrize("mode", ["auto", "copy", "reference", *OFFLOAD])


@pytest.mark.slow
@not_waiting
@pytest.mark.parametrize("kind", ["jax", pytest.param("torchax", marks=pytest.mark.long)])
def test_saving_metrics_does_not_wait_for_the_device(directory: Path, kind: str, mode: Any) -> None:
    options = CheckpointOptions(snapshot=mode)
    with TorchaxCheckpointer(directory, preservation_policy=BEST, options=options) as ckpt:
        ckpt.save(1, state={"w": jnp.ones(2)}, metrics={"loss": 1e9})  # compiles the snapshot
        ckpt.wait_until_finished()
        result = pending_scalar()
        value = torchax_backend.wrap(result) if kind == "torchax" else result
        ckpt.record(recorded=value)
        assert ckpt.save(2, state={"w": jnp.ones(2)}, metrics={"loss": value}, force=True)
        assert not result.is_ready()
    expected = float(np.asarray(result))
    fresh = TorchaxCheckpointer(directory)
    assert fresh.metrics(2) == {"loss": expected, "recorded": expected}


@not_waiting
def test_saving_does_not_wait_for_what_is_being_computed(directory: Path, mode: Any) -> None:
    with TorchaxCheckpointer(directory, options=CheckpointOptions(snapshot=mode)) as ckpt:
        ckpt.save(1, state={"w": jnp.float32(0)})
        ckpt.wait_until_finished()
        result = pending_scalar()
        assert ckpt.save(2, state={"w": result})
        assert not result.is_ready()
    assert TorchaxCheckpointer(directory).load(2)["w"] == result


def test_a_metric_donated_right_after_save_is_saved_as_it_was(directory: Path) -> None:
    """As when a metric lives in the state that the next step donates."""
    next_step = jax.jit(lambda count: count + 1, donate_argnums=0)
    count = jnp.ones((), jnp.int32) * 7
    with TorchaxCheckpointer(directory) as ckpt:
        # Metrics are fetched in order: the count is gone when its turn comes.
        ckpt.save(1, state=STATE, metrics={"loss": pending_scalar(), "count": count})
        next_step(count)
        assert count.is_deleted()
        ckpt.wait_until_finished()
    assert TorchaxCheckpointer(directory).metrics(1)["count"] == 7


def test_a_metric_donated_before_save_is_refused_by_name(directory: Path) -> None:
    gone = jnp.ones(()) + 1
    gone.delete()
    with TorchaxCheckpointer(directory) as ckpt:
        with pytest.raises(MetricsError, match="loss"):
            ckpt.save(1, state=STATE, metrics={"loss": gone})
        with pytest.raises(MetricsError, match="loss"):
            ckpt.record(loss=gone)
        assert ckpt.save(1, state=STATE)


def _looped() -> list[Any]:
    looped: list[Any] = []
    looped.append(looped)
    return looped


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        1 + 2j,
        _looped(),
        jnp.ones(2),
        torchax_backend.wrap(jnp.ones((2, 1))),
        jnp.complex64(1),
        jax.random.key(0),
        np.array("text"),
        np.array([None]),
        np.datetime64("2020-01-01"),
        np.zeros((), [("field", "i4")]),
        on_cpu(1 + 2j, torch.complex64),
        {"deep": [jnp.ones(())]},
    ],
    ids=_kind,
)
def test_what_is_neither_a_number_nor_json_is_refused_by_name(value: Any) -> None:
    with pytest.raises(MetricsError, match="'the loss'"):
        check_metrics({"fine": 1, "the loss": value})


def test_json_that_could_not_be_read_back_is_refused_with_the_reason() -> None:
    deep: Any = 0
    for _ in range(200):  # how deep Python reads and writes depends on the stack of the caller
        deep = [deep]
    for value, reason in (
        ({"by": {1: 0.5, "1": 0.25}}, "two keys are equal as texts"),
        ([deep], "nested deeper than 100 levels"),
        (10**5000, "4300 digits"),
    ):
        with pytest.raises(MetricsError, match=f"'loss'.*{reason}"):
            check_metrics({"loss": value})


def test_tensors_without_plain_data_and_odd_mappings_are_refused() -> None:
    with torchax_backend.native_torch():
        tensors = [torch.ones(1).to_sparse(), torch.empty((), device="meta")]
    cases: list[tuple[Any, str]] = [({"loss": tensor}, "'loss'") for tensor in tensors]
    cases += [({1: 1.0}, "names must be strings"), ([("loss", 1)], "expected a mapping")]
    for metrics, said in cases:
        with pytest.raises(MetricsError, match=said):
            check_metrics(metrics)


def test_a_tracer_is_refused_by_name() -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        for value in (x, torchax_backend.wrap(x)):
            with pytest.raises(MetricsError, match="'loss' is a JAX tracer"):
                check_metrics({"loss": value})
        return x

    step(jnp.ones(()))


@pytest.mark.parametrize("value", [math.nan, on_cpu(math.nan, torch.float32), "text", True])
def test_what_a_best_n_rule_cannot_rank_is_refused_at_save(directory: Path, value: Any) -> None:
    either = policies.AnyPreservationPolicy([policies.LatestN(1), BEST])
    for policy in (BEST, either):
        with TorchaxCheckpointer(directory, preservation_policy=policy) as ckpt:
            with pytest.raises(MetricsError, match="'loss' at step 3") as caught:
                ckpt.save(3, state=STATE, metrics={"loss": value})
            assert caught.value.step == 3
            assert ckpt.all_steps() == []


@pytest.mark.parametrize("value", [math.nan, "text"])
@pytest.mark.parametrize("why", ["forced", "preempted"])
def test_a_metric_that_cannot_be_ranked_costs_no_step_that_must_be_saved(
    directory: Path, why: str, value: Any, preempt: Callable[[], None]
) -> None:
    options = CheckpointOptions(on_save_error="raise")  # for saves that failed, which this is not
    best = policies.AnyPreservationPolicy([BEST, policies.LatestN(2)])
    with TorchaxCheckpointer(directory, preservation_policy=best, options=options) as ckpt:
        ckpt.save(1, state=STATE, metrics={"loss": 1.0}, force=True)
        if why == "preempted":
            preempt()
        metrics = {"loss": value, "a": 1}
        assert ckpt.save(2, state=STATE, metrics=metrics, force=why == "forced")
        assert ckpt.save(3, state=STATE, force=True)
        with pytest.raises(MetricsError, match="'loss' at step 2"):
            ckpt.wait_until_finished()
        ckpt.check_for_errors()  # was raised, and is read
        assert ckpt.all_steps() == [1, 2, 3]
        assert ckpt.best_step() == 1
        assert ckpt.metrics(2)["a"] == 1


@pytest.mark.parametrize("wraps", [False, True])
def test_a_device_metric_that_cannot_be_ranked_costs_no_step(directory: Path, wraps: bool) -> None:
    with TorchaxCheckpointer(directory, preservation_policy=BEST) as ckpt:
        loss: Any = jnp.log(jnp.float32(-1))
        ckpt.save(3, state=STATE, metrics={"loss": torchax_backend.wrap(loss) if wraps else loss})
        with pytest.raises(MetricsError, match="'loss' at step 3") as caught:
            ckpt.wait_until_finished()
        assert caught.value.step == 3
        ckpt.check_for_errors()  # was raised, and is read
        assert ckpt.all_steps() == [3]
        # A metric that no rule ranks may be NaN.
        metrics = {"loss": jnp.float32(2), "other": math.nan}
        ckpt.save(4, state=STATE, metrics=metrics, force=True)
        ckpt.wait_until_finished()
        assert ckpt.best_step() == 4
