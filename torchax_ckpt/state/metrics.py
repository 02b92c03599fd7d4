"""Owns metrics: checked when they are given, fetched from devices only in the background."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from torchax_ckpt import torchax_backend as backend
from torchax_ckpt.errors import MetricsError

Pending = Mapping[str, Any]
"""Metrics by name: JSON values, and device scalars that were not fetched yet."""


def check_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as they can be kept until they are fetched; waits for no device.

    Raises:
      MetricsError: names the first metric that is neither a number nor JSON.
    """
    if not isinstance(metrics, Mapping):
        raise MetricsError(
            f"metrics: expected a mapping of names to numbers, found {metrics!r:.80}"
        )
    return {_name(name): _check(name, value) for name, value in metrics.items()}


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise MetricsError(f"metrics: names must be strings, found {name!r:.80}")
    return name


def _check(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if backend.is_device_tensor(value):
            value = backend.buffer(value)
        else:
            with backend.native_torch():
                value = value.detach().to(torch.float64).numpy() if value.numel() == 1 else value
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        if isinstance(value, jax.core.Tracer):
            raise MetricsError(f"metric {name!r} is a JAX tracer; record it outside of jit")
        if value.size != 1 or value.dtype.kind in "OSUc":
            raise MetricsError(
                f"metric {name!r}: expected a scalar, found {value.dtype}{list(value.shape)}"
            )
        return value if isinstance(value, jax.Array) else _python_scalar(value)
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise MetricsError(
            f"metric {name!r}: {value!r:.80} is neither a number nor JSON ({error})"
        ) from error
    return value


def _python_scalar(value: Any) -> Any:
    # item() of an ml_dtypes scalar is not a Python number.
    scalar = np.asarray(value).reshape(())
    if scalar.dtype.kind == "V":
        scalar = scalar.astype(np.float64)
    return scalar.item()


def fetch(pending: Pending) -> dict[str, Any]:
    """The metrics as JSON; waits for those that are on devices."""
    return {
        name: _python_scalar(np.asarray(value)) if isinstance(value, jax.Array) else value
        for name, value in pending.items()
    }


def fetch_ranked(
    pending: Pending, ranked: Iterable[str], step: int
) -> tuple[dict[str, Any], MetricsError | None]:
    """What ``fetch`` gives, and the error that ``require_ranking`` would raise for it."""
    metrics = fetch(pending)
    try:
        require_ranking(metrics, ranked, step)
    except MetricsError as problem:
        return metrics, problem
    return metrics, None


def require_ranking(metrics: Mapping[str, Any], ranked: Iterable[str], step: int) -> None:
    """Raises MetricsError if a ranked metric is there but ranks nothing: NaN, or no number.

    Metrics that are still on a device pass; they are looked at again once fetched.
    """
    for name in ranked:
        value = metrics.get(name)
        if value is None or isinstance(value, jax.Array):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise MetricsError(
                f"metric {name!r} at step {step} is {value!r}, which a best-N rule cannot rank. "
                "Give a number, or leave the metric out at this step.",
                step=step,
            )
