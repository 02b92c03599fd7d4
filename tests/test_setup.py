"""What is installed, and what importing it does not do."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
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
            "", "from torchax_ckpt import TorchaxCheckpointer, policies", [], marks=pytest.mark.slow
        ),
        pytest.param(
            "logging.root.addHandler(logging.NullHandler())",
            "from torchax_ckpt import TorchaxCheckpointer, policies",
            ["NullHandler"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import absl.logging",
            "from torchax_ckpt import TorchaxCheckpointer, policies",
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
        if "Checkpointer" in {imports!r}:
            keep = policies.AnyPreservationPolicy([policies.LatestN(1)])
            with TorchaxCheckpointer({str(tmp_path)!r}, preservation_policy=keep) as ckpt:
                for step in (1, 2):  # Orbax's policies, which log, answer before and after it
                    ckpt.save(step, state={{"n": 1}}, force=step == 2)
                    ckpt.wait_until_finished()
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


@pytest.mark.parametrize(
    ("scheme", "extra", "client"), [("gs", "gcs", "gcsfs"), ("s3", "s3", "s3fs")]
)
def test_a_bucket_without_its_extra_is_refused_with_what_to_install(
    scheme: str, extra: str, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, client, None)
    url = f"{scheme}://bucket/run"
    said = f'{url}: a bucket needs the extra {extra}: pip install "torchax-ckpt[{extra}]"'
    for opens in (torchax_ckpt.TorchaxCheckpointer, torchax_ckpt.load_torch_state_dict):
        with pytest.raises(errors.DirectoryError, match=f"^{re.escape(said)}$"):
            opens(url)


@pytest.mark.parametrize("client", ["gcsfs", "s3fs"])
def test_a_bucket_where_none_can_be_is_refused_without_the_extra_too(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, client, None)
    tier = torchax_ckpt.LocalTier("gs://bucket/x" if client == "gcsfs" else "s3://bucket/x")
    with pytest.raises(errors.DirectoryError, match="expected a path on this host; found"):
        torchax_ckpt.TorchaxCheckpointer(tmp_path / "run", local=tier)


# --- tests/versions.toml, whose sets have few packages ---


def imports(tree: ast.Module) -> Iterator[str]:
    """What a file imports when it is imported, as pytest imports its plugins."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytest_plugins":
            yield from ast.literal_eval(node.value)


