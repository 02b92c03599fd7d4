"""Prometheus: what a run exports, and what the dashboard and the alert ask of it."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import prometheus_client
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from support import ROOT
from support.damage import fill_disk, set_commit_time
from support.steps import save_due, two_tiers
from support.training import mlp

from torchax_ckpt import Stats, TorchaxCheckpointer
from torchax_ckpt.errors import SaveError
from torchax_ckpt.integrations.prometheus import PrometheusMetrics

EXAMPLE = ROOT / "examples" / "grafana"


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """What a scrape over HTTP returns, by the names of samples without labels."""
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    server.shutdown()
    server.server_close()
    thread.join()
    return {s.name: s.value for f in families for s in f.samples if not s.labels}


def test_a_scrape_returns_what_the_statistics_say(directory: Path) -> None:
    registry = CollectorRegistry()
    free_disk = fill_disk()
    with TorchaxCheckpointer(directory, on_event=PrometheusMetrics(registry)) as ckpt:
        ckpt.attach(mlp())
        ckpt.save(1, force=True)
        with pytest.raises(SaveError):
            ckpt.wait_until_finished()
        free_disk()
        for step in (2, 4, 7):
            ckpt.save(step, force=True)
            ckpt.save(step)
            ckpt.wait_until_finished()
        ckpt.restore(4)
        assert ckpt.stats().newest_step == 7  # until a step of the new branch is durable
        ckpt.save(5, force=True)
    found, stats = scraped(registry), ckpt.stats()
    assert (stats.num_saves, stats.num_durable, stats.num_failed) == (5, 4, 1)
    assert (stats.num_skipped, stats.num_restores, stats.newest_step) == (3, 1, 5)
    for name, metric in Stats.metrics().items():
        if metric.kind in ("count", "sum"):
            sample = f"torchax_ckpt_{name.removeprefix('num_')}_total"
            assert found[sample] == getattr(stats, name), name
    for name in ("blocking_seconds", "num_bytes", "shared_bytes", "interval_steps"):
        assert found[f"torchax_ckpt_{name}_count"] == 4
    assert (
        0 < found["torchax_ckpt_blocking_seconds_sum"] < found["torchax_ckpt_durable_seconds_sum"]
    )
    assert found["torchax_ckpt_new_bytes_sum"] == found["torchax_ckpt_num_bytes_sum"] > 0
    assert found["torchax_ckpt_total_bytes"] == stats.total_bytes
    time.sleep(0.05)
    later = scraped(registry)["torchax_ckpt_newest_age_seconds"]
    assert later > found["torchax_ckpt_newest_age_seconds"] + 0.05
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        PrometheusMetrics(registry)


def test_a_name_that_is_taken_adds_no_metric() -> None:
    registry = CollectorRegistry()
    taken = prometheus_client.Gauge("torchax_ckpt_newest_step", "another's", registry=registry)
    with pytest.raises(ValueError, match="newest_step"):
        PrometheusMetrics(registry)
    registry.unregister(taken)
    PrometheusMetrics(registry)


def test_the_age_is_that_of_the_newest_durable_step_after_a_restart_too(
    directory: Path, tmp_path: Path
) -> None:
    ramdisk, registry = tmp_path / "ramdisk", CollectorRegistry()
    with two_tiers(directory, ramdisk, durable=(1,)) as ckpt:
        ckpt.attach(stateful={})
        save_due(ckpt, 1, 2)
    set_commit_time(directory / "1", time.time_ns() - 3600 * 10**9)
    metrics = PrometheusMetrics(registry)
    assert scraped(registry)["torchax_ckpt_newest_age_seconds"] < 60
    with two_tiers(directory, ramdisk, durable=(), on_event=metrics) as ckpt:
        assert ckpt.attach(stateful={}) == 2
        assert ckpt.stats().newest_step is None  # that of the local tier is not taken for it
        save_due(ckpt, 3)
    assert scraped(registry)["torchax_ckpt_newest_step"] == ckpt.stats().newest_step == 1
    assert 3600 <= scraped(registry)["torchax_ckpt_newest_age_seconds"] < 3660


def test_the_dashboard_shows_every_metric_and_the_alerts_ask_for_one() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry)
    families = {s.name: family.name for family in registry.collect() for s in family.samples}

    def asked(text: str) -> set[str]:
        return {families[name] for name in re.findall(r"\btorchax_ckpt_\w+", text)}

    panels = json.loads((EXAMPLE / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert asked("\n".join(queries)) == {*families.values()}
    (group,) = yaml.safe_load((EXAMPLE / "alerts.yaml").read_text())["groups"]
    assert [len(asked(rule["expr"])) for rule in group["rules"]] == [1, 1]
