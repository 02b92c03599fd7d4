"""What is installed, and what importing it does not do."""

from __future__ import annotations

import os
import re
import socket
import sys
import types
from pathlib import Path

import pytest
from support.processes import run_python

import torchax_ckpt
from torchax_ckpt import errors


@pytest.fixture(scope="module")
def shared() -> None:
    """A fixture that several tests may share."""


@pytest.mark.usefixtures("shared")
def test_tests_that_share_a_fixture_run_on_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist finds the group at the end of a test's name, where not every pytest keeps it."""
    if "PYTEST_XDIST_WORKER" in os.environ and request.config.getvalue("loadgroup"):
        assert request.node.nodeid.endswith("@test_setup.py:shared")


def test_the_public_names_are_sorted_and_complete() -> None:
    names = torchax_ckpt.__all__
    assert names == sorted(names)
    assert dir(torchax_ckpt) == names
    assert {"CheckpointOptions", "TorchaxCheckpointer", "errors", "policies"} <= set(names)
    for name in names:
        getattr(torchax_ckpt, name)
    bound = {
        name
        for name, value in vars(torchax_ckpt).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert bound - {"annotations", "attributes", "Any", "TYPE_CHECKING"} <= set(names)


@pytest.mark.slow
def test_importing_starts_no_backend() -> None:
    # initialize raises once there is a backend: users call it after their imports.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result = run_python(
        f"""
        from torchax_ckpt import TorchaxCheckpointer, errors, policies
        import jax
        from jax._src import xla_bridge

        assert not xla_bridge.backends_are_initialized()
        place = "127.0.0.1:{port}"
        jax.distributed.initialize(place, 1, 0, coordinator_bind_address=place)
        print(jax.process_count(), "of", jax.device_count(), "devices")
        jax.distributed.shutdown()
        """,
        devices=2,
        fresh=True,
    )
    assert result.stdout.strip() == "1 of 2 devices"


def test_importing_the_package_alone_is_light() -> None:
    result = run_python(
        """
        import sys
        import torchax_ckpt

        print(sorted({"jax", "lightning", "orbax", "torch", "torchax"} & sys.modules.keys()))
        """,
        fresh=True,
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("before", "imports", "handlers"),
    [
        ("", "from torchax_ckpt import policies; policies.LatestN", []),
        pytest.param(
            "", "from torchax_ckpt import TorchaxCheckpointer", [], marks=pytest.mark.slow
        ),
        pytest.param(
            "logging.root.addHandler(logging.NullHandler())",
            "from torchax_ckpt import TorchaxCheckpointer",
            ["NullHandler"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import absl.logging",
            "from torchax_ckpt import TorchaxCheckpointer",
            ["StreamHandler"],  # absl's own, for a program that may rely on it
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_import_leaves_the_root_logger_to_the_program(
    before: str, imports: str, handlers: list[str], tmp_path: Path
) -> None:
    """With absl's handler there, basicConfig would do nothing."""
    result = run_python(
        f"""
        import logging
        {before}
        {imports}
        print([type(handler).__name__ for handler in logging.root.handlers])
        logging.basicConfig(level=logging.INFO, format="own %(message)s")
        logging.getLogger("program").info("line")
        """,
        fresh=True,
    )
    assert result.stdout.strip() == str(handlers)
    assert ("own line" in result.stderr) is (not handlers)


# What the extra gcs installs, and what uses it.
BUCKETS = ["aiohttp", "gcsfs", "google.api_core", "google.auth", "google.cloud.storage", "requests"]


def test_a_local_run_needs_nothing_of_buckets(tmp_path: Path) -> None:
    result = run_python(
        f"""
        import sys

        libraries = {BUCKETS}
        print(*set(libraries) & sys.modules.keys())
        sys.modules.update(dict.fromkeys(libraries))  # from now on their imports fail
        import numpy as np
        from torchax_ckpt import TorchaxCheckpointer

        with TorchaxCheckpointer({str(tmp_path)!r}) as ckpt:
            ckpt.save(1, state={{"w": np.arange(8)}}, force=True)
            ckpt.wait_until_finished()
            assert ckpt.load(1)["w"].tolist() == [*range(8)]
        """
    )
    assert result.stdout.split() == []


def test_a_bucket_without_its_extra_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    said = 'gs://bucket/run: a bucket needs the extra gcs: pip install "torchax-ckpt[gcs]"'
    for opens in (torchax_ckpt.TorchaxCheckpointer, torchax_ckpt.load_torch_state_dict):
        with pytest.raises(errors.DirectoryError, match=f"^{re.escape(said)}$"):
            opens("gs://bucket/run")
