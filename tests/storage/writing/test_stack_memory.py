"""The memory in which the host makes stacks: mapped by the first save that needs it, then freed."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest
from support.compare import assert_trees_identical
from support.steps import save_due

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.devices import host_array
from torchax_ckpt.storage.writing import array_writer

STATE = {f"layers.{i}.w": jnp.full((128, 512), i, jnp.float32) for i in range(8)}
ALWAYS = policies.FixedIntervalPolicy(1)


class Pages(mmap.mmap):
    """Says how many bytes are mapped, and on which thread."""

    mapped: ClassVar[weakref.WeakSet[Pages]]
    on: ClassVar[set[str]]
    refused: ClassVar[bool] = False

    def __new__(cls, fileno: int, length: int, flags: int) -> Pages:
        cls.on.add(threading.current_thread().name)
        if cls.refused:
            raise OSError(12, "Cannot allocate memory")
        pages = super().__new__(cls, fileno, length, flags)
        cls.mapped.add(pages)
        return pages

    @classmethod
    def num_bytes(cls) -> int:
        gc.collect()
        return sum(map(len, cls.mapped))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> type[Pages]:
    kind = type("Recorded", (Pages,), {"mapped": weakref.WeakSet(), "on": set()})
    monkeypatch.setattr(host_array.mmap, "mmap", kind)
    return kind


def opened(path: Path, **options: Any) -> TorchaxCheckpointer:
    local = LocalTier(path / "local", save_decision_policy=ALWAYS)
    options = {"snapshot": "reference", **options}
    return TorchaxCheckpointer(
        path / "run",
        save_decision_policy=ALWAYS,
        local=local,
        options=CheckpointOptions(**options),
    )


def test_it_is_mapped_by_the_save_that_stacks_and_freed_by_close(
    tmp_path: Path, pages: type[Pages]
) -> None:
    ckpt = opened(tmp_path)
    save_due(ckpt, 1, of={"w": jnp.ones(3)})
    assert not pages.num_bytes()
    save_due(ckpt, 2, of=STATE)
    assert (
        pages.num_bytes() == 2 * array_writer.STACK_BYTES
    )  # of each tier, the first of two memories
    assert pages.on == {"save-2"}
    assert ckpt.save(3, state={name: array + 1 for name, array in STATE.items()})
    ckpt.close()
    assert not pages.num_bytes()
    reader = opened(tmp_path, read_only=True)
    assert_trees_identical(reader.load(2), STATE, shardings=False)
    assert not pages.num_bytes()


def test_a_system_that_does_not_give_it_gets_saves_that_need_less(
    directory: Path, pages: type[Pages], caplog: pytest.LogCaptureFixture
) -> None:
    pages.refused = True
    with opened(directory) as ckpt:
        assert ckpt.save(1, state=STATE)
    assert pages.on == {"save-1"}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert_trees_identical(ckpt.load(1), STATE, shardings=False)
