"""Metrics of a step: checked in the caller's thread, fetched from devices in the save's thread."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.device_programs import copied
from torchax_ckpt.errors import MetricsError
from torchax_ckpt.state.findings import type_name
from torchax_ckpt.state.pytree import Encoder

logger = logging.getLogger(__name__)


def check_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics as JSON values or device scalars, unfetched; raises MetricsError."""
    if not isinstance(metrics, Mapping):
        raise MetricsError(
            f"metrics: expected a mapping of names to numbers, found {metrics!r:.80}"
        )
    for name in metrics:
        if not isinstance(name, str):
            raise MetricsError(f"metrics: names must be strings, found {name!r:.80}")
    return {name: _check(name, value) for name, value in metrics.items()}


def _check(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = _array_of(name, value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        if isinstance(value, jax.core.Tracer):
            raise MetricsError(f"metric {name!r} is a JAX tracer; record the metric outside of jit")
        if value.size != 1 or not _is_real(value.dtype):
            raise MetricsError(
                f"metric {name!r}: expected a scalar, found {value.dtype}{list(value.shape)}"
            )
        if not isinstance(value, jax.Array):
            return _python_scalar(value)
        if value.is_deleted():
            raise MetricsError(
                f"metric {name!r}: its buffer was donated to a jitted step and is gone; record "
                "the value that the step returned"
            )
        return value
    try:
        found = json.loads(text := json.dumps(value))
        if json.dumps(found) != text:
            raise ValueError("two keys are equal as texts")
        if isinstance(found, (list, dict)):
            Encoder().encode(found, (name,))  # refuses what nests too deeply for a reader
    except (TypeError, ValueError, RecursionError) as error:
        raise MetricsError(
            f"metric {name!r}: expected a number or JSON, found {type_name(value)} ({error})"
        ) from error
    return found


def _array_of(name: str, tensor: torch.Tensor) -> Any:
    if torchax_backend.is_device_tensor(tensor):
        return torchax_backend.buffer(tensor)
    if tensor.is_meta or (why := torchax_backend.why_unsupported(tensor)) is not None:
        why = "is on the meta device" if tensor.is_meta else why
        raise MetricsError(f"metric {name!r}: {why}")
    with torchax_backend.native_torch():
        return torchax_backend.to_numpy(tensor)


def _is_real(dtype: Any) -> bool:
    if dtype.itemsize > 8 or jax.dtypes.issubdtype(dtype, np.timedelta64):
        return False  # excludes float128, and timedelta64, which numpy counts as an integer
    return any(jax.dtypes.issubdtype(dtype, k) for k in (np.bool_, np.integer, np.floating))


def _python_scalar(value: Any) -> Any:
    # item() of an ml_dtypes scalar does not return a Python number.
    scalar = np.asarray(value).reshape(())
    if scalar.dtype.kind == "V":
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            scalar = scalar.astype(np.float64)
    return scalar.item()


def fetching(
    pending: Mapping[str, Any], ranked: Sequence[str], step: int, *, must_save: bool
) -> Callable[[], tuple[dict[str, Any], MetricsError | None]]:
    """Returns a function that fetches metrics, and the error if one of ``ranked`` is no number.

    A host metric that is none raises here, unless ``must_save``: a later step can be saved instead.
    """
    if not must_save:
        _require_ranking(pending, ranked, step)
    held = {  # copied at once, because a jitted step may donate their buffers before the fetch
        name: copied(_check(name, value)) if isinstance(value, jax.Array) else value
        for name, value in pending.items()
    }

    def fetch_ranked() -> tuple[dict[str, Any], MetricsError | None]:
        metrics = {
            name: _python_scalar(np.asarray(value)) if isinstance(value, jax.Array) else value
            for name, value in held.items()
        }
        try:
            _require_ranking(metrics, ranked, step)
        except MetricsError as problem:
            return metrics, problem
        return metrics, None

    return fetch_ranked


def checked_again(metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns metrics that were checked earlier; logs and leaves out those donated since."""
    valid = {}
    for name, value in metrics.items():
        try:
            valid[name] = _check(name, value)
        except MetricsError as error:
            logger.warning("step %d is saved without a metric: %s", step, error)
    return valid


def may_rank(value: Any) -> bool:
    """Returns whether a best-N rule can rank a metric, as far as is known without fetching it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, jax.Array) or (is_number and value == value)


def _require_ranking(metrics: Mapping[str, Any], ranked: Iterable[str], step: int) -> None:
    """Raises MetricsError if a fetched metric that a best-N rule ranks is NaN or not a number."""
    for name in ranked:
        value = metrics.get(name)
        if value is not None and not may_rank(value):
            raise MetricsError(
                f"metric {name!r} at step {step} is {value!r}, which a best-N rule cannot rank. "
                "Give a number, or leave the metric out at this step.",
                step=step,
            )
