"""The wheel and the source distribution: what they hold, and that the wheel works installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


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


def test_the_wheel_works_in_an_environment_of_its_own(dist: Path, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    wheel = next(dist.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", wheel)
    # It sees the dependencies that are installed here, and no .pth file among them: not the
    # package that is being worked on.
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
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
    assert Path(where).is_relative_to(folder)
    assert version == VERSION
    command = [python, "-I", folder / "bin" / "torchax-ckpt", "--version"]
    assert run(*command, cwd=tmp_path) == f"torchax-ckpt {VERSION}\n"


def test_the_licence_is_named_and_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
