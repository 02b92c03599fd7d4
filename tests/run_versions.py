"""Tries the package with sets of releases, and prints a table of those that pass.

    python tests/run_versions.py [SET ...]

tests/versions.toml says which sets there are and which tests they run. At the end, each set reads
the steps that the others wrote. The table shows the last run of each set. A run of all sets, if all
pass, writes it into docs/installation.md. It needs only Python: uv or pip installs everything else.
"""

from __future__ import annotations

import datetime
import glob
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".venvs"
PAGE = ROOT / "docs" / "installation.md"
PLAN = tomllib.loads((ROOT / "tests" / "versions.toml").read_text())
SHOWN = ("torch", "jax", "torchax", "orbax-checkpoint", "numpy")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEPENDENCIES = PROJECT["dependencies"] + EXTRAS["cli"] + EXTRAS["lightning"]
# Where pyenv and uv keep the Pythons that are not on the PATH.
KEPT = ("~/.pyenv/versions/{}.*/bin/python", "~/.local/share/uv/python/cpython-{}.*/bin/python")
_VERSIONS = f"""
import importlib.metadata as m, json
print(json.dumps({{name: m.version(name) for name in {SHOWN!r}}}))
"""


def find_python(version: str) -> str | None:
    """Returns a Python of this version that runs; a name on the PATH may lead to none."""
    found = [f"python{version}"]
    found += [path for kept in KEPT for path in glob.glob(os.path.expanduser(kept.format(version)))]
    for python in found:
        if shutil.which(python):
            told = subprocess.run([python, "--version"], capture_output=True, text=True)
            if told.returncode == 0 and told.stdout.startswith(f"Python {version}."):
                return python
    return None


def run(
    *command: str | Path, before: Path | None = None, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command in the checkout; imports from the folder ``before`` first, if one is given."""
    paths = [*filter(None, (before, ROOT, ROOT / "tests"))]
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, paths))}
    return subprocess.run(list(map(str, command)), cwd=ROOT, env=env, text=True, **settings)


def install(name: str, chosen: dict[str, Any], python: str) -> Path:
    """Returns the venv of a set, with the newest releases of what is not pinned.

    Made anew unless it stands as the set asks. Raises CalledProcessError if it cannot be installed.
    """
    venv = VENVS / name
    torch = f"torch=={chosen['torch']}"
    words = ["-e", ".[cli,lightning]", torch, *PLAN["requires"], *chosen.get("pins", ())]
    done, wanted = venv / "installed.json", [words, DEPENDENCIES]
    is_there = done.exists() and (venv / "bin/python").exists()
    if not is_there or json.loads(done.read_text()) != wanted:
        shutil.rmtree(venv, ignore_errors=True)
        run(python, "-m", "venv", venv, check=True)
    run(python, ".ci/install.py", venv / "bin/python", "--upgrade", *words, check=True)
    done.write_text(json.dumps(wanted))
    return venv


def try_set(name: str, chosen: dict[str, Any], python: str) -> bool:
    """Installs and tests a set; notes the result beside its venv."""
    began = time.monotonic()
    noted = VENVS / f"{name}.json"
    noted.unlink(missing_ok=True)
    shutil.rmtree(VENVS / "steps" / name, ignore_errors=True)
    try:
        venv = install(name, chosen, python)
    except subprocess.CalledProcessError as error:
        print(f"{name}: cannot be installed: {error}", flush=True)
        return False
    installed = time.monotonic()
    python = str(venv / "bin/python")
    flags = ["-q", "-n", "auto", "--dist", "loadgroup", "--durations=5"]
    for marks, key in (("not slow", "everyday"), ("not long", "slow"), ("long", "long")):
        if run(python, "-m", "pytest", *flags, "-m", marks, *PLAN[key]).returncode:
            return False
    tested = time.monotonic()
    step = VENVS / "steps" / name
    if run(python, "tests/programs/step_of_versions.py", "write", step).returncode:
        return False
    versions = json.loads(run(python, "-c", _VERSIONS, check=True, stdout=subprocess.PIPE).stdout)
    seconds = [round(installed - began), round(tested - installed)]
    today = datetime.date.today().isoformat()
    noted.write_text(json.dumps([chosen["python"], versions, seconds, today]))
    return True


def try_orbax() -> list[str]:
    """Tries the releases of Orbax, each in front of that of a set; returns those that fail."""
    python = VENVS / PLAN["orbax"]["set"] / "bin/python"
    failed = []
    for release in PLAN["orbax"]["releases"]:
        folder = VENVS / f"orbax-{release}"
        pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade")
        run(*pip, "--target", folder, f"orbax-checkpoint=={release}", check=True)
        print(f"Orbax {release}", flush=True)
        tests = ("pytest", "-q", "-n", "auto", *PLAN["orbax"]["tests"])
        if run(python, "-m", *tests, before=folder).returncode:
            failed.append(f"Orbax {release}")
    return failed


def exchange(names: list[str]) -> bool:
    """Lets the sets that ran read, and compare, the steps of all sets that ever ran."""
    steps = [p.parent for p in sorted((VENVS / "steps").glob("*/expected.json"))]
    steps = [path for path in steps if path.name in PLAN["sets"]]
    program = "tests/programs/step_of_versions.py"
    pairs = itertools.product(names, steps)
    codes = [run(VENVS / n / "bin/python", program, "read", step).returncode for n, step in pairs]
    return not any(codes)


def table() -> str:
    """Returns the table of the sets that passed when they were last tried."""
    lines = ["| set | Python | " + " | ".join(SHOWN) + " | tried on |"]
    lines.append("|---" * (len(SHOWN) + 3) + "|")
    for name in PLAN["sets"]:
        if (noted := VENVS / f"{name}.json").exists():
            python, versions, _, day = json.loads(noted.read_text())
            found = [versions[library].partition("+")[0] for library in SHOWN]
            lines.append("| " + " | ".join([name, python, *found, day]) + " |")
    return "\n".join(lines)


def main() -> int:
    """Tries the sets that the arguments name, or all; returns the exit code."""
    names = sys.argv[1:] or list(PLAN["sets"])
    pythons = {PLAN["sets"][name]["python"]: None for name in names}
    found = {version: find_python(version) for version in pythons}
    if missing := [version for version, python in found.items() if python is None]:
        print(f"This machine lacks Python {' and '.join(missing)}, which pyenv and uv install.")
        return 1
    VENVS.mkdir(exist_ok=True)
    passed = []
    for name in names:
        chosen = PLAN["sets"][name]
        print(f"{name}: {chosen}", flush=True)
        if try_set(name, chosen, str(found[chosen["python"]])):
            passed.append(name)
    is_exchanged = exchange(passed)
    print(rows := table())
    for name in passed:
        install_secs, test_secs = json.loads((VENVS / f"{name}.json").read_text())[2]
        print(f"{name}: {install_secs} s to install, {test_secs} s to test")
    failed = [name for name in names if name not in passed]
    if PLAN["orbax"]["set"] in passed:
        failed += try_orbax()
    if failed or not is_exchanged:
        print("failed: " + ", ".join(failed or ["reading the steps of other sets"]))
        return 1
    if set(passed) == set(PLAN["sets"]):
        text = re.sub(
            r"(?s)(<!-- versions -->\n).*?(\n<!-- end -->)", rf"\1{rows}\2", PAGE.read_text()
        )
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
