"""``PrometheusMetrics``: what ``ckpt.stats()`` returns, for Prometheus to scrape."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from torchax_ckpt import Event, Stats

__all__ = ["PrometheusMetrics"]

_BUCKETS = {
    "seconds": [2.0**n for n in range(-10, 13)],  # from 1 ms to an hour
    "bytes": [4.0**n for n in range(5, 22)],  # from 1 KiB to 4 TiB
    "": [2.0**n for n in range(17)],
}


class PrometheusMetrics:
    """Exports the metrics of saves and restores with ``prometheus_client``::

        prometheus_client.start_http_server(9400)
        with TorchaxCheckpointer("runs/a", on_event=PrometheusMetrics()) as ckpt:
            ...

    Counts of ``Stats`` are exported as counters (``torchax_ckpt_saves_total``), quantiles as
    histograms (``torchax_ckpt_blocking_seconds``), and other attributes as gauges. The ages of the
    newest durable step and of the newest in the mirror are those at the scrape. Until a step is
    known, its age counts from the construction of this object. One object may serve the
    checkpointers of a program, one after another.

    Args:
      registry: where the metrics are registered; default: what ``start_http_server`` serves.

    Raises:
      ValueError: the registry has one of these metrics already; none is added to it.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics = []
        collectors: list[Counter | Gauge | Histogram] = []
        for metric in Stats.metrics().values():
            is_total = metric.kind in ("count", "sum")
            name = metric.name.removeprefix("num_" * is_total).replace("_secs", "_seconds")
            name_and_help = f"torchax_ckpt_{name}", metric.help
            take: Callable[[float], None]
            if is_total:
                collectors.append(counter := Counter(*name_and_help, registry=None))
                take = counter.inc
            elif metric.kind == "quantiles":
                buckets = _BUCKETS[metric.unit]
                collectors.append(
                    histogram := Histogram(*name_and_help, buckets=buckets, registry=None)
                )
                take = histogram.observe
            else:
                collectors.append(gauge := Gauge(*name_and_help, registry=None))
                take = gauge.set
                if metric.kind == "age":
                    age = _Age()
                    gauge.set_function(age.secs)
                    take = age.begin
            self._metrics.append((metric, take))
        with contextlib.ExitStack() as undo:  # all or none
            for collector in collectors:
                registry.register(collector)
                undo.callback(registry.unregister, collector)
            undo.pop_all()

    def __call__(self, event: Event) -> None:
        """Takes the numbers of an event."""
        for metric, take in self._metrics:
            if (number := event.number(metric)) is not None:
                take(number)


class _Age:
    """The age of a step, which grows until a newer one is known."""

    def __init__(self) -> None:
        self.begin(time.time())

    def begin(self, at_secs: float) -> None:
        self._began_secs = at_secs

    def secs(self) -> float:
        return max(0.0, time.time() - self._began_secs)
