"""Installs packages into an environment by uv, which is quick, or by pip where uv cannot.

    python .ci/install.py ENVIRONMENT/bin/python ARGUMENT ...

The arguments are those that ``pip install`` and ``uv pip install`` share. uv gets pip's settings:
indexes, links, constraints, certificates. It is taken from the PATH, or pip installs it into the
environment. pip installs the packages if uv fails, if there is no uv, or if pip has a setting that
is not known here.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

# Settings of pip that say what is installed, and uv's variables with the same meaning. A list has
# the separator that uv expects.
FOR_UV = {
    "cert": ("SSL_CERT_FILE", None),
    "client-cert": ("SSL_CLIENT_CERT", None),
    "constraint": ("UV_CONSTRAINT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", None),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", None),
    "no-index": ("UV_NO_INDEX", None),
    "proxy": ("ALL_PROXY", None),
    "timeout": ("UV_HTTP_TIMEOUT", None),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
# Settings that change only what pip says, or how it works.
WITHOUT_EFFECT = {
    *("break-system-packages", "cache-dir", "config-file", "disable-pip-version-check", "log"),
    *("no-cache-dir", "no-color", "no-input", "no-warn-script-location", "progress-bar", "quiet"),
    *("require-virtualenv", "retries", "root-user-action", "verbose"),
}


def pip_settings(python: str) -> dict[str, str]:
    """Returns pip's settings for ``pip install``, by name, from its files and its environment."""
    command = [python, "-m", "pip", "config", "list"]
    loud = {**os.environ, "PIP_QUIET": "0"}  # otherwise a quiet pip would list nothing
    listed = subprocess.run(command, env=loud, capture_output=True, text=True, check=True).stdout
    settings = {}
    for section in ("global", "install", ":env:"):  # each replaces the one before
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.rpartition(".")[0] == section:
                settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    return settings


def uv_environment(settings: dict[str, str]) -> dict[str, str]:
    """Returns uv's environment with pip's settings; raises ValueError for one that is not known."""
    if unknown := sorted(settings.keys() - FOR_UV.keys() - WITHOUT_EFFECT):
        raise ValueError(f"pip's setting {', '.join(unknown)} is not known for uv")
    # As pip does, uv then takes the best release of all indexes, and not of the first that has one.
    environment = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in settings.items():
        if name in FOR_UV and value.strip():
            variable, separator = FOR_UV[name]
            values = [os.path.expanduser(part) for part in value.split()] if separator else [value]
            environment[variable] = (separator or "").join(values)
    return {**environment, **os.environ}  # what is set for uv itself counts


def find_uv(python: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command of uv and additional variables; raises CalledProcessError without uv."""
    try:
        subprocess.run(["uv", "--version"], capture_output=True, check=True)
        return ["uv"], {}
    except (OSError, subprocess.CalledProcessError):  # a name on the PATH may lead to nothing
        install = [python, "-m", "pip", "install", "--quiet", "uv"]
        subprocess.run(install, capture_output=True, check=True)
    # Beside the environment, on the same file system, uv links packages from its cache. In the home
    # folder the cache could take as much space again.
    return [python, "-m", "uv"], {"UV_CACHE_DIR": str(Path(python).parents[2] / ".uv-cache")}


def main(python: str, *arguments: str) -> int:
    """Installs, and returns the exit code."""
    python = os.path.abspath(python)
    try:
        settings = uv_environment(pip_settings(python))
        uv, cache = find_uv(python)
        command = [*uv, "pip", "install", "--quiet", "--python", python, *arguments]
        subprocess.run(command, env={**cache, **settings}, check=True)
        return 0
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"Installing by pip, because uv cannot: {error}", file=sys.stderr, flush=True)
    eager = ["--upgrade-strategy", "eager"] if "--upgrade" in arguments else []  # as uv does
    install = [python, "-m", "pip", "install", "--quiet", *eager, *arguments]
    return subprocess.run(install, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
