"""The devices of a topology, as far as no libtpu is needed: names, meshes and errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import topology


@pytest.fixture
def libtpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that stands for libtpu."""
    library = tmp_path / "libtpu.so"
    library.touch()
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    return library


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch, libtpu: Path) -> Iterator[list[dict[str, Any]]]:
    """What libtpu is asked to describe."""
    asked: list[dict[str, Any]] = []

    def describe(**given: Any) -> topologies.TopologyDescription:
        asked.append(given)
        return topologies.TopologyDescription(jax.devices("cpu"))

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    yield asked
    topology.devices.cache_clear()


def test_libtpu_is_asked_for_chips_of_hosts(described: list[dict[str, Any]]) -> None:
    assert topology.devices("v5e:2x6") == tuple(jax.devices("cpu"))
    topology.devices("v5p:2x2x6", 2)
    topology.devices("v4:2x2x6")  # one device per chip, as JAX has on a v4
    topology.devices("v6e:1x1")  # libtpu's hosts of four chips do not divide it
    topology.devices("v6e:2x6", one_chip_per_host=True)
    one = {"chips_per_host_bounds": (1, 1, 1)}
    assert [{k: v for k, v in asked.items() if k != "platform"} for asked in described] == [
        {"topology_name": "v5e:2x6"},
        {"topology_name": "v5p:2x2x6", "num_slices": 2},
        {"topology_name": "v4:2x2x6", "chip_config_name": "megacore"},
        {"topology_name": "v6e:1x1", **one},
        {"topology_name": "v6e:2x6", **one},
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["", "v5e", "v5e:4", "v5e:4x0", "v3:2x2", "v5p-0", "v9-8"],
            'expected a name such as "v5e:16x16" .*found {name!r}; .*v4-N and v5p-N',
        ),
        (["v5e:2x2x2", "v6e:2x2x2"], "and for v[56]e 2 lengths, found '{name}'"),
        (["v5p:8x8"], "and for v5p 3 lengths, found '{name}'"),
        # Names of products are explained.
        (["v5p-8"], "counts cores: it has 4 chips; give v5p:2x2x1,"),
        (["v4-32"], "counts cores: it has 16 chips; give v4:2x2x4,"),
        (["v5litepod-16"], "counts chips: it has 16 chips; give v5e:4x4,"),
        (["v6e-8"], "counts chips: it has 8 chips; give v6e:2x4,"),
        (["v6e-1"], "counts chips: it has 1 chip; give v6e:1x1,"),
    ],
)
def test_another_name_is_refused_with_what_names_are(names: list[str], message: str) -> None:
    for name in names:
        with pytest.raises(PlanError, match=message.format(name=name)):
            topology.devices(name)


def test_without_libtpu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere/libtpu.so")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError) as caught:
        topology.devices("v5e:6x4")
    assert "found none (TPU_LIBRARY_PATH names no file: /nowhere/libtpu.so)" in str(caught.value)
    assert "pip install 'torchax-ckpt[tpu-check]'" in str(caught.value)


@pytest.mark.parametrize(
    ("said", "begin", "part"),
    [
        (
            "INVALID_ARGUMENT: Topology layout is not divisible",
            "unknown TPU topology: libtpu does not know 'v5e:6x4'; expected",
            "libtpu says: INVALID_ARGUMENT: Topology layout is not divisible",
        ),
        (
            "ABORTED: Internal error when accessing libtpu multi-process lockfile.",
            "libtpu is in use: another program on this machine",
            "ALLOW_MULTIPLE_LIBTPU_LOAD=1",
        ),
        (
            "INTERNAL: Failed to open: file too short",
            f"libtpu cannot be used: expected the libtpu of the installed jax, found jax "
            f"{jax.__version__}, which wants libtpu==",
            "the libtpu at TPU_LIBRARY_PATH, {libtpu}; run: pip install",
        ),
    ],
)
def test_what_libtpu_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, libtpu: Path, said: str, begin: str, part: str
) -> None:
    def refuse(**given: Any) -> None:
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(PlanError) as caught:
        topology.devices("v5e:6x4")
    assert str(caught.value).startswith(begin)
    assert part.format(libtpu=libtpu) in str(caught.value)


def test_a_mesh_has_a_position_for_every_chip_or_is_refused() -> None:
    mesh = topology.mesh(jax.devices("cpu"), {"slice": 2, "fsdp": 4})
    assert dict(mesh.shape) == {"slice": 2, "fsdp": 4}
    assert list(mesh.devices.flat) == jax.devices("cpu")
    refused: list[tuple[dict[str, int], str]] = [
        ({"fsdp": 3, "tp": 5}, "multiply to 8, .*, found fsdp=3 x tp=5 = 15; change"),
        ({"fsdp": 3}, "found fsdp=3; change"),  # fewer than there are
        ({}, "found no axes"),
        ({"tp": 0}, "axis 'tp' of the mesh: expected a positive int, found 0"),
    ]
    for axes, message in refused:
        with pytest.raises(PlanError, match=message):
            topology.mesh(jax.devices("cpu"), axes)
