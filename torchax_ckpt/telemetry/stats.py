"""Defines ``Stats``, whose attributes are the table of all metrics of saves and restores.

Events, loggers, Prometheus and ``torchax-ckpt report`` take names and descriptions from it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np

Kind = Literal["count", "sum", "quantiles", "latest", "age"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantiles:
    """The median and the 90th percentile of the latest 1,000 measured values.

    Attributes:
      p50: the median.
      p90: the value that nine of ten values do not exceed, interpolated between two values.
    """

    p50: float
    p90: float

    @classmethod
    def of(cls, values: Collection[float]) -> Quantiles | None:
        """Returns the quantiles of ``values``, or None if there are no values."""
        if not values:
            return None
        p50, p90 = np.quantile(list(values), (0.5, 0.9)).tolist()
        return cls(p50=p50, p90=p90)


@dataclasses.dataclass(frozen=True)
class Metric:
    """Describes an attribute of ``Stats``.

    Attributes:
      name: the name of the attribute, and of the value in events.
      kind: how the attribute is computed. "count" counts events; "sum" adds the values in events,
        "quantiles" describes their distribution, and "latest" takes the latest one; "age" takes the
        latest one too, and adds the time since then.
      event: the name of the events that count; "" for all events that have the value.
      help: what the attribute says.
      label: its title on the page of ``torchax-ckpt report``; "" if it has none.
    """

    name: str
    kind: Kind
    event: str
    help: str
    label: str = ""

    @property
    def unit(self) -> str:
        """The unit that the end of the name states, "seconds" or "bytes"; "" for counts."""
        return {"secs": "seconds", "bytes": "bytes"}.get(self.name.rpartition("_")[2], "")


def _metric(event: str, text: str, label: str = "", *, kind: Kind = "quantiles") -> Any:
    metadata = {"kind": kind, "event": event, "help": text, "label": label}
    return dataclasses.field(metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """How many saves and restores a checkpointer made in this process, and what they cost.

    Any attribute but a count is None until its first value is measured. In a run of several
    processes, only process 0 measures bytes, after the save.
    """

    num_saves: int = _metric("saving", "saves that began", kind="count")
    num_durable: int = _metric("durable", "saves that were committed", kind="count")
    num_failed: int = _metric("failed", "saves that failed", kind="count")
    num_skipped: int = _metric("saving", "calls of save() that the policy declined", kind="sum")
    num_restores: int = _metric("restored", "steps that were restored", kind="count")
    blocking_secs: Quantiles | None = _metric(
        "durable", "seconds for which a durable save blocked the training thread", "training waits"
    )
    durable_secs: Quantiles | None = _metric(
        "durable", "seconds from the call of save() to the commit", "complete on storage after"
    )
    interval_secs: Quantiles | None = _metric(
        "saving", "seconds from one snapshot to the next", "time from save to save"
    )
    interval_steps: Quantiles | None = _metric(
        "saving", "training steps from one snapshot to the next", "steps from save to save"
    )
    num_bytes: Quantiles | None = _metric("durable", "bytes that a step takes on storage")
    new_bytes: Quantiles | None = _metric("durable", "bytes of a step that its save wrote")
    shared_bytes: Quantiles | None = _metric(
        "durable", "bytes of a step in reused files, which are links or a bucket's copies"
    )
    restore_secs: Quantiles | None = _metric("restored", "seconds that a restore took")
    num_abandoned: int | None = _metric("", "steps of abandoned branches", kind="latest")
    abandoned_bytes: int | None = _metric(
        "", "bytes that a prune of these would free", kind="latest"
    )
    total_bytes: int | None = _metric(
        "", "bytes of all steps; shared bytes count once", kind="latest"
    )
    newest_step: int | None = _metric("", "the newest durable step", kind="latest")
    newest_age_secs: float | None = _metric(
        "", "seconds since the newest durable step was committed", kind="age"
    )

    num_mirrored: int = _metric("mirrored", "steps that were copied to the mirror", kind="count")
    num_mirror_failures: int = _metric(
        "mirror_failed", "copies to the mirror that failed", kind="count"
    )
    mirror_secs: Quantiles | None = _metric("mirrored", "seconds that a copy to the mirror took")
    sent_bytes: Quantiles | None = _metric(
        "mirrored", "bytes of a step that were sent to the mirror"
    )
    mirrored_step: int | None = _metric("", "the newest step in the mirror", kind="latest")
    mirrored_age_secs: float | None = _metric(
        "", "seconds since the newest step in the mirror was committed", kind="age"
    )

    @classmethod
    @functools.cache
    def metrics(cls) -> Mapping[str, Metric]:
        """Returns the name of each attribute -> how it is computed."""
        return {f.name: Metric(f.name, **f.metadata) for f in dataclasses.fields(cls)}


Stats.__doc__ = f"{Stats.__doc__}\n    Attributes:\n" + "".join(
    f"      {name}: {metric.help}.\n" for name, metric in Stats.metrics().items()
)
