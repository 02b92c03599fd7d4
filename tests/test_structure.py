"""The house: imports point one way, and each library is met in its own room."""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchax_ckpt

pytestmark = pytest.mark.xdist_group("structure")  # one worker parses the files

PACKAGE = Path(torchax_ckpt.__file__).parent
TOP, TORCH, JAX, ORBAX = "torchax", "torch", "jax", "orbax"

# From the ground up: a room may import those above it in this table, and its own files; beside it
# the libraries that it may know of torchax, torch, JAX and Orbax.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "options": set(),
    "layout": set(),
    "runtime": {JAX, ORBAX},
    "plain_torch": {TORCH},
    "torchax_backend": {TOP, TORCH, JAX},
    "devices": {JAX},
    "shardings": {JAX},
    "processes": {JAX},
    "policies": {ORBAX, TORCH},  # names of torch for the type checker
    "snapshot": {JAX},
    "planning": {TORCH, JAX},  # JAX loaded at first use
    "state": {TORCH, JAX},
    "storage/medium": set(),
    "storage/directory": {JAX},
    "storage/arrays": {JAX},
    "storage/writing": {JAX},
    "compilation": {JAX},
    "telemetry": {JAX},
    "stored": set(),
    "formats": {TORCH},
    "saving": {TORCH, JAX},
    "restoring": {JAX},
    "torch": {TORCH},
    "publishing": {TORCH},  # loaded by the Reader alone
    "checkpointer": set(),
    "cli": set(),
    "integrations": {TOP, TORCH, JAX},
}
MAX_FILES, MAX_FILES_AT_THE_TOP, MAX_LINES = 13, 6, 500
MAX_LINES_OF = {"checkpointer.py": 600, "run_directory.py": 520}
# Such a file makes a reader open a second file to understand the first.
MAX_FILES_THAT_ONE_OTHER_IMPORTS = 28

FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The files' syntax, which a process that only collects the tests does not parse."""
    return {path: ast.parse(path.read_text()) for path in FILES}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    """The room of a module of this package; "" for the package's own ``__init__``."""
    parts = module.split(".")[1:]
    return max(("/".join(parts[:n]) for n in range(3) if "/".join(parts[:n]) in ROOMS), default="")


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """What a file imports, also inside functions; modules of this package by their full names."""
    found = []
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_package = node.module in MODULES and full not in MODULES
                found.append(node.module if is_package else full)
    return tuple(found)


def ours(path: Path) -> Iterator[str]:
    return (name for name in imports(path) if name.split(".")[0] == "torchax_ckpt")


def test_every_file_is_in_a_room() -> None:
    found = {room_of(module) for module in MODULES} - {""}
    assert found == set(ROOMS)


def test_imports_point_down() -> None:
    order = list(ROOMS)
    for module, path in MODULES.items():
        room = room_of(module)
        for name in ours(path) if room else ():  # the package itself names what it loads lazily
            other = room_of(name) or "checkpointer"  # a public name, of any room
            assert order.index(other) <= order.index(room), (
                f"{module} imports {name}, of a room further down in ROOMS"
            )


def test_no_files_import_each_other() -> None:
    graph = {module: set(ours(path)) - {module} for module, path in MODULES.items()}
    done: dict[str, bool] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*path, module))
            done[module] = True

    for module in graph.keys() - {"torchax_ckpt"}:
        visit(module, ())


def test_a_room_knows_only_its_own_libraries() -> None:
    for module, path in MODULES.items():
        names = [name.removeprefix("torchax_ckpt.runtime.lazily.") for name in imports(path)]
        found = {name.split(".")[0] for name in names} & {TOP, TORCH, JAX, ORBAX}
        assert found <= ROOMS.get(room_of(module), set()), path


def test_a_file_is_read_in_one_sitting_and_says_what_it_is() -> None:
    for path, tree in trees().items():
        assert path.read_text().count("\n") <= MAX_LINES_OF.get(path.name, MAX_LINES), path
        assert ast.get_docstring(tree), f"{path}: no module docstring"


def test_no_folder_is_crowded() -> None:
    counts = collections.Counter(p.parent for p in FILES if p.name != "__init__.py")
    assert counts.pop(PACKAGE) <= MAX_FILES_AT_THE_TOP
    assert max(counts.values()) <= MAX_FILES