def test_what_the_sets_of_releases_run_is_there_and_imports_only_what_they_install() -> None:
    tests = ROOT / "tests"
    plan = tomllib.loads((tests / "versions.toml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = [*plan["requires"], *project["dependencies"], *extras["cli"], *extras["lightning"]]
    distributions = {re.split(r"[^\w-]", words)[0].replace("_", "-") for words in installed}
    known = importlib.metadata.packages_distributions()

    chosen = [*plan["everyday"], *plan["slow"], *plan["long"], *plan["orbax"]["tests"]]
    named = [(ROOT / name.partition("::")[0], name.partition("::")[2]) for name in chosen]
    for place, test in named:
        assert not test or f"\ndef {test}(" in place.read_text()
    places = [tests / "conftest.py", *(place for place, _ in named)]
    left = [file for place in places for file in (place, *place.rglob("*.py")) if file.is_file()]
    seen: set[Path] = set()
    missing = set()
    while left:
        file = left.pop()
        names = [] if file in seen else imports(ast.parse(file.read_text()))
        seen.add(file)
        for name in names:
            ours = tests / (name.replace(".", "/") + ".py")
            of = {found.replace("_", "-") for found in known.get(name.partition(".")[0], ())}
            if ours.exists():
                left.append(ours)
            elif of and not of & distributions:
                missing.add(f"{file.relative_to(tests)}: {name}")
    assert len(seen) > 60
    assert not missing


# --- .ci/install.py, by which make and tests/run_versions.py install ---

PIP_CONF = """
[global]
index_url = https://user:secret@own.index/simple
extra-index-url =
    file:///one/simple
    file:///other/simple
find-links = /replaced
timeout = 7
quiet = 1

[install]
constraint = /a.txt
    ~/b.txt
find-links = /wheels /more

[list]
format = columns
"""


def installed_by(
    folder: Path, listed: str, uv: int | None, *arguments: str, **variables: str
) -> tuple[list[str], dict[str, str], str]:
    """The calls of pip and uv that an installation makes, uv's variables, and what is said.

    pip and uv only note their calls. ``listed`` is the command that lists pip's settings; uv ends
    with the code ``uv``; with None there is none, and pip cannot install it.
    """
    python, notes, environment = folder / "env/bin/python", folder / "notes", folder / "environment"
    python.parent.mkdir(parents=True, exist_ok=True)
    notes.write_text("")
    environment.write_text("")
    python.write_text(
        f"""#!/bin/sh
        case "$*" in "-m pip config list") exec {listed};; esac
        echo "$*" >> {notes}
        case "$*" in
            *"install --quiet uv") exit {int(uv is None)};;
            "-m uv "*) env > {environment}; exit {uv or 0};;
        esac
        """
    )
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "HOME": "/home/her", **variables}
    command = [sys.executable, str(ROOT / ".ci/install.py"), str(python), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    given = dict(line.partition("=")[::2] for line in environment.read_text().splitlines())
    calls = notes.read_text().replace(f" --python {python}", "").splitlines()
    return calls, given, done.stderr


UV_IS_INSTALLED = "-m pip install --quiet uv"


def test_uv_installs_with_the_settings_of_pip(tmp_path: Path) -> None:
    """Of its files and variables, which the real pip reads; those for uv itself count more."""
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    variables = {
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_CERT": "/etc/her.pem",
        "PIP_FIND_LINKS": "/wheels /more",
        "UV_HTTP_TIMEOUT": "9",
    }
    listed = f"{sys.executable} -m pip config list"
    calls, given, said = installed_by(tmp_path, listed, 0, "-e", ".[demo]", **variables)
    assert calls == [UV_IS_INSTALLED, "-m uv pip install --quiet -e .[demo]"]
    expected = {
        "SSL_CERT_FILE": "/etc/her.pem",
        "UV_CACHE_DIR": str(tmp_path / ".uv-cache"),
        "UV_CONSTRAINT": "/a.txt /home/her/b.txt",
        "UV_DEFAULT_INDEX": "https://user:secret@own.index/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_HTTP_TIMEOUT": "9",
        "UV_INDEX": "file:///one/simple file:///other/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert {name: given.get(name) for name in expected} == expected
    assert said == ""


@pytest.mark.parametrize(
    ("listed", "uv", "tried", "why"),
    [
        ("true", 2, [UV_IS_INSTALLED, "-m uv pip install --quiet --upgrade x"], "exit status 2"),
        ("true", None, [UV_IS_INSTALLED], "exit status 1"),
        (
            "echo \"install.no-binary=':all:'\"",
            0,
            [],
            "pip's setting no-binary is not known for uv",
        ),
    ],
    ids=["uv fails", "no uv", "another setting"],
)
def test_pip_installs_where_uv_cannot(
    listed: str, uv: int | None, tried: list[str], why: str, tmp_path: Path
) -> None:
    calls, _, said = installed_by(tmp_path, listed, uv, "--upgrade", "x")
    assert calls == [*tried, "-m pip install --quiet --upgrade-strategy eager --upgrade x"]
    assert said.startswith("Installing by pip, because uv cannot: ")
    assert why in said


def test_a_uv_on_the_path_is_taken_with_its_own_cache(tmp_path: Path) -> None:
    uv = tmp_path / "bin/uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\necho "uv $*" >> {tmp_path}/notes; env > {tmp_path}/environment\n')
    uv.chmod(0o755)
    calls, given, _ = installed_by(tmp_path, "true", 1, "x", PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    assert calls == ["uv --version", "uv pip install --quiet x"]
    assert "UV_CACHE_DIR" not in given
