"""The set-up of every test: eight CPU devices, torchax enabled, fixed seeds."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import weakref

from support.jax_releases import xla_flags

# Set before anything imports JAX. One process simulates a host with eight chips.
os.environ["XLA_FLAGS"] = xla_flags(8)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# A shell starts background jobs with SIGINT ignored, and their child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The compilation cache that tests and the programs they start share: see support/compiled.py.
# The first process creates the folder for the processes that it starts.
if "TORCHAX_CKPT_TESTS_COMPILED" not in os.environ:
    COMPILED = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
    os.environ["TORCHAX_CKPT_TESTS_COMPILED"] = COMPILED

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import pytest
import torch
import torchax
from support import compiled, forked
from support.live import Groups, Together
from support.stages import Gate

from torchax_ckpt.runtime import preemption, stages
from torchax_ckpt.saving import closing

os.environ.setdefault(forked.OWNER, str(os.getpid()))  # the workers of pytest-xdist inherit it
compiled.share(Path(os.environ["TORCHAX_CKPT_TESTS_COMPILED"], "by-tests"))

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")


# The order of the programs in live groups. The workers of pytest-xdist inherit it.
SEED = os.environ.setdefault("TORCHAX_CKPT_TESTS_SEED", str(random.randrange(10**6)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--new-groups",
        action="store_true",
        help="run the tests that use live groups only, each program in a new group",
    )


def pytest_report_header() -> str:
    return f"live groups: TORCHAX_CKPT_TESTS_SEED={SEED} repeats the order of their programs"


def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores that this process may use, because some tests only wait."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs the tests that share a module fixture on one worker, so that it is created once.

    The tests with live groups come first, on one worker. Their modules are in a random order, and
    so are the tests of each module.
    """
    live: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (live if "together" in item.fixturenames else others).append(item)  # type: ignore[attr-defined]
    order = random.Random(SEED)
    modules = {path: order.random() for path in dict.fromkeys(item.path for item in live)}
    live.sort(key=lambda item: (modules[item.path], order.random()))
    if is_alone := config.getoption("new_groups"):
        config.hook.pytest_deselected(items=others)
        others.clear()
    items[:] = [*live, *others]
    for item in live if not is_alone else ():
        item.add_marker(pytest.mark.xdist_group("together"))
    for item in live if is_alone else others:
        known = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
        shared = {
            d.argname for (*_, d) in known if d.scope == "module" and "parametrize" not in d.argname
        }
        if shared:
            name = f"{item.path.name}:{','.join(sorted(shared))}"
            item.add_marker(pytest.mark.xdist_group(name))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets tests that compile for TPUs share no compiled programs.

    Freezes what was imported and collected: without it, each full collection of garbage, which
    many tests and the package itself ask for, would look through a million objects for 0.4 s.
    """
    gc.collect()
    gc.freeze()
    if any(item.get_closest_marker("tpu") for item in session.items):
        compiled.share_nothing()


@pytest.fixture(scope="session", autouse=True)
def _torchax_enabled() -> Iterator[None]:
    """Enables torchax once, globally, as a user's program does."""
    torchax.enable_globally()
    yield
    torchax.disable_globally()


@pytest.fixture(scope="session")
def together(pytestconfig: pytest.Config) -> Iterator[Together]:
    """Runs a program on live processes: ``run_processes``, without starting any."""
    with Groups(is_new=pytestconfig.getoption("new_groups")) as groups:
        yield groups.run


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    torch.manual_seed(0)
    torchax.default_env().manual_seed(0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The path of a run's directory, which does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _modes_are_left() -> Iterator[None]:
    """Asserts that a test leaves torchax enabled exactly once, as later tests expect."""
    depth = torch._C._len_torch_function_stack()
    yield
    assert torch._C._len_torch_function_stack() == depth, "torchax stays enabled, or disabled"


@pytest.fixture(autouse=True)
def _forgotten_checkpointers_end() -> Iterator[None]:
    """Ends what a test's checkpointers without ``close`` still do, so that no later test sees it.

    The collector may come at any time: in a later test, whose log would then have their messages.
    Those of fixtures that several tests share stay.
    """
    earlier = weakref.WeakSet(closing._unfinished)
    yield
    if any(e._savers and e._state != "ended" for e in closing._unfinished if e not in earlier):
        gc.collect()
    for each in list(closing._dropped):
        if each._task is not None:
            each._task.ended.wait(60)


@pytest.fixture
def preempt(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has the runs of this process notice a SIGTERM, which does not end the process."""
    return lambda: monkeypatch.setattr(preemption._watch, "noticed_at", time.monotonic())


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory for the program of a documentation page.

    The program may enable or disable torchax; the fixture undoes that.
    """
    monkeypatch.chdir(tmp_path)
    depth = torch._C._len_torch_function_stack()
    yield
    while torch._C._len_torch_function_stack() > depth:
        torchax.disable_globally()
    while torch._C._len_torch_function_stack() < depth:
        torchax.enable_globally()


@pytest.fixture
def eight_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the eight CPU devices stand for the chips of every topology, without libtpu."""
    monkeypatch.setattr(
        "torchax_ckpt.planning.topology.devices", lambda *args, **options: tuple(jax.devices())
    )


@pytest.fixture
def opened() -> Iterator[threading.Event]:
    """Storage that hangs until the event is set."""
    gate = Gate("write the arrays")
    yield gate.opened
    gate.opened.set()


@pytest.fixture(autouse=True)
def _uninterrupted() -> Iterator[None]:
    """Ends what a test does at stages."""
    yield
    stages.observers.clear()
