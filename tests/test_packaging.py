"""The wheel and the source distribution: what they hold, and that the wheel works installed."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import ROOT

import torchax_ckpt
from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.cli.app import COMMANDS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both distributions; the wheel is built from the source distribution, without an index."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"torchax_ckpt-{VERSION}-py3-none-any.whl",
        f"torchax_ckpt-{VERSION}.tar.gz",
    ]
    return folder


def files(*folders: str) -> set[str]:
    """The files of folders, but for what Python and running programs leave there."""
    left = {"__pycache__", "runs", ".ipynb_checkpoints"}
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not left & set(path.parts)
    }


def test_the_wheel_holds_the_package_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    about = f"torchax_ckpt-{VERSION}.dist-info"
    assert names == files("torchax_ckpt") | {
        f"{about}/METADATA",
        f"{about}/RECORD",
        f"{about}/WHEEL",
        f"{about}/entry_points.txt",
        f"{about}/licenses/LICENSE",
    }
    assert "torchax_ckpt/py.typed" in names


def test_the_source_distribution_holds_all_that_tests_and_docs_need(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        prefix = f"torchax_ckpt-{VERSION}/"
        names = {m.name.removeprefix(prefix) for m in archive.getmembers() if not m.isdir()}
    expected = files("torchax_ckpt", "tests", "examples", "benchmarks", "docs", "notebooks")
    expected -= {f"docs/{name}" for name in files("notebooks")}  # copies that the site is built of
    texts = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"}
    assert names == expected | texts | {"Makefile", "pyproject.toml", ".gitignore", "PKG-INFO"}


def test_an_index_would_take_both(dist: Path) -> None:
    assert run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which sees the dependencies that are installed here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    wheel = next(dist.glob("*.whl"))
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", wheel)
    # Only folders of packages: not the package that is being worked on.
    site = next(folder.glob("lib/python*/site-packages"))
    found = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "dependencies.pth").write_text("\n".join([*found, ""]))
    return folder


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    program = """if True:
        import importlib, importlib.metadata, pkgutil
        import torchax_ckpt
        for name in torchax_ckpt.__all__:
            getattr(torchax_ckpt, name)
        for module in pkgutil.walk_packages(torchax_ckpt.__path__, "torchax_ckpt."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        print(torchax_ckpt.__file__, importlib.metadata.version("torchax-ckpt"))
    """
    # -I: neither the working directory nor PYTHONPATH may bring in another copy.
    where, version = run(python, "-I", "-c", program, cwd=tmp_path).split()
    assert Path(where).is_relative_to(environment)
    assert version == VERSION
    command: list[str | Path] = [python, "-I", environment / "bin" / "torchax-ckpt", "--version"]
    assert run(*command, cwd=tmp_path) == f"torchax-ckpt {VERSION}\n"

    with TorchaxCheckpointer(tmp_path / "run", preservation_policy=policies.PreserveAll()) as ckpt:
        for step in (1, 2):
            state = {"w": np.full(8, 2, np.float32)}
            ckpt.save(step, state=state, metrics={"loss": step}, force=True)
    commands = {
        "ls run": "loss=2",
        "show run 2 --filter state/*": "state/w",
        "verify run --all": ", intact",
        "diff run/1 run/2": "identical to the bit",
        "report run page.html": "page.html",
        "plan --params 70B --chips 4096 --blocking 1s --durable 2min": "goodput",
        "export run 2 out.safetensors --at state": "1 tensor, 32 B",
        "follow run published --once --format safetensors --at state": "step 2: published as",
        "import out.safetensors imported": "step 0 in",
        "copy run/2 kept": "verified: 2",
        "mirror run mirrored --once": "step 2",
        "fetch mirrored fetched": "step 2",
        "prune run --policy LatestN(1) --delete": "deleted step 1",
    }
    assert {line.split()[0] for line in commands} == {*COMMANDS}
    for line, expected in commands.items():
        assert expected in run(*command[:-1], *line.split(), cwd=tmp_path), line
    made = {"run", "page.html", "out.safetensors", "published", "imported", "kept"}
    assert made <= {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"2"}
    assert not (tmp_path / "run" / "1").exists()


# --- what is imported is declared ---


def imported(path: Path, *, at_import: bool) -> Iterator[str]:
    """Full names of what a file imports; at_import: of what it takes when it is imported itself."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if at_import and (is_function or for_types):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        nodes += ast.iter_child_nodes(node)


def file_of(name: str) -> Path | None:
    """The file of this package that an import of a module, or of a name in one, takes first."""
    below = ROOT.joinpath(*name.split("."))
    found = [below.with_suffix(".py"), below / "__init__.py"]
    found += [below.parent.with_suffix(".py"), below.parent / "__init__.py"]
    return next((path for path in found if path.is_file()), None)


def loaded_with_the_package() -> set[Path]:
    """The files that any public name brings in."""
    names = ["torchax_ckpt", *(f"torchax_ckpt.{name}" for name in torchax_ckpt._LAZY.values())]
    files: set[Path] = set()
    while names:
        name = names.pop()
        if name.startswith("torchax_ckpt") and (file := file_of(name)) and file not in files:
            files.add(file)
            names += [*imported(file, at_import=True)]
    return files


def libraries(names: Iterator[str]) -> set[str]:
    own = {"torchax_ckpt", "__future__", *sys.stdlib_module_names}
    return {name.split(".")[0] for name in names} - own


def normalized(requirement: str) -> str:
    """The name of the distribution that a requirement asks for."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def declared(*extras: str) -> set[str]:
    """What is installed on purpose with these extras, and those that they name."""
    found = set(map(normalized, PROJECT["dependencies"]))
    for extra in extras:
        for requirement in PROJECT["optional-dependencies"][extra]:
            match = re.match(r"torchax-ckpt\[(.*)\]", requirement)
            found |= declared(*match[1].split(",")) if match else {normalized(requirement)}
    return found


distributions = functools.cache(importlib.metadata.packages_distributions)


def undeclared(names: set[str], declared: set[str]) -> set[str]:
    """Libraries of which no distribution is declared."""
    known = distributions()
    return {name for name in names if not set(map(normalized, known.get(name, []))) & declared}


def test_what_the_package_imports_is_a_core_dependency() -> None:
    files = loaded_with_the_package()
    assert {"checkpointer.py", "saver.py", "restore.py"} <= {path.name for path in files}
    assert not {path.parent.name for path in files} & {"cli", "integrations", "lightning"}
    needed = libraries(name for path in files for name in imported(path, at_import=True))
    assert {"jax", "torch", "xxhash", "tqdm"} <= needed  # so they are found
    assert not undeclared({*needed, "orbax"}, declared())  # runtime/lazily.py imports Orbax
    assert undeclared(needed, declared() - {"tqdm"}) == {"tqdm"}


def test_what_is_imported_elsewhere_is_in_an_extra() -> None:
    extras_of = {
        "torchax_ckpt": ["cli", "gcs", "lightning", "prometheus", "s3"],
        "examples": ["examples", "ray"],
    }
    extras_of |= {"notebooks": ["notebooks"], "benchmarks": ["bench"], "tests": ["tests"]}
    for folder, extras in extras_of.items():
        paths = sorted((ROOT / folder).rglob("*.py"))
        own = {path.stem for path in paths} | {path.parent.name for path in paths} | {"benchmarks"}
        needed = libraries(name for path in paths for name in imported(path, at_import=False)) - own
        if folder == "tests":
            needed -= {path.stem for path in ROOT.glob("*/*.py")}
            needed -= {"PySide6"}  # of the extra browser, which only `make test-long` installs
        assert needed
        assert not undeclared(needed, declared(*extras)), folder