def test_few_files_are_imported_by_one_other() -> None:
    importers = collections.Counter(name for path in FILES for name in {*ours(path)})
    assert list(importers.values()).count(1) <= MAX_FILES_THAT_ONE_OTHER_IMPORTS


def test_no_two_classes_have_one_name() -> None:
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    classes = collections.Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    twice = [name for name, count in classes.items() if count > 1]
    assert twice == []


def test_no_two_files_have_one_name() -> None:
    counts = collections.Counter(p.name for p in FILES if p.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


def imported_from_here(path: Path) -> Iterator[tuple[str, ast.alias]]:
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchax_ckpt"):
            yield from ((f"{node.module}.{alias.name}", alias) for alias in node.names)


def test_modules_of_this_package_keep_their_names() -> None:
    for path in FILES:
        assert not any(alias.asname for _, alias in imported_from_here(path)), path


def test_private_parts_of_other_libraries_are_met_in_one_file_each() -> None:
    """None of Orbax's, but in the names that a step records for Orbax's readers."""
    for path in FILES:
        private = {name for name in imports(path) if "._" in name}
        assert not [name for name in private if "orbax" in name], path
        if path.name != "torchax_backend.py":
            assert not re.search(r"\._elem|_jax_array", path.read_text()), path
        if path.name not in {"liveness.py", "jax_versions.py"}:
            assert not [name for name in private if name.startswith("jax._src")], path
        if path.name != "prometheus.py":
            assert not [name for name in imports(path) if "prometheus_client" in name], path


def test_integrations_use_what_users_use() -> None:
    """The public names, and nothing of the rooms behind them but what the Publisher is made of."""
    public = ("integrations", "publishing", *torchax_ckpt.__all__)
    for path in (PACKAGE / "integrations").rglob("*.py"):
        for name, _ in imported_from_here(path):
            _, *rest = name.split(".")
            is_thread = rest[:2] == ["runtime", "background"]  # every thread of the package is
            assert rest[0] in public or is_thread, f"{path}: {rest}"


# Functions outside of ``device_program`` that compute with JAX, and why no program runs there.
COMPUTING = {
    "bitcast.py": "called inside of registered programs",
    "move_shards.py _grid_program": "called by functions that are registered",
    "leaf.py _no_keys": "an empty array, for abstract random keys only",
}
# What JAX answers from dtypes alone, and what keeps the array that it is given.
ANSWERED = {"issubdtype", "iinfo", "finfo", "dtype", "key_data", "wrap_key_data", "key_impl"}


def test_programs_on_devices_are_registered() -> None:
    """Whatever the package jits is a program that ``make test-tpu`` compiles."""
    found = set()
    for path, tree in trees().items():
        for function in tree.body:
            name = getattr(function, "name", "")
            marks = [ast.unparse(mark) for mark in getattr(function, "decorator_list", [])]
            if any(mark.startswith("device_program") for mark in marks):
                continue
            for node in ast.walk(function):
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                of_jax = re.match(
                    r"(jnp|jax\.lax|jax\.random|jax\.nn)\.(\w+)$|jax\.(jit|shard_map)$", called
                )
                jits = isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.jit"
                if jits or (of_jax and of_jax[2] not in ANSWERED):
                    found.add(path.name if path.name in COMPUTING else f"{path.name} {name}")
        assert not set(imports(path)) & {"jax.jit", "jax.shard_map"}, path
    assert found == set(COMPUTING)


# What torch.save has written is read without running code of it. DCP's metadata is a pickle by its
# format: the one unpickler calls nothing that the metadata names (tests/formats/test_dcp.py).
# DCP's own load planner unpickles values; for it, the storage reader pickles plain ones.
PICKLING = {"state_dict.py torch.save", "torch_files.py torch.load", "flattened_step.py torch.save"}


def test_nothing_is_pickled_or_evaluated() -> None:
    found = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec"}, path
                if called in {"torch.load", "torch.save"}:
                    found.add(f"{path.name} {called}")
                    settings = [f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords]
                    assert called == "torch.save" or "weights_only=True" in settings
        unpicklers = {n.split(".")[0] for n in imports(path)} & {"pickle", "dill", "marshal"}
        assert unpicklers == ({"pickle"} if path.name == "dcp.py" else set()), path
        assert not re.search(r"pickle\.(loads?|dumps?|Unpickler)\(", path.read_text()), path
    assert found == PICKLING
