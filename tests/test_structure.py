"""The house: imports point one way, and each library is met in its own room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchax_ckpt

PACKAGE = Path(torchax_ckpt.__file__).parent
MAX_LINES = 400

# From the ground up: a room may import those below it, and its neighbours in the same folder.
FLOORS = [
    "errors",
    "failures",
    "steps",
    "progress",
    "options",
    "planning",
    "layout",
    "torchax_backend",
    "bits",
    "sharding",
    "state",
    "device_memory",
    "snapshot",
    "preemption",
    "lifetime",
    "storage",
    "stored",
    "comparing",
    "copying",
    "formats",
    "parts",
    "content",
    "history",
    "in_flight",
    "telemetry",
    "writing",
    "saving",
    "deciding",
    "restoring",
    "exchange",
    "slices",
    "tiers",
    "pretrained",
    "policies",
    "checkpointer",
    "cli",
    "integrations",
    "__init__",
]

# Room -> libraries it must not know. What is not listed may be known.
FORBIDDEN = {
    "errors": {"torch", "torchax", "jax", "orbax", "numpy"},
    "failures": {"torch", "torchax", "jax", "orbax", "numpy"},
    "steps": {"torch", "torchax", "jax", "orbax", "numpy"},
    "progress": {"torch", "torchax", "jax", "orbax", "numpy", "rich"},
    "options": {"torch", "torchax", "jax", "orbax"},
    "planning": {"torchax", "jax", "orbax"},  # torch's names alone, for the type checker
    "layout": {"torch", "torchax", "jax", "orbax"},
    "torchax_backend": {"orbax"},
    "bits": {"torch", "torchax", "orbax"},
    "sharding": {"torch", "torchax", "orbax"},
    "state": {"torchax", "orbax"},
    "device_memory": {"torch", "torchax", "orbax"},
    "snapshot": {"torch", "torchax", "orbax"},
    "preemption": {"torch", "torchax", "orbax"},
    "lifetime": {"torch", "torchax", "orbax"},
    "storage": {"torch", "torchax"},
    "stored": {"torch", "torchax", "jax", "orbax"},
    "comparing": {"torch", "torchax", "jax", "orbax"},
    "copying": {"torch", "torchax", "jax", "orbax"},
    "formats": {"torchax", "jax", "orbax"},
    "content": {"torch", "torchax", "jax", "orbax"},
    "history": {"torch", "torchax", "jax", "orbax"},
    "in_flight": {"torch", "torchax", "jax", "orbax"},
    "telemetry": {"torch", "torchax", "orbax"},
    "writing": {"torch", "torchax", "orbax"},
    "saving": {"torch", "torchax", "orbax"},
    "deciding": {"torch", "torchax", "jax", "orbax"},
    "restoring": {"torch", "torchax", "orbax"},
    "parts": {"torch", "torchax", "orbax"},
    "exchange": {"torch", "torchax", "orbax"},
    "slices": {"torch", "torchax", "orbax"},
    "tiers": {"torch", "torchax", "jax", "orbax"},
    "pretrained": {"torch", "torchax", "orbax"},
    "policies": {"torch", "torchax", "orbax"},
    "checkpointer": {"torch", "torchax", "orbax"},
    "cli": {"torch", "torchax", "jax", "orbax"},
    "integrations": {"orbax"},
    "__init__": {"torch", "torchax", "jax", "orbax"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Full names of everything the file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in modules()} == set(FLOORS)
    assert set(FORBIDDEN) == set(FLOORS)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    for name in imports(path):
        library, *rest = name.split(".")
        assert library not in FORBIDDEN[room], f"{room} must not know {library}"
        # The package's own __init__ names what it loads lazily; the lazy names are strings.
        if library == "torchax_ckpt" and room != "__init__":
            other = rest[0] if rest[0] in FLOORS else "checkpointer"  # a public name, of any room
            assert FLOORS.index(other) <= FLOORS.index(room), f"{room} imports {other}, above it"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_read_in_one_sitting_and_says_what_it_owns(path: Path) -> None:
    source = path.read_text()
    limit = 680 if path.name == "checkpointer.py" else MAX_LINES  # mostly the public docstrings
    assert source.count("\n") <= limit
    assert ast.get_docstring(ast.parse(source)), "no module docstring"


def test_private_torchax_is_met_in_one_file() -> None:
    for path in modules():
        if path.name != "torchax_backend.py":
            assert "._elem" not in path.read_text(), path
            assert "_jax_array" not in path.read_text(), path


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "integrations").rglob("*.py")), ids=lambda p: p.name
)
def test_integrations_use_what_users_use(path: Path) -> None:
    """The public names, and nothing of the rooms behind them."""
    for name in imports(path):
        library, *rest = name.split(".")
        if library == "torchax_ckpt" and rest[0] != "integrations":
            assert rest[0] in torchax_ckpt.__all__, f"{path}: {name}"


def test_nothing_is_pickled_or_evaluated() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                # What torch.load reads is written by torch.save; nothing is read with them.
                is_export = called == "torch.save" and path.name == "state_dict.py"
                assert is_export or called not in {"eval", "exec", "torch.load", "torch.save"}, path
        assert not {n.split(".")[0] for n in imports(path)} & {"pickle", "dill", "marshal"}, path
