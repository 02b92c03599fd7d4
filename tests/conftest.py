"""What every test runs under: eight CPU devices, torchax enabled, small and quiet."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

# Before JAX is imported anywhere: one process plays a host with eight chips.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# What a shell runs in the background ignores Ctrl-C, and hands that on to all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where the programs that tests start again and again keep what JAX compiles: see
# support/processes.py. The first process to come here makes the place, for those it starts.
if "TORCHAX_CKPT_TESTS_COMPILED" not in os.environ:
    COMPILED = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
    os.environ["TORCHAX_CKPT_TESTS_COMPILED"] = COMPILED

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torchax

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")


def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores that this process may use, as some tests wait."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of a module fixture on one worker, so that it is made once."""
    for item in items:
        known = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
        shared = {
            d.argname for (*_, d) in known if d.scope == "module" and "parametrize" not in d.argname
        }
        if shared:
            name = f"{item.path.name}:{','.join(sorted(shared))}"
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(scope="session", autouse=True)
def _torchax_enabled() -> Iterator[None]:
    """As in a user's program: torchax is enabled once, globally."""
    torchax.enable_globally()
    yield
    torchax.disable_globally()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    torch.manual_seed(0)
    torchax.default_env().manual_seed(0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory for one run, which does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _modes_are_left() -> Iterator[None]:
    """A test that enabled torchax once more would change what later ones see."""
    depth = torch._C._len_torch_function_stack()
    yield
    assert torch._C._len_torch_function_stack() == depth, "torchax stays enabled, or disabled"


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working directory of a page's program, which enables torchax anew, or disables it."""
    monkeypatch.chdir(tmp_path)
    depth = torch._C._len_torch_function_stack()
    yield
    while torch._C._len_torch_function_stack() > depth:
        torchax.disable_globally()
    while torch._C._len_torch_function_stack() < depth:
        torchax.enable_globally()
